"""Batched image operations against Pillow and torchvision on images made here: gradients, shapes and noise."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as reference

from massl.ops import cpu_resample, image_ops
from massl.ops.image_ops import RaggedImages

LEVEL = 1 / 255


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth colours, a hard-edged disc and bar, and some noise."""
    random = np.random.default_rng(seed)
    y, x = np.meshgrid(np.linspace(0, 1, height), np.linspace(0, 1, width), indexing="ij")
    channels = [
        0.5 + 0.5 * np.sin(random.uniform(1, 6) * x + random.uniform(1, 6) * y + random.uniform(0, 6)) for _ in range(3)
    ]
    pixels = np.stack(channels, axis=-1)
    pixels[(x - 0.4) ** 2 + (y - 0.6) ** 2 < 0.04] = random.uniform(0, 1, 3)
    pixels[(x > 0.7) & (x < 0.8)] = random.uniform(0, 1, 3)
    pixels += random.normal(0, 0.04, pixels.shape)
    return Image.fromarray((pixels.clip(0, 1) * 255).round().astype(np.uint8))


def as_bytes(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def as_floats(images: list[Image.Image]) -> Tensor:
    return torch.stack([as_bytes(image) for image in images]) / 255


def ragged(images: list[Image.Image]) -> RaggedImages:
    return RaggedImages.from_list([as_bytes(image) for image in images])


def in_levels(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Mean and largest absolute difference in grey levels."""
    difference = (ours - theirs).abs() * 255
    return float(difference.mean()), float(difference.max())


def test_ragged_images_lie_one_after_another_and_a_micro_batch_shares_their_pixels(images: list[Image.Image]) -> None:
    batch = ragged(images)
    assert len(batch) == len(images)
    for image, offset, (height, width) in zip(images, batch.offsets.tolist(), batch.sizes.tolist(), strict=True):
        there = batch.pixels[offset : offset + 3 * height * width].view(3, height, width)
        assert torch.equal(there, as_bytes(image))
    part = batch.slice(2, 5)
    assert len(part) == 3
    assert part.pixels.data_ptr() == batch.pixels.data_ptr()
    assert torch.equal(part.to("cpu").offsets, batch.offsets[2:5])
    boxes, flip = random_boxes(batch.sizes, num_views=2), torch.zeros(2, len(images), dtype=torch.bool)
    whole = image_ops.crop_resize(batch, boxes, size=16, flip=flip)
    assert torch.equal(image_ops.crop_resize(part, boxes[:, 2:5], size=16, flip=flip[:, 2:5]), whole[:, 2:5])


SIZES = [(90, 120), (33, 47), (1, 1), (3, 500), (500, 3), (224, 224), (260, 301)]


@pytest.fixture(scope="module")
def images() -> list[Image.Image]:
    return [picture(height, width, seed) for seed, (height, width) in enumerate(SIZES)]


def random_boxes(sizes: Tensor, num_views: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    extent = (torch.rand(num_views, len(sizes), 2, generator=generator) * sizes).long() + 1
    corner = (torch.rand(num_views, len(sizes), 2, generator=generator) * (sizes - extent + 1)).long()
    boxes = torch.cat([corner, extent], dim=-1)
    boxes[0] = torch.cat([torch.zeros_like(sizes), sizes], dim=1)  # the whole image is one of the views
    return boxes


def pillow_views(images: list[Image.Image], boxes: Tensor, size: int, flip: Tensor, *, columns_first: bool) -> Tensor:
    """Pillow 13 filters rows first when height shrinks much more than width; all before it filter columns first, as two
    calls still do.
    """
    views = []
    for image, (top, left, height, width), mirrored in zip(
        images * len(boxes), boxes.view(-1, 4).tolist(), flip.view(-1), strict=True
    ):
        crop = image.crop((left, top, left + width, top + height))
        if columns_first:
            crop = crop.resize((size, height), Image.Resampling.BICUBIC)
        crop = crop.resize((size, size), Image.Resampling.BICUBIC)
        views.append(crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else crop)
    return as_floats(views).view(*flip.shape, 3, size, size)


@pytest.mark.parametrize("size", [1, 16, 35, 96, 224])  # 35: the last block of output pixels is not full
def test_crop_resize_is_pillows_crop_and_bicubic_resize_up_to_its_rounding(
    images: list[Image.Image], size: int
) -> None:
    batch = ragged(images)
    boxes = random_boxes(batch.sizes, num_views=4)
    flip = torch.arange(boxes.shape[0] * boxes.shape[1]).view(boxes.shape[:2]) % 2 == 0
    views = image_ops.crop_resize(batch, boxes, size=size, flip=flip)
    assert views.shape == (4, len(images), 3, size, size)
    assert views.min() >= 0
    assert views.max() <= 1
    assert in_levels(views, pillow_views(images, boxes, size, flip, columns_first=False))[0] < 0.5
    # Pillow rounds twice, to half a level each; the second filter can enlarge the first error by its absolute weights'
    # sum, below 1.4.
    assert in_levels(views, pillow_views(images, boxes, size, flip, columns_first=True))[1] < 1.2


def test_crop_resize_in_small_chunks_gives_the_same_views(
    images: list[Image.Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = ragged(images)
    boxes = random_boxes(batch.sizes, num_views=5)
    flip = torch.zeros(boxes.shape[:2], dtype=torch.bool)
    whole = image_ops.crop_resize(batch, boxes, size=40, flip=flip)
    monkeypatch.setattr(cpu_resample, "_CHUNK_BYTES", 1)
    assert torch.equal(image_ops.crop_resize(batch, boxes, size=40, flip=flip), whole)
    monkeypatch.setattr(cpu_resample, "_BUFFER_FLOATS", 1)
    by_row = image_ops.crop_resize(batch, boxes, size=40, flip=flip)
    torch.testing.assert_close(by_row, whole, rtol=0, atol=1e-6)


def test_crop_resize_of_a_box_of_the_output_size_copies_the_pixels() -> None:
    image = picture(40, 50)
    view = image_ops.crop_resize(
        ragged([image]), torch.tensor([[[3, 5, 24, 24]]]), size=24, flip=torch.zeros(1, 1, dtype=torch.bool)
    )
    torch.testing.assert_close(view[0, 0], as_bytes(image)[:, 3:27, 5:29] / 255, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [1, 16, 64, 224])
def test_crop_resize_is_pillows_crop_and_bilinear_resize_up_to_its_rounding(
    images: list[Image.Image], size: int
) -> None:
    batch = ragged(images)
    boxes = random_boxes(batch.sizes, num_views=3)
    flip = torch.arange(boxes.shape[0] * boxes.shape[1]).view(boxes.shape[:2]) % 2 == 0
    views = image_ops.crop_resize(batch, boxes, size=size, flip=flip, filter="bilinear")
    expected = []
    for image, (top, left, height, width), mirrored in zip(
        images * 3, boxes.view(-1, 4).tolist(), flip.view(-1), strict=True
    ):
        crop = image.crop((left, top, left + width, top + height)).resize((size, size), Image.Resampling.BILINEAR)
        expected.append(ImageOps.mirror(crop) if mirrored else crop)
    # Two roundings of half a level each, which weights that are nowhere negative do not enlarge.
    assert in_levels(views, as_floats(expected).view_as(views))[1] < 1.01
    bicubic = image_ops.crop_resize(batch, boxes, size=size, flip=flip)
    assert in_levels(views, bicubic)[1] > 2 or size == 1, "the filters differ"


@pytest.mark.parametrize("size", [40, 90])
def test_bilinear_resize_of_the_whole_image_is_pillows_resize_of_a_box(size: int) -> None:
    image = picture(60, 80)
    box = torch.tensor([[[0, 0, 60, 80]]])
    view = image_ops.crop_resize(
        ragged([image]), box, size=size, flip=torch.zeros(1, 1, dtype=torch.bool), filter="bilinear"
    )
    expected = as_floats([image.resize((size, size), Image.Resampling.BILINEAR, box=(0, 0, 80, 60))])
    assert in_levels(view[0], expected)[1] < 1.01


@pytest.mark.parametrize(("size", "crop_ratio"), [(224, 0.875), (64, 0.875), (32, 1.0), (7, 0.8)])
def test_centre_view_is_torchvisions_resize_and_centre_crop(size: int, crop_ratio: float) -> None:
    images = [
        picture(height, width, seed)
        for seed, (height, width) in enumerate([(90, 121), (333, 500), (47, 33), (1, 1), (224, 224)])
    ]
    shorter_side = round(size / crop_ratio)
    transform = v2.Compose([v2.Resize(shorter_side, v2.InterpolationMode.BICUBIC), v2.CenterCrop(size)])
    views = image_ops.centre_view(ragged(images), size=size, crop_ratio=crop_ratio)
    mean, largest = in_levels(views, as_floats([transform(image) for image in images]))
    assert mean < 0.5
    assert largest < 1.3


def test_centre_view_refuses_a_ratio_above_one() -> None:
    with pytest.raises(ValueError, match=r"crop_ratio.*1\.5"):
        image_ops.centre_view(ragged([picture(8, 8)]), size=4, crop_ratio=1.5)


COLOUR_CASES = {
    "brightness": (image_ops.adjust_brightness, reference.adjust_brightness, [0.6, 0.9, 1.0, 1.4, 0.0, 3.0]),
    "contrast": (image_ops.adjust_contrast, reference.adjust_contrast, [0.6, 0.9, 1.0, 1.4, 0.0, 3.0]),
    "saturation": (image_ops.adjust_saturation, reference.adjust_saturation, [0.8, 0.9, 1.0, 1.2, 0.0, 3.0]),
    "hue": (image_ops.adjust_hue, reference.adjust_hue, [-0.1, 0.1, 0.0, 0.05, 0.5, -0.5]),
}


@pytest.mark.parametrize("name", COLOUR_CASES)
def test_colour_operation_takes_one_factor_per_image_and_agrees_with_torchvision(name: str) -> None:
    ours, theirs, factors = COLOUR_CASES[name]
    pictures = [picture(60, 70, seed) for seed in range(len(factors))]
    floats = as_floats(pictures)
    result = ours(floats, torch.tensor(factors))
    expected = torch.stack([theirs(image, factor) for image, factor in zip(floats, factors, strict=True)])
    # torchvision's grey weights for tensors sum to 0.9999, ours and Pillow's to 1; a factor of 3 doubles that.
    torch.testing.assert_close(result, expected, rtol=0, atol=3e-4)
    # Pillow keeps hue in 8 bits, which costs it up to 2 levels at large turns; the first four factors are those of the
    # recipe.
    on_pictures = [theirs(image, factor) for image, factor in zip(pictures[:4], factors[:4], strict=True)]
    assert in_levels(result[:4], as_floats(on_pictures))[0] < 1


def test_hue_leaves_grey_black_and_white_alone_and_a_full_turn_changes_nothing() -> None:
    greys = torch.tensor([0.0, 0.3, 1.0]).view(1, 1, 1, 3).expand(1, 3, 1, 3)
    torch.testing.assert_close(image_ops.adjust_hue(greys, torch.tensor([0.3])), greys)
    floats = as_floats([picture(20, 20)])
    torch.testing.assert_close(image_ops.adjust_hue(floats, torch.tensor([1.0])), floats, rtol=0, atol=2e-6)


def test_grey_is_pillows_luminance_in_three_channels() -> None:
    image = picture(60, 70)
    mean, largest = in_levels(image_ops.grey(as_floats([image])), as_floats([image.convert("L").convert("RGB")]))
    assert mean < 0.3
    assert largest < 0.51


def test_colour_jitter_applies_the_four_operations_in_each_images_own_order() -> None:
    images = as_floats([picture(30, 40, seed) for seed in range(8)])
    generator = torch.Generator().manual_seed(3)
    factors = torch.rand(8, 4, generator=generator) * 0.8 + torch.tensor([0.6, 0.6, 0.6, -0.4])
    order = torch.rand(8, 4, generator=generator).argsort(1)
    expected = []
    for image, image_factors, image_order in zip(images, factors, order.tolist(), strict=True):
        for number in image_order:
            operation = list(COLOUR_CASES.values())[number][1]
            image = operation(image, float(image_factors[number]))
        expected.append(image)
    before = images.clone()
    jittered = image_ops.colour_jitter(images, factors, order)
    torch.testing.assert_close(jittered, torch.stack(expected), rtol=0, atol=1e-3)
    assert torch.equal(images, before), "a pure function must not change its input"
    assert not torch.allclose(image_ops.colour_jitter(images, factors, order.flip(1)), jittered, atol=1e-3), (
        "the order matters"
    )


@pytest.mark.parametrize("shape", [(96, 96), (40, 71), (1, 1), (2, 5)])
def test_gaussian_blur_is_pillows_up_to_its_rounding(shape: tuple[int, int]) -> None:
    sigmas = torch.linspace(0.1, 2.0, 12)
    pictures = [picture(*shape, seed) for seed in range(len(sigmas))]
    blurred = [
        image.filter(ImageFilter.GaussianBlur(sigma)) for image, sigma in zip(pictures, sigmas.tolist(), strict=True)
    ]
    mean, largest = in_levels(image_ops.gaussian_blur(as_floats(pictures), sigmas), as_floats(blurred))
    assert mean < 0.5
    assert largest < 3  # Pillow rounds after each of its six passes, by half a level at most


def test_gaussian_blur_spreads_a_point_with_the_variance_of_its_sigma() -> None:
    sigma = 1.7
    point = torch.zeros(1, 3, 41, 41)
    point[:, :, 20, 20] = 1
    blurred = image_ops.gaussian_blur(point, torch.tensor([sigma]))[0, 0]
    offsets = torch.arange(41) - 20.0
    assert float(blurred.sum()) == pytest.approx(1, abs=1e-5)
    assert float((blurred.sum(0) * offsets.square()).sum()) == pytest.approx(sigma**2, rel=1e-4)
    assert float((blurred.sum(1) * offsets.square()).sum()) == pytest.approx(sigma**2, rel=1e-4)


def test_solarise_inverts_exactly_what_pillow_inverts() -> None:
    image = picture(60, 70)
    assert in_levels(image_ops.solarise(as_floats([image])), as_floats([ImageOps.solarize(image, 128)]))[1] < 1e-4


def test_normalise_subtracts_the_mean_and_divides_by_the_deviation_of_each_channel() -> None:
    floats = as_floats([picture(10, 12)])
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    torch.testing.assert_close(
        image_ops.normalise(floats, mean, std), reference.normalize(floats, list(mean), list(std))
    )


@pytest.mark.parametrize("side", [4, 40])  # a few pixels, and enough of them to be copied image by image
def test_update_rows_changes_the_chosen_images_only(side: int) -> None:
    images = torch.rand(5, 3, side, side, generator=torch.Generator().manual_seed(0))
    before, chosen, factors = (
        images.clone(),
        torch.tensor([False, True, False, True, False]),
        torch.linspace(0.1, 0.5, 5),
    )
    image_ops.update_rows(images, chosen, image_ops.adjust_brightness, factors)
    assert torch.equal(images[~chosen], before[~chosen])
    torch.testing.assert_close(images[chosen], before[chosen] * factors[chosen].view(-1, 1, 1, 1))
