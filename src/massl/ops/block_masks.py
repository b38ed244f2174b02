"""Random patch masks: iBOT's hidden rectangles, and the patches that stay visible to MAE.

A mask depends only on the caller's key, the image and the view, not on worker, rank or position in the batch. It is
bitwise the same on every device: besides integers only float32 sums, products and square roots are used, which all
processors round in the same way, unlike exponentials.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from massl import keyed_random

# Tries per mask, over all its rectangles; a mask that needs more ends early. With iBOT's ratios, none of 200,000 masks
# of 14 x 14 patches needed more than 42, none of 40,000 of 28 x 28 more than 58; with ratio 0.9 none more than 108.
NUM_TRIES = 128
NUM_FAILURES = 10  # failed tries in a row that end a mask
NUM_DRAWS = 4  # random numbers per try: area, aspect ratio, top, left
LOG_ASPECT_RATIO = math.log(1 / 0.3)  # height / width lies between 0.3 and 1 / 0.3, uniform in its logarithm
EXPONENTIAL_TERMS = 9


def block_masks(
    key: keyed_random.Key,
    image_indices: Tensor,
    *,
    num_views: int,
    grid: tuple[int, int],
    ratios: Sequence[float] = (0.0, 0.3),
    ratio_variances: Sequence[float] = (0.0, 0.2),
    device: torch.device | str | None = None,
) -> Tensor:  # [B] int64 -> [num_views, B, height * width] bool, true where a patch is hidden
    """Masks of overlapping rectangles as in iBOT (Zhou et al., 2022, after BEiT, Bao et al., 2022), with its defaults.

    Each mask takes one of `ratios` at random, changes it by at most its variance, and hides up to this share of the
    patches. Every try draws a rectangle with an area between (shorter side // 3) ** 2 and what is left to hide; it is
    placed if it is smaller than the grid in both directions and hides more patches, but not too many. Ten failed tries
    in a row end the mask, so most masks hide a little less than their share. `device` defaults to that of the indices.
    """
    keys = _view_keys(key, image_indices, num_views, device)
    targets = _num_hidden(keys, grid[0] * grid[1], ratios, ratio_variances)
    if keys.is_cuda:
        from massl.ops.kernels import masks  # imported here: needs Triton, which only GPU builds have

        return masks.place_rectangles(targets, rectangle_draws(keys, 0, NUM_TRIES), grid)
    return place_rectangles(targets, keys, grid)


def random_kept(
    key: keyed_random.Key,
    image_indices: Tensor,
    *,
    num_views: int,
    num_patches: int,
    num_kept: int,
    device: torch.device | str | None = None,
) -> Tensor:  # [B] int64 -> [num_views, B, num_kept] int64
    """Indices of the patches that stay visible to MAE's encoder (He et al., 2022): the first of a shuffled list."""
    if not 0 < num_kept <= num_patches:
        raise ValueError(f"{num_kept} of {num_patches} patches cannot stay visible; choose 1 to {num_patches}")
    keys = _view_keys(key, image_indices, num_views, device)
    noise = keyed_random.bits(keys[..., None], torch.arange(num_patches, device=keys.device))
    return noise.argsort(dim=-1, stable=True)[..., :num_kept]


def _view_keys(
    key: keyed_random.Key, image_indices: Tensor, num_views: int, device: torch.device | str | None
) -> Tensor:  # -> [V, B]
    views = torch.arange(num_views, device=image_indices.device)[:, None]
    keys = keyed_random.bits(key, image_indices[None, :], views)
    return keys if device is None else keys.to(device, non_blocking=True)


def _num_hidden(keys: Tensor, num_patches: int, ratios: Sequence[float], ratio_variances: Sequence[float]) -> Tensor:
    """How many patches each mask [V, B] may hide, in float32, not rounded."""
    pairs = list(zip(ratios, ratio_variances, strict=True))
    for ratio, variance in pairs:
        if variance < 0.0 or not 0.0 <= ratio - variance <= ratio + variance <= 1.0:
            raise ValueError(f"ratio {ratio} +- {variance} exceeds the range 0 to 1")
    choice = keyed_random.integers(keys, "ratio", upper=len(pairs))
    unit = keyed_random.uniform(keys, "share")
    share = torch.zeros_like(unit)
    for number, (ratio, variance) in enumerate(pairs):
        share = torch.where(choice == number, ratio - variance + unit * (2 * variance), share)
    return share * num_patches


def rectangle_draws(keys: Tensor, first_try: int, num_tries: int) -> Tensor:  # [V, B] -> [V, B, tries * NUM_DRAWS]
    numbers = torch.arange(first_try * NUM_DRAWS, (first_try + num_tries) * NUM_DRAWS, device=keys.device)
    return keyed_random.uniform(keys[..., None], numbers)


def smallest_area(grid: tuple[int, int]) -> int:
    return (min(grid) // 3) ** 2


def place_rectangles(targets: Tensor, keys: Tensor, grid: tuple[int, int]) -> Tensor:  # [V, B] each -> [V, B, H * W]
    """The plain version of the kernel: all masks make one try at a time until all are finished."""
    height, width = grid
    rows = torch.arange(height, device=keys.device)[:, None]
    columns = torch.arange(width, device=keys.device)
    masks = torch.zeros(*keys.shape, height, width, dtype=torch.bool, device=keys.device)
    num_hidden, failures = torch.zeros_like(targets), torch.zeros_like(targets)
    for number in range(NUM_TRIES):
        left_to_hide = targets - num_hidden
        trying = (left_to_hide >= 1) & (failures < NUM_FAILURES)
        if not trying.any():
            break
        for_area, for_aspect, for_top, for_left = rectangle_draws(keys, number, 1).unbind(-1)
        low = smallest_area(grid)
        side = torch.sqrt(low + for_area * (left_to_hide - low))
        half_log_aspect = (for_aspect - 0.5) * LOG_ASPECT_RATIO
        tall = (side * _exponential(half_log_aspect) + 0.5).floor()
        wide = (side * _exponential(-half_log_aspect) + 0.5).floor()
        top, left = (for_top * (height - tall + 1)).floor(), (for_left * (width - wide + 1)).floor()
        inside = _between(rows, top, tall) & _between(columns, left, wide)
        num_new = (inside & ~masks).sum(dim=(-2, -1))
        placed = trying & (tall < height) & (wide < width) & (num_new > 0) & (num_new <= left_to_hide)
        masks |= inside & placed[..., None, None]
        num_hidden += torch.where(placed, num_new, 0)
        failures = torch.where(placed, 0.0, failures + 1)
    return masks.flatten(2)


def _between(numbers: Tensor, first: Tensor, count: Tensor) -> Tensor:  # -> [V, B, n, 1] or [V, B, 1, n]
    first, count = first[..., None, None], count[..., None, None]
    return (numbers >= first) & (numbers < first + count)


def _exponential(x: Tensor) -> Tensor:
    """exp(x) by its Taylor series; for |x| <= 0.6 the remainder is below 2e-9."""
    value = torch.ones_like(x)
    for number in range(EXPONENTIAL_TERMS, 0, -1):
        value = value * x * (1.0 / number) + 1.0
    return value
