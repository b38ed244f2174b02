import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from massl.ops.scoring.neighbours import cosine_topk, knn_accuracy, own_image_found, weighted_vote


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cosine(first: Tensor, second: Tensor) -> float:
    return float(first @ second) / math.sqrt(float(first @ first) * float(second @ second))


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 7), st.integers(1, 5), st.data())
@settings(max_examples=40)
def test_the_neighbours_are_those_a_plain_loop_finds(
    num_queries: int, num_rows: int, dim: int, chunk_rows: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, num_rows))
    queries, database = draw(num_queries, dim, seed=1), 5.0 * draw(num_rows, dim, seed=2)
    similarities, indices = cosine_topk(queries, database, num_neighbours=k, chunk_rows=chunk_rows)
    assert similarities.shape == indices.shape == (num_queries, k)
    for q in range(num_queries):
        all_similarities = [cosine(queries[q], row) for row in database]
        assert similarities[q].tolist() == pytest.approx(sorted(all_similarities, reverse=True)[:k], abs=1e-5)
        # ties may come in any order
        assert [all_similarities[i] for i in indices[q]] == pytest.approx(similarities[q].tolist(), abs=1e-5)
        assert len(set(indices[q].tolist())) == k


@pytest.mark.parametrize("num_neighbours", [0, 4])
def test_more_neighbours_than_rows_are_refused(num_neighbours: int) -> None:
    with pytest.raises(ValueError, match=f"{num_neighbours} neighbours"):
        cosine_topk(draw(2, 4, seed=0), draw(3, 4, seed=1), num_neighbours=num_neighbours)


def test_each_neighbour_votes_with_the_exponential_of_its_similarity() -> None:
    similarities = torch.tensor([[0.9, 0.5, 0.4], [0.2, 0.1, 0.0]])
    labels = torch.tensor([[2, 0, 0], [1, 1, 2]])
    scores = weighted_vote(similarities, labels, num_classes=4, temperature=0.07)
    for row in range(2):
        weights = [math.exp(float(similarity) / 0.07) for similarity in similarities[row]]
        expected = [
            sum(weight for weight, label in zip(weights, labels[row], strict=True) if label == c) for c in range(4)
        ]
        torch.testing.assert_close(scores[row] / scores[row].sum(), torch.tensor(expected) / sum(expected))


def test_one_near_neighbour_outvotes_two_far_ones_only_when_the_temperature_is_low() -> None:
    similarities, labels = torch.tensor([[0.9, 0.7, 0.7]]), torch.tensor([[0, 1, 1]])
    assert weighted_vote(similarities, labels, num_classes=2, temperature=0.07).argmax() == 0
    assert weighted_vote(similarities, labels, num_classes=2, temperature=1.0).argmax() == 1


def test_the_vote_stays_finite_at_a_tiny_temperature() -> None:
    assert (
        weighted_vote(torch.tensor([[1.0, 0.9]]), torch.tensor([[0, 1]]), num_classes=2, temperature=1e-4)
        .isfinite()
        .all()
    )


def test_accuracy_is_the_percentage_that_a_plain_loop_gets_right() -> None:
    queries, database = draw(30, 5, seed=3), draw(40, 5, seed=4)
    query_labels, database_labels = (
        (queries[:, 0] > 0).long(),
        (database[:, 0] > 0).long() + (database[:, 1] > 1).long(),
    )
    num_right = 0
    for query, label in zip(queries, query_labels, strict=True):
        nearest = sorted(range(40), key=lambda i: -cosine(query, database[i]))[:5]
        scores = [0.0, 0.0, 0.0]
        for i in nearest:
            scores[int(database_labels[i])] += math.exp(cosine(query, database[i]) / 0.07)
        num_right += scores.index(max(scores)) == label
    assert 0 < num_right < 30
    assert knn_accuracy(queries, query_labels, database, database_labels, num_neighbours=5) == pytest.approx(
        100 * num_right / 30
    )


def test_accuracy_takes_all_rows_when_there_are_fewer_than_asked_for() -> None:
    database = torch.eye(2)
    assert knn_accuracy(database, torch.tensor([0, 1]), database, torch.tensor([0, 1]), num_neighbours=20) == 100.0


def test_a_class_that_only_queries_have_counts_as_wrong() -> None:
    database = torch.eye(2)
    assert knn_accuracy(database, torch.tensor([0, 7]), database, torch.tensor([0, 1]), num_neighbours=1) == 50.0


def test_views_find_their_images_by_direction_and_equal_features_by_chance() -> None:
    images = draw(40, 8, seed=3)
    assert own_image_found(7.0 * images, images) == 100.0
    moved = torch.cat([images[10:20], images[:10], images[20:]])
    assert own_image_found(moved, images) == 50.0
    assert own_image_found(torch.ones(40, 8), torch.ones(40, 8)) == 2.5
