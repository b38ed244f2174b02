"""What is not finite must not score: NaN ranks first in torch.topk and argsort."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from massl.evaluations.protocols.clustering import ClusteringSettings, cluster
from massl.evaluations.protocols.knn import knn_scores, top_accuracy
from massl.evaluations.protocols.logreg import LogisticSettings, score_logistic
from massl.ops.scoring.finite import NotFinite, num_not_finite, require_finite
from massl.ops.scoring.kmeans import spherical_kmeans
from massl.ops.scoring.linear_heads import classify, count_correct
from massl.ops.scoring.neighbours import cosine_topk, knn_accuracy, own_image_found
from massl.ops.scoring.ranking import rank_by_cosine

LABELS = torch.arange(12) % 3

# (train [12, 4], test [12, 4]) -> anything
SCORERS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "k-NN": lambda train, test: knn_scores(train, LABELS, test, num_classes=3, ks=(5,), temperature=0.07),
    "k-NN of probes": lambda train, test: knn_accuracy(test, LABELS, train, LABELS, num_neighbours=5),
    "neighbours": lambda train, test: cosine_topk(test, train, num_neighbours=2),
    "own image": lambda train, test: own_image_found(test, train),
    "retrieval": lambda train, test: rank_by_cosine(test, train),
    "clustering": lambda train, test: cluster(train, test, num_clusters=3, settings=ClusteringSettings()),
    "logistic regression": lambda train, test: score_logistic(
        train, LABELS, test, num_classes=3, settings=LogisticSettings()
    ),
    "a linear head": lambda train, test: classify(torch.ones(3, 4) + train[:3], torch.zeros(3), test + 0 * train),
}


def rows(seed: int) -> Tensor:
    return torch.randn(12, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scorer", SCORERS)
def test_finite_rows_are_scored(scorer: str) -> None:
    SCORERS[scorer](rows(0), rows(1))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["train", "test"])
@pytest.mark.parametrize("scorer", SCORERS)
def test_scorers_refuse_rows_that_are_not_finite_and_count_them(scorer: str, which: str, value: float) -> None:
    train, test = rows(0), rows(1)
    (train if which == "train" else test)[7, 2] = value
    with pytest.raises(NotFinite, match="1 of 12 rows"):
        SCORERS[scorer](train, test)


def test_scores_that_are_no_numbers_are_never_right() -> None:
    scores, labels = torch.full((4, 3), torch.nan), torch.tensor([0, 1, 2, 0])
    assert top_accuracy(scores, labels, num_best=1) == 0.0
    assert top_accuracy(scores, labels, num_best=5) == 0.0
    assert int(count_correct(torch.ones(1, 3, 4), torch.zeros(1, 3), torch.full((4, 4), torch.nan), labels)) == 0


def test_rows_are_counted_whatever_their_sum() -> None:
    large = torch.full((5, 3), 3e38)  # finite, though their sum is not
    assert num_not_finite(large) == 0
    large[1, 1], large[3] = -torch.inf, torch.nan
    assert num_not_finite(large) == 2
    assert num_not_finite(torch.tensor([[torch.inf, 0.0], [-torch.inf, 0.0]])) == 2  # they cancel to NaN
    assert num_not_finite(torch.zeros(2, 3, dtype=torch.uint8)) == 0
    require_finite(torch.zeros(0, 3), name="none")


def test_points_of_k_means_are_checked() -> None:
    points = rows(0)
    points[0, 0] = torch.nan
    with pytest.raises(NotFinite, match="1 of 12 rows of the points"):
        spherical_kmeans(points, num_clusters=2, key=(0,))
