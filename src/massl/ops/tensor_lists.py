"""What the update kernels need to know of a list of tensors; apart from the kernels, so that asking does not need
Triton.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def fit_update_kernels(tensors: Sequence[Tensor]) -> bool:
    """Contiguous float32, all on one GPU."""
    return (
        len(tensors) > 0
        and tensors[0].is_cuda
        and all(
            tensor.device == tensors[0].device and tensor.dtype == torch.float32 and tensor.is_contiguous()
            for tensor in tensors
        )
    )
