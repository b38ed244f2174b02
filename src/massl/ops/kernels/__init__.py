"""Triton kernels. Importing this room needs Triton, so other rooms import it inside functions, for CUDA tensors only.

Each kernel has a plain PyTorch reference elsewhere (`ops`, `nn.transformer.plain`, torch's optimizers); tests compare.
"""
