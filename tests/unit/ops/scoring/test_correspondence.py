import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from massl.ops.scoring import correspondence
from massl.ops.scoring.correspondence import (
    PatchCentres,
    grid_distance,
    match_patches,
    match_picture,
    most_attended,
    overlap_mask,
    patch_centres,
    share_by_chance,
    share_within,
    true_matches,
)

SIZES = torch.tensor([[300, 400]])  # of one image


def centres(top: int, left: int, height: int, width: int, *, flipped: bool = False, grid: int = 4) -> PatchCentres:
    return patch_centres(torch.tensor([[top, left, height, width]]), torch.tensor([flipped]), SIZES, grid=grid)


def random_tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


# ---- where patches lie -----------------------------------------------------------------------------------------------


@given(
    st.integers(0, 100),
    st.integers(0, 100),
    st.integers(1, 200),
    st.integers(1, 300),
    st.booleans(),
    st.integers(1, 14),
)
def test_centres_are_the_odd_ones_of_equally_spaced_points(
    top: int, left: int, height: int, width: int, flipped: bool, grid: int
) -> None:
    found = centres(top, left, height, width, flipped=flipped, grid=grid)
    ends = (left / 400, (left + width) / 400)
    np.testing.assert_allclose(found.rows[0], np.linspace(top / 300, (top + height) / 300, 2 * grid + 1)[1::2])
    np.testing.assert_allclose(found.columns[0], np.linspace(*(ends[::-1] if flipped else ends), 2 * grid + 1)[1::2])


def test_the_overlap_of_two_quarters_by_hand() -> None:
    """View 1 is the left half of the image, view 2 its right half from 3/8 on; four patches a side, all rows shared."""
    first, second = centres(0, 0, 300, 200), centres(0, 150, 300, 250)
    # Columns of view 1: 1/16 3/16 5/16 7/16; the first of view 2: 3/8 + 5/64 = 29/64. Half a patch is 1/8: 7/16 reaches
    # it, and 5/16 + 1/8 = 28/64 does not.
    assert overlap_mask(first, second).view(4, 4).tolist() == [[False, False, False, True]] * 4
    assert overlap_mask(first, first).all()


def test_views_of_different_corners_do_not_overlap() -> None:
    assert not overlap_mask(centres(0, 0, 90, 120), centres(210, 280, 90, 120)).any()


@given(
    st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(50, 200), st.integers(50, 300), st.booleans()),
    st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(50, 200), st.integers(50, 300), st.booleans()),
)
def test_overlap_and_truth_are_those_of_a_search_over_all_pairs_of_patches(
    one: tuple[int, int, int, int, bool], other: tuple[int, int, int, int, bool]
) -> None:
    grid = 3
    first, second = (centres(*box[:4], flipped=box[4], grid=grid) for box in (one, other))
    overlap, truth = overlap_mask(first, second)[0].tolist(), true_matches(first, second)[0].tolist()
    points = [(float(row), float(column)) for row in second.rows[0] for column in second.columns[0]]
    for patch in range(grid * grid):
        row, column = float(first.rows[0, patch // grid]), float(first.columns[0, patch % grid])
        distances = [(row - y) ** 2 + (column - x) ** 2 for y, x in points]
        assert distances[truth[patch]] == pytest.approx(min(distances), abs=1e-12)
        rows, columns = [y for y, _ in points], [x for _, x in points]
        half = 1 / 6
        shared = (
            row + half > min(rows)
            and row - half < max(rows)
            and column + half > min(columns)
            and column - half < max(columns)
        )
        assert overlap[patch] == shared


# ---- matching --------------------------------------------------------------------------------------------------------


def shifted_views(
    down: int, right: int, *, flipped: bool = False, grid: int = 8
) -> tuple[Tensor, Tensor, PatchCentres, PatchCentres]:
    """Tokens and centres of two windows of one large grid of random tokens, the second so many patches further."""
    world = random_tokens(2 * grid, 2 * grid, 16)
    first = world[:grid, :grid].reshape(1, grid * grid, 16)
    window = world[down : down + grid, right : right + grid]
    second = (window.flip(1) if flipped else window).reshape(1, grid * grid, 16)
    places = [torch.tensor([[0, 0, grid, grid]]), torch.tensor([[down, right, grid, grid]])]
    size = torch.tensor([[2 * grid, 2 * grid]])
    views = [
        patch_centres(box, torch.tensor([flip]), size, grid=grid)
        for box, flip in zip(places, (False, flipped), strict=True)
    ]
    return first, second, views[0], views[1]


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize(("down", "right"), [(0, 0), (2, 1), (0, 5)])
def test_a_shift_by_whole_patches_is_recovered(down: int, right: int, flipped: bool) -> None:
    first, second, *views = shifted_views(down, right, flipped=flipped)
    truth = true_matches(*views)
    # Half a patch of the published mask is half of a patch of the whole image, so the mask is wider than what both
    # views show.
    shared = torch.tensor([[row >= down and column >= right for row in range(8) for column in range(8)]])
    assert (overlap_mask(*views) | ~shared).all()
    matches = match_patches(first, second, cosine=True)
    assert share_within(matches, truth, shared, grid=8, radius=0).item() == 1.0
    wrong = true_matches(views[0], shifted_views((down + 3) % 8, (right + 3) % 8, flipped=flipped)[3])
    assert share_within(matches, wrong, shared, grid=8, radius=0).item() < 0.2


def test_long_tokens_win_the_dot_product_but_not_the_cosine() -> None:
    first = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    second = torch.tensor([[[1.0, 0.1], [5.0, 5.0]]])
    assert match_patches(first, second).tolist() == [[1, 1]]
    assert match_patches(first, second, cosine=True).tolist() == [[0, 1]]


def test_matching_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = random_tokens(5, 6, 3), random_tokens(5, 7, 3) + 0.1
    expected = torch.stack([(a @ b.T).argmax(dim=1) for a, b in zip(first, second, strict=True)])
    for limit in (1, 2 * 6 * 7, 1 << 20):
        monkeypatch.setattr(correspondence, "_CHUNK_SIMILARITIES", limit)
        assert torch.equal(match_patches(first, second), expected)


def test_distance_on_the_grid_is_the_larger_of_rows_and_columns() -> None:
    # On a grid of 4: 5 is (1, 1), 14 is (3, 2), 4 is (1, 0).
    assert grid_distance(torch.tensor([5, 5, 5]), torch.tensor([14, 4, 5]), grid=4).tolist() == [2, 1, 0]


def test_only_overlapping_patches_count_and_a_radius_forgives() -> None:
    truth = torch.tensor([[0, 5, 10, 15]]).expand(2, 4)
    matches = torch.tensor([[0, 6, 8, 15]]).expand(2, 4)  # distances 0, 1, 2, 0
    overlap = torch.tensor([[True, True, True, False], [False] * 4])
    shares = [share_within(matches, truth, overlap, grid=4, radius=radius) for radius in (0, 1, 2)]
    assert [share[0].item() for share in shares] == pytest.approx([1 / 3, 2 / 3, 1])
    assert all(share[1].isnan() for share in shares)  # views that do not overlap have no share


@pytest.mark.parametrize("radius", [0, 1, 2, 5])
def test_chance_is_the_mean_over_all_possible_matches(radius: int) -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(0, 16, (3, 16), generator=generator)
    overlap = torch.rand(3, 16, generator=generator) < 0.6
    each = [share_within(torch.full_like(truth, match), truth, overlap, grid=4, radius=radius) for match in range(16)]
    torch.testing.assert_close(share_by_chance(truth, overlap, grid=4, radius=radius), torch.stack(each).mean(dim=0))


# ---- drawing ---------------------------------------------------------------------------------------------------------


def test_points_are_the_most_attended_patches_strongest_first() -> None:
    attention = torch.tensor([[[[0.1, 0.9], [0.3, 0.2]], [[0.1, 0.1], [0.8, 0.2]]]])  # mean over heads 0.1 0.5 0.55 0.2
    assert [points.tolist() for points in most_attended(attention, grid=2, num_points=3)] == [[2, 1, 3]]


def test_points_outside_the_overlap_are_never_chosen() -> None:
    attention = torch.tensor([[[[0.1, 0.9], [0.3, 0.2]]]]).expand(2, 1, 2, 2)
    overlap = torch.tensor([[True, False, True, True], [False, False, False, True]])
    assert [points.tolist() for points in most_attended(attention, grid=2, num_points=2, overlap=overlap)] == [
        [2, 3],
        [3],
    ]


def test_a_finer_attention_grid_gives_its_nearest_values() -> None:
    fine = torch.arange(16.0).view(1, 1, 4, 4)  # at half the size the values 0 2 8 10 remain
    assert [points.tolist() for points in most_attended(fine, grid=2, num_points=4)] == [[3, 2, 1, 0]]
    fine[0, 0, 0, 2] = 99
    fine[0, 0, 3, 3] = 999  # falls between the nearest ones
    assert most_attended(fine, grid=2, num_points=1)[0].tolist() == [1]


def luminance(pixels: Tensor) -> Tensor:  # [..., 3] -> [...]
    levels = pixels.double() / 255
    linear = torch.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)
    return linear @ torch.tensor([0.2126, 0.7152, 0.0722], dtype=torch.float64)


@pytest.mark.parametrize("zoom", [1, 3])
def test_a_line_joins_the_centres_of_matching_patches(zoom: int) -> None:
    grey = torch.full((64, 64, 3), 128, dtype=torch.uint8)
    picture = match_picture(grey, grey, torch.tensor([1]), torch.tensor([14]), patch=16, zoom=zoom)
    assert picture.shape == (64 * zoom, 128 * zoom, 3)
    changed = (picture != 128).any(dim=2).nonzero()
    # Patch 1 of a 4 x 4 grid is centred at x 24, y 8; patch 14 at x 40, y 56, in the right picture.
    reach = 5 * max(1, zoom)
    for axis, (low, high) in enumerate([(8, 56), (24, 64 + 40)]):
        assert abs(changed[:, axis].min().item() - low * zoom) <= reach
        assert abs(changed[:, axis].max().item() - high * zoom) <= reach
    assert len(set(changed[:, 1].tolist())) >= 80 * zoom  # without a break


@pytest.mark.parametrize("level", [0, 60, 128, 200, 255])
def test_each_line_stands_out_from_any_picture_and_neighbours_differ(level: int) -> None:
    plain = torch.full((160, 160, 3), level, dtype=torch.uint8)
    patches = torch.arange(0, 100, 10)[:8]  # the first patch of each row of a 10 x 10 grid
    picture = match_picture(plain, plain, patches, patches, patch=16)
    middle = picture[:, 160]  # across all lines
    background = luminance(plain[0, 0])
    colours = []
    for row in range(8, 128, 16):
        crossing = luminance(middle[row - 6 : row + 6])
        brighter, darker = torch.maximum(crossing, background), torch.minimum(crossing, background)
        assert float(((brighter + 0.05) / (darker + 0.05)).max()) >= 3.0
        colours.append(tuple(middle[row].tolist()))
    assert len(set(colours)) == 8


def test_both_pictures_stand_side_by_side_and_do_not_mix() -> None:
    black, white = torch.zeros(8, 8, 3, dtype=torch.uint8), torch.full((8, 8, 3), 255, dtype=torch.uint8)
    none = torch.empty(0, dtype=torch.int64)
    picture = match_picture(black, white, none, none, patch=4, zoom=4)
    assert torch.equal(picture[:, :32], torch.zeros(32, 32, 3, dtype=torch.uint8))
    assert torch.equal(picture[:, 32:], torch.full((32, 32, 3), 255, dtype=torch.uint8))
    apart = match_picture(black, black, torch.tensor([0]), torch.tensor([0]), patch=4, zoom=4, gap=6)
    assert apart.shape == (32, 70, 3)
    assert apart[31, :, 0].tolist() == [0] * 32 + [255] * 6 + [0] * 32
    assert bool((apart[8, 8 : 8 + 38] != 0).any(dim=1).all())  # the line, from one centre to the other
