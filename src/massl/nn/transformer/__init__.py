"""Shortcuts for plain ViTs: `plain` is the reference, `fused` trains with the kernels of `ops.kernels`, `inference`
computes features with them.
"""
