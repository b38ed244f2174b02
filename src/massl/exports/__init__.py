"""Trained backbones as folders that other libraries open: one file per library, the model card and its picture.

`hubconf.py` is copied into torch.hub folders, so it imports nothing of massl. Opening a run is the command's work.
"""
