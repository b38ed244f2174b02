"""Pure tensor functions (losses, masks, image operations): no files, no state, no modules.

`kernels/` holds the Triton versions and is imported only for CUDA tensors; `scoring/` holds what evaluations compute.
"""
