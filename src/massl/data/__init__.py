"""From stored images to batches and views. No networks and no training state.

`sources/` says where images are stored, `loading/` decodes them into batches, `views` augments, `evaluation/` is what
protocols look at. `order` maps a step to image indices, `keys` stores names of any bytes.
"""
