"""Hidden patches as a fixed number of rows, because shapes in a CUDA graph cannot depend on the data."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Chance that a step hides more patches than there are slots; the last ones are then left out of its loss.
_OVERFLOW_PROBABILITY = 1e-9


def num_slots(num_masks: int, num_patches: int, *, ratios: Sequence[float], ratio_variances: Sequence[float]) -> int:
    """Slots for the hidden patches of independent `block_masks`.

    By Hoeffding's inequality (1963), a sum of n independent numbers between 0 and m exceeds its mean by more than
    m sqrt(n ln(1 / p) / 2) with a probability below p. For 256 masks of 14 x 14 patches with iBOT's ratios, which hide
    7,526 patches on average and 25,088 at most, that gives 12,574 slots.
    """
    largest_ratio = max(ratio + variance for ratio, variance in zip(ratios, ratio_variances, strict=True))
    most = math.ceil(largest_ratio * num_patches)
    mean = num_masks * num_patches * sum(ratios) / len(ratios)
    excess = most * math.sqrt(num_masks * -math.log(_OVERFLOW_PROBABILITY) / 2)
    return min(num_masks * most, math.ceil(mean + excess))


def masked_rows(masks: Tensor, slots: int) -> tuple[Tensor, Tensor]:  # [R, N] bool -> [slots] int64, [slots] float32
    """Indices of the hidden patches among all R x N; weights that average over the patches of a view, then over views.

    Views that hide nothing count as 0, as in iBOT. Slots beyond the last hidden patch hold visible ones of weight 0.
    """
    weights = masks / (len(masks) * masks.sum(dim=1, keepdim=True).clamp(min=1))
    rows = torch.argsort(masks.flatten().to(torch.uint8), descending=True, stable=True)[:slots]
    return rows, weights.flatten()[rows]
