"""Views of evaluations against Pillow's and torchvision's own on pictures made here."""

from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from massl.data.evaluation.views import (
    CentreView,
    EvaluationView,
    RandomCropView,
    SquareView,
    StoredView,
    ThumbnailView,
    view_key,
    whole_patches,
)
from massl.data.sources.base import DataError
from massl.ops.image_ops import Filter, RaggedImages

SIZES = [(90, 121), (200, 150), (47, 33), (64, 64), (30, 300)]  # height, width
RESAMPLING = {"bicubic": v2.InterpolationMode.BICUBIC, "bilinear": v2.InterpolationMode.BILINEAR}


def picture(height: int, width: int, seed: int) -> Image.Image:
    """Waves of colour with hard edges and noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / max(height, width)
    waves = [np.sin(random.uniform(5, 25) * x + random.uniform(5, 25) * y) for _ in range(3)]
    pixels = 128 + 90 * np.stack(waves, axis=-1) + random.normal(0, 8, (height, width, 3))
    pixels[(x > 0.3) & (x < 0.4)] = random.uniform(0, 255, 3)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


PICTURES = [picture(*size, seed) for seed, size in enumerate(SIZES)]


def planes(image: Image.Image) -> Tensor:  # -> uint8 [3, H, W]
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def batch_of(pictures: list[Image.Image]) -> RaggedImages:
    return RaggedImages.from_list([planes(image) for image in pictures])


def applied(view: EvaluationView, pictures: list[Image.Image] = PICTURES) -> list[Tensor]:
    """One image after another."""
    groups = view.apply(batch_of(pictures), torch.arange(len(pictures)))
    assert all(group.dtype == torch.float32 for group in groups)
    return [image for group in groups for image in group]


def largest_difference_in_levels(ours: list[Tensor], theirs: list[Image.Image]) -> float:
    assert [tuple(view.shape) for view in ours] == [tuple(planes(image).shape) for image in theirs]
    return max(float((view * 255 - planes(image)).abs().max()) for view, image in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("filter", get_args(Filter))
@pytest.mark.parametrize(("size", "shorter_side"), [(112, 128), (28, 32), (32, 37)])
def test_a_centre_view_is_torchvisions_resize_and_centre_crop(size: int, shorter_side: int, filter: Filter) -> None:
    transform = v2.Compose([v2.Resize(shorter_side, RESAMPLING[filter]), v2.CenterCrop(size)])
    # Pillow rounds twice by half a level; negative weights of the bicubic filter enlarge the first by up to 1.4.
    limit = 1.01 if filter == "bilinear" else 1.3
    views = applied(CentreView(size=size, filter=filter))
    assert largest_difference_in_levels(views, [transform(image) for image in PICTURES]) < limit


def test_a_centre_view_without_a_margin_keeps_the_whole_shorter_side() -> None:
    transform = v2.Compose([v2.Resize(40, v2.InterpolationMode.BICUBIC), v2.CenterCrop(40)])
    assert (
        largest_difference_in_levels(
            applied(CentreView(size=40, crop_ratio=1.0)), [transform(image) for image in PICTURES]
        )
        < 1.3
    )


@pytest.mark.parametrize("filter", get_args(Filter))
@pytest.mark.parametrize("size", [24, 150])
def test_a_square_view_is_pillows_resize_of_the_whole_image(size: int, filter: Filter) -> None:
    resampling = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}[filter]
    # In two steps, columns first: recent versions of Pillow begin with the rows where those shrink much more.
    expected = [image.resize((size, image.height), resampling).resize((size, size), resampling) for image in PICTURES]
    limit = 1.01 if filter == "bilinear" else 1.3
    assert largest_difference_in_levels(applied(SquareView(size=size, filter=filter)), expected) < limit


def test_a_stored_view_is_exactly_the_stored_image() -> None:
    assert largest_difference_in_levels(applied(StoredView()), PICTURES) < 1e-4
    alike = [picture(20, 30, seed) for seed in range(3)]
    groups = StoredView().apply(batch_of(alike), torch.arange(3))
    assert [tuple(group.shape) for group in groups] == [(3, 3, 20, 30)]
    assert torch.equal((groups[0] * 255).round().byte(), torch.stack([planes(image) for image in alike]))


@pytest.mark.parametrize("max_side", [32, 77, 100, 1000])
def test_a_thumbnail_view_is_exactly_pillows_thumbnail(max_side: int) -> None:
    expected = [image.copy() for image in PICTURES]
    for image in expected:
        image.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
    views = applied(ThumbnailView(max_side=max_side))
    assert largest_difference_in_levels(views, expected) < 1e-4
    assert all(max(view.shape) <= max_side for view in views)
    if max_side == 1000:
        assert largest_difference_in_levels(views, PICTURES) < 1e-4  # nothing is enlarged


def test_views_of_a_micro_batch_are_those_of_its_images() -> None:
    whole, part = batch_of(PICTURES), batch_of(PICTURES).slice(2, 4)
    views: list[EvaluationView] = [
        CentreView(size=16),
        SquareView(size=16),
        StoredView(),
        ThumbnailView(max_side=20),
        RandomCropView(size=16, seed=0, epoch=0),
    ]
    for view in views:
        of_whole, of_part = view.apply(whole, torch.arange(5)), view.apply(part, torch.arange(2, 4))
        expected = [image for group in of_whole for image in group][2:4]
        for image, other in zip((image for group in of_part for image in group), expected, strict=True):
            assert torch.equal(image, other)


# ---- random crops ----------------------------------------------------------------------------------------------------


def ramp(height: int, width: int) -> Image.Image:
    """Red grows with the column and green with the row, both by whole levels: colours tell where a pixel was."""
    rows, columns = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([columns, rows, np.zeros_like(rows)], axis=-1).astype(np.uint8))


def boxes_of(view: RandomCropView, *, num_images: int, height: int = 200, width: int = 240) -> tuple[Tensor, Tensor]:
    """Top, left, height and width of the crops [N, 4], read off the colours of a ramp, and which are mirrored [N]."""
    image = planes(ramp(height, width))
    images = RaggedImages(
        pixels=image.flatten(),
        offsets=torch.zeros(num_images, dtype=torch.int64),
        sizes=torch.tensor([[height, width]] * num_images),
    )
    (views,) = view.apply(images, torch.arange(num_images))
    # [N, size]: where the columns and rows of each view lie
    columns, rows = views[:, 0].mean(1) * 255, views[:, 1].mean(2) * 255
    # away from the borders, where the filter is cut off
    middle = slice(view.size // 4, view.size // 4 + view.size // 2 + 1)
    across, down = ((line[:, middle][:, -1] - line[:, middle][:, 0]) / (view.size // 2) for line in (columns, rows))
    centre_row, centre_column = rows.mean(1) + 0.5, columns.mean(1) + 0.5
    crop_height, crop_width = down * view.size, across.abs() * view.size
    return torch.stack(
        [centre_row - crop_height / 2, centre_column - crop_width / 2, crop_height, crop_width], dim=1
    ), across < 0


def test_random_crops_have_the_asked_area_lie_inside_and_are_mirrored_half_of_the_time() -> None:
    boxes, mirrored = boxes_of(RandomCropView(size=16, seed=3, epoch=0), num_images=800)
    top, left, height, width = boxes.unbind(1)
    area, ratio = height * width / (200 * 240), width / height
    assert 0.07 < float(area.min()) < 0.1
    assert 0.9 < float(area.max()) < 1.01
    # (0.08 + 1) / 2 but for the largest, which do not fit at every ratio
    assert float(area.mean()) == pytest.approx(0.5, abs=0.05)
    assert 0.74 < float(ratio.min()) < 0.8
    assert 1.25 < float(ratio.max()) < 1.35
    assert min(float(top.min()), float(left.min())) > -0.6
    assert float((top + height).max()) < 200.6
    assert float((left + width).max()) < 240.6
    # deviation of the binomial distribution: 0.018
    assert float(mirrored.float().mean()) == pytest.approx(0.5, abs=0.06)


def test_the_scale_bounds_the_area_of_random_crops() -> None:
    boxes, _ = boxes_of(RandomCropView(size=16, seed=3, epoch=0, scale=(0.3, 0.4)), num_images=200)
    area = boxes[:, 2] * boxes[:, 3] / (200 * 240)
    assert 0.29 < float(area.min()) < 0.32
    assert 0.38 < float(area.max()) < 0.41


@pytest.mark.parametrize("filter", get_args(Filter))
def test_a_random_crop_is_pillows_crop_resize_and_mirror(filter: Filter) -> None:
    resampling = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}[filter]
    size, num_images = 16, 12
    source = picture(200, 240, seed=9)
    view = RandomCropView(size=size, seed=1, epoch=2, filter=filter)
    boxes, mirrored = boxes_of(RandomCropView(size=size, seed=1, epoch=2), num_images=num_images)
    for number, image in enumerate(applied(view, [source] * num_images)):
        top, left, height, width = boxes[number].round().int().tolist()
        crop = source.crop((left, top, left + width, top + height))
        expected = crop.resize((size, height), resampling).resize((size, size), resampling)
        expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored[number] else expected
        assert largest_difference_in_levels([image], [expected]) < 1.3


def test_a_random_crop_depends_on_seed_epoch_and_image_and_not_on_the_batch() -> None:
    pictures = [PICTURES[0]] * 4

    def views(indices: list[int], *, seed: int = 0, epoch: int = 0) -> Tensor:
        return RandomCropView(size=16, seed=seed, epoch=epoch).apply(
            batch_of(pictures[: len(indices)]), torch.tensor(indices)
        )[0]

    together = views([7, 8, 9, 10])
    assert torch.equal(views([9])[0], together[2])
    assert torch.equal(views([10, 7]), together[[3, 0]])
    others = [views([7], seed=1)[0], views([7], epoch=1)[0], together[1]]
    assert not any(torch.equal(other, together[0]) for other in others)


# ---- keys and sizes --------------------------------------------------------------------------------------------------


def test_different_views_have_different_keys() -> None:
    views = [
        CentreView(size=32),
        CentreView(size=48),
        CentreView(size=32, crop_ratio=1.0),
        CentreView(size=32, filter="bilinear"),
        SquareView(size=32),
        StoredView(),
        ThumbnailView(max_side=32),
        RandomCropView(size=32, seed=0, epoch=0),
        RandomCropView(size=32, seed=0, epoch=1),
    ]
    assert len({repr(view_key(view)) for view in views}) == len(views)
    assert view_key(CentreView(size=32)) == {"view": "CentreView", "size": 32, "crop_ratio": 0.875, "filter": "bicubic"}


def test_a_size_must_be_whole_patches() -> None:
    assert whole_patches(224, 16, option="--knn.size") == 224
    assert whole_patches(225, None, option="--knn.size") == 225
    with pytest.raises(
        DataError, match=r"--knn.size 225 is no multiple of the model's patch of 16 px; choose 224 or 240"
    ):
        whole_patches(225, 16, option="--knn.size")
    with pytest.raises(DataError, match=r"choose 16$"):
        whole_patches(7, 16, option="--knn.size")
