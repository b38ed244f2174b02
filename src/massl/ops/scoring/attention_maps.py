"""Pictures of class-token attention, as DINO and iBOT draw them: all heads in colours, and a heat map of each."""

import colorsys
import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# iBOT's colours of six heads
_FIRST_COLOURS = ((0, 160, 215), (220, 55, 60), (245, 180, 0), (10, 120, 190), (40, 150, 100), (135, 75, 145))
_DARKEST, _BRIGHTEST, _DIMMING = 192, 256, 0.1  # grey levels of the background, before it is dimmed to near-black


def mass_mask(attention: Tensor, *, mass: float = 0.6) -> Tensor:  # [..., h, w] -> bool [..., h, w]
    """The fewest patches that hold `mass` of a map's attention: those with a cumulated share above 1 - mass."""
    # stable: equal patches are dropped in reading order
    values, order = attention.flatten(-2).double().sort(dim=-1, stable=True)
    total = values.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    kept = (values / total).cumsum(dim=-1) > 1 - mass
    return torch.zeros_like(kept).scatter(-1, order, kept).view(attention.shape)


def winning_heads(maps: Tensor) -> Tensor:  # [..., heads, h, w] -> [..., heads, h, w]
    """Zero where another head is stronger; of equal heads the first wins."""
    strongest = maps == maps.amax(dim=-3, keepdim=True)
    return maps * (strongest & (strongest.cumsum(dim=-3) == 1))


def stretched(maps: Tensor, num_axes: int) -> Tensor:
    """Values scaled to [0, 1] over the last `num_axes` axes; 0 if all are equal."""
    axes = tuple(range(-num_axes, 0))
    low, high = maps.amin(axes, keepdim=True), maps.amax(axes, keepdim=True)
    return torch.where(high > low, (maps - low) / (high - low), 0.0)


# [..., heads, h, w] -> [..., heads, h, w]
def head_opacity(attention: Tensor, *, mass: float = 0.6, threshold: float = 0.2) -> Tensor:
    """Opacity of each head's colour: the root of its stretched attention where it wins and exceeds the threshold."""
    strength = stretched(winning_heads(attention * mass_mask(attention, mass=mass)), 2)
    return torch.where(strength > threshold, strength.sqrt(), 0.0)


@functools.cache
def head_colours(num_heads: int) -> tuple[tuple[int, int, int], ...]:
    """(red, green, blue) in 0..255 for each head: iBOT's six, then bright colours far from all before."""
    shades = [(hue / 24, saturation, value) for hue in range(24) for saturation in (0.45, 0.9) for value in (0.7, 1.0)]
    candidates = [tuple(round(255 * part) for part in colorsys.hsv_to_rgb(*shade)) for shade in shades]
    colours = list(_FIRST_COLOURS[:num_heads])
    while len(colours) < num_heads:
        distances = [
            min(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) for other in colours) for one in candidates
        ]
        red, green, blue = candidates[distances.index(max(distances))]
        colours.append((red, green, blue))
    return tuple(colours)


def colour_map(
    image: Tensor, attention: Tensor, *, patch: int, mass: float = 0.6, threshold: float = 0.2
) -> Tensor:  # normalised [3, H, W], [heads, h, w] -> uint8 [h * patch, w * patch, 3]
    """All heads in one picture: each patch in the colour of its strongest head, over a dimmed grey image (iBOT)."""
    height, width = attention.shape[1] * patch, attention.shape[2] * patch
    bright = _DARKEST + (_BRIGHTEST - _DARKEST) * stretched(image[:, :height, :width].double(), 3)
    grey = _DIMMING * bright.mean(dim=0)[:, :, None]
    opacity = enlarged(head_opacity(attention.double(), mass=mass, threshold=threshold), patch)
    colours = torch.tensor(head_colours(len(attention)), dtype=torch.float64, device=attention.device)
    # At most one head covers a patch, so that the sum mixes no colours.
    painted = grey * (1 - opacity.sum(dim=0)[:, :, None]) + torch.einsum("hyx,hc->yxc", opacity, colours)
    return painted.round().clamp(0, 255).to(torch.uint8)


def heat_map(attention: Tensor, *, patch: int) -> Tensor:  # [h, w] -> uint8 [h * patch, w * patch, 3]
    """One map, scaled to [0, 1], in matplotlib's default colours."""
    from matplotlib import colormaps  # here: slow to import, and training draws no maps

    coloured = np.asarray(colormaps["viridis"](stretched(attention.double(), 2).cpu().numpy(), bytes=True))
    return enlarged(torch.from_numpy(coloured[:, :, :3].copy()).movedim(2, 0), patch).movedim(0, 2)


def enlarged(maps: Tensor, factor: int) -> Tensor:  # [..., h, w] -> [..., h * factor, w * factor]
    """Nearest-neighbour up-sampling."""
    return maps.repeat_interleave(factor, dim=-2).repeat_interleave(factor, dim=-1)


def attention_tiles(
    image: Tensor, attention: Tensor, *, patch: int, mean: Sequence[float], std: Sequence[float], mass: float = 0.6
) -> list[Tensor]:  # normalised [3, H, W], [heads, h, w] -> uint8 [h * patch, w * patch, 3] each
    """Image, colour map, and the heat map of each head."""
    height, width = attention.shape[1] * patch, attention.shape[2] * patch
    photo = to_picture(image[:, :height, :width], mean=mean, std=std).cpu()
    return [
        photo,
        colour_map(image, attention, patch=patch, mass=mass).cpu(),
        *(heat_map(head, patch=patch) for head in attention),
    ]


# [..., 3, H, W] -> uint8 [..., H, W, 3]
def to_picture(images: Tensor, *, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Undo the normalisation."""
    shift, scale = (
        torch.tensor(tuple(values), dtype=images.dtype, device=images.device).view(3, 1, 1) for values in (mean, std)
    )
    return (255 * (images * scale + shift)).round().clamp(0, 255).to(torch.uint8).movedim(-3, -1)
