import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from massl.data.evaluation.subsets import (
    balanced_choice,
    fraction_choice,
    long_tail_choice,
    long_tail_counts,
    split_off,
)
from massl.data.sources.base import DataError

CLASS_SIZES = (40, 3, 100, 7)


def shuffled_labels(class_sizes: tuple[int, ...] = CLASS_SIZES, seed: int = 0) -> Tensor:
    labels = torch.repeat_interleave(torch.arange(len(class_sizes)), torch.tensor(class_sizes))
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]


def is_sorted_set(indices: Tensor, num_images: int) -> bool:
    numbers = indices.tolist()
    return (
        indices.dtype == torch.int64
        and numbers == sorted(set(numbers))
        and numbers[0] >= 0
        and numbers[-1] < num_images
    )


@given(
    class_sizes=st.lists(st.integers(2, 9), min_size=1, max_size=6),
    num_per_class=st.integers(1, 2),
    seed=st.integers(0, 5),
)
def test_a_balanced_choice_holds_equally_many_of_each_class(
    class_sizes: list[int], num_per_class: int, seed: int
) -> None:
    labels = shuffled_labels(tuple(class_sizes), seed)
    chosen = balanced_choice(labels, num_per_class=num_per_class, key=(seed, "few"))
    assert is_sorted_set(chosen, len(labels))
    assert labels[chosen].bincount().tolist() == [num_per_class] * len(class_sizes)


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.1, [4, 1, 10, 1]), (0.5, [20, 2, 50, 4]), (1e-9, [1] * 4), (1.0, list(CLASS_SIZES))]
)
def test_a_fraction_is_taken_of_each_class_but_at_least_one_image(fraction: float, expected: list[int]) -> None:
    labels = shuffled_labels()
    chosen = fraction_choice(labels, fraction=fraction, key=(0,))
    assert is_sorted_set(chosen, len(labels))
    assert labels[chosen].bincount().tolist() == expected


def test_a_class_number_without_images_stays_without_in_a_fraction() -> None:
    labels = torch.tensor([0, 0, 2, 2])
    assert fraction_choice(labels, fraction=0.5, key=(0,)).shape == (2,)


def test_the_same_key_chooses_the_same_and_less_of_it_lies_inside_more() -> None:
    labels = shuffled_labels()
    small, large = (
        set(fraction_choice(labels, fraction=fraction, key=(3, "share")).tolist()) for fraction in (0.05, 0.3)
    )
    assert small < large
    few, more = (set(balanced_choice(labels, num_per_class=num, key=(3, "share")).tolist()) for num in (1, 3))
    assert few < more
    again = balanced_choice(labels, num_per_class=3, key=(3, "share"))
    assert set(again.tolist()) == more != set(balanced_choice(labels, num_per_class=3, key=(4, "share")).tolist())


def test_every_image_of_a_class_is_chosen_equally_often() -> None:
    labels = shuffled_labels((10, 5))
    times = torch.zeros(15)
    for seed in range(600):
        times[balanced_choice(labels, num_per_class=2, key=(seed,))] += 1
    for label, expected in ((0, 120), (1, 240)):  # deviations of the binomial distribution: 9.8 and 12
        assert (times[labels == label] - expected).abs().max() < 45
        assert times[labels == label].std() > 2


def test_long_tail_counts_fall_from_the_largest_to_the_smallest() -> None:
    # Three classes: tails 0.7, 1.7 and 2.7 of 3.4, so quantiles of 4.857, 2 and 1.259 with the power 1.
    assert long_tail_counts(3, largest=100, smallest=10, power=1.0) == [
        100,
        round(10 + 90 * (2 - 1.2593) / (4.8571 - 1.2593)),
        10,
    ]
    counts = long_tail_counts(200, largest=500)
    assert (counts[0], counts[-1]) == (500, 5)
    assert counts == sorted(counts, reverse=True)
    assert long_tail_counts(4, largest=7, smallest=7) == [7] * 4


def test_long_tail_counts_are_the_medians_of_random_pareto_sets() -> None:
    drawn = np.sort(np.random.default_rng(0).pareto(6.0, (4000, 30)), axis=1)[:, ::-1]
    medians = np.median(drawn, axis=0)
    expected = 5 + (1280 - 5) * (medians - medians[-1]) / (medians[0] - medians[-1])
    counts = np.array(long_tail_counts(30, largest=1280))
    assert np.abs(counts - expected).max() < 25  # the largest deviation of a median over 4000 draws


def test_long_tail_counts_of_imagenets_shape_are_near_the_published_set() -> None:
    counts = torch.tensor(long_tail_counts(1000, largest=1280))
    assert int(counts.sum()) == pytest.approx(115_846, rel=0.03)
    many, few = int((counts > 100).sum()), int((counts < 20).sum())
    assert abs(many - 385) < 15
    assert abs(few - 136) < 15


def test_a_long_tail_gives_the_counts_to_classes_in_a_random_order() -> None:
    labels, counts = shuffled_labels((50, 60, 70, 80, 90)), [50, 20, 9, 4, 1]
    chosen = {seed: long_tail_choice(labels, counts, key=(seed,)) for seed in range(8)}
    per_class = {seed: tuple(labels[indices].bincount(minlength=5).tolist()) for seed, indices in chosen.items()}
    assert all(is_sorted_set(indices, len(labels)) for indices in chosen.values())
    assert all(sorted(found, reverse=True) == counts for found in per_class.values())
    assert len({found.index(50) for found in per_class.values()}) > 2  # which class is frequent is drawn, too


@given(num_images=st.integers(2, 60), fraction=st.floats(0.01, 0.99))
def test_what_is_split_off_and_what_is_kept_are_all_images(num_images: int, fraction: float) -> None:
    kept, held_out = split_off(num_images, fraction=fraction, key=(1,))
    assert is_sorted_set(kept, num_images)
    assert is_sorted_set(held_out, num_images)
    assert sorted(kept.tolist() + held_out.tolist()) == list(range(num_images))
    assert abs(len(held_out) - fraction * num_images) <= 1


def test_what_is_split_off_is_drawn_by_key() -> None:
    first, second = (split_off(100, fraction=0.2, key=(seed,))[1].tolist() for seed in (0, 1))
    assert first != second != list(range(20))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            lambda: balanced_choice(torch.tensor([0, 1, 1]), num_per_class=2, key=(0,)),
            "1 of 2 classes .* class 0 has 1 of 2",
        ),
        (lambda: balanced_choice(torch.tensor([0, 2]), num_per_class=1, key=(0,)), "class 1 has 0 of 1"),
        (lambda: balanced_choice(torch.tensor([0]), num_per_class=0, key=(0,)), "at least 1"),
        (lambda: balanced_choice(torch.tensor([0, -1]), num_per_class=1, key=(0,)), "1 of 2 images have no label"),
        (lambda: fraction_choice(torch.tensor([0, 1]), fraction=0.0, key=(0,)), "above 0"),
        (lambda: fraction_choice(torch.tensor([], dtype=torch.int64), fraction=0.5, key=(0,)), "no images"),
        (lambda: long_tail_choice(torch.tensor([0, 0, 1]), [2, 2], key=(0,)), "class 1 has 1 of 2"),
        (lambda: long_tail_choice(torch.tensor([0, 0, 1, 1]), [2, 2, 1], key=(0,)), "class 2 has 0 of"),
        (lambda: long_tail_choice(torch.tensor([0, 1, 2]), [1, 1], key=(0,)), "counts for 2 classes.* of 3"),
        (lambda: long_tail_counts(1, largest=10), "at least 2 classes"),
        (lambda: long_tail_counts(10, largest=3), "smallest <= largest"),
        (lambda: split_off(1, fraction=0.5, key=(0,)), "at least 2 images"),
        (lambda: split_off(9, fraction=1.0, key=(0,)), "between 0 and 1"),
    ],
)
def test_what_cannot_be_chosen_is_explained(choice: object, message: str) -> None:
    assert callable(choice)
    with pytest.raises(DataError, match=message):
        choice()
