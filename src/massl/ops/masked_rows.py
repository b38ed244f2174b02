"""Hidden patches as rows of a fixed number: a step that is recorded as a CUDA graph knows no shape that depends on the
data.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Chance that one step hides more patches than there are slots; the last ones are then left out of its loss.
_OVERFLOW_PROBABILITY = 1e-9


def num_slots(num_masks: int, num_patches: int, *, ratios: Sequence[float], ratio_variances: Sequence[float]) -> int:
    """Slots for the hidden patches of independent masks, each of which takes one of `ratios` at random, moved by at
    most its variance.

    By Hoeffding's inequality (1963), a sum of n independent numbers between 0 and m exceeds its mean by m sqrt(n ln(1 /
    p) / 2) with a probability below p. Of 256 masks of 14 x 14 patches with iBOT's ratios, which hide up to 25,088
    patches and 7,526 on average, that is 12,574.
    """
    most = math.ceil(
        max(ratio + variance for ratio, variance in zip(ratios, ratio_variances, strict=True)) * num_patches
    )
    mean = num_masks * num_patches * sum(ratios) / len(ratios)
    excess = most * math.sqrt(num_masks * -math.log(_OVERFLOW_PROBABILITY) / 2)
    return min(num_masks * most, math.ceil(mean + excess))


def masked_rows(masks: Tensor, slots: int) -> tuple[Tensor, Tensor]:  # [R, N] bool -> [slots] int64, [slots] float32
    """The hidden patches' numbers among all R x N, in order, and weights that average over the patches of a view, then
    over all R views.

    Views that hide nothing count as 0 in that average, as in iBOT. Slots beyond the last hidden patch hold visible ones
    with weight 0.
    """
    weights = masks / (len(masks) * masks.sum(dim=1, keepdim=True).clamp(min=1))
    rows = torch.argsort(masks.flatten().to(torch.uint8), descending=True, stable=True)[:slots]
    return rows, weights.flatten()[rows]
