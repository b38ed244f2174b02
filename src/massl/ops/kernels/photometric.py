"""GPU kernels for photometric augmentation: one for colour, one for blur, solarise, normalise and round."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from massl.ops.kernels.resample import (
    FACTORS,
    GREYED,
    JITTERED,
    NUM_COLUMNS,
    ORDER,
    SIGMA,
    SOLARISED,
    clipped,
    load_channels,
    store_channels,
)

_CONTRAST, _SATURATION, _HUE = map(tl.constexpr, (1, 2, 3))  # positions in image_ops.JITTER_OPERATIONS; brightness is 0

# ---- colour ----------------------------------------------------------------------------------------------------------


def colour_in_place(views: Tensor, jobs: Tensor, *, pixels_at_once: int = 2048, num_warps: int = 8) -> None:
    """Jitter, then grey, the views [N, 3, S, S] whose jobs [N, 24] say so, as image_ops.colour_jitter and grey do."""
    num_pixels = views.shape[2] * views.shape[3]
    _colour_kernel[(len(jobs),)](
        views, jobs.view(torch.float32), num_pixels,
        PIXELS_AT_ONCE=pixels_at_once, num_warps=num_warps, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def _luminance(red, green, blue):
    return 0.299 * red + 0.587 * green + 0.114 * blue


@triton.jit
def _hue_ramp(position):
    position -= 6 * tl.floor(position / 6)
    return clipped(tl.minimum(position, 4 - position))


@triton.jit
def _jittered(red, green, blue, operation, factor, mean_luminance):
    """One of image_ops.JITTER_OPERATIONS; `operation` is a scalar, so all threads take the same branch."""
    if operation == _HUE:
        value = tl.maximum(tl.maximum(red, green), blue)
        chroma = value - tl.minimum(tl.minimum(red, green), blue)
        divisor = tl.maximum(chroma, 1e-6)
        not_red = tl.where(value == green, (blue - red) / divisor + 2, (red - green) / divisor + 4)
        sector = tl.where(value == red, (green - blue) / divisor, not_red) + 6 * factor
        red, green, blue = (
            value - chroma * _hue_ramp(sector + 5),
            value - chroma * _hue_ramp(sector + 3),
            value - chroma * _hue_ramp(sector + 1),
        )
    else:
        other = tl.where(
            operation == _SATURATION,
            _luminance(red, green, blue),
            tl.where(operation == _CONTRAST, mean_luminance, 0.0),
        )
        red, green, blue = (
            clipped(factor * red + (1 - factor) * other),
            clipped(factor * green + (1 - factor) * other),
            clipped(factor * blue + (1 - factor) * other),
        )
    return red, green, blue


@triton.jit
def _colour_kernel(views, floats, num_pixels, PIXELS_AT_ONCE: tl.constexpr):
    """One view: a pass up to contrast, to get the mean luminance that contrast needs, and a pass that writes."""
    view = tl.program_id(0)
    parameters = floats + view * NUM_COLUMNS
    jittered, greyed = tl.load(parameters + JITTERED) > 0, tl.load(parameters + GREYED) > 0
    first_red = views + view.to(tl.int64) * (3 * num_pixels)
    luminances = tl.full((PIXELS_AT_ONCE,), 0.0, tl.float32)
    if jittered:
        for begin in range(0, num_pixels, PIXELS_AT_ONCE):
            positions = begin + tl.arange(0, PIXELS_AT_ONCE)
            inside = positions < num_pixels
            red, green, blue = load_channels(first_red + positions, num_pixels, inside)
            before_contrast = 1
            for turn in tl.static_range(4):
                operation = tl.load(parameters + ORDER + turn).to(tl.int32)
                before_contrast = tl.where(operation == _CONTRAST, 0, before_contrast)
                if before_contrast > 0:
                    red, green, blue = _jittered(
                        red, green, blue, operation, tl.load(parameters + FACTORS + operation), 0.0
                    )
            luminances += tl.where(inside, _luminance(red, green, blue), 0.0)
    mean_luminance = tl.sum(luminances, 0) / num_pixels
    if jittered | greyed:
        for begin in range(0, num_pixels, PIXELS_AT_ONCE):
            positions = begin + tl.arange(0, PIXELS_AT_ONCE)
            inside = positions < num_pixels
            red, green, blue = load_channels(first_red + positions, num_pixels, inside)
            if jittered:
                for turn in tl.static_range(4):
                    operation = tl.load(parameters + ORDER + turn).to(tl.int32)
                    red, green, blue = _jittered(
                        red, green, blue, operation, tl.load(parameters + FACTORS + operation), mean_luminance
                    )
            if greyed:
                red = _luminance(red, green, blue)
                green, blue = red, red
            store_channels(first_red + positions, num_pixels, inside, red, green, blue)


# ---- blur, solarise, normalise ---------------------------------------------------------------------------------------

_TILE, _WINDOW = 32, 64  # per axis: pixels that one program writes, and that it reads for their blur


def can_blur(sigma: float) -> bool:
    """Whether three box passes for this sigma stay inside the window: up to 5.4 pixels."""
    return 3 * (int((4 * sigma**2 + 1) ** 0.5 - 1) // 2 + 1) <= (_WINDOW - _TILE) // 2


def finish(
    views: Tensor, jobs: Tensor, *, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype
) -> Tensor:  # float32 [N, 3, S, S], [N, 24] -> [N, 3, S, S]
    """Blur (sigmas must satisfy `can_blur`) and solarise the views whose jobs say so; normalise and round all."""
    finished = torch.empty_like(views, dtype=dtype)
    size = views.shape[-1]
    tiles_across = triton.cdiv(size, _TILE)
    _finish_kernel[(len(jobs) * tiles_across**2,)](
        views, jobs.view(torch.float32), finished, size, tiles_across, *mean, *std,
        TILE=_TILE, WINDOW=_WINDOW, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return finished


@triton.jit
def _box(outputs, sources, extent, size):
    """One pass of image_ops' extended box filter, before division by its sum, which is the same for all outputs."""
    reach = tl.maximum(extent + 1 - tl.abs(outputs[:, None] - sources[None, :]), 0.0)
    at_border = (sources == 0) | (sources == size - 1)
    weights = tl.where(at_border[None, :], reach, tl.minimum(reach, 1.0))
    return tl.where((sources < size)[None, :], weights, 0.0).to(tl.float16)


@triton.jit
def _three_box_passes(outputs, sources, extent, size):
    box = _box(sources, sources, extent, size)
    twice = tl.dot(_box(outputs, sources, extent, size), box).to(tl.float16)
    return tl.dot(twice, box).to(tl.float16)


@triton.jit
def _blurred(channel, inside, down, across, row_scale, column_scale):
    window = tl.load(channel, mask=inside, other=0.0).to(tl.float16)
    half = (tl.dot(window, across) * column_scale).to(tl.float16)
    return tl.dot(down, half) * row_scale


@triton.jit
def _solarised_normalised(values, solarised, mean, std):
    threshold = tl.where(solarised, 128 / 255, 2.0)
    return (tl.where(values >= threshold, 1 - values, values) - mean) / std


@triton.jit
def _finish_kernel(
    views, floats, finished, size, tiles_across, mean_red, mean_green, mean_blue, std_red, std_green, std_blue,
    TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One tile of one view, all channels."""
    num_tiles = tiles_across * tiles_across
    view, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    first_row, first_column = tile // tiles_across * TILE, tile % tiles_across * TILE
    sigma, solarised = (
        tl.load(floats + view * NUM_COLUMNS + SIGMA),
        tl.load(floats + view * NUM_COLUMNS + SOLARISED) > 0,
    )
    start, plane = view.to(tl.int64) * (3 * size * size), size * size
    out_rows, out_columns = first_row + tl.arange(0, TILE), first_column + tl.arange(0, TILE)
    out_places = out_rows[:, None] * size + out_columns[None, :]
    out_inside = (out_rows < size)[:, None] & (out_columns < size)[None, :]
    if sigma > 0:
        variance = sigma * sigma / 3
        whole = tl.floor((tl.sqrt(12 * variance + 1) - 1) * 0.5)
        edge = (2 * whole + 1) * (3 * variance - whole * (whole + 1)) / (6 * ((whole + 1) * (whole + 1) - variance))
        radius = 3 * (whole.to(tl.int32) + 1)
        rows = tl.maximum(first_row - radius, 0) + tl.arange(0, WINDOW)
        columns = tl.maximum(first_column - radius, 0) + tl.arange(0, WINDOW)
        down = _three_box_passes(out_rows, rows, whole + edge, size)
        across = _three_box_passes(out_columns, columns, whole + edge, size)
        row_scale = 1 / tl.maximum(tl.sum(down.to(tl.float32), 1), 1e-6)[:, None]
        column_scale = 1 / tl.maximum(tl.sum(across.to(tl.float32), 1), 1e-6)[None, :]
        across = tl.trans(across)
        last_row, last_column = (
            tl.minimum(first_row + TILE + radius, size),
            tl.minimum(first_column + TILE + radius, size),
        )
        inside = (rows < last_row)[:, None] & (columns < last_column)[None, :]
        places = views + start + rows[:, None] * size + columns[None, :]
        red = _blurred(places, inside, down, across, row_scale, column_scale)
        green = _blurred(places + plane, inside, down, across, row_scale, column_scale)
        blue = _blurred(places + 2 * plane, inside, down, across, row_scale, column_scale)
    else:
        red, green, blue = load_channels(views + start + out_places, plane, out_inside)
    element = finished.dtype.element_ty
    red = _solarised_normalised(red, solarised, mean_red, std_red).to(element)
    green = _solarised_normalised(green, solarised, mean_green, std_green).to(element)
    blue = _solarised_normalised(blue, solarised, mean_blue, std_blue).to(element)
    store_channels(finished + start + out_places, plane, out_inside, red, green, blue)
