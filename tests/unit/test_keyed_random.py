import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from massl import keyed_random

INT64 = st.integers(min_value=-(2**63), max_value=2**63 - 1)


def chi_square(counts: Tensor) -> float:
    expected = counts.sum().item() / counts.numel()
    return float(((counts.double() - expected) ** 2 / expected).sum())


def test_the_hash_is_the_one_that_earlier_runs_were_made_with() -> None:
    """A change here would silently change every run: order of images, crops, memory blocks, initial weights."""
    keys = (7, "drop path", torch.arange(3), torch.tensor([[0], [-5]]))
    assert int(keyed_random.bits(0)) == 58958004536289862
    assert int(keyed_random.bits("crop")) == 4464051449394386195
    assert int(keyed_random.bits(-1)) == 1894239664750043953
    assert int(keyed_random.bits(1 << 40)) == 3524129185037820553
    assert int(keyed_random.bits(0, "order", 3, 17)) == 2209442850599282436
    assert keyed_random.bits(*keys).tolist() == [
        [582615879621912182, 2401504399256378056, 3701905325639976912],
        [2750573937892086457, 2618271172961506740, 2205821641551113210],
    ]
    assert keyed_random.seed_from(5, "backbone") == 2362485052181233737


def test_what_is_made_of_the_bits_is_what_earlier_runs_were_made_with() -> None:
    uniform = [0.0707656741142273, 0.9713382720947266, 0.6122432351112366, 0.23361492156982422]
    assert keyed_random.uniform(1, "u", torch.arange(4)).tolist() == uniform  # exact on every device
    assert keyed_random.permutation(10, 0, "order", 0).tolist() == [6, 1, 5, 3, 0, 7, 2, 8, 9, 4]
    assert keyed_random.integers(3, "i", torch.arange(6), upper=100).tolist() == [83, 76, 11, 59, 95, 57]
    # log and cos: the last digits are the backend's
    normal = [-0.7471181750297546, -0.7671570181846619, 1.841025948524475]
    torch.testing.assert_close(keyed_random.normal(2, "n", torch.arange(3)), torch.tensor(normal), rtol=0, atol=1e-6)


@given(INT64, st.text(max_size=5), INT64)
def test_the_same_key_gives_the_same_bits_whatever_was_drawn_between(seed: int, purpose: str, item: int) -> None:
    before = keyed_random.bits(seed, purpose, item)
    torch.rand(3)
    keyed_random.bits(item, purpose)
    assert torch.equal(keyed_random.bits(seed, purpose, item), before)
    assert 0 <= int(before) < 1 << 62


@given(st.lists(INT64, min_size=1, max_size=4), st.lists(INT64, min_size=1, max_size=3))
def test_tensors_broadcast_to_what_each_single_key_gives(columns: list[int], rows: list[int]) -> None:
    drawn = keyed_random.bits(5, torch.tensor(columns), "view", torch.tensor(rows)[:, None])
    assert drawn.tolist() == [[int(keyed_random.bits(5, column, "view", row)) for column in columns] for row in rows]


def test_nested_keys_are_the_same_as_flat_ones() -> None:
    assert torch.equal(keyed_random.bits((1, ("a", 2)), 3), keyed_random.bits(1, "a", 2, 3))


def test_any_integer_type_of_tensor_gives_the_same_bits() -> None:
    expected = keyed_random.bits("type", torch.tensor([0, 1]))
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert torch.equal(keyed_random.bits("type", torch.tensor([0, 1], dtype=dtype)), expected)


def test_keys_that_look_alike_give_different_bits() -> None:
    keys = [
        (1, 2),
        (2, 1),
        (1,),
        (1, 0),
        (0, 1),
        ("1", 2),
        (1, "2"),
        ("1", "2"),
        ("12",),
        ("1",),
        (12,),
        (-1,),
        (2**32 - 1,),
        (1 << 32,),
        (2**63 - 1,),
    ]
    assert len({int(keyed_random.bits(*key)) for key in keys}) == len(keys)


def test_the_extremes_of_64_bits_are_keys_and_what_exceeds_them_is_refused() -> None:
    assert int(keyed_random.bits(-(2**63))) != int(keyed_random.bits(2**63 - 1))
    for too_large in (2**63, -(2**63) - 1):
        with pytest.raises(ValueError, match="does not fit 64 bits"):
            keyed_random.bits(too_large)


def test_a_floating_point_tensor_is_refused_as_a_key() -> None:
    with pytest.raises(TypeError, match="floating-point"):
        keyed_random.bits(0, torch.tensor([1.0]))


def test_a_key_without_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one part"):
        keyed_random.bits()


@pytest.mark.parametrize("purpose", ["crop", "order"])
def test_uniform_numbers_of_consecutive_keys_fill_all_bins_evenly(purpose: str) -> None:
    drawn = keyed_random.uniform(0, purpose, torch.arange(1 << 16))
    assert drawn.dtype == torch.float32
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    # 255 degrees of freedom: mean 255, standard deviation 22.6; five of those either way.
    assert 142 < chi_square(torch.histc(drawn, bins=256, min=0.0, max=1.0)) < 368


def test_both_halves_of_the_bits_are_uniform() -> None:
    words = keyed_random.bits("halves", torch.arange(1 << 16))
    for half in (words >> 31, words & 0x7FFFFFFF):
        assert 142 < chi_square(torch.bincount(half >> 23, minlength=256)) < 368
        assert 142 < chi_square(torch.bincount(half & 0xFF, minlength=256)) < 368


def test_neighbouring_keys_are_independent() -> None:
    """Pairs (this key, the next one) fill the square evenly, along items and along seeds."""
    items = torch.arange(1 << 16)
    for first, second in [
        (keyed_random.uniform(0, items), keyed_random.uniform(0, items + 1)),
        (keyed_random.uniform(items, "a"), keyed_random.uniform(items + 1, "a")),
        (keyed_random.uniform(items, "a"), keyed_random.uniform(items, "b")),
        (keyed_random.uniform(0, items, 0), keyed_random.uniform(0, items, 1)),
    ]:
        cells = (first * 16).long() * 16 + (second * 16).long()
        assert 142 < chi_square(torch.bincount(cells, minlength=256)) < 368


def test_every_bit_of_a_key_changes_half_of_the_bits_drawn() -> None:
    items = torch.arange(512)
    for position in range(63):
        changed = keyed_random.bits("avalanche", items) ^ keyed_random.bits("avalanche", items ^ (1 << position))
        num_flipped = sum(int((changed >> bit & 1).sum()) for bit in range(62)) / 512
        assert 29 < num_flipped < 33, position  # 31 of 62; the mean of 512 draws has a standard deviation of 0.17


def test_uniform_numbers_lie_between_the_bounds_given() -> None:
    drawn = keyed_random.uniform("bounds", torch.arange(10_000), low=-3.0, high=5.0)
    assert drawn.min() >= -3.0
    assert drawn.max() <= 5.0
    assert abs(drawn.mean() - 1.0) < 0.1


def test_integers_stay_below_each_upper_bound_and_reach_all_values() -> None:
    drawn = keyed_random.integers("dice", torch.arange(6000), upper=6)
    assert chi_square(torch.bincount(drawn, minlength=6)) < 25  # 5 degrees of freedom
    uppers = torch.tensor([1, 2, 1000])
    assert (keyed_random.integers("dice", torch.arange(200)[:, None], upper=uppers) < uppers).all()


def test_normal_numbers_have_the_moments_of_a_standard_normal() -> None:
    drawn = keyed_random.normal("moments", torch.arange(200_000)).double()
    assert drawn.isfinite().all()
    assert abs(drawn.mean()) < 0.01
    assert abs(drawn.var() - 1.0) < 0.02
    assert abs((drawn**3).mean()) < 0.04
    assert abs((drawn**4).mean() - 3.0) < 0.1
    assert abs((drawn.abs() < 1.0).double().mean() - 0.6827) < 0.005


@given(st.integers(min_value=0, max_value=300), INT64)
@settings(max_examples=50)
def test_a_permutation_holds_every_item_once(num_items: int, key: int) -> None:
    assert keyed_random.permutation(num_items, key).sort().values.tolist() == list(range(num_items))


def test_every_order_of_four_items_comes_equally_often() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for key in range(2400):
        order = tuple(keyed_random.permutation(4, "orders", key).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    # 23 degrees of freedom: mean 23, standard deviation 6.8
    assert chi_square(torch.tensor(list(counts.values()))) < 57


def test_permutations_of_neighbouring_keys_have_little_in_common() -> None:
    first, second = (keyed_random.permutation(10_000, 0, "order", epoch) for epoch in (0, 1))
    assert (first == second).sum() < 8  # of two independent permutations one position agrees on average
