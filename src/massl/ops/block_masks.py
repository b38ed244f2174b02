"""Which patches a masked-image method hides: iBOT's rectangles, and the patches that MAE leaves visible.

A mask is a function of the caller's key, the image and the view, such as ((seed, "block masks", step), image, view), so
it does not depend on worker, rank or position in the batch. It is the same on every device, bit for bit: beside
integers only float32 sums, products and square roots are used, which every processor rounds in the same way;
exponentials it rounds as it likes.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from massl import keyed_random

# Tries of one mask, over all its rectangles; a mask that would need more ends early. With iBOT's ratios none of 200,000
# masks of 14 x 14 patches needed more than 42 and none of 40,000 of 28 x 28 more than 58; where 0.9 of 28 x 28 are to
# be hidden, none more than 108.
NUM_TRIES = 128
NUM_FAILURES = 10  # so many tries in a row that place no rectangle end a mask
NUM_DRAWS = 4  # random numbers of a try: area, aspect ratio, top, left
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
    """Masks of overlapping rectangles, as iBOT draws them (Zhou et al., 2022, after Bao et al., 2022, BEiT); the
    defaults are iBOT's.

    Each mask takes one of `ratios` at random, moves it by at most its variance, and may then hide so large a share of
    the patches. Every try draws a rectangle with an area between (shorter side // 3) ** 2 and what is left to hide; it
    is placed if it is lower and narrower than the grid and hides some patches more, but not too many. Ten tries in a
    row without success end the mask, so most masks hide a little less than their share. `device`: where the masks are
    wanted, by default where the image numbers are.
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
) -> Tensor:  # [B] int64 -> [num_views, B, num_kept] int64, different numbers below num_patches
    """The patches that stay visible to MAE's encoder (He et al., 2022), in random order: the first ones of a shuffled
    list of all.
    """
    if not 0 < num_kept <= num_patches:
        raise ValueError(f"{num_kept} of {num_patches} patches cannot stay visible; choose 1 to {num_patches}")
    return _random_order(_view_keys(key, image_indices, num_views, device), num_patches)[..., :num_kept]


# -> [V, B]
def _view_keys(
    key: keyed_random.Key, image_indices: Tensor, num_views: int, device: torch.device | str | None
) -> Tensor:
    views = torch.arange(num_views, device=image_indices.device)[:, None]
    keys = keyed_random.bits(key, image_indices[None, :], views)
    return keys if device is None else keys.to(device, non_blocking=True)


def _random_order(keys: Tensor, num_patches: int) -> Tensor:  # [V, B] -> [V, B, num_patches]
    noise = keyed_random.bits(keys[..., None], torch.arange(num_patches, device=keys.device))
    return noise.argsort(dim=-1, stable=True)


# [V, B] -> [V, B]
def _num_hidden(keys: Tensor, num_patches: int, ratios: Sequence[float], ratio_variances: Sequence[float]) -> Tensor:
    """How many patches each mask may hide, a float32 number that is not rounded yet."""
    pairs = list(zip(ratios, ratio_variances, strict=True))
    for ratio, variance in pairs:
        if variance < 0.0 or not 0.0 <= ratio - variance <= ratio + variance <= 1.0:
            raise ValueError(f"a share of patches lies between 0 and 1; {ratio} +- {variance} does not")
    choice = keyed_random.integers(keys, "ratio", upper=len(pairs))
    unit = keyed_random.uniform(keys, "share")
    share = torch.zeros_like(unit)
    for number, (ratio, variance) in enumerate(pairs):
        share = torch.where(choice == number, ratio - variance + unit * (2 * variance), share)
    return share * num_patches


# [V, B] -> [V, B, num_tries * NUM_DRAWS] in [0, 1)
def rectangle_draws(keys: Tensor, first_try: int, num_tries: int) -> Tensor:
    numbers = torch.arange(first_try * NUM_DRAWS, (first_try + num_tries) * NUM_DRAWS, device=keys.device)
    return keyed_random.uniform(keys[..., None], numbers)


def smallest_area(grid: tuple[int, int]) -> int:
    return (min(grid) // 3) ** 2


# [V, B] float32, [V, B] -> [V, B, H * W]
def place_rectangles(targets: Tensor, keys: Tensor, grid: tuple[int, int]) -> Tensor:
    """The slow truth beside the kernel: all masks try once, then all again, until none has anything left to try."""
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


# [n, 1] or [n], [V, B], [V, B] -> [V, B, n, 1] or [V, B, 1, n]
def _between(numbers: Tensor, first: Tensor, count: Tensor) -> Tensor:
    first, count = first[..., None, None], count[..., None, None]
    return (numbers >= first) & (numbers < first + count)


def _exponential(x: Tensor) -> Tensor:
    """exp(x) by its series; for |x| <= 0.6 the terms left out are below 2e-9."""
    value = torch.ones_like(x)
    for number in range(EXPONENTIAL_TERMS, 0, -1):
        value = value * x * (1.0 / number) + 1.0
    return value
