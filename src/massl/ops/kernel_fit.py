"""Whether the update kernels apply to a list of tensors; not in `kernels`, which cannot be imported without Triton."""

from collections.abc import Sequence

import torch
from torch import Tensor


def fits_update_kernels(tensors: Sequence[Tensor]) -> bool:
    """Contiguous float32, all on one GPU."""
    if not tensors or not tensors[0].is_cuda:
        return False
    device = tensors[0].device
    return all(one.device == device and one.dtype == torch.float32 and one.is_contiguous() for one in tensors)
