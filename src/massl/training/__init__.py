"""The training loop and what it keeps: step, schedules, optimizers, checkpoints, probes, metrics.

Training sees `methods.base`, never a method by name.
"""
