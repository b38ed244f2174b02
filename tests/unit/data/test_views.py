"""Multi-crop views: what is drawn, how often, and that it depends on the image and the epoch alone."""

import dataclasses
import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as reference

from massl.config import RecipeError, validate
from massl.data import views as views_module
from massl.data.views import ViewBatch, ViewParameters, ViewSettings, draw_parameters, make_views
from massl.ops.image_ops import RaggedImages

SMALL = ViewSettings(num_local=3, global_size=32, local_size=16)


def image_of(height: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randint(0, 256, (3, 5, 6), generator=generator, dtype=torch.uint8)
    noise = torch.randint(0, 20, (3, height, width), generator=generator)
    smooth: Tensor = reference.resize(coarse, [height, width])
    return (smooth.long() + noise).clamp(0, 255).byte()


def draw_many(
    settings: ViewSettings, num_images: int = 4000, height: int = 375, width: int = 500, **keys: int
) -> ViewParameters:
    sizes = torch.tensor([[height, width]]).expand(num_images, 2)
    return draw_parameters(
        settings, sizes, torch.arange(num_images), seed=keys.get("seed", 0), epoch=keys.get("epoch", 0)
    )


def largest_gap(first: Tensor, second: Tensor) -> float:
    """Kolmogorov and Smirnov's distance between two samples."""
    points = torch.cat([first, second])
    return float(
        max(abs(float((first <= p).float().mean()) - float((second <= p).float().mean())) for p in points[::7])
    )


def test_every_choice_is_made_as_often_as_the_settings_say() -> None:
    drawn = draw_many(ViewSettings(num_global=3, num_local=2))

    def frequency(choice: Tensor) -> list[float]:
        return choice.float().mean(1).tolist()

    tolerance = 4 * math.sqrt(0.25 / 4000)  # four standard deviations of the widest case
    assert frequency(drawn.flipped) == pytest.approx([0.5] * 5, abs=tolerance)
    assert frequency(drawn.jittered) == pytest.approx([0.8] * 5, abs=tolerance)
    assert frequency(drawn.greyed) == pytest.approx([0.2] * 5, abs=tolerance)
    assert frequency(drawn.blurred) == pytest.approx([1.0, 0.1, 0.1, 0.5, 0.5], abs=tolerance)
    assert frequency(drawn.solarised) == pytest.approx([0.0, 0.2, 0.2, 0.0, 0.0], abs=tolerance)


def test_choices_of_one_view_are_independent() -> None:
    drawn = draw_many(ViewSettings(num_local=0), 4000, 3750, 5000)
    columns = [getattr(drawn, field.name)[1].reshape(4000, -1).double() for field in dataclasses.fields(drawn)]
    boxes, flipped, jittered, factors, order, *rest = columns
    relative_top = (boxes[:, :1] + 0.5) / (3751 - boxes[:, 2:3])
    correlation = torch.corrcoef(torch.cat([relative_top, boxes[:, 2:3], flipped, jittered, factors, *rest], dim=1).T)
    assert float((correlation - torch.eye(len(correlation))).abs().max()) < 5 / math.sqrt(4000)
    counts = Counter(map(tuple, order.long().tolist()))
    assert set(counts) == set(itertools.permutations(range(4)))
    assert 100 < min(counts.values()) <= max(counts.values()) < 240  # 167 expected


def test_jitter_and_blur_strengths_fill_their_ranges_evenly() -> None:
    drawn = draw_many(ViewSettings(num_local=0, brightness=1.5))
    values = torch.cat([drawn.jitter_factors, drawn.blur_sigmas[..., None]], dim=-1).view(-1, 5)
    low, high = torch.tensor([0.0, 0.6, 0.8, -0.1, 0.1]), torch.tensor([2.5, 1.4, 1.2, 0.1, 2.0])
    unit = (values - low) / (high - low)
    assert unit.min() > -1e-6
    assert unit.max() < 1 + 1e-6
    torch.testing.assert_close(unit.mean(0), torch.full((5,), 0.5), rtol=0, atol=0.015)
    torch.testing.assert_close(unit.std(0), torch.full((5,), 12**-0.5), rtol=0, atol=0.01)


@pytest.mark.parametrize(("height", "width"), [(375, 500), (32, 32), (120, 700), (1, 1), (3, 500), (500, 3)])
def test_crops_lie_inside_the_image_and_cover_the_asked_part(height: int, width: int) -> None:
    settings = ViewSettings()
    boxes = draw_many(settings, 500, height, width).boxes
    top, left, crop_height, crop_width = boxes.unbind(-1)
    assert int(torch.stack([top, left]).min()) >= 0
    assert int(torch.stack([crop_height, crop_width]).min()) >= 1
    assert int((top + crop_height).max()) <= height
    assert int((left + crop_width).max()) <= width
    if (height, width) == (375, 500):
        part = crop_height * crop_width / (height * width)
        assert 0.315 < float(part[:2].min()) < 0.35
        assert 0.95 < float(part[:2].max()) <= 1
        assert 0.049 < float(part[2:].min()) < 0.055
        assert 0.31 < float(part[2:].max()) < 0.325
        ratio = crop_width / crop_height
        assert 0.74 < float(ratio.min()) < 0.77
        assert 1.3 < float(ratio.max()) < 1.35


def test_image_too_long_for_any_crop_gives_its_centre_of_the_nearest_ratio() -> None:
    settings = ViewSettings(num_local=0, global_scale=(0.9, 1.0))
    assert draw_many(settings, 2, 100, 900).boxes.tolist() == [[[0, 383, 100, 133]] * 2] * 2
    assert draw_many(settings, 2, 900, 100).boxes.tolist() == [[[383, 0, 133, 100]] * 2] * 2


@pytest.mark.parametrize(("height", "width"), [(375, 500), (200, 900), (32, 32)])
def test_crops_are_distributed_as_those_of_torchvision(height: int, width: int) -> None:
    settings = ViewSettings(num_local=1)
    boxes = draw_many(settings, 2000, height, width).boxes[[0, 2]].double()
    blank = Image.new("RGB", (width, height))
    torch.manual_seed(0)
    for ours, scale in zip(boxes, (settings.global_scale, settings.local_scale), strict=True):
        draws = [RandomResizedCrop.get_params(blank, list(scale), list(settings.aspect_ratio)) for _ in range(2000)]
        theirs = torch.tensor(draws, dtype=torch.float64)
        # Two samples of 2000 differ by more than 0.06 once in 700 tries if their distributions are equal.
        assert largest_gap(ours[:, 2] * ours[:, 3], theirs[:, 2] * theirs[:, 3]) < 0.06
        assert largest_gap(ours[:, 2] / ours[:, 3], theirs[:, 2] / theirs[:, 3]) < 0.06
        assert largest_gap(ours[:, 0], theirs[:, 0]) < 0.06
        assert largest_gap(ours[:, 1], theirs[:, 1]) < 0.06


def test_another_seed_epoch_image_or_view_draws_other_parameters() -> None:
    settings = ViewSettings()
    base, other_epoch, other_seed = (draw_many(settings, 50, **keys) for keys in ({}, {"epoch": 1}, {"seed": 1}))
    for other in (other_epoch, other_seed):
        assert (base.boxes == other.boxes).all(-1).float().mean() < 0.01
        assert (base.blur_sigmas == other.blur_sigmas).float().mean() < 0.01
    assert len(set(base.blur_sigmas.flatten().tolist())) > 0.99 * base.blur_sigmas.numel()
    assert len(set(map(tuple, base.boxes.view(-1, 4).tolist()))) > 0.99 * base.blur_sigmas.numel()


def test_parameters_of_an_image_do_not_depend_on_the_batch_around_it() -> None:
    sizes, indices = torch.tensor([[40, 60], [375, 500], [33, 20]]), torch.tensor([7, 123456789, 2])
    together = draw_parameters(SMALL, sizes, indices, seed=5, epoch=3)
    alone = draw_parameters(SMALL, sizes[1:2], indices[1:2], seed=5, epoch=3)
    for field in dataclasses.fields(alone):
        assert torch.equal(getattr(alone, field.name)[:, 0], getattr(together, field.name)[:, 1]), field.name


def test_views_of_an_image_are_bitwise_the_same_alone_and_elsewhere_in_a_batch() -> None:
    images = [image_of(60, 80, 0), image_of(32, 32, 1), image_of(101, 47, 2), image_of(90, 90, 3)]
    indices = torch.tensor([4, 11, 9, 30])
    whole = make_views(RaggedImages.from_list(images), indices, SMALL, seed=1, epoch=2)
    turned = [2, 0, 3, 1]
    moved = make_views(RaggedImages.from_list([images[i] for i in turned]), indices[turned], SMALL, seed=1, epoch=2)
    assert whole.local_views is not None
    assert moved.local_views is not None
    assert torch.equal(moved.global_views, whole.global_views[:, turned])
    assert torch.equal(moved.local_views, whole.local_views[:, turned])
    assert torch.equal(moved.image_indices, indices[turned])
    for position, image in enumerate(images):
        alone = make_views(RaggedImages.from_list([image]), indices[position : position + 1], SMALL, seed=1, epoch=2)
        assert alone.local_views is not None
        assert torch.equal(alone.global_views[:, 0], whole.global_views[:, position])
        assert torch.equal(alone.local_views[:, 0], whole.local_views[:, position])


def test_large_views_of_an_image_are_bitwise_the_same_alone_and_in_a_batch_with_two_threads() -> None:
    """Enough pixels that torch shares the work on a single view among threads."""
    settings = ViewSettings(num_global=2, num_local=1, global_size=224, local_size=96, jitter_probability=1.0)
    images = [image_of(300, 400, 0), image_of(420, 250, 1), image_of(224, 224, 2)]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        whole = make_views(RaggedImages.from_list(images), torch.arange(3), settings, seed=1, epoch=2)
        for number, image in enumerate(images):
            alone = make_views(RaggedImages.from_list([image]), torch.tensor([number]), settings, seed=1, epoch=2)
            for group, expected in zip(alone.groups(), whole.groups(), strict=True):
                assert torch.equal(group[:, 0], expected[:, number])
    finally:
        torch.set_num_threads(threads)


def test_views_in_another_dtype_are_those_in_float32_rounded_once() -> None:
    images = RaggedImages.from_list([image_of(60, 80, 0), image_of(32, 32, 1)])
    exact, rounded = (
        make_views(images, torch.arange(2), SMALL, seed=0, epoch=0, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    for exact_group, rounded_group in zip(exact.groups(), rounded.groups(), strict=True):
        assert torch.equal(rounded_group, exact_group.bfloat16())


PLAIN: dict[str, Any] = {
    "flip_probability": 0.0,
    "jitter_probability": 0.0,
    "grey_probability": 0.0,
    "first_global_blur_probability": 0.0,
    "second_global_blur_probability": 0.0,
    "local_blur_probability": 0.0,
    "solarise_probability": 0.0,
    "mean": (0.0, 0.0, 0.0),
    "std": (1.0, 1.0, 1.0),
}


def views_with(**changes: Any) -> list[Tensor]:
    """First global, second global and local view of three images; only `changes` is switched on."""
    settings = ViewSettings(num_local=1, global_size=24, local_size=24, **{**PLAIN, **changes})
    images = RaggedImages.from_list([image_of(40, 50, seed) for seed in range(3)])
    batch = make_views(images, torch.arange(3), settings, seed=0, epoch=0)
    assert batch.local_views is not None
    return [*batch.global_views, *batch.local_views]


def test_each_setting_reaches_the_views_it_names_and_no_other() -> None:
    plain = views_with()

    def changed(**changes: Any) -> list[bool]:
        return [
            not torch.allclose(view, before, atol=1e-4)
            for view, before in zip(views_with(**changes), plain, strict=True)
        ]

    assert changed() == [False, False, False]
    assert changed(first_global_blur_probability=1.0) == [True, False, False]
    assert changed(second_global_blur_probability=1.0) == [False, True, False]
    assert changed(local_blur_probability=1.0) == [False, False, True]
    assert changed(solarise_probability=1.0) == [False, True, False]
    assert changed(jitter_probability=1.0) == [True, True, True]
    assert changed(grey_probability=1.0) == [True, True, True]
    assert changed(global_jitter_probability=1.0) == changed(global_grey_probability=1.0) == [True, True, False]
    assert changed(jitter_probability=1.0, global_jitter_probability=0.0) == [False, False, True]
    assert changed(grey_probability=1.0, global_grey_probability=0.0) == [False, False, True]
    greyed, flipped = views_with(grey_probability=1.0), views_with(flip_probability=1.0)
    normalised = views_with(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    for grey, flip, normal, before in zip(greyed, flipped, normalised, plain, strict=True):
        assert torch.equal(grey[:, 0], grey[:, 1])
        assert torch.equal(grey[:, 1], grey[:, 2])
        torch.testing.assert_close(flip, before.flip(-1), rtol=0, atol=1e-5)
        torch.testing.assert_close(normal, reference.normalize(before, [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]))


def test_operations_come_in_the_order_grey_blur_solarise() -> None:
    everything = {
        "grey_probability": 1.0,
        "second_global_blur_probability": 1.0,
        "solarise_probability": 1.0,
        "blur_sigma": (1.5, 1.5),
    }
    before, view = views_with(grey_probability=1.0)[1], views_with(**everything)[1]
    kernel_size = 13
    blurred = reference.gaussian_blur(before, [kernel_size, kernel_size], [1.5, 1.5])
    expected = torch.where(blurred >= 128 / 255, 1 - blurred, blurred)
    inside = (..., slice(8, -8), slice(8, -8))  # torchvision mirrors at the border, Pillow repeats
    sure = (blurred - 128 / 255).abs() > 0.01
    assert float(((view - expected).abs() * sure)[inside].max()) < 0.01


def test_default_views_have_the_papers_shapes() -> None:
    images = RaggedImages.from_list([image_of(60, 80, 0)])
    batch = make_views(images, torch.tensor([0]), ViewSettings(), seed=0, epoch=0)
    assert batch.local_views is not None
    assert batch.global_views.shape == (2, 1, 3, 224, 224)
    assert batch.local_views.shape == (10, 1, 3, 96, 96)
    assert batch.global_views.dtype == torch.float32
    assert batch.global_views.is_contiguous()
    assert make_views(images, torch.tensor([0]), ViewSettings(num_local=0), seed=0, epoch=0).local_views is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_global": 0}, "num_global: Input should be greater than or equal to 1"),
        ({"num_local": -1}, "num_local: Input should be greater than or equal to 0"),
        ({"grey_probability": 1.1}, "grey_probability: Input should be less than or equal to 1"),
        ({"global_scale": (0.5, 0.3)}, r"global_scale is \[0\.5, 0\.3\]; it needs 0 < smallest <= largest <= 1"),
        ({"local_scale": (0.1, 1.2)}, r"local_scale is \[0\.1, 1\.2\]; it needs"),
        ({"local_scale": (0.0, 0.2)}, r"local_scale is \[0\.0, 0\.2\]; it needs"),
        ({"aspect_ratio": (2.0, 1.0)}, r"aspect_ratio is \[2\.0, 1\.0\]; it needs"),
        ({"std": (0.2, 0.0, 0.2)}, r"std is \[0\.2, 0\.0, 0\.2\]"),
    ],
)
def test_impossible_settings_are_refused_with_their_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        validate(ViewSettings, values, origin="test")


def assert_same_but_for_rounding(views: ViewBatch, expected: ViewBatch, settings: ViewSettings) -> None:
    """Within 1.5 grey levels, of which solarising takes one where a pixel falls on the other side of its threshold, and
    0.1 on average.
    """
    for group, expected_group in zip(views.groups(), expected.groups(), strict=True):
        assert group.shape == expected_group.shape
        in_levels = (group.cpu() - expected_group).abs() * torch.tensor(settings.std).view(3, 1, 1) * 255
        assert float(in_levels.max()) < 1.5
        assert float(in_levels.mean()) < 0.1


@pytest.mark.kernel
@pytest.mark.parametrize("blur_sigma", [(0.1, 2.0), (1.0, 9.0)])  # the second is too wide for the kernel
def test_views_by_kernels_equal_those_of_image_ops(
    blur_sigma: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SMALL.model_copy(update={"blur_sigma": blur_sigma, "global_size": 40})
    images = RaggedImages.from_list([image_of(30 + 10 * seed, 80, seed) for seed in range(4)]).slice(1, 4)
    expected = make_views(images, torch.arange(3), settings, seed=0, epoch=0)
    if torch.cuda.is_available():
        images = images.to("cuda")
    monkeypatch.setattr(views_module, "_render", views_module._render_by_kernels)  # in Python where there is no GPU
    views = make_views(images, torch.arange(3), settings, seed=0, epoch=0)
    assert_same_but_for_rounding(views, expected, settings)
    assert not torch.equal(views.global_views.cpu(), expected.global_views), "the kernels were not used"
    moved = make_views(images.slice(2, 3), torch.tensor([2]), settings, seed=0, epoch=0)
    if blur_sigma[1] < 5:
        assert torch.equal(moved.global_views[:, 0], views.global_views[:, 2])


@pytest.mark.gpu
def test_views_on_a_gpu_equal_those_on_the_cpu_and_never_wait_for_it() -> None:
    settings = ViewSettings(num_local=4)
    images = RaggedImages.from_list([image_of(300 + 40 * seed, 500, seed) for seed in range(8)])
    indices = torch.arange(8)
    on_cpu = make_views(images, indices, settings, seed=0, epoch=0)
    device_images = images.to("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        on_gpu = make_views(device_images, indices, settings, seed=0, epoch=0)
        in_bfloat16 = make_views(device_images, indices, settings, seed=0, epoch=0, dtype=torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_but_for_rounding(on_gpu, on_cpu, settings)
    for rounded, exact in zip(in_bfloat16.groups(), on_gpu.groups(), strict=True):
        assert torch.equal(rounded, exact.bfloat16())
