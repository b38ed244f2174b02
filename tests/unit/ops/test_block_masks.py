"""iBOT's masks against a loop written after their description, and the kernel against the tensor operations."""

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from massl import keyed_random
from massl.ops import block_masks as module
from massl.ops.block_masks import block_masks, random_kept
from massl.ops.kernels.masks import place_rectangles as place_by_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KEY = (7, "block masks", 3)
IMAGES = torch.arange(1000, 1600)


def masks_of(ratio: float, *, variance: float = 0.0, grid: tuple[int, int] = (14, 14), num_images: int = 600) -> Tensor:
    return block_masks(KEY, IMAGES[:num_images], num_views=2, grid=grid, ratios=[ratio], ratio_variances=[variance])


def drawn_one_by_one(draw: Callable[[], float], target: float, grid: tuple[int, int]) -> list[list[bool]]:
    """The rule as iBOT's authors state it, one patch at a time."""
    height, width = grid
    mask = [[False] * width for _ in range(height)]
    lowest, failures = (min(height, width) // 3) ** 2, 0
    while failures < 10:
        left_to_hide = target - sum(map(sum, mask))
        if left_to_hide < 1:
            break
        area = lowest + (left_to_hide - lowest) * draw()
        aspect = math.exp(math.log(0.3) + (math.log(1 / 0.3) - math.log(0.3)) * draw())
        tall, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        top, left = math.floor(draw() * (height - tall + 1)), math.floor(draw() * (width - wide + 1))
        failures += 1
        if tall < height and wide < width:
            new = [
                (row, column)
                for row, column in itertools.product(range(top, top + tall), range(left, left + wide))
                if not mask[row][column]
            ]
            if 0 < len(new) <= left_to_hide:
                failures = 0
                for row, column in new:
                    mask[row][column] = True
    return mask


def farthest_apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of two empirical distribution functions (Kolmogorov and Smirnov)."""
    places = torch.cat([ours, theirs]).unique()
    shares = [torch.searchsorted(sample.sort().values, places, right=True) / len(sample) for sample in (ours, theirs)]
    return float((shares[0] - shares[1]).abs().max())


def extents(masks: Tensor) -> Tensor:  # [N, H, W] -> [2, N]
    """How many rows and how many columns hold a hidden patch."""
    return torch.stack([masks.any(dim=2).sum(dim=1), masks.any(dim=1).sum(dim=1)])


@pytest.mark.parametrize(
    ("ratio", "variance", "grid"),
    [(0.3, 0.2, (14, 14)), (0.09, 0.0, (14, 14)), (0.5, 0.1, (6, 11))],
    ids=["as in iBOT", "one rectangle at most", "not square"],
)
def test_masks_are_distributed_as_those_of_the_loop(ratio: float, variance: float, grid: tuple[int, int]) -> None:
    """1200 of ours and 1200 of the loop: by chance the functions are 0.08 apart once in a thousand times."""
    ours = masks_of(ratio, variance=variance, grid=grid).flatten(0, 1).view(-1, *grid)
    generator = random.Random(0)
    num_patches = grid[0] * grid[1]
    loop = [
        drawn_one_by_one(generator.random, generator.uniform(ratio - variance, ratio + variance) * num_patches, grid)
        for _ in range(len(ours))
    ]
    theirs = torch.tensor(loop)
    assert farthest_apart(ours.sum(dim=(1, 2)), theirs.sum(dim=(1, 2))) < 0.08
    for of_ours, of_theirs in zip(extents(ours), extents(theirs), strict=True):
        assert farthest_apart(of_ours, of_theirs) < 0.08
    for own, other in zip(extents(ours), extents(theirs), strict=True):
        assert float(own.float().mean()) == pytest.approx(float(other.float().mean()), rel=0.04)
    # Where the hidden patches lie; a share of 1200 has a standard deviation of 0.014 at most.
    assert float((ours.float().mean(dim=0) - theirs.float().mean(dim=0)).abs().max()) < 0.08


@pytest.mark.parametrize(
    ("ratio", "grid"), [(0.3, (14, 14)), (0.8, (7, 5)), (1.0, (3, 9)), (0.5, (2, 2)), (0.6, (1, 8))]
)
def test_with_the_same_random_numbers_a_mask_is_that_of_the_loop_to_the_patch(
    ratio: float, grid: tuple[int, int]
) -> None:
    masks = masks_of(ratio, grid=grid, num_images=20)
    for view, position in itertools.product(range(2), range(20)):
        seed = keyed_random.bits(KEY, int(IMAGES[position]), view)
        draws = iter(keyed_random.uniform(seed, torch.arange(4 * module.NUM_TRIES)).tolist())
        expected = drawn_one_by_one(
            lambda draws=draws: next(draws), float(torch.tensor(ratio) * (grid[0] * grid[1])), grid
        )
        assert masks[view, position].view(grid).tolist() == expected


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.37, 0.75, 1.0])
@pytest.mark.parametrize("grid", [(14, 14), (6, 6), (5, 9)])
def test_a_mask_never_hides_more_than_its_share_and_seldom_much_less(ratio: float, grid: tuple[int, int]) -> None:
    masks = masks_of(ratio, grid=grid, num_images=100)
    num_patches = grid[0] * grid[1]
    counts = masks.sum(dim=-1)
    assert masks.shape == (2, 100, num_patches)
    assert int(counts.max()) <= int(ratio * num_patches)
    assert float(counts.float().mean()) >= 0.85 * int(ratio * num_patches)


def test_by_default_every_other_mask_is_empty_and_the_others_hide_a_tenth_to_a_half() -> None:
    counts = block_masks(KEY, IMAGES, num_views=2, grid=(14, 14)).sum(dim=-1).flatten()
    assert float((counts == 0).float().mean()) == pytest.approx(0.5, abs=0.05)
    shares = counts[counts > 0] / 196
    assert 0.05 < float(shares.min()) < 0.12  # int(0.1 * 196) = 19 at least, less what ten tries could not fill
    assert 0.46 < float(shares.max()) <= 0.5
    assert float(shares.mean()) == pytest.approx(0.3, abs=0.02)


def test_the_listed_ratios_are_equally_likely_and_each_keeps_its_own_variance() -> None:
    keys = module._view_keys(KEY, IMAGES, 2, None)
    counts = module._num_hidden(keys, 100, [0.2, 0.5, 0.8], [0.0, 0.1, 0.0]).flatten()
    for lowest, highest in [(20, 20), (40, 60), (80, 80)]:
        chosen = counts[(counts > lowest - 0.001) & (counts < highest + 0.001)]
        assert len(chosen) / len(counts) == pytest.approx(1 / 3, abs=0.05)
    between = counts[(counts > 30) & (counts < 70)]
    assert 40 <= float(between.min()) < 41
    assert 59 < float(between.max()) <= 60
    assert float(between.mean()) == pytest.approx(50, abs=1.0)


def all_kinds(key: keyed_random.Key, images: Tensor, num_views: int = 2) -> list[Tensor]:
    return [
        block_masks(key, images, num_views=num_views, grid=(6, 6), ratios=[0.5], ratio_variances=[0.1]),
        random_kept(key, images, num_views=num_views, num_patches=36, num_kept=9),
    ]


def test_masks_depend_on_key_image_and_view_alone_and_not_on_the_rest_of_the_batch() -> None:
    images = torch.tensor([5, 900_000, 17, 3])
    for whole, part in zip(all_kinds(KEY, images), all_kinds(KEY, images[[2, 0]], num_views=1), strict=True):
        assert torch.equal(whole[:1, [2, 0]], part)
    for by_number, by_tensor in zip(
        all_kinds(KEY, images), all_kinds((7, "block masks", torch.tensor(3)), images), strict=True
    ):
        assert torch.equal(by_number, by_tensor)


def test_every_image_view_and_key_has_a_mask_of_its_own() -> None:
    images = torch.tensor([5, 900_000, 17])
    for masks, of_another_key in zip(all_kinds(KEY, images), all_kinds((7, "block masks", 4), images), strict=True):
        rows = torch.cat([masks.flatten(0, 1), of_another_key.flatten(0, 1)])
        assert len(rows.unique(dim=0)) == 12


def test_kept_patches_are_different_ones_each_equally_often_and_in_any_order() -> None:
    kept = random_kept(KEY, IMAGES, num_views=2, num_patches=8, num_kept=3)
    assert kept.shape == (2, 600, 3)
    assert kept.dtype == torch.int64
    assert (kept.sort(dim=-1).values.diff(dim=-1) > 0).all()
    for place in range(3):
        frequency = torch.bincount(kept[..., place].flatten(), minlength=8) / 1200
        assert float((frequency - 1 / 8).abs().max()) < 0.04
    everything = random_kept(KEY, IMAGES, num_views=2, num_patches=8, num_kept=8)
    assert torch.equal(everything[..., :3], kept)
    assert (everything.sort(dim=-1).values == torch.arange(8)).all()


@pytest.mark.parametrize("num_kept", [0, 9])
def test_more_patches_than_there_are_or_none_cannot_be_kept(num_kept: int) -> None:
    with pytest.raises(ValueError, match="choose 1 to 8"):
        random_kept(KEY, IMAGES, num_views=1, num_patches=8, num_kept=num_kept)


@pytest.mark.parametrize(("ratio", "variance"), [(0.1, 0.2), (0.9, 0.2), (1.1, 0.0), (0.3, -0.1)])
def test_shares_beyond_none_or_all_of_the_patches_are_refused(ratio: float, variance: float) -> None:
    with pytest.raises(ValueError, match="0 to 1"):
        masks_of(ratio, variance=variance)


def by_kernel_and_by_tensors(grid: tuple[int, int], ratio: float, num_images: int) -> tuple[Tensor, Tensor]:
    keys = module._view_keys(KEY, IMAGES[:num_images], 2, None)
    targets = module._num_hidden(keys, grid[0] * grid[1], [ratio], [0.1])
    draws = module.rectangle_draws(keys, 0, module.NUM_TRIES)
    by_kernel = place_by_kernel(targets.to(DEVICE), draws.to(DEVICE), grid).cpu()
    return by_kernel, module.place_rectangles(targets, keys, grid)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("grid", "ratio"), [((5, 9), 0.5), ((14, 14), 0.3), ((6, 6), 0.9), ((9, 5), 0.5), ((2, 1), 0.5)]
)
def test_the_kernel_makes_the_same_masks_bit_for_bit(grid: tuple[int, int], ratio: float) -> None:
    """The interpreter takes 5 ms for a try."""
    by_kernel, by_tensors = by_kernel_and_by_tensors(grid, ratio, num_images=600 if DEVICE.type == "cuda" else 4)
    assert by_kernel.dtype == torch.bool
    assert torch.equal(by_kernel, by_tensors)


@pytest.mark.kernel
def test_where_tries_run_out_the_masks_are_still_the_same_and_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = by_kernel_and_by_tensors((8, 8), 0.8, num_images=4)[1]
    monkeypatch.setattr(module, "NUM_TRIES", 5)
    by_kernel, by_tensors = by_kernel_and_by_tensors((8, 8), 0.8, num_images=4)
    assert torch.equal(by_kernel, by_tensors)
    assert (by_tensors <= whole).all()
    assert by_tensors.sum() < whole.sum()


@pytest.mark.kernel
def test_no_images_have_no_masks() -> None:
    assert block_masks(KEY, IMAGES[:0], num_views=2, grid=(4, 4), device=DEVICE).shape == (2, 0, 16)


@pytest.mark.kernel
def test_masks_wanted_on_a_device_are_those_of_the_cpu() -> None:
    for kind, sizes in (
        (block_masks, {"grid": (14, 14)}),
        (random_kept, {"num_patches": 9, "num_kept": 4}),
    ):
        there = kind(KEY, IMAGES, num_views=2, device=DEVICE, **sizes)  # type: ignore[operator]
        assert there.device.type == DEVICE.type
        assert torch.equal(there.cpu(), kind(KEY, IMAGES, num_views=2, **sizes))  # type: ignore[operator]


@pytest.mark.gpu
def test_masks_can_be_part_of_a_cuda_graph_that_reads_the_step_anew() -> None:
    step, images = torch.tensor(0, device=DEVICE), IMAGES.to(DEVICE)
    all_kinds((7, "block masks", step), images)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = all_kinds((7, "block masks", step), images)
    for number in (3, 4):
        step.fill_(number)
        graph.replay()
        for ours, expected in zip(recorded, all_kinds((7, "block masks", number), IMAGES), strict=True):
            assert torch.equal(ours.cpu(), expected)
