import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from massl import keyed_random
from massl.ops.mixup import (
    Mixture,
    draw_mixture,
    erase_rectangles,
    mix_images,
    mix_rows,
    mixture_of,
    smoothed_targets,
    soft_cross_entropy,
    symmetric_beta,
)

CPU = torch.device("cpu")


def noise(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(0))


def drawn(step: int | Tensor, *, mixup: float = 0.8, cutmix: float = 1.0, probability: float = 0.5) -> Mixture:
    options = {"mixup_alpha": mixup, "cutmix_alpha": cutmix, "cutmix_probability": probability}
    return draw_mixture(0, "mixing", step, size=(8, 6), device=CPU, **options)


def is_cut(mixture: Mixture) -> bool:
    return set(mixture.pixel_shares.unique().tolist()) <= {0.0, 1.0}


# Numbers from Beta(alpha, alpha): mean 1/2, variance 1 / (8 alpha + 4), and these quartiles.
@pytest.mark.parametrize(("alpha", "quartile"), [(0.2, 0.0282), (0.8, 0.2150), (1.0, 0.25), (4.0, 0.3791)])
def test_shares_follow_the_beta_distribution(alpha: float, quartile: float) -> None:
    shares = symmetric_beta(keyed_random.bits(0, torch.arange(20_000)), "share", alpha=alpha)
    assert (shares.shape, shares.dtype) == ((20_000,), torch.float32)
    assert shares.mean().item() == pytest.approx(0.5, abs=0.01)
    assert shares.var().item() == pytest.approx(1 / (8 * alpha + 4), rel=0.03)
    assert (shares < quartile).float().mean().item() == pytest.approx(0.25, abs=0.01)


def test_tiny_and_huge_alphas_give_numbers_too() -> None:
    keys = keyed_random.bits(0, torch.arange(200))
    tiny, huge = (symmetric_beta(keys, "share", alpha=alpha) for alpha in (1e-3, 1e4))
    torch.testing.assert_close(tiny, tiny.round(), atol=0.2, rtol=0)
    assert 0.4 < tiny.mean() < 0.6
    assert (huge - 0.5).abs().max() < 0.02
    assert not torch.equal(tiny, symmetric_beta(keys, "another", alpha=1e-3))


def test_a_mixture_is_a_function_of_its_key_given_as_number_or_tensor() -> None:
    first, again, later = drawn(3), drawn(torch.tensor(3)), drawn(4)
    assert torch.equal(first.share, again.share)
    assert torch.equal(first.pixel_shares, again.pixel_shares)
    assert first.share != later.share


def test_mixup_and_cutmix_are_taken_as_often_as_asked() -> None:
    assert all(is_cut(drawn(step, probability=1.0)) for step in range(8))
    assert not any(is_cut(drawn(step, probability=0.0)) for step in range(8))
    assert sum(is_cut(drawn(step, probability=0.3)) for step in range(80)) == pytest.approx(24, abs=12)


def test_where_one_alpha_is_zero_the_other_kind_is_always_taken() -> None:
    assert not any(is_cut(drawn(step, cutmix=0.0)) for step in range(8))
    assert all(is_cut(drawn(step, mixup=0.0)) for step in range(8))


def test_the_share_of_a_cut_is_what_is_left_of_the_image() -> None:
    for step in range(30):
        mixture = drawn(step, mixup=0.0)
        assert mixture.share.item() == pytest.approx(mixture.pixel_shares.mean().item())


def test_a_cut_is_a_rectangle_around_its_centre_that_ends_at_the_border() -> None:
    share, cuts = torch.tensor(0.75), torch.tensor(True)
    inner = mixture_of(share, cuts=cuts, centre=(torch.tensor(4), torch.tensor(4)), size=(8, 8))
    expected = torch.ones(8, 8)
    expected[2:6, 2:6] = 0
    assert torch.equal(inner.pixel_shares, expected)
    assert inner.share == 0.75
    corner = mixture_of(share, cuts=cuts, centre=(torch.tensor(0), torch.tensor(7)), size=(8, 8))
    expected = torch.ones(8, 8)
    expected[:2, 5:] = 0
    assert torch.equal(corner.pixel_shares, expected)
    assert corner.share.item() == pytest.approx(1 - 6 / 64)


def test_centres_reach_all_of_the_image() -> None:
    touched = torch.stack([1 - drawn(step, mixup=0.0).pixel_shares for step in range(60)]).mean(dim=0)
    assert touched.min() > 0.05


@pytest.mark.parametrize("cuts", [True, False])
def test_each_image_is_mixed_with_the_one_at_the_other_end(cuts: bool) -> None:
    images = noise(5, 3, 8, 6)
    centre = (torch.tensor(3), torch.tensor(2))
    mixture = mixture_of(torch.tensor(0.7), cuts=torch.tensor(cuts), centre=centre, size=(8, 6))
    mixed = mix_images(images, mixture)
    for number in range(5):
        expected = images[number] * mixture.pixel_shares + images[4 - number] * (1 - mixture.pixel_shares)
        torch.testing.assert_close(mixed[number], expected)
    assert torch.equal(
        mix_images(images.bfloat16(), mixture), mix_images(images.bfloat16().float(), mixture).bfloat16()
    )
    rows = noise(5, 4)
    torch.testing.assert_close(mix_rows(rows, torch.tensor(0.7))[1], 0.7 * rows[1] + 0.3 * rows[3])


def test_smoothed_targets_sum_to_one_and_are_zero_without_a_label() -> None:
    targets = smoothed_targets(torch.tensor([2, -1, 0]), num_classes=4, smoothing=0.2)
    expected = [[0.05, 0.05, 0.85, 0.05], [0.0] * 4, [0.85, 0.05, 0.05, 0.05]]
    torch.testing.assert_close(targets, torch.tensor(expected))


def test_cross_entropy_with_smoothed_targets_is_that_of_torch() -> None:
    logits, labels = noise(6, 5).requires_grad_(), torch.tensor([0, 4, 1, 1, 2, 3])
    ours = soft_cross_entropy(logits, smoothed_targets(labels, num_classes=5, smoothing=0.1))
    theirs = cross_entropy(logits, labels, label_smoothing=0.1)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)))


def test_rows_without_a_label_add_nothing_but_count() -> None:
    logits = noise(4, 5)
    targets = smoothed_targets(torch.tensor([0, 4, -1, -1]), num_classes=5, smoothing=0.1)
    torch.testing.assert_close(soft_cross_entropy(logits, targets), soft_cross_entropy(logits[:2], targets[:2]) / 2)
    assert soft_cross_entropy(logits.bfloat16(), targets).dtype == torch.float32


def erased(num_images: int, *, probability: float = 1.0, step: int = 0, size: tuple[int, int] = (20, 16)) -> Tensor:
    """Which pixels of empty images were filled: [R, H, W] bool."""
    keys = keyed_random.bits(0, step, torch.arange(num_images))
    images = torch.full((num_images, 3, *size), torch.inf)
    filled = erase_rectangles(images, keys, 0, "noise", step, probability=probability).isfinite()
    assert torch.equal(filled, filled[:, :1].expand_as(filled))
    return filled[:, 0]


def test_erased_pixels_form_one_rectangle_of_allowed_area_and_aspect() -> None:
    filled = erased(300)
    heights, widths = filled.any(dim=2).sum(dim=1), filled.any(dim=1).sum(dim=1)
    areas = filled.sum(dim=(1, 2))
    assert torch.equal(areas, heights * widths)
    shares, log_aspects = areas / 320, (heights / widths).log()
    assert areas.min() > 0
    assert shares.min() > 0.01
    assert shares.max() < 1 / 3 + 0.05
    assert shares.mean().item() == pytest.approx((0.02 + 1 / 3) / 2, abs=0.02)
    assert log_aspects.abs().max() < math.log(1 / 0.3) + 0.5  # sides are rounded to pixels
    assert log_aspects.mean().abs() < 0.15
    # uniform in its logarithm
    assert log_aspects.std().item() == pytest.approx(2 * math.log(1 / 0.3) / math.sqrt(12), abs=0.15)


def test_a_rectangle_is_lower_and_narrower_than_the_image() -> None:
    for size in ((6, 60), (60, 6)):
        filled = erased(200, size=size)
        assert filled.any(dim=(1, 2)).float().mean() > 0.9  # another try is made where one does not fit
        assert filled.any(dim=2).sum(dim=1).max() < size[0]
        assert filled.any(dim=1).sum(dim=1).max() < size[1]


def test_rectangles_lie_anywhere_in_the_image() -> None:
    share_erased = erased(600).float().mean(dim=0)
    assert share_erased[0].max() > 0.02
    assert share_erased[-1].max() > 0.02
    assert share_erased[:, 0].max() > 0.02
    assert share_erased[:, -1].max() > 0.02
    assert share_erased[10, 8] < 0.6


def test_as_many_images_are_erased_as_asked_and_each_by_its_own_key() -> None:
    assert erased(800, probability=0.25).any(dim=(1, 2)).sum().item() == pytest.approx(200, abs=40)
    assert not erased(50, probability=0.0).any()
    assert torch.equal(erased(40, probability=0.5)[:20], erased(20, probability=0.5))
    assert not torch.equal(erased(20), erased(20, step=1))


def test_the_noise_is_normal_and_another_for_each_image() -> None:
    keys = keyed_random.bits(0, torch.arange(64))
    images = torch.full((64, 3, 20, 16), torch.inf)
    filled = erase_rectangles(images, keys, 7, probability=1.0)
    values = filled[filled.isfinite()]
    assert values.mean().abs() < 0.1
    assert values.std().item() == pytest.approx(1.0, abs=0.1)
    places = filled.isfinite()
    pairs = [
        (filled[0][both], filled[other][both]) for other in range(1, 64) if (both := places[0] & places[other]).any()
    ]
    assert len(pairs) > 10
    assert sum(torch.equal(*pair) for pair in pairs) <= 1  # two of 320 places to read from may be the same
    colours = filled[0].flatten(1)
    assert not torch.equal(colours[0], colours[1])
    assert not torch.equal(filled, erase_rectangles(images, keys, 8, probability=1.0))


def test_what_is_not_erased_stays_bit_for_bit_and_keeps_its_type() -> None:
    images = noise(6, 3, 12, 12).bfloat16()
    filled = erase_rectangles(images, keyed_random.bits(0, torch.arange(6)), 7, probability=0.5)
    changed = (filled != images).any(dim=1)
    assert filled.dtype == torch.bfloat16
    assert 0 < changed.sum() < changed.numel() / 3
