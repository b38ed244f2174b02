"""Patch features as colours: their first three principal components as red, green and blue, as DINOv2 draws them."""

from typing import NamedTuple

import torch
from torch import Tensor

_NUM_COLOURS = 3
_CLIPPED = 0.01  # share of the patches at each end of a component that get its darkest or brightest value


class PatchColours(NamedTuple):
    colours: Tensor  # uint8 [N, H, W, 3]; background is black
    explained: float  # share of the variance that the three components hold, of the patches that are shown
    is_shown: Tensor  # bool [N, H, W]: not background


def patch_colours(patches: Tensor, *, threshold: float | None = None) -> PatchColours:  # [N, H, W, D]
    """Equal colours mean similar features, in all N images: they share the components and their scale.

    With a threshold in (0, 1), patches whose first component, scaled to [0, 1], is below it are background; the
    colours are then the components of the others alone (Oquab et al., 2023). Components come by falling variance, each
    with the sign that makes the middle of the images brighter than their border: the same on every machine.
    """
    rows = patches.double().cpu()  # float64: the order of close components must not depend on rounding
    is_shown = torch.ones(rows.shape[:3], dtype=torch.bool)
    if threshold is not None:
        first = _components(rows, is_shown, num=1)[0][..., 0]
        is_shown = _scaled(first, first.flatten()) >= threshold
    components, explained = _components(rows, is_shown, num=_NUM_COLOURS)
    scaled = [_scaled(component, component[is_shown]) for component in components.unbind(-1)]
    colours = (255 * torch.stack(scaled, dim=-1)).round().to(torch.uint8)
    colours[~is_shown] = 0
    return PatchColours(colours, explained, is_shown)


def _components(rows: Tensor, is_used: Tensor, *, num: int) -> tuple[Tensor, float]:
    """[N, H, W, D] projected on the components of the rows in use -> [N, H, W, num], and their share of the variance.

    What has fewer components has zeros for the others.
    """
    used = rows[is_used]
    centred = used - used.mean(dim=0)
    variances, axes = torch.linalg.eigh(centred.T @ centred)  # in rising order
    variances, axes = variances.flip(0).clamp_min(0), axes.flip(1)
    num_real = int((variances > 1e-9 * variances.sum()).sum())
    projected = rows.new_zeros(*rows.shape[:3], num)
    shared = min(num, num_real)
    projected[..., :shared] = (rows - used.mean(dim=0)) @ axes[:, :shared]
    total = float(variances.sum())
    return projected * _signs(projected), float(variances[:shared].sum()) / total if total > 0 else 0.0


def _signs(projected: Tensor) -> Tensor:  # [N, H, W, C] -> [C]
    height, width = projected.shape[1:3]
    is_border = torch.ones(height, width, dtype=torch.bool)
    is_border[1:-1, 1:-1] = False
    if bool(is_border.all()):
        return torch.ones(projected.shape[-1], dtype=projected.dtype)
    middle, border = (projected[:, where].mean(dim=(0, 1)) for where in (~is_border, is_border))
    return torch.where(middle >= border, 1.0, -1.0).to(projected.dtype)


def _scaled(component: Tensor, shown: Tensor) -> Tensor:  # [N, H, W], [n] -> [N, H, W] in [0, 1]
    """0 and 1 are the values that few of the shown patches exceed; 0.5 where all are equal."""
    ordered = shown.sort().values
    cut = int(_CLIPPED * len(ordered))
    low, high = ordered[cut], ordered[len(ordered) - 1 - cut]
    if not bool(high > low):
        return torch.full_like(component, 0.5)
    return ((component - low) / (high - low)).clamp(0, 1)
