"""Batched image operations on any device: crop and resize, colour, blur, solarise.

Images are float32 [N, 3, H, W] in [0, 1]. Parameters (boxes, factors, sigmas) stay on the CPU, where they are drawn, so
grouping images by operation never waits for the device. Each operation follows Pillow's for 8-bit images, without
rounding to 8 bits in between. On a GPU resampling is a Triton kernel (kernels.resample).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

_CHUNK_BYTES = 128 << 20  # working memory of resampling; on two cores, 4 to 256 MiB are equally fast
# Sides of the windows read around crops. Finer steps waste less arithmetic, coarser ones share larger batched products:
# for 12 views of 500-pixel images, powers of two take twice as long and multiples of 16 as long as these.
_WINDOW_SIDES = torch.tensor(
    [16, 24, 32, 48, 64, 96, *range(128, 512, 64), *(side << octave for octave in range(9) for side in (512, 768))]
)


Filter = Literal["bicubic", "bilinear"]  # both antialiased, as Pillow's are


@dataclass(frozen=True, kw_only=True)
class RaggedImages:
    """Images of different sizes, each [3, H, W] uint8, flattened and concatenated."""

    pixels: Tensor  # [P] uint8, on any device
    offsets: Tensor  # [B] int64 on the CPU: start of each image in `pixels`
    sizes: Tensor  # [B, 2] int64 on the CPU: height, width

    @classmethod
    def from_list(cls, images: Sequence[Tensor]) -> Self:  # each uint8 [3, H, W]
        ends = torch.tensor([image.numel() for image in images]).cumsum(0)
        return cls(
            pixels=torch.cat([image.flatten() for image in images]),
            offsets=torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1]]),
            sizes=torch.tensor([image.shape[1:] for image in images]),
        )

    def __len__(self) -> int:
        return len(self.offsets)

    def slice(self, start: int, stop: int) -> Self:
        """Images start to stop; the pixels are shared."""
        return replace(self, offsets=self.offsets[start:stop], sizes=self.sizes[start:stop])

    def to(self, device: torch.device | str) -> Self:
        """The same images with their pixels on the device; offsets and sizes stay on the CPU."""
        return replace(self, pixels=self.pixels.to(device, non_blocking=True))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to `device` without waiting: copies to a GPU are asynchronous only from pinned memory."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def update_rows(images: Tensor, chosen: Tensor, operation: Callable[..., Tensor], *parameters: Tensor) -> None:
    """Replace the `chosen` images (CPU bool [N]) in place by operation(images, *parameters)."""
    rows = chosen.nonzero().squeeze(1)
    if len(rows):
        there = to_device(rows, images.device)
        images.index_copy_(0, there, operation(images[there], *(parameter[rows] for parameter in parameters)))


# ---- crop and resize -------------------------------------------------------------------------------------------------


class Axis(NamedTuple):
    """How N images are resampled along one axis; each field is [N] float32 (integers below 2**24 are exact)."""

    first: Tensor  # the first source pixel that is read
    num_read: Tensor  # how many are read from there on
    origin: Tensor  # outer edge of output pixel 0, in pixels after `first`
    step: Tensor  # source pixels per output pixel; negative when mirrored


def crop_resize(images: RaggedImages, boxes: Tensor, *, size: int, flip: Tensor, filter: Filter = "bicubic") -> Tensor:
    """Views of size x size pixels: crop, antialiased resize, mirror (Pillow's `crop`, `resize` and `transpose`).

    CPU int64 [V, B, 4] (top, left, height, width), CPU bool [V, B] -> [V, B, 3, size, size] in [0, 1].
    """
    num_views, num_images, _ = boxes.shape
    sources = torch.arange(num_images).repeat(num_views)
    views = _resample(images, sources, *crop_axes(boxes, size=size, flip=flip), size, filter)
    return views.view(num_views, num_images, 3, size, size)


def crop_axes(boxes: Tensor, *, size: int, flip: Tensor) -> tuple[Axis, Axis]:
    """Rows and columns of the N crops of `crop_resize`, view by view."""
    top, left, height, width = boxes.reshape(-1, 4).float().unbind(1)
    mirrored = flip.reshape(-1)
    rows = Axis(top, height, torch.zeros_like(top), height / size)
    return rows, Axis(left, width, torch.where(mirrored, width, 0), torch.where(mirrored, -width, width) / size)


def centre_view(
    images: RaggedImages, *, size: int, crop_ratio: float, filter: Filter = "bicubic"
) -> Tensor:  # -> [B, 3, size, size] in [0, 1]
    """Views for evaluation: resize the shorter side to size / crop_ratio, then crop the centre, as torchvision does."""
    if not 0 < crop_ratio <= 1:
        raise ValueError(f"crop_ratio, the kept part of the shorter side, must lie in (0, 1]; got {crop_ratio}")
    sizes = images.sizes
    resized = round(size / crop_ratio) * sizes // sizes.amin(1, keepdim=True)
    margin = torch.round((resized - size).double() / 2)  # half to even, as CenterCrop
    step = sizes.double() / resized
    start, reach = margin * step, 2 * step.clamp_min(1)  # only pixels within `reach` of the central part are read
    first = (start - reach).floor().clamp_min(0)
    num_read = torch.minimum((start + size * step + reach).ceil(), sizes.double()) - first
    rows, columns = (
        Axis(*(field[:, axis].float() for field in (first, num_read, start - first, step))) for axis in (0, 1)
    )
    return _resample(images, torch.arange(len(images)), rows, columns, size, filter)


def _resample(
    images: RaggedImages, sources: Tensor, rows: Axis, columns: Axis, size: int, filter: Filter
) -> Tensor:  # -> [N, 3, size, size]
    """Row n: image `sources[n]` of the batch, resampled along both axes as two matrix products.

    Only a window around each crop is read. Windows have few different sizes, so that many share a batched product; a
    window's size depends only on its own crop, so that results do not depend on the rest of the batch.
    """
    pixels = images.pixels
    if pixels.is_cuda:
        from massl.ops.kernels import resample  # imported here: needs Triton, which only GPU builds have

        jobs = resample.pack_jobs(images, sources, rows, columns)
        return resample.resample(pixels, to_device(jobs, pixels.device), size=size, filter=filter)
    height_class, width_class = (torch.bucketize(axis.num_read.long(), _WINDOW_SIDES) for axis in (rows, columns))
    classes = height_class * len(_WINDOW_SIDES) + width_class
    order = torch.argsort(classes, stable=True)
    places = to_device(torch.stack([images.offsets, *images.sizes.T])[:, sources[order]], pixels.device)  # int64
    jobs = to_device(torch.stack([torch.arange(len(sources)), *rows, *columns])[:, order], pixels.device)
    widest = int(_WINDOW_SIDES[width_class.max()])
    line = torch.cat([pixels, pixels.new_zeros(widest)])  # a window may reach past the last pixel
    views = torch.empty(len(sources), 3, size, size, device=pixels.device)
    for chunk, height, width in _chunks(classes[order], size):
        slots, *axes = jobs[:, chunk]
        chunk_rows, chunk_columns = Axis(*axes[:4]), Axis(*axes[4:])
        windows = _windows(line, places[:, chunk], chunk_rows.first, chunk_columns.first, height, width)
        across = _weights(chunk_columns, size, width, filter).mT / 255
        # Columns first, clipped in between, as Pillow does (since 13 unless the height shrinks much more).
        half = torch.bmm(windows.float().flatten(1, 2), across).clamp_(0, 1).view(-1, 3, height, size)
        views.index_copy_(0, slots.long(), (_weights(chunk_rows, size, height, filter)[:, None] @ half).clamp_(0, 1))
    return views


def _chunks(sorted_classes: Tensor, size: int) -> Iterator[tuple[slice, int, int]]:
    """Slices of one window size that fit the working memory, with the window's height and width."""
    begin = 0
    for window_class, num in Counter(sorted_classes.tolist()).items():
        height, width = (int(_WINDOW_SIDES[part]) for part in divmod(window_class, len(_WINDOW_SIDES)))
        num_bytes = 15 * height * width + 12 * size * (height + size) + 16 * size * max(height, width)
        num_at_once = max(1, _CHUNK_BYTES // num_bytes)
        for start in range(begin, begin + num, num_at_once):
            yield slice(start, min(start + num_at_once, begin + num)), height, width
        begin += num


def _windows(line: Tensor, places: Tensor, tops: Tensor, lefts: Tensor, height: int, width: int) -> Tensor:
    """Windows [n, 3, height, width] of the flattened images at `places` (offsets, heights, widths)."""
    offsets, image_heights, image_widths = places[:, :, None, None]
    rows = torch.minimum(tops.long()[:, None] + torch.arange(height, device=line.device), image_heights[:, 0] - 1)
    planes = torch.arange(3, device=line.device)[:, None] * image_heights
    starts = offsets + (planes + rows[:, None]) * image_widths + lefts.long()[:, None, None]
    return line.unfold(0, width, 1)[starts]  # whole rows: 9 times as fast on the CPU as an index per pixel


def _weights(axis: Axis, size: int, width: int, filter: Filter) -> Tensor:  # -> [n, size, width]
    """Pillow's antialiased taps (bicubic: Keys, 1981, a = -1/2): stretched when shrinking, cut at borders, sum 1."""
    outputs, inputs = (torch.arange(num, device=axis.step.device) + 0.5 for num in (size, width))
    step = axis.step[:, None]
    centres = axis.origin[:, None] + outputs * step
    distance = (inputs - centres[:, :, None]).abs_() / step.abs().clamp_min(1)[:, :, None]
    outer, inner = (2 - distance).clamp_min_(0), (1 - distance).clamp_min_(0)
    cubic = outer * outer * (outer - 1) / 2 + inner * inner * (1 - 2 * inner)  # Keys' two pieces without a branch
    taps = inner if filter == "bilinear" else cubic
    taps *= (inputs < axis.num_read[:, None])[:, None]
    return taps / taps.sum(-1, keepdim=True)


# ---- colour ----------------------------------------------------------------------------------------------------------


def _luminance(images: Tensor) -> Tensor:  # [N, 3, H, W] -> [N, 1, H, W]
    red, green, blue = images.unbind(1)
    return (0.299 * red + 0.587 * green + 0.114 * blue).unsqueeze(1)


def _blend(images: Tensor, other: Tensor | float, factors: Tensor) -> Tensor:
    """factor * image + (1 - factor) * other, clipped."""
    weights = to_device(factors, images.device).view(-1, 1, 1, 1)
    return (weights * images + (1 - weights) * other).clamp_(0, 1)


def grey(images: Tensor) -> Tensor:
    return _luminance(images).expand_as(images)


def adjust_brightness(images: Tensor, factors: Tensor) -> Tensor:  # [N, 3, H, W], [N] -> [N, 3, H, W]
    return _blend(images, 0.0, factors)


def adjust_contrast(images: Tensor, factors: Tensor) -> Tensor:  # [N, 3, H, W], [N] -> [N, 3, H, W]
    return _blend(images, _luminance(images).mean((1, 2, 3), keepdim=True), factors)


def adjust_saturation(images: Tensor, factors: Tensor) -> Tensor:  # [N, 3, H, W], [N] -> [N, 3, H, W]
    return _blend(images, _luminance(images), factors)


def adjust_hue(images: Tensor, shifts: Tensor) -> Tensor:  # [N, 3, H, W], [N] -> [N, 3, H, W]
    """Turn the HSV hue by `shifts` turns, keeping saturation and value."""
    red, green, blue = images.unbind(1)
    value = images.amax(1)
    chroma = value - images.amin(1)
    divisor = chroma.clamp_min(1e-6)  # grey pixels have no hue: any value works
    from_red, from_green, from_blue = (green - blue) / divisor, (blue - red) / divisor + 2, (red - green) / divisor + 4
    sector = torch.where(value == red, from_red, torch.where(value == green, from_green, from_blue))
    sector = sector + 6 * to_device(shifts, images.device).view(-1, 1, 1)
    offsets = torch.arange(5, 0, -2, device=images.device).view(3, 1, 1)  # 5, 3, 1 for red, green, blue
    position = (sector[:, None] + offsets) % 6
    return value[:, None] - chroma[:, None] * torch.minimum(position, 4 - position).clamp_(0, 1)


JITTER_OPERATIONS = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)


def colour_jitter(images: Tensor, factors: Tensor, order: Tensor) -> Tensor:  # [N, 3, H, W], CPU [N, 4], CPU [N, 4]
    """Apply the four JITTER_OPERATIONS to each image in its own order; column k of `factors` belongs to operation k."""
    jittered = images.clone()
    for operations in order.unbind(1):
        for number, operation in enumerate(JITTER_OPERATIONS):
            update_rows(jittered, operations == number, operation, factors[:, number])
    return jittered


def solarise(images: Tensor, threshold: float = 128 / 255) -> Tensor:
    return torch.where(images >= threshold, 1 - images, images)


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:  # [..., 3, H, W]
    shift, scale = to_device(torch.tensor([tuple(mean), tuple(std)]), images.device).view(2, 3, 1, 1).unbind()
    return (images - shift) / scale


# ---- blur ------------------------------------------------------------------------------------------------------------


def gaussian_blur(images: Tensor, sigmas: Tensor) -> Tensor:  # [N, 3, H, W], [N] -> [N, 3, H, W]
    """Pillow's GaussianBlur(sigma): three box filters per axis, borders repeated, as one matrix product per axis."""
    device_sigmas = to_device(sigmas, images.device)
    height, width = images.shape[2:]
    across = _three_box_passes(device_sigmas, width)
    down = across if height == width else _three_box_passes(device_sigmas, height)
    return down[:, None] @ (images.flatten(1, 2) @ across.mT).view_as(images)


def _three_box_passes(sigmas: Tensor, num_pixels: int) -> Tensor:  # [N] -> [N, num_pixels, num_pixels]
    """The matrix of three passes of the extended box filter (Gwosdek et al., 2011).

    One pass weighs offsets up to `whole` by 1 and the next by `edge` in [0, 1), so that its variance is sigma**2 / 3.
    """
    variance = sigmas.square() / 3
    whole = ((torch.sqrt(12 * variance + 1) - 1) / 2).floor()
    edge = (2 * whole + 1) * (3 * variance - whole * (whole + 1)) / (6 * ((whole + 1).square() - variance))
    position = torch.arange(num_pixels, device=sigmas.device)
    reach = (whole + edge)[:, None, None] + 1 - (position[:, None] - position).abs()
    box = reach.clamp(0, 1)
    # The first and last pixel also count for their copies beyond the border; those weights sum to max(reach, 0).
    box[:, :, 0], box[:, :, -1] = reach[:, :, 0].clamp_min(0), reach[:, :, -1].clamp_min(0)
    box = box / box.sum(-1, keepdim=True)
    return box @ box @ box
