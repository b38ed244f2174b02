"""Matching patches of two images, and the true matches if both are crops of one image (iBOT, Zhou et al., 2022).

Positions are fractions of the image's height and width; grids are square, g patches a side, numbered row by row.
"""

from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn.functional import interpolate, normalize

_CHUNK_SIMILARITIES = 1 << 26  # held at once while matching: 256 MiB in float32
_SMOOTHING = 3  # lines are drawn so many times larger and then reduced
_HEIGHT_PER_LINE = 90  # height of a picture / width of a line
_LINE_EDGE = (16, 16, 16)
_LINE_COLOURS = (  # bright, so that all stand out from the dark edge
    (255, 225, 25),
    (60, 200, 255),
    (255, 110, 110),
    (110, 235, 110),
    (255, 160, 40),
    (255, 150, 235),
    (255, 255, 255),
    (185, 165, 255),
)


class PatchCentres(NamedTuple):
    """Where the patches of B square views lie in their images."""

    rows: Tensor  # [B, g] float64, from the top of the image
    columns: Tensor  # [B, g] float64, from its left; falling where the view is mirrored


# [B, 4], bool [B], [B, 2]
def patch_centres(boxes: Tensor, flipped: Tensor, sizes: Tensor, *, grid: int) -> PatchCentres:
    """Centres of the patches of crops `boxes` (top, left, height, width) of images of `sizes`, in pixels."""
    top, left, height, width = boxes.double()[:, :, None].unbind(1)
    image_height, image_width = sizes.double()[:, :, None].unbind(1)
    down = (torch.arange(grid, dtype=torch.float64, device=boxes.device) + 0.5) / grid
    across = torch.where(flipped[:, None], 1 - down, down)
    return PatchCentres(rows=(top + height * down) / image_height, columns=(left + width * across) / image_width)


def overlap_mask(first: PatchCentres, second: PatchCentres) -> Tensor:  # -> bool [B, g * g]
    """Patches of the first view that the second shows too: within half a patch of the range of its centres.

    Half a patch is 0.5 / g of the whole image, whatever the size of the crop, as in the published protocol.
    """
    reach = 0.5 / first.rows.shape[1]
    rows, columns = (
        (mine + reach > others.amin(dim=1, keepdim=True)) & (mine - reach < others.amax(dim=1, keepdim=True))
        for mine, others in zip(first, second, strict=True)
    )
    return (rows[:, :, None] & columns[:, None, :]).flatten(1)


def true_matches(first: PatchCentres, second: PatchCentres) -> Tensor:  # -> int64 [B, g * g]
    """For each patch of the first view the patch of the second whose centre is nearest in the image."""
    # A squared distance is a sum over rows and columns, so that each axis can be minimised alone.
    rows, columns = (
        (mine[:, :, None] - others[:, None, :]).abs().argmin(dim=2) for mine, others in zip(first, second, strict=True)
    )
    return (rows[:, :, None] * second.columns.shape[1] + columns[:, None, :]).flatten(1)


# [B, N, D], [B, M, D] -> int64 [B, N]
def match_patches(first: Tensor, second: Tensor, *, cosine: bool = False) -> Tensor:
    """For each patch token of the first images the one of the second with the largest dot product, or cosine."""
    num_images_at_once = max(1, _CHUNK_SIMILARITIES // (first.shape[1] * second.shape[1]))
    matches = []
    for queries, candidates in zip(
        torch.split(first, num_images_at_once), torch.split(second, num_images_at_once), strict=True
    ):
        if cosine:
            queries, candidates = normalize(queries, dim=-1), normalize(candidates, dim=-1)
        matches.append(torch.bmm(queries, candidates.mT).argmax(dim=2))
    return torch.cat(matches)


# numbers of patches, broadcast against each other
def grid_distance(patches: Tensor, others: Tensor, *, grid: int) -> Tensor:
    """Chebyshev distance in patches."""
    return torch.maximum((patches // grid - others // grid).abs(), (patches % grid - others % grid).abs())


# [B, g * g] each -> [B] float64
def share_within(matches: Tensor, truth: Tensor, overlap: Tensor, *, grid: int, radius: int) -> Tensor:
    """Share of the overlapping patches matched within `radius` of the truth; NaN for views that do not overlap."""
    hits = (grid_distance(matches, truth, grid=grid) <= radius) & overlap
    return hits.sum(dim=1).double() / overlap.sum(dim=1).double()


# [B, g * g] each -> [B] float64
def share_by_chance(truth: Tensor, overlap: Tensor, *, grid: int, radius: int) -> Tensor:
    """Expected `share_within` if each match is a random patch of the second view."""
    # number of patches within the radius of the true one along each axis, cut at the border
    rows, columns = (
        (place + radius).clamp_max(grid - 1) - (place - radius).clamp_min(0) + 1
        for place in (truth // grid, truth % grid)
    )
    return torch.where(overlap, (rows * columns).double() / grid**2, 0.0).sum(dim=1) / overlap.sum(dim=1).double()


def most_attended(
    attention: Tensor, *, grid: int, num_points: int, overlap: Tensor | None = None
) -> list[Tensor]:  # [B, heads, h, w], bool [B, g * g] -> [n] patches of each image
    """The patches with the most attention, averaged over heads and resized to our grid, strongest first.

    Only patches in the overlap; published figures fill up with patches that have no match.
    """
    scores = interpolate(attention, size=(grid, grid), mode="nearest").mean(dim=1).flatten(1)
    nums = torch.full((len(scores),), grid * grid)
    if overlap is not None:
        scores = scores.masked_fill(~overlap, -1.0)  # attention is never negative
        nums = overlap.sum(dim=1)
    order = scores.argsort(dim=1, descending=True, stable=True)
    return [patches[: min(num_points, num)] for patches, num in zip(order, nums.tolist(), strict=True)]


def match_picture(
    first: Tensor, second: Tensor, points: Tensor, matches: Tensor, *, patch: int, zoom: int = 1, gap: int = 0
) -> Tensor:  # uint8 [H, W, 3] twice, [n], [n] -> uint8 [zoom * H, 2 * zoom * W + gap, 3]
    """Two pictures side by side, with a line from each of the `points` (patches of the first) to its match.

    Published figures have thin red lines and no `gap`. Here neighbouring lines differ in colour, and each has a dark
    edge, so that it can be followed on any picture.
    """
    height, width = zoom * first.shape[0], zoom * first.shape[1]
    pair = Image.new("RGB", (2 * width + gap, height), (255, 255, 255))
    for picture, left in ((first, 0), (second, width + gap)):
        pair.paste(Image.fromarray(picture.cpu().numpy()).resize((width, height), Image.Resampling.BICUBIC), (left, 0))
    lines = Image.new("RGBA", (_SMOOTHING * pair.width, _SMOOTHING * height))  # reduced at the end: smooth edges
    draw, side = ImageDraw.Draw(lines), _SMOOTHING * zoom * patch
    grid, right = _SMOOTHING * width // side, _SMOOTHING * (width + gap)
    thick = _SMOOTHING * max(2.0, height / _HEIGHT_PER_LINE)
    joined = zip(points.tolist(), matches.tolist(), strict=True)
    for number, (point, match) in enumerate(joined):
        (x, y), (match_x, match_y) = ((side * (at % grid + 0.5), side * (at // grid + 0.5)) for at in (point, match))
        ends = (x, y), (right + match_x, match_y)
        for colour, extra in ((_LINE_EDGE, 2 * _SMOOTHING), (_LINE_COLOURS[number % len(_LINE_COLOURS)], 0)):
            draw.line(ends, fill=colour, width=round(thick + extra))
            for end in ends:
                draw.circle(end, 1.3 * thick + extra / 2, fill=colour)
    lines = lines.resize(pair.size, Image.Resampling.BOX)
    pair.paste(lines, mask=lines)
    return torch.from_numpy(np.array(pair))
