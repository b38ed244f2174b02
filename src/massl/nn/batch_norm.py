"""Batch norm over the images of all processes, without running statistics."""

import torch
from torch import Tensor, nn

from massl import distributed
from massl.config import RecipeError

_EPSILON = 1e-5  # torch's, and that of every method here


class BatchNorm(nn.Module):
    """Batch norm (Ioffe and Szegedy, 2015) by the statistics of the batch alone, each view of it apart, over all ranks together.

    There are no running statistics: they would be read in evaluation only, and the heads that use this end with training. So a forward
    pass changes nothing, and a teacher normalises by its own batch too, as MoCo-v3's does. Where a batch is spread over ranks the result
    and its gradients are those of one process with all of it, as in torch's SyncBatchNorm.
    """

    def __init__(self, dim: int, *, scale: bool = True, shift: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim)) if scale else None
        self.bias = nn.Parameter(torch.zeros(dim)) if shift else None

    def forward(self, rows: Tensor) -> Tensor:  # [..., N, D] -> the same, float32
        """Zero mean and unit variance over the N rows (of all ranks), for each leading index on its own; then weight and bias, if any."""
        num_rows = rows.shape[-2] * distributed.world_size()
        if num_rows < 2:
            raise RecipeError("batch norm compares the images of a batch and needs two at least: raise trainer.batch_size")
        rows = rows.float()  # in bfloat16 the mean of 4096 rows has 3 digits
        mean = distributed.sum_over_ranks(rows.sum(dim=-2, keepdim=True)) / num_rows
        centred = rows - mean  # before squaring: mean of squares less square of mean would cancel where the mean is large
        variance = distributed.sum_over_ranks(centred.square().sum(dim=-2, keepdim=True)) / num_rows
        normed = centred * torch.rsqrt(variance + _EPSILON)
        scaled = normed if self.weight is None else normed * self.weight
        return scaled if self.bias is None else scaled + self.bias
