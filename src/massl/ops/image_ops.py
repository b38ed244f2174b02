"""Image operations on whole batches: crop and resize, colour, blur, solarise.

All are pure functions of tensors that run on any device; resampling on a GPU is a kernel of view_kernels, which does to
whole views what these do step by step. Images are float32 in [0, 1], [N, 3, H, W]. Parameters (boxes, factors, sigmas)
live on the CPU, where they are drawn, so grouping images by what they need never waits for the device. Each operation
follows what Pillow does to 8-bit images, but does not round to 8 bits in between.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

# of working memory while resampling; from 4 to 256 MiB the time on two cores differs by less than its noise
_CHUNK_BYTES = 128 << 20
# Sides of the windows read around crops. Finer steps waste less arithmetic, coarser ones share larger batched products:
# on the 12 views of 500-pixel images powers of two take twice as long, and multiples of 16 as long as these.
_WINDOW_SIDES = torch.tensor(
    [16, 24, 32, 48, 64, 96, *range(128, 512, 64), *(side << octave for octave in range(9) for side in (512, 768))]
)


Filter = Literal["bicubic", "bilinear"]  # both antialiased, as Pillow's are


@dataclass(frozen=True, kw_only=True)
class RaggedImages:
    """Images of different sizes, one after another: each is [3, H, W] uint8, flattened."""

    pixels: Tensor  # [P] uint8, on any device
    offsets: Tensor  # [B] int64 on the CPU: where each image begins in `pixels`
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
        """Images start to stop, as a micro-batch: the pixels are shared."""
        return replace(self, offsets=self.offsets[start:stop], sizes=self.sizes[start:stop])

    def to(self, device: torch.device | str) -> Self:
        """The same images with their pixels on the device; where they lie stays here, where crop boxes are drawn."""
        return replace(self, pixels=self.pixels.to(device, non_blocking=True))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on `device` without waiting for it: a copy to a GPU is only asynchronous from pinned memory."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def update_rows(images: Tensor, chosen: Tensor, operation: Callable[..., Tensor], *parameters: Tensor) -> None:
    """Replace the `chosen` images (CPU bool [N]) in place by operation(images, *parameters); the others are not
    touched.
    """
    rows = chosen.nonzero().squeeze(1)
    if len(rows):
        there = to_device(rows, images.device)
        images.index_copy_(0, there, operation(images[there], *(parameter[rows] for parameter in parameters)))


# ---- crop and resize -------------------------------------------------------------------------------------------------


class Axis(NamedTuple):
    """How N images are resampled along one axis; each field is [N] float32 (whole numbers below 2**24 are exact)."""

    first: Tensor  # the first source pixel that is read
    num_read: Tensor  # how many are read from there on
    origin: Tensor  # where the outer edge of output pixel 0 lies, in pixels after `first`
    step: Tensor  # source pixels per output pixel; negative when mirrored


def crop_resize(images: RaggedImages, boxes: Tensor, *, size: int, flip: Tensor, filter: Filter = "bicubic") -> Tensor:
    """Views of size x size pixels: crop, antialiased resize, mirror (Pillow's `crop`, `resize` and `transpose`).

    CPU int64 [V, B, 4] (top, left, height, width), CPU bool [V, B] -> [V, B, 3, size, size] in [0, 1].
    """
    num_views, num_images, _ = boxes.shape
    views = _resample(
        images, torch.arange(num_images).repeat(num_views), *crop_axes(boxes, size=size, flip=flip), size, filter
    )
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
    """Views for evaluation: shorter side resized to size / crop_ratio, then the central size x size (torchvision
    Resize, CenterCrop).
    """
    if not 0 < crop_ratio <= 1:
        raise ValueError(
            f"crop_ratio is {crop_ratio}; it must lie in (0, 1]: the part of the shorter side that is kept"
        )
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

    Only a window around each crop is read. Windows have few different sizes, so that those of one size share a batched
    product, and a window's size depends on its own crop alone, so that the products do not depend on what else is in
    the batch.
    """
    pixels = images.pixels
    if pixels.is_cuda:
        from massl.ops.kernels import resample  # imported here: needs Triton, which only GPU builds have

        jobs = resample.pack_jobs(images, sources, rows, columns)
        return resample.resample(pixels, to_device(jobs, pixels.device), size=size, filter=filter)
    height_class, width_class = (torch.bucketize(axis.num_read.long(), _WINDOW_SIDES) for axis in (rows, columns))
    classes = height_class * len(_WINDOW_SIDES) + width_class
    order = torch.argsort(classes, stable=True)
    # int64: offsets pass 2**24
    places = to_device(torch.stack([images.offsets, *images.sizes.T])[:, sources[order]], pixels.device)
    jobs = to_device(torch.stack([torch.arange(len(sources)), *rows, *columns])[:, order], pixels.device)
    widest = int(_WINDOW_SIDES[width_class.max()])
    line = torch.cat([pixels, pixels.new_zeros(widest)])  # a window may reach past the last pixel
    views = torch.empty(len(sources), 3, size, size, device=pixels.device)
    for chunk, height, width in _chunks(classes[order], size):
        slots, *axes = jobs[:, chunk]
        chunk_rows, chunk_columns = Axis(*axes[:4]), Axis(*axes[4:])
        windows = _windows(line, places[:, chunk], chunk_rows.first, chunk_columns.first, height, width)
        across = _weights(chunk_columns, size, width, filter).mT / 255
        # Columns first, clipped in between, as Pillow does (since 13 unless height shrinks much more): only its
        # rounding differs.
        half = torch.bmm(windows.float().flatten(1, 2), across).clamp_(0, 1).view(-1, 3, height, size)
        views.index_copy_(0, slots.long(), (_weights(chunk_rows, size, height, filter)[:, None] @ half).clamp_(0, 1))
    return views


def _chunks(sorted_classes: Tensor, size: int) -> Iterator[tuple[slice, int, int]]:
    """Runs of one window size that fit the working memory, with the window's height and width."""
    begin = 0
    for window_class, num in Counter(sorted_classes.tolist()).items():
        height, width = (int(_WINDOW_SIDES[part]) for part in divmod(window_class, len(_WINDOW_SIDES)))
        num_bytes = 15 * height * width + 12 * size * (height + size) + 16 * size * max(height, width)
        num_at_once = max(1, _CHUNK_BYTES // num_bytes)
        for start in range(begin, begin + num, num_at_once):
            yield slice(start, min(start + num_at_once, begin + num)), height, width
        begin += num


# -> [n, 3, height, width]
def _windows(line: Tensor, places: Tensor, tops: Tensor, lefts: Tensor, height: int, width: int) -> Tensor:
    """uint8 read from the flattened images, whose offsets, heights and widths are `places`; beyond a crop lies what
    gets no weight.
    """
    offsets, image_heights, image_widths = places[:, :, None, None]
    rows = torch.minimum(tops.long()[:, None] + torch.arange(height, device=line.device), image_heights[:, 0] - 1)
    planes = torch.arange(3, device=line.device)[:, None] * image_heights
    starts = offsets + (planes + rows[:, None]) * image_widths + lefts.long()[:, None, None]
    return line.unfold(0, width, 1)[starts]  # whole rows at a time: 9 times as fast on the CPU as an index per pixel


def _weights(axis: Axis, size: int, width: int, filter: Filter) -> Tensor:  # -> [n, size, width]
    """Pillow's antialiased taps (bicubic: Keys, 1981, a = -1/2): stretched when shrinking, cut at the border, summing
    to 1.
    """
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
    """Turn the hue of the HSV hexagon by `shifts` turns, keeping saturation and value."""
    red, green, blue = images.unbind(1)
    value = images.amax(1)
    chroma = value - images.amin(1)
    divisor = chroma.clamp_min(1e-6)  # grey pixels have no hue: any will do
    from_red, from_green, from_blue = (green - blue) / divisor, (blue - red) / divisor + 2, (red - green) / divisor + 4
    sector = torch.where(value == red, from_red, torch.where(value == green, from_green, from_blue))
    sector = sector + 6 * to_device(shifts, images.device).view(-1, 1, 1)
    # 5, 3, 1 for red, green, blue
    position = (sector[:, None] + torch.arange(5, 0, -2, device=images.device).view(3, 1, 1)) % 6
    return value[:, None] - chroma[:, None] * torch.minimum(position, 4 - position).clamp_(0, 1)


JITTER_OPERATIONS = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)


# [N, 3, H, W], CPU [N, 4], CPU [N, 4] -> [N, 3, H, W]
def colour_jitter(images: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """Each image through the four JITTER_OPERATIONS in its own order; column k of `factors` belongs to operation k."""
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
    """Pillow's GaussianBlur(sigma): three passes of a box filter per axis, borders repeated, as one matrix product per
    axis.
    """
    device_sigmas = to_device(sigmas, images.device)
    height, width = images.shape[2:]
    across = _three_box_passes(device_sigmas, width)
    down = across if height == width else _three_box_passes(device_sigmas, height)
    return down[:, None] @ (images.flatten(1, 2) @ across.mT).view_as(images)


def _three_box_passes(sigmas: Tensor, num_pixels: int) -> Tensor:  # [N] -> [N, num_pixels, num_pixels]
    """The matrix of three passes of the extended box filter (Gwosdek et al., 2011).

    One pass weighs offsets up to `whole` by 1 and the next by `edge` in [0, 1), chosen so that its variance is sigma**2
    / 3.
    """
    variance = sigmas.square() / 3
    whole = ((torch.sqrt(12 * variance + 1) - 1) / 2).floor()
    edge = (2 * whole + 1) * (3 * variance - whole * (whole + 1)) / (6 * ((whole + 1).square() - variance))
    position = torch.arange(num_pixels, device=sigmas.device)
    reach = (whole + edge)[:, None, None] + 1 - (position[:, None] - position).abs()
    box = reach.clamp(0, 1)
    # The first and last pixel also stand for all their copies beyond the border; those weights sum to max(reach, 0).
    box[:, :, 0], box[:, :, -1] = reach[:, :, 0].clamp_min(0), reach[:, :, -1].clamp_min(0)
    box = box / box.sum(-1, keepdim=True)
    return box @ box @ box
