"""Video object segmentation: propagating labels to the next frame, and scoring masks against the truth.

Propagation as in Jabri et al., 2020, and DINO (Caron et al., 2021); scores of the DAVIS benchmark (Perazzi et al.,
2016): region similarity J and contour accuracy F.
"""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv2d, interpolate, normalize

_CHUNK_ELEMENTS = 1 << 26  # similarities at once: 256 MiB

_CONTOUR_TOLERANCE = 0.008  # largest distance between matching contours / diagonal of the image


def propagate_labels(
    target: Tensor,
    context: Tensor,
    labels: Tensor,
    *,
    grid: tuple[int, int],
    radius: int,
    num_neighbours: int,
    temperature: float,
) -> Tensor:  # [N, D], [F, N, D], [F, N, C] -> [N, C]
    """Soft labels of the N = height x width patches of a frame, from F frames with known labels.

    Each patch takes the mean label of the `num_neighbours` most similar patches (and ties) at most `radius` rows and
    columns away, in any of the frames, weighted by exp(cosine / temperature).
    """
    num_frames, num_patches, _ = context.shape
    patches = torch.arange(num_patches, device=target.device)
    rows, columns = patches // grid[1], patches % grid[1]
    queries, keys = normalize(target.float(), dim=-1), normalize(context.float(), dim=-1).flatten(0, 1).T
    known = labels.flatten(0, 1)
    propagated = []
    for chunk in torch.split(patches, max(1, _CHUNK_ELEMENTS // (num_frames * num_patches))):
        is_near = ((rows[chunk, None] - rows).abs() <= radius) & ((columns[chunk, None] - columns).abs() <= radius)
        similarities = (queries[chunk] @ keys).masked_fill(~is_near.repeat(1, num_frames), -math.inf)
        best = torch.topk(similarities, min(num_neighbours, similarities.shape[1]), dim=1).values
        # Subtracting the largest similarity keeps the ratios of weights and prevents overflow.
        weights = torch.where(similarities >= best[:, -1:], torch.exp((similarities - best[:, :1]) / temperature), 0.0)
        propagated.append(weights @ known / weights.sum(dim=1, keepdim=True))
    return torch.cat(propagated)


def label_map(labels: Tensor, *, scale: int) -> Tensor:  # [C, h, w] -> int64 [h * scale, w * scale]
    """The class of each pixel: soft labels are enlarged, each class is stretched to [0, 1], and the largest wins."""
    enlarged = interpolate(labels[None], scale_factor=scale, mode="bilinear", align_corners=False)[0]
    lowest, highest = torch.aminmax(enlarged.flatten(1), dim=1, keepdim=True)
    lowest, highest = lowest[..., None], highest[..., None]
    # NaN or noise for a class that is the same everywhere, which is replaced below by 0 or 1
    stretched = (enlarged - lowest) / (highest - lowest)
    varies = highest - lowest > 1e-6 * highest  # enlarging rounds: equal values may differ in the last bit
    return torch.where(varies, stretched, (highest > 0).to(enlarged.dtype)).argmax(dim=0)


def resize_nearest(values: Tensor, size: tuple[int, int]) -> Tensor:  # [H, W] -> [size[0], size[1]]
    """Pillow's `resize` with NEAREST."""
    rows, columns = (_nearest(old, new).to(values.device) for old, new in zip(values.shape, size, strict=True))
    return values[rows[:, None], columns]


def _nearest(num_old: int, num_new: int) -> Tensor:  # -> int64 [num_new]
    # A running sum, as in Pillow: its rounding decides where a centre falls on an edge.
    step = num_old / num_new
    centres = np.cumsum([step * 0.5, *[step] * (num_new - 1)])
    return torch.from_numpy(np.floor(centres).astype(np.int64).clip(0, num_old - 1))


# ---- scores ----------------------------------------------------------------------------------------------------------


def region_similarity(masks: Tensor, truths: Tensor) -> Tensor:  # bool [M, H, W], bool [M, H, W] -> [M] float64
    """J: intersection over union; 1 where both masks are empty."""
    num_common = (masks & truths).sum(dim=(1, 2)).double()
    num_any = (masks | truths).sum(dim=(1, 2)).double()
    return torch.where(num_any > 0, num_common / num_any, 1.0)


def contour_accuracy(masks: Tensor, truths: Tensor) -> Tensor:  # bool [M, H, W], bool [M, H, W] -> [M] float64
    """F: harmonic mean of precision and recall of contour pixels, matched within 0.8 % of the diagonal."""
    tolerance = math.ceil(_CONTOUR_TOLERANCE * math.hypot(*masks.shape[1:]))
    contours, true_contours = contour(masks), contour(truths)
    precision = _share_near(contours, true_contours, tolerance)
    recall = _share_near(true_contours, contours, tolerance)
    return torch.where(precision + recall > 0, 2 * precision * recall / (precision + recall), 0.0)


def contour(masks: Tensor) -> Tensor:  # bool [M, H, W] -> bool [M, H, W]
    """Pixels that differ from the right, lower or lower right neighbour; the border is repeated."""
    right = torch.cat([masks[:, :, 1:], masks[:, :, -1:]], dim=2)
    below, right_below = (torch.cat([rows[:, 1:], rows[:, -1:]], dim=1) for rows in (masks, right))
    return (masks ^ right) | (masks ^ below) | (masks ^ right_below)


# bool [M, H, W], bool [M, H, W] -> [M] float64
def _share_near(contours: Tensor, others: Tensor, tolerance: int) -> Tensor:
    """Share of contour pixels with one of the other contour within the tolerance; 1 for an empty contour."""
    offsets = torch.arange(-tolerance, tolerance + 1, device=contours.device)
    disk = (offsets[:, None].square() + offsets.square() <= tolerance**2).float()
    is_near = conv2d(others[:, None].float(), disk[None, None], padding=tolerance)[:, 0] > 0.5
    num_pixels = contours.sum(dim=(1, 2)).double()
    return torch.where(num_pixels > 0, (contours & is_near).sum(dim=(1, 2)) / num_pixels, 1.0)
