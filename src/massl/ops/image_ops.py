"""Batched image operations on any device: crop and resize, colour, blur, solarise.

Images are float32 [N, 3, H, W] in [0, 1]. Parameters (boxes, factors, sigmas) stay on the CPU, where they are drawn, so
grouping images by operation never waits for the device. Each operation follows Pillow's for 8-bit images, without
rounding to 8 bits in between. Resampling itself is in cpu_resample, and on a GPU in kernels.resample.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from massl.ops.cpu_resample import Axis as Axis
from massl.ops.cpu_resample import Filter as Filter
from massl.ops.cpu_resample import resample_on_cpu

_BLUR_BLOCK = 32  # output pixels that share a matrix product


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
        updated = operation(images.index_select(0, there), *(parameter[rows] for parameter in parameters))
        if images.is_cuda or images[0].numel() < 4096:
            images.index_copy_(0, there, updated)
        else:  # on the CPU index_copy_ takes as long per pixel as ten copies
            for row, image in zip(rows.tolist(), updated.unbind(), strict=True):
                images[row].copy_(image)


# ---- crop and resize -------------------------------------------------------------------------------------------------


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
    """Row n: image `sources[n]` of the batch, resampled along both axes; a view does not depend on the others."""
    pixels = images.pixels
    if pixels.is_cuda:
        from massl.ops.kernels import resample  # imported here: needs Triton, which only GPU builds have

        jobs = resample.pack_jobs(images, sources, rows, columns)
        return resample.resample(pixels, to_device(jobs, pixels.device), size=size, filter=filter)
    return resample_on_cpu(pixels, images.offsets[sources], images.sizes[sources], rows, columns, size, filter)


# ---- colour ----------------------------------------------------------------------------------------------------------


def _luminance(images: Tensor) -> Tensor:  # [N, 3, H, W] -> [N, 1, H, W]
    red, green, blue = images.unbind(1)
    return (0.299 * red).add_(green, alpha=0.587).add_(blue, alpha=0.114).unsqueeze(1)


def _blend(images: Tensor, other: Tensor | float, factors: Tensor) -> Tensor:
    """factor * image + (1 - factor) * other, clipped."""
    weights = to_device(factors, images.device).view(-1, 1, 1, 1)
    return (weights * images).add_((1 - weights) * other).clamp_(0, 1)


def grey(images: Tensor) -> Tensor:
    return _luminance(images).expand_as(images)


def adjust_brightness(images: Tensor, factors: Tensor) -> Tensor:  # [N, 3, H, W], [N] -> [N, 3, H, W]
    return _blend(images, 0.0, factors)


def adjust_contrast(images: Tensor, factors: Tensor) -> Tensor:  # [N, 3, H, W], [N] -> [N, 3, H, W]
    # two means: that of one whole image may be split among threads, and would then depend on the number of images
    return _blend(images, _luminance(images).mean(3, keepdim=True).mean(2, keepdim=True), factors)


def adjust_saturation(images: Tensor, factors: Tensor) -> Tensor:  # [N, 3, H, W], [N] -> [N, 3, H, W]
    return _blend(images, _luminance(images), factors)


def adjust_hue(images: Tensor, shifts: Tensor) -> Tensor:  # [N, 3, H, W], [N] -> [N, 3, H, W]
    """Turn the HSV hue by `shifts` turns, keeping saturation and value."""
    red, green, blue = images.unbind(1)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    from_green, from_blue = (blue - red).add_(chroma, alpha=2), (red - green).add_(chroma, alpha=4)
    sector = torch.where(value == red, green - blue, torch.where(value == green, from_green, from_blue))
    sector /= chroma.clamp_min(1e-6)  # grey pixels have no hue: any value works
    sector += 6 * to_device(shifts, images.device).view(-1, 1, 1)
    sector -= 6 * (sector / 6).floor_()  # red at 0 and 6, green at 2, blue at 4
    turned = torch.empty_like(images)
    torch.sub(sector, 3, out=turned[:, 0]).abs_().sub_(1)
    torch.sub(sector, 2, out=turned[:, 1]).abs_().neg_().add_(2)
    torch.sub(sector, 4, out=turned[:, 2]).abs_().neg_().add_(2)
    return turned.clamp_(0, 1).sub_(1).mul_(chroma[:, None]).add_(value[:, None])


JITTER_OPERATIONS = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)


def colour_jitter(images: Tensor, factors: Tensor, order: Tensor) -> Tensor:  # [N, 3, H, W], CPU [N, 4], CPU [N, 4]
    """Apply the four JITTER_OPERATIONS to each image in its own order; column k of `factors` belongs to operation k."""
    jittered = images.clone()
    for operations in order.unbind(1):
        for number in set(operations.tolist()):
            update_rows(jittered, operations == number, JITTER_OPERATIONS[number], factors[:, number])
    return jittered


def solarise(images: Tensor, threshold: float = 128 / 255) -> Tensor:
    return torch.where(images >= threshold, 1 - images, images)


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:  # [..., 3, H, W]
    shift, scale = to_device(torch.tensor([tuple(mean), tuple(std)]), images.device).view(2, 3, 1, 1).unbind()
    return (images - shift) / scale


# ---- blur ------------------------------------------------------------------------------------------------------------


def gaussian_blur(images: Tensor, sigmas: Tensor) -> Tensor:  # [N, 3, H, W], CPU [N] -> [N, 3, H, W]
    """Pillow's GaussianBlur(sigma): three box filters per axis, borders repeated, as matrix products."""
    largest_side = max(images.shape[2:])
    if largest_side <= 2 * _BLUR_BLOCK:
        return _blur(images, sigmas, block=largest_side, reach=0)
    blurred, radii = torch.empty_like(images), _whole_radius(sigmas)
    for radius in set(radii.tolist()):
        rows = to_device((radii == radius).nonzero().squeeze(1), images.device)
        reach = 3 * (int(radius) + 1)  # of three passes: an output pixel depends on no pixel further away
        some = _blur(images.index_select(0, rows), sigmas[radii == radius], block=_BLUR_BLOCK, reach=reach)
        blurred.index_copy_(0, rows, some)
    return blurred


def _blur(images: Tensor, sigmas: Tensor, *, block: int, reach: int) -> Tensor:
    """Each block of output pixels is a product with the pixels up to `reach` away from it."""
    device_sigmas = to_device(sigmas, images.device)
    height, width = images.shape[2:]
    columns = list(_blur_blocks(device_sigmas, width, block, reach))
    rows = columns if height == width else list(_blur_blocks(device_sigmas, height, block, reach))
    parts = [images[..., inputs].flatten(1, 2) @ weights.mT for inputs, weights in columns]
    across = torch.cat(parts, dim=2).view_as(images)
    return torch.cat([weights[:, None] @ across[:, :, inputs] for inputs, weights in rows], dim=2)


def _blur_blocks(sigmas: Tensor, num_pixels: int, block: int, reach: int) -> Iterator[tuple[slice, Tensor]]:
    """For each block of output pixels the input pixels it depends on, and their weights [N, outputs, inputs].

    The weights of all blocks are rows of one small matrix: near a border they depend on the distance from it only, and
    elsewhere they are all alike.
    """
    num_inputs = min(block + 2 * reach, num_pixels)
    matrix = _three_box_passes(sigmas, num_inputs)
    for first in range(0, num_pixels, block):
        first_input = min(max(first - reach, 0), num_pixels - num_inputs)
        rows = slice(first - first_input, min(first + block, num_pixels) - first_input)
        yield slice(first_input, first_input + num_inputs), matrix[:, rows]


def _whole_radius(sigmas: Tensor) -> Tensor:
    """Offsets that one box filter weighs fully, if its variance is sigma**2 / 3."""
    return ((torch.sqrt(4 * sigmas.square() + 1) - 1) / 2).floor()


def _three_box_passes(sigmas: Tensor, num_pixels: int) -> Tensor:  # [N] -> [N, num_pixels, num_pixels]
    """The matrix of three passes of the extended box filter (Gwosdek et al., 2011).

    One pass weighs offsets up to `whole` by 1 and the next by `edge` in [0, 1), so that its variance is sigma**2 / 3.
    """
    variance = sigmas.square() / 3
    whole = _whole_radius(sigmas)
    edge = (2 * whole + 1) * (3 * variance - whole * (whole + 1)) / (6 * ((whole + 1).square() - variance))
    position = torch.arange(num_pixels, device=sigmas.device)
    reach = (whole + edge)[:, None, None] + 1 - (position[:, None] - position).abs()
    box = reach.clamp(0, 1)
    # The first and last pixel also count for their copies beyond the border; those weights sum to max(reach, 0).
    box[:, :, 0], box[:, :, -1] = reach[:, :, 0].clamp_min(0), reach[:, :, -1].clamp_min(0)
    box = box / box.sum(-1, keepdim=True)
    return box @ box @ box
