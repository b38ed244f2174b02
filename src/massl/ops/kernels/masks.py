"""iBOT's rectangle masks as one Triton kernel instead of some thousand launches, bitwise equal to `block_masks`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from massl.ops import block_masks

_LOG_ASPECT_RATIO = tl.constexpr(block_masks.LOG_ASPECT_RATIO)
_TERMS = tl.constexpr(block_masks.EXPONENTIAL_TERMS)


@triton.jit
def _exponential(x):
    value = x * 0.0 + 1.0
    for done in tl.static_range(_TERMS):
        value = value * x * (1.0 / (_TERMS - done)) + 1.0
    return value


@triton.jit
def _rectangles_kernel(
    targets_ptr, draws_ptr, masks_ptr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
    SMALLEST_AREA: tl.constexpr, NUM_TRIES: tl.constexpr, NUM_DRAWS: tl.constexpr, NUM_FAILURES: tl.constexpr,
):  # fmt: skip
    """One program per mask, which stays in registers until it is finished."""
    program = tl.program_id(0).to(tl.int64)
    rows, columns = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_W)
    mask = tl.zeros([BLOCK_H, BLOCK_W], dtype=tl.int32)
    left_to_hide = tl.load(targets_ptr + program)
    target, num_hidden, failures, number = left_to_hide, left_to_hide * 0.0, 0, 0
    while (left_to_hide >= 1) & (failures < NUM_FAILURES) & (number < NUM_TRIES):
        draws = draws_ptr + (program * NUM_TRIES + number) * NUM_DRAWS
        side = tl.sqrt_rn(SMALLEST_AREA + tl.load(draws) * (left_to_hide - SMALLEST_AREA))
        half_log_aspect = (tl.load(draws + 1) - 0.5) * _LOG_ASPECT_RATIO
        tall = tl.floor(side * _exponential(half_log_aspect) + 0.5)
        wide = tl.floor(side * _exponential(-half_log_aspect) + 0.5)
        top = tl.floor(tl.load(draws + 2) * (HEIGHT - tall + 1))
        left = tl.floor(tl.load(draws + 3) * (WIDTH - wide + 1))
        inside = ((rows >= top) & (rows < top + tall))[:, None] & ((columns >= left) & (columns < left + wide))[None, :]
        new = tl.where(inside & (mask == 0), 1, 0)
        num_new = tl.sum(new)
        placed = (tall < HEIGHT) & (wide < WIDTH) & (num_new > 0) & (num_new <= left_to_hide)
        mask += tl.where(placed, new, 0)
        num_hidden += tl.where(placed, num_new, 0)
        failures = tl.where(placed, 0, failures + 1)
        left_to_hide = target - num_hidden
        number += 1
    at = rows[:, None] * WIDTH + columns[None, :]
    tl.store(
        masks_ptr + program * (HEIGHT * WIDTH) + at,
        mask.to(tl.uint8),
        mask=(rows < HEIGHT)[:, None] & (columns < WIDTH)[None, :],
    )


def place_rectangles(targets: Tensor, draws: Tensor, grid: tuple[int, int]) -> Tensor:
    """`block_masks.place_rectangles` from draws made beforehand: [V, B], [V, B, tries * draws] -> [V, B, H * W]."""
    height, width = grid
    masks = torch.empty(*targets.shape, height * width, dtype=torch.bool, device=targets.device)
    if masks.numel() == 0:
        return masks
    # No fused multiply-adds: they round once where the tensor operations round twice.
    _rectangles_kernel[(targets.numel(),)](
        targets.contiguous(), draws.contiguous(), masks.view(torch.uint8),
        HEIGHT=height, WIDTH=width, BLOCK_H=triton.next_power_of_2(height), BLOCK_W=triton.next_power_of_2(width),
        SMALLEST_AREA=block_masks.smallest_area(grid), NUM_TRIES=block_masks.NUM_TRIES, NUM_DRAWS=block_masks.NUM_DRAWS,
        NUM_FAILURES=block_masks.NUM_FAILURES, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return masks
