"""Pure tensor functions: no files, no state, no modules. Losses and image operations lie here.

`kernels/` holds the Triton versions and is imported only for CUDA tensors; `scoring/` holds what evaluations compute.
"""
