"""The kernels against image_ops: all shapes on a GPU, one on a CPU, in Triton's interpreter."""

from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from massl.ops import image_ops
from massl.ops.image_ops import Filter, RaggedImages
from massl.ops.kernels import photometric, resample
from massl.ops.kernels.resample import ResampleTiles

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.kernel
SIZES = [(90, 120), (33, 47), (1, 1), (3, 150), (150, 3), (64, 64)]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def noise(height: int, width: int, seed: int) -> Tensor:
    """Bytes at random: nothing is harder to resample."""
    return torch.randint(0, 256, (3, height, width), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.fixture(scope="module")
def images() -> RaggedImages:
    return RaggedImages.from_list([noise(*size, seed) for seed, size in enumerate(SIZES)])


def boxes_and_flips(sizes: Tensor) -> tuple[Tensor, Tensor]:
    """The whole image, a random crop and a single pixel of each; every other one mirrored."""
    generator = torch.Generator().manual_seed(0)
    extent = (torch.rand(len(sizes), 2, generator=generator) * sizes).long() + 1
    corner = (torch.rand(len(sizes), 2, generator=generator) * (sizes - extent + 1)).long()
    crops = [(torch.zeros_like(sizes), sizes), (corner, extent), (sizes - 1, torch.ones_like(sizes))]
    boxes = torch.stack([torch.cat(crop, dim=1) for crop in crops])
    return boxes, torch.arange(boxes[..., 0].numel()).view(boxes.shape[:2]) % 2 == 0


def by_kernel(
    images: RaggedImages,
    boxes: Tensor,
    flip: Tensor,
    size: int,
    *,
    filter: Filter = "bicubic",
    tiles: ResampleTiles = resample.DEFAULT_TILES,
) -> Tensor:
    sources = torch.arange(len(images)).repeat(len(boxes))
    jobs = resample.pack_jobs(images, sources, *image_ops.crop_axes(boxes, size=size, flip=flip))
    views = resample.resample(images.pixels.to(DEVICE), jobs.to(DEVICE), size=size, filter=filter, tiles=tiles)
    return views.cpu().view(*flip.shape, 3, size, size)


def largest_difference_in_levels(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float().cpu() - theirs).abs().max()) * 255


@pytest.mark.parametrize(
    ("size", "filter"),
    [
        (33, "bicubic"),
        (1, "bicubic"),
        (7, "bicubic"),
        (32, "bicubic"),
        (70, "bicubic"),
        (7, "bilinear"),
        (33, "bilinear"),
    ],
)
def test_resampled_views_are_those_of_crop_resize(images: RaggedImages, size: int, filter: Filter) -> None:
    boxes, flip = boxes_and_flips(images.sizes)
    views = by_kernel(images, boxes, flip, size, filter=filter)
    expected = image_ops.crop_resize(images, boxes, size=size, flip=flip, filter=filter)
    assert largest_difference_in_levels(views, expected) < 0.25
    assert abs(float((views - expected).mean())) * 255 < 0.02  # rounding must not darken or brighten


@pytest.mark.parametrize("tiles", [(64, 32, 16, 64, 4), (16, 16, 16, 16, 1), (16, 64, 64, 16, 4)])
def test_resampled_views_do_not_depend_on_the_tiles_but_for_rounding(
    images: RaggedImages, tiles: tuple[int, ...]
) -> None:
    boxes, flip = boxes_and_flips(images.sizes)
    views = by_kernel(images, boxes, flip, 40, tiles=ResampleTiles(*tiles))
    assert largest_difference_in_levels(views, image_ops.crop_resize(images, boxes, size=40, flip=flip)) < 0.25


def test_crops_far_larger_and_far_smaller_than_the_view() -> None:
    images = RaggedImages.from_list([noise(400, 600, 0), noise(5, 4, 1)])
    boxes, flip = torch.tensor([[[0, 0, 400, 600], [1, 1, 3, 2]]]), torch.tensor([[True, True]])
    views = by_kernel(images, boxes, flip, 16)
    assert largest_difference_in_levels(views, image_ops.crop_resize(images, boxes, size=16, flip=flip)) < 0.25


def test_an_image_beyond_two_gibibytes_is_found() -> None:
    image = noise(20, 30, 0)
    offset = 2**31 + 12345
    pixels = torch.empty(offset + image.numel(), dtype=torch.uint8)  # memory that is never touched costs nothing
    pixels[offset:] = image.flatten()
    far = RaggedImages(pixels=pixels, offsets=torch.tensor([offset]), sizes=torch.tensor([[20, 30]]))
    box, flip = torch.tensor([[[2, 3, 15, 20]]]), torch.tensor([[False]])
    assert torch.equal(by_kernel(far, box, flip, 16), by_kernel(RaggedImages.from_list([image]), box, flip, 16))


@pytest.mark.parametrize("filter", get_args(Filter))
def test_centre_views_by_kernel_are_those_on_the_cpu(
    images: RaggedImages, filter: Filter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resample_by_kernel(
        images: RaggedImages, sources: Tensor, rows: image_ops.Axis, columns: image_ops.Axis, size: int, filter: Filter
    ) -> Tensor:
        jobs = resample.pack_jobs(images, sources, rows, columns)
        return resample.resample(images.pixels.to(DEVICE), jobs.to(DEVICE), size=size, filter=filter)

    expected = image_ops.centre_view(images, size=24, crop_ratio=0.875, filter=filter)
    monkeypatch.setattr(image_ops, "_resample", resample_by_kernel)
    assert (
        largest_difference_in_levels(image_ops.centre_view(images, size=24, crop_ratio=0.875, filter=filter), expected)
        < 0.25
    )


@pytest.mark.parametrize("size", [9, 60])
def test_bilinear_views_by_kernel_are_pillows(size: int) -> None:
    image = noise(31, 47, 5)
    box, flip = torch.tensor([[[3, 4, 25, 40]]]), torch.tensor([[False]])
    view = by_kernel(RaggedImages.from_list([image]), box, flip, size, filter="bilinear")
    crop = Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0).numpy())).crop((4, 3, 44, 28))
    expected = torch.from_numpy(np.array(crop.resize((size, size), Image.Resampling.BILINEAR))).permute(2, 0, 1) / 255
    assert largest_difference_in_levels(view[0, 0], expected) < 1.25  # Pillow rounds twice


def jobs_of(num_views: int, **parameters: Tensor) -> Tensor:
    """Jobs whose crops do not matter."""
    off = torch.zeros(num_views)
    order = torch.arange(4).expand(num_views, 4)
    defaults = {
        "factors": torch.ones(num_views, 4),
        "order": order,
        "jittered": off,
        "greyed": off,
        "solarised": off,
        "sigmas": off,
    }
    packed = resample.pack_photometric(**{**defaults, **parameters})
    nowhere = RaggedImages.from_list([torch.zeros(3, 1, 1, dtype=torch.uint8)])
    axis = image_ops.Axis(off, off, off, off)
    return resample.pack_jobs(nowhere, torch.zeros(num_views, dtype=torch.int64), axis, axis, packed).to(DEVICE)


@pytest.mark.parametrize("size", [48, 1, 13])  # 48 x 48 is more than one block of pixels
def test_colour_by_kernel_is_jitter_in_each_views_order_and_then_grey(size: int) -> None:
    generator = torch.Generator().manual_seed(2)
    num_views = 24
    views = torch.rand(num_views, 3, size, size, generator=generator)
    views[0, :, :, 0] = 0.3  # no hue
    factors = torch.rand(num_views, 4, generator=generator) * 0.8 + torch.tensor([0.6, 0.6, 0.6, -0.4])
    order = torch.stack([torch.randperm(4, generator=generator) for _ in range(num_views)])
    jittered, greyed = torch.arange(num_views) % 4 > 0, torch.arange(num_views) % 3 == 0
    expected = views.clone()
    image_ops.update_rows(expected, jittered, image_ops.colour_jitter, factors, order)
    image_ops.update_rows(expected, greyed, image_ops.grey)
    coloured = views.to(DEVICE)
    photometric.colour_in_place(
        coloured, jobs_of(num_views, factors=factors, order=order, jittered=jittered, greyed=greyed)
    )
    torch.testing.assert_close(coloured.cpu(), expected, rtol=0, atol=1e-5)
    untouched = ~jittered & ~greyed
    assert untouched.any()
    assert torch.equal(coloured.cpu()[untouched], views[untouched])


@pytest.mark.parametrize("size", [31, 1, 2, 70])
def test_finish_blurs_solarises_and_normalises_as_image_ops(size: int) -> None:
    sigmas = torch.tensor([0.1, 0.8, 1.5, 2.0, 3.1, 5.4, 0.0, 0.0])
    assert photometric.can_blur(float(sigmas.max()))
    solarised = torch.arange(len(sigmas)) % 2 == 1
    views = torch.rand(len(sigmas), 3, size, size, generator=torch.Generator().manual_seed(4))
    expected = views.clone()
    image_ops.update_rows(expected, sigmas > 0, image_ops.gaussian_blur, sigmas)
    image_ops.update_rows(expected, solarised, image_ops.solarise)
    jobs = jobs_of(len(sigmas), solarised=solarised, sigmas=sigmas)
    finished = photometric.finish(views.to(DEVICE), jobs, mean=MEAN, std=STD, dtype=torch.float32).cpu()
    shown = finished * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
    # Solarising jumps by one level at its threshold, so a pixel there may differ by that much more.
    assert largest_difference_in_levels(shown[~solarised], expected[~solarised]) < 0.25
    assert largest_difference_in_levels(shown[solarised], expected[solarised]) < 1.25
    torch.testing.assert_close(finished[sigmas == 0], image_ops.normalise(expected, MEAN, STD)[sigmas == 0])
    # Triton's Python mode cuts bfloat16 off instead of rounding
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
    rounded = photometric.finish(views.to(DEVICE), jobs, mean=MEAN, std=STD, dtype=dtype)
    assert torch.equal(rounded.cpu(), finished.to(dtype))


def test_blurs_wider_than_the_window_are_refused() -> None:
    # 3 * (whole + 1) <= 16 holds up to whole = 4, and whole is 5 from sigma = sqrt(30) on.
    assert photometric.can_blur(5.47)
    assert not photometric.can_blur(5.48)
