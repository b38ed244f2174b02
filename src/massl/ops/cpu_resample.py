"""Crop, antialiased resize and mirror of many crops on the CPU, as small matrix products.

Resampling is linear in rows and in columns. An output pixel depends on few source pixels, so an axis is cut into blocks
of output pixels: each block is a product with the source pixels that it needs. Multiplying with the weights of all
source pixels, most of them 0, takes 2 to 6 times the arithmetic. Source pixels are converted to floats in the cache.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

_CHUNK_BYTES = 64 << 20  # memory for weights
_BLOCK = 16  # output pixels that share a matrix product
_BUFFER_FLOATS = 1 << 18  # source pixels converted at once: 1 MiB stays in the cache

Filter = Literal["bicubic", "bilinear"]  # both antialiased, as Pillow's are


class Axis(NamedTuple):
    """How N images are resampled along one axis; each field is [N] float32 (integers below 2**24 are exact)."""

    first: Tensor  # the first source pixel that is read
    num_read: Tensor  # how many are read from there on
    origin: Tensor  # outer edge of output pixel 0, in pixels after `first`
    step: Tensor  # source pixels per output pixel; negative when mirrored


def resample_on_cpu(
    pixels: Tensor, offsets: Tensor, sizes: Tensor, rows: Axis, columns: Axis, size: int, filter: Filter
) -> Tensor:  # -> [N, 3, size, size]
    """View n: the image of `sizes[n]` (height, width) at `offsets[n]` in `pixels`, resampled along both axes.

    A view depends only on its own image and axes, bit for bit, not on the views around it.
    """
    views = torch.empty(len(offsets), 3, size, size)
    num_taps = int(max(_blocks(axis, size).num_taps.max() for axis in (rows, columns)))
    num_at_once = max(1, _CHUNK_BYTES // (32 * size * num_taps))  # weights of both axes, and what computing them needs
    for start in range(0, len(offsets), num_at_once):
        some = slice(start, start + num_at_once)
        down, across = (Axis(*(field[some] for field in axis)) for axis in (rows, columns))
        _resample_some(pixels, offsets[some], sizes[some], down, across, filter, views[some])
    return views


class _Blocks(NamedTuple):
    """How N axes are cut into blocks of output pixels. Each block reads few source pixels: 4 output pixels more than
    its own, which is far less than the whole crop. The source position of block k is k * stride - pad.
    """

    origin: Tensor  # [N] float32: as in Axis, for a positive step
    step: Tensor
    num_read: Tensor
    pad: Tensor  # [N] float32, whole numbers, as are stride and num_taps
    stride: Tensor
    num_taps: Tensor  # source pixels that a block reads, rounded up so that few different numbers occur


def _block_shape(size: int) -> tuple[int, int]:
    """Number of blocks, and output pixels in each; together at least `size`."""
    num_blocks = -(-size // _BLOCK)
    return num_blocks, -(-size // num_blocks)


def _blocks(axis: Axis, size: int) -> _Blocks:
    num_blocks, block = _block_shape(size)
    step = axis.step.abs()
    origin = axis.origin + size * axis.step.clamp_max(0)  # mirrored views are mirrored at the end
    reach = 2 * step.clamp_min(1)
    pad = (reach - origin).ceil().clamp_min(0)
    stride = (block * step).floor()
    drift = (num_blocks - 1) * (block * step - stride)  # of the last block against its exact position
    needed = (origin + pad + block * step + reach + drift).ceil() + 1
    unit = 2 ** (needed.log2().floor() - 3).clamp_min(2)
    return _Blocks(origin, step, axis.num_read, pad, stride, (needed / unit).ceil() * unit)


def _block_weights(blocks: _Blocks, size: int, filter: Filter, total: float) -> list[Tensor]:
    """For each axis [num_blocks, num_taps, block]: the weights of its source pixels, which sum to `total`."""
    weights: list[Tensor] = [blocks.step] * len(blocks.step)
    for num_taps in sorted(set(blocks.num_taps.tolist())):
        members = (blocks.num_taps == num_taps).nonzero().squeeze(1)
        several = _taps(_Blocks(*(field[members] for field in blocks)), int(num_taps), size, filter, total)
        for member, own in zip(members.tolist(), several.unbind(), strict=True):
            weights[member] = own
    return weights


def _taps(blocks: _Blocks, num_taps: int, size: int, filter: Filter, total: float) -> Tensor:
    """Pillow's antialiased taps (bicubic: Keys, 1981, a = -1/2): stretched when shrinking, cut at borders."""
    origin, step, num_read, pad, stride = (field[:, None, None] for field in blocks[:5])
    num_blocks, block = _block_shape(size)
    inputs = torch.arange(num_blocks)[:, None] * stride - pad + (torch.arange(num_taps) + 0.5)
    centres = origin + (torch.arange(num_blocks * block).view(num_blocks, block) + 0.5) * step
    distance = (inputs[..., None] - centres[:, :, None]).abs_() / step.clamp_min(1)[..., None]
    inner = (1 - distance).clamp_min_(0)
    if filter == "bilinear":
        taps = inner
    else:  # Keys' two pieces without a branch
        outer = distance.neg_().add_(2).clamp_min_(0)
        taps = outer * outer * (outer - 1) / 2 + inner * inner * (1 - 2 * inner)
    taps *= ((inputs > 0) & (inputs < num_read))[..., None]
    # the last block may have pixels beyond the view, whose weights may sum to 0; they are not used
    return taps.mul_(total / taps.sum(2, keepdim=True).clamp_min(1e-6))


def _resample_some(
    pixels: Tensor, offsets: Tensor, sizes: Tensor, rows: Axis, columns: Axis, filter: Filter, views: Tensor
) -> None:
    """Write view n into `views[n]`: each block of columns is a matrix product, then each block of rows."""
    size = views.shape[-1]
    num_blocks, block = _block_shape(size)
    down, across = _blocks(rows, size), _blocks(columns, size)
    across_weights = _block_weights(across, size, filter, 1 / 255)
    down_weights = [weights.mT for weights in _block_weights(down, size, filter, 1)]
    # Pixels that are read with weight 0 must be finite: both buffers start as zeros and only ever hold finite numbers.
    pitches, heights = (
        torch.maximum(axis.pad + axis.num_read, (num_blocks - 1) * axis.stride + axis.num_taps).long()
        for axis in (across, down)
    )
    rows_at_once = (_BUFFER_FLOATS // (3 * pitches)).clamp_min(1)
    buffer = torch.zeros(int((3 * pitches * torch.minimum(rows_at_once, rows.num_read.long())).max()))
    side = num_blocks * block
    half = torch.zeros(int(heights.max()) * 3 * side)  # [row, channel, column]
    numbers = [offsets + pixels.storage_offset(), *sizes.T, rows.first, rows.num_read]
    numbers += [columns.first, columns.num_read, across.pad, across.stride, down.pad, down.stride, pitches]
    numbers += [rows_at_once, columns.step < 0]
    jobs = torch.stack([number.long() for number in numbers], dim=1).tolist()
    # as_strided: half as much overhead as slicing, which matters for small images
    for view, job, column_weights, row_weights in zip(views.unbind(), jobs, across_weights, down_weights, strict=True):
        offset, height, width, top, num_rows, left, num_columns, pad, stride, row_pad, row_stride, *rest = job
        pitch, num_at_once, mirrored = rest
        for start in range(0, num_rows, num_at_once):
            num = min(num_at_once, num_rows - start)
            place = offset + (top + start) * width + left
            window = pixels.as_strided((num, 3, num_columns), (width, height * width, 1), place)
            buffer.as_strided((num, 3, num_columns), (3 * pitch, pitch, 1), pad).copy_(window)
            bands = buffer.as_strided((num_blocks, 3 * num, column_weights.shape[1]), (stride, pitch, 1))
            # Columns first, clipped in between, as Pillow does (since 13 unless the height shrinks much more).
            there = half.as_strided((num_blocks, 3 * num, block), (block, side, 1), (row_pad + start) * 3 * side)
            torch.clamp(torch.bmm(bands, column_weights), 0, 1, out=there)
        bands = half.as_strided((num_blocks, row_weights.shape[2], 3 * side), (row_stride * 3 * side, 3 * side, 1))
        whole = torch.bmm(row_weights, bands).as_strided((3, size, size), (side, 3 * side, 1))
        torch.clamp(whole.flip(2) if mirrored else whole, 0, 1, out=view)
