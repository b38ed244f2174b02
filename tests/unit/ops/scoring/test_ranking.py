import math
from collections.abc import Set

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from massl.ops.scoring.ranking import average_precisions, mean_of_answered, precisions_at, rank_by_cosine


def marks(*members: Set[int], num_images: int) -> Tensor:
    return torch.tensor([[image in query for image in range(num_images)] for query in members])


def score(
    ranking: list[int], positives: set[int], junk: Set[int] = frozenset(), *, num_images: int | None = None
) -> float:
    num_images = num_images or len(ranking)
    return float(
        average_precisions(
            torch.tensor([ranking]), marks(positives, num_images=num_images), marks(junk, num_images=num_images)
        )
    )


def precision(ranking: list[int], positives: set[int], junk: set[int], k: int) -> float:
    num_images = len(ranking)
    return float(
        precisions_at(
            torch.tensor([ranking]), marks(positives, num_images=num_images), marks(junk, num_images=num_images), k=k
        )
    )


def slow_average_precision(ranking: list[int], positives: set[int], junk: set[int]) -> float:
    """The area under straight lines between the points (recall, precision) that a reader of the list meets."""
    judged = [image for image in ranking if image not in junk]
    area, num_found = 0.0, 0
    for num_read, image in enumerate(judged):
        if image not in positives:
            continue
        before = num_found / num_read if num_read else 1.0
        num_found += 1
        after = num_found / (num_read + 1)
        area += (before + after) / 2 / len(positives)
    return area


def slow_precision(ranking: list[int], positives: set[int], junk: set[int], k: int) -> float:
    judged = [image for image in ranking if image not in junk]
    last = max(place for place, image in enumerate(judged, start=1) if image in positives)
    first_images = judged[: min(last, k)]
    return sum(image in positives for image in first_images) / len(first_images)


@pytest.mark.parametrize("num_positives", [1, 2, 5])
def test_a_perfect_ranking_scores_one(num_positives: int) -> None:
    assert score([4, 2, 0, 1, 3], set([4, 2, 0, 1, 3][:num_positives])) == 1.0


@pytest.mark.parametrize("rank", range(1, 8))
def test_a_single_positive_at_rank_r_scores_half_the_reciprocal_of_its_place(rank: int) -> None:
    assert score(list(range(8)), {rank}) == pytest.approx(1 / (2 * (rank + 1)))


def test_a_worked_example_with_two_positives() -> None:
    # Positives stand at ranks 1 and 3: ((0/1 + 1/2) / 2 + (1/3 + 2/4) / 2) / 2 = (1/4 + 5/12) / 2
    assert score([3, 0, 2, 1], {0, 1}) == pytest.approx(1 / 3)


def test_junk_above_a_positive_changes_nothing() -> None:
    without = score([3, 0, 2, 1], {0, 1}, num_images=6)
    assert score([4, 3, 0, 5, 2, 1], {0, 1}, {4, 5}) == pytest.approx(without)
    assert score([4, 3, 0, 5, 2, 1], {0, 1}) < without


def test_only_junk_that_is_above_is_taken_out() -> None:
    assert score([1, 0, 2], {0}, {2}) == pytest.approx(1 / 4)


def test_a_positive_that_is_listed_as_junk_too_does_not_lift_itself() -> None:
    assert score([0, 1], {1}, {1}) == pytest.approx(1 / 4)


def test_a_ranking_that_ends_before_a_positive_gives_it_nothing() -> None:
    assert score([0, 1], {5}, num_images=6) == 0.0
    assert score([0, 1], {0, 5}, num_images=6) == pytest.approx(1 / 2)


worlds = st.integers(2, 12).flatmap(
    lambda num_images: st.tuples(
        st.permutations(range(num_images)), st.lists(st.sampled_from("pjn"), min_size=num_images, max_size=num_images)
    )
)


@given(st.lists(worlds, min_size=1, max_size=4), st.integers(1, 6))
def test_scores_are_those_of_a_reader_who_walks_down_the_list(drawn: list[tuple[list[int], list[str]]], k: int) -> None:
    for ranking, kinds in drawn:
        positives, junk = ({image for image, kind in enumerate(kinds) if kind == wanted} for wanted in "pj")
        if positives:
            assert score(ranking, positives, junk) == pytest.approx(slow_average_precision(ranking, positives, junk))
            assert precision(ranking, positives, junk, k) == pytest.approx(slow_precision(ranking, positives, junk, k))
        else:
            assert math.isnan(score(ranking, positives, junk))
            assert math.isnan(precision(ranking, positives, junk, k))


def test_many_queries_at_once_are_scored_as_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    rankings = torch.stack([torch.randperm(30, generator=generator) for _ in range(8)])
    kinds = torch.randint(0, 4, (8, 30), generator=generator)
    together = (
        average_precisions(rankings, kinds == 0, kinds == 1),
        precisions_at(rankings, kinds == 0, kinds == 1, k=5),
    )
    for query in range(8):
        one = slice(query, query + 1)
        torch.testing.assert_close(
            together[0][one], average_precisions(rankings[one], kinds[one] == 0, kinds[one] == 1)
        )
        torch.testing.assert_close(
            together[1][one], precisions_at(rankings[one], kinds[one] == 0, kinds[one] == 1, k=5)
        )


def test_precision_counts_no_further_than_the_last_positive() -> None:
    assert precision([0, 1, 2, 3, 4], {0, 1}, set(), k=5) == 1.0
    assert precision([2, 0, 1, 3, 4], {0, 1}, set(), k=5) == pytest.approx(2 / 3)
    assert precision([2, 0, 1, 3, 4], {0, 1}, {2}, k=5) == 1.0
    assert precision([2, 0, 1, 3, 4], {0, 1}, set(), k=1) == 0.0
    assert precision([2, 0, 1, 3, 4], {0, 1}, set(), k=2) == 0.5


def test_queries_without_positives_are_skipped_and_not_counted() -> None:
    rankings = torch.tensor([[0, 1, 2]] * 3)
    scores = average_precisions(rankings, marks({0}, set(), {1}, num_images=3), marks(set(), {0}, set(), num_images=3))
    mean, num_queries = mean_of_answered(scores)
    assert mean == pytest.approx((1 + 1 / 4) / 2)
    assert num_queries == 2


def test_images_are_ranked_by_angle_whatever_their_length() -> None:
    database = torch.tensor([[0.0, 50.0], [0.1, 0.1], [9.0, 0.0], [-5.0, 1.0]])
    assert rank_by_cosine(torch.tensor([[3.0, 0.1]]), database).tolist() == [[2, 1, 0, 3]]


def test_equally_similar_images_keep_their_order() -> None:
    assert rank_by_cosine(torch.ones(1, 2), torch.ones(40, 2)).tolist() == [list(range(40))]
