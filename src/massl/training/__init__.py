"""The training loop and its parts: step, schedules, optimizers, checkpoints, probes, logs, run folder.

Training sees `methods.base`, never a method by name.
"""
