"""Resampling by blocks of output pixels against whole matrix products in float64, without a block."""

import pytest
import torch
from torch import Tensor

from massl.ops.cpu_resample import Axis, Filter, resample_on_cpu


def weights(axis: Axis, number: int, num_pixels: int, size: int, filter: Filter) -> Tensor:  # -> [size, num_pixels]
    """The weight of each pixel of an image's side for each output pixel."""
    first, num_read, origin, step = (float(field[number]) for field in axis)
    inputs = torch.arange(num_pixels, dtype=torch.float64) + 0.5 - first
    centres = origin + (torch.arange(size, dtype=torch.float64) + 0.5) * step
    distance = (inputs - centres[:, None]).abs() / max(abs(step), 1)
    near, far = distance < 1, (distance >= 1) & (distance < 2)
    cubic = near * (1.5 * distance**3 - 2.5 * distance**2 + 1)
    cubic += far * (-0.5 * distance**3 + 2.5 * distance**2 - 4 * distance + 2)
    taps = (near * (1 - distance) if filter == "bilinear" else cubic) * ((inputs > 0) & (inputs < num_read))
    return taps / taps.sum(1, keepdim=True)


SIZES = torch.tensor([[61, 200], [200, 61], [1, 1], [5, 300], [90, 90]])


def axes(seed: int, size: int) -> tuple[Axis, Axis]:
    """Crops of all images: every second one mirrored, origins between pixels as in centre views."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for side in SIZES.float().T:
        num_read = 1 + (torch.rand(len(side), generator=generator) * side).floor()
        first = (torch.rand(len(side), generator=generator) * (side - num_read)).floor()
        margin = torch.rand(len(side), generator=generator) * num_read / 8
        made.append(Axis(first, num_read, margin, (num_read - 2 * margin) / size))
    rows, columns = made
    mirrored = torch.arange(len(SIZES)) % 2 == 0
    origin = torch.where(mirrored, columns.num_read - columns.origin, columns.origin)
    return rows, columns._replace(origin=origin, step=torch.where(mirrored, -columns.step, columns.step))


@pytest.mark.parametrize("filter", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [1, 7, 16, 33, 96])
def test_blocks_give_what_whole_matrices_give(size: int, filter: Filter) -> None:
    generator = torch.Generator().manual_seed(size)
    images = [torch.randint(0, 256, (3, *shape), generator=generator, dtype=torch.uint8) for shape in SIZES.tolist()]
    lengths = torch.tensor([image.numel() for image in images])
    # not at the start of its storage, as in a part of a batch
    pixels = torch.cat([torch.zeros(7, dtype=torch.uint8), *(image.flatten() for image in images)])[7:]
    for seed in range(3):
        rows, columns = axes(seed, size)
        views = resample_on_cpu(pixels, lengths.cumsum(0) - lengths, SIZES, rows, columns, size, filter)
        for number, (image, view) in enumerate(zip(images, views, strict=True)):
            across = weights(columns, number, image.shape[2], size, filter)
            down = weights(rows, number, image.shape[1], size, filter)
            expected = (down @ (image.double() / 255 @ across.T).clamp(0, 1)).clamp(0, 1)
            torch.testing.assert_close(view.double(), expected, rtol=0, atol=2e-5)
