"""Views on a GPU in three launches per view size: resample (here), colour and finish (photometric).

The reference is image_ops; results agree to a fraction of a grey level. All parameters of a view are one row of a job
table, which reaches the device in a single copy. Programs do not depend on each other or on the batch, so a view is
bitwise the same at any position of a batch.

The tensor cores get float16 weights and images: bytes are exact in it, and each sum is divided by the sum of the
*rounded* weights, so a constant image stays constant. tf32 has as many bits, but is truncated, which darkens.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from massl.ops.image_ops import Axis, Filter, RaggedImages

# ---- the job table ---------------------------------------------------------------------------------------------------

# 4-byte columns: the image's offset (8 bytes), height and width, both axes, then the row of `pack_photometric`.
ROW_AXIS, COLUMN_AXIS, FACTORS, ORDER, JITTERED, GREYED, SOLARISED, SIGMA = map(
    tl.constexpr, (4, 8, 12, 16, 20, 21, 22, 23)
)
NUM_COLUMNS = tl.constexpr(24)
_NUM_PHOTOMETRIC = 12


def pack_photometric(
    factors: Tensor, order: Tensor, *, jittered: Tensor, greyed: Tensor, solarised: Tensor, sigmas: Tensor
) -> Tensor:
    """[N, 4], [N, 4], the others [N] -> float32 [N, _NUM_PHOTOMETRIC]. A sigma of 0 means no blur."""
    return torch.cat([factors, order, torch.stack([jittered, greyed, solarised, sigmas], dim=1)], dim=1).float()


def pack_jobs(
    images: RaggedImages, sources: Tensor, rows: Axis, columns: Axis, photometric: Tensor | None = None
) -> Tensor:
    """CPU int32 [N, 24]: view n is image `sources[n]` resampled along `rows` and `columns`, then `photometric[n]`."""
    places = torch.cat([images.offsets[:, None].view(torch.int32), images.sizes.int()], dim=1)[sources]
    axes = torch.stack([*rows, *columns], dim=1)
    if photometric is None:
        photometric = axes.new_zeros(len(sources), _NUM_PHOTOMETRIC)
    return torch.cat([places, axes.view(torch.int32), photometric.view(torch.int32)], dim=1)


# ---- crop and resize -------------------------------------------------------------------------------------------------


class ResampleTiles(NamedTuple):
    """Output pixels that one program writes and source pixels it reads at once; powers of two >= 16."""

    out_rows: int = 32
    out_columns: int = 32
    source_rows: int = 32
    source_columns: int = 32
    num_warps: int = 2  # a warp takes 16 rows of a tile; more than two would repeat work


DEFAULT_TILES = ResampleTiles()


def resample(
    pixels: Tensor, jobs: Tensor, *, size: int, filter: Filter = "bicubic", tiles: ResampleTiles = DEFAULT_TILES
) -> Tensor:
    """uint8 [P] (a ragged batch), its jobs on the device -> float32 [N, 3, size, size] in [0, 1]."""
    views = torch.empty(len(jobs), 3, size, size, device=pixels.device)
    tiles_across, tiles_down = triton.cdiv(size, tiles.out_columns), triton.cdiv(size, tiles.out_rows)
    _resample_kernel[(len(jobs) * tiles_down * tiles_across,)](
        pixels, jobs.view(torch.int64), jobs, jobs.view(torch.float32), views, size,
        tiles_across, tiles_down * tiles_across, OUT_ROWS=tiles.out_rows, OUT_COLUMNS=tiles.out_columns,
        SOURCE_ROWS=tiles.source_rows, SOURCE_COLUMNS=tiles.source_columns,
        BILINEAR=filter == "bilinear", num_warps=tiles.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
    return views


@triton.jit
def _load_four(place):
    return tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)


@triton.jit
def load_channels(places, plane, inside):
    red, green = tl.load(places, mask=inside, other=0), tl.load(places + plane, mask=inside, other=0)
    return red, green, tl.load(places + 2 * plane, mask=inside, other=0)


@triton.jit
def store_channels(places, plane, inside, red, green, blue):
    tl.store(places, red, mask=inside)
    tl.store(places + plane, green, mask=inside)
    tl.store(places + 2 * plane, blue, mask=inside)


@triton.jit
def _support(first_output, num_outputs, origin, step, num_read):
    """The first source pixel with a weight for these outputs, and the one after the last."""
    edge, other_edge = origin + first_output * step, origin + (first_output + num_outputs) * step
    reach = 2 * tl.maximum(tl.abs(step), 1.0)
    begin = tl.maximum(tl.floor(tl.minimum(edge, other_edge) - reach), 0.0)
    end = tl.minimum(tl.ceil(tl.maximum(edge, other_edge) + reach), num_read)
    return begin.to(tl.int32), end.to(tl.int32)


@triton.jit
def _taps(sources, outputs, origin, step, num_read, BILINEAR: tl.constexpr):
    """The weights of image_ops before division by their sum, from positions that broadcast to a matrix."""
    distance = tl.abs(sources + 0.5 - (origin + (outputs + 0.5) * step)) / tl.maximum(tl.abs(step), 1.0)
    outer, inner = tl.maximum(2 - distance, 0.0), tl.maximum(1 - distance, 0.0)
    taps = inner if BILINEAR else outer * outer * (outer - 1) * 0.5 + inner * inner * (1 - 2 * inner)
    return tl.where(sources < num_read, taps, 0.0).to(tl.float16)


@triton.jit
def clipped(values):
    return tl.minimum(tl.maximum(values, 0.0), 1.0)


@triton.jit
def _resample_kernel(
    pixels, longs, ints, floats, views, size, tiles_across, num_tiles,
    OUT_ROWS: tl.constexpr, OUT_COLUMNS: tl.constexpr, SOURCE_ROWS: tl.constexpr, SOURCE_COLUMNS: tl.constexpr,
    BILINEAR: tl.constexpr,
):  # fmt: skip
    """One tile of one view, all channels: columns, clip, rows. `longs`, `ints` and `floats` are the same job table."""
    view, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    first_row, first_column = tile // tiles_across * OUT_ROWS, tile % tiles_across * OUT_COLUMNS
    job = view * NUM_COLUMNS
    height, width = tl.load(ints + job + 2), tl.load(ints + job + 3)
    top, num_rows, row_origin, row_step = _load_four(floats + job + ROW_AXIS)
    left, num_columns, column_origin, column_step = _load_four(floats + job + COLUMN_AXIS)
    row_begin, row_end = _support(first_row, OUT_ROWS, row_origin, row_step, num_rows)
    column_begin, column_end = _support(first_column, OUT_COLUMNS, column_origin, column_step, num_columns)
    # 64 bits up to the corner of each channel's crop, as a batch may exceed 2 GiB; 32 bits within a channel.
    plane = height.to(tl.int64) * width
    red_corner = pixels + tl.load(longs + job // 2) + top.to(tl.int64) * width + left.to(tl.int64)
    out_rows, out_columns = first_row + tl.arange(0, OUT_ROWS), first_column + tl.arange(0, OUT_COLUMNS)
    row_sums = tl.full((OUT_ROWS,), 0.0, tl.float32)
    red = tl.full((OUT_ROWS, OUT_COLUMNS), 0.0, tl.float32)
    green, blue = red, red
    for row_block in range(row_begin, row_end, SOURCE_ROWS):
        rows = row_block + tl.arange(0, SOURCE_ROWS)
        column_sums = tl.full((OUT_COLUMNS,), 0.0, tl.float32)
        red_half = tl.full((SOURCE_ROWS, OUT_COLUMNS), 0.0, tl.float32)
        green_half, blue_half = red_half, red_half
        for column_block in range(column_begin, column_end, SOURCE_COLUMNS):
            columns = column_block + tl.arange(0, SOURCE_COLUMNS)
            across = _taps(columns[:, None], out_columns[None, :], column_origin, column_step, num_columns, BILINEAR)
            column_sums += tl.sum(across.to(tl.float32), 0)
            inside = (rows < row_end)[:, None] & (columns < column_end)[None, :]
            reds, greens, blues = load_channels(red_corner + rows[:, None] * width + columns[None, :], plane, inside)
            red_half = tl.dot(reds.to(tl.float16), across, red_half)
            green_half = tl.dot(greens.to(tl.float16), across, green_half)
            blue_half = tl.dot(blues.to(tl.float16), across, blue_half)
        down = _taps(rows[None, :], out_rows[:, None], row_origin, row_step, num_rows, BILINEAR)
        row_sums += tl.sum(down.to(tl.float32), 1)
        # sums are near max(1, step); those of columns beyond the view may be 0
        scale = 1 / (255 * tl.maximum(column_sums, 1e-6)[None, :])
        red = tl.dot(down, clipped(red_half * scale).to(tl.float16), red)
        green = tl.dot(down, clipped(green_half * scale).to(tl.float16), green)
        blue = tl.dot(down, clipped(blue_half * scale).to(tl.float16), blue)
    scale = 1 / tl.maximum(row_sums, 1e-6)[:, None]
    places = views + view.to(tl.int64) * (3 * size * size) + out_rows[:, None] * size + out_columns[None, :]
    inside = (out_rows < size)[:, None] & (out_columns < size)[None, :]
    store_channels(places, size * size, inside, clipped(red * scale), clipped(green * scale), clipped(blue * scale))
