from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from massl.data.evaluation.views import CentreView
from massl.data.sources.array import ArraySource
from massl.data.sources.base import DataError
from massl.evaluations.base import EvaluationData, LabelledFeatures
from massl.evaluations.measurement import EvaluationError
from massl.evaluations.protocols import clustering
from massl.evaluations.protocols.clustering import (
    ClusteringSettings,
    agreement,
    cluster,
    cluster_numbers,
    measure_clustering,
    standardised,
    train_statistics,
)
from massl.ops.scoring.kmeans import Clusters, spherical_kmeans


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_dimensions_are_standardised_as_scikit_learn_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clustering, "_CHUNK_ROWS", 7)
    scales = torch.tensor([1.0, 100.0, 1e-3, 0.0, 0.0, 1.0])
    offsets = torch.tensor([0.0, 500.0, 1.0, 0.1, 0.0, -3.0])
    train, test = (offsets + scales * draw(number, 6, seed=number) for number in (40, 9))
    test[:, 3] += 2.0  # a dimension that does not vary in training, but in the test
    scaler = StandardScaler().fit(train.double().numpy())
    statistics = train_statistics(train)
    for rows in (train, test):
        truth = torch.from_numpy(scaler.transform(rows.double().numpy())).float()
        torch.testing.assert_close(standardised(rows, *statistics), truth, rtol=1e-4, atol=2e-4)


def test_clusters_that_are_the_classes_score_100_whatever_their_numbers() -> None:
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 2])
    assert agreement(labels, torch.tensor([5, 5, 0, 0, 3, 3, 3])) == pytest.approx(
        {"NMI": 100.0, "AMI": 100.0, "ARI": 100.0}
    )


def test_scores_of_a_class_split_in_two_are_those_worked_out_by_hand() -> None:
    scores = agreement(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 2]))
    assert scores["NMI"] == pytest.approx(100.0 * 1.0 / 1.25)  # entropies of 1 and 1.5 bit, of which 1 is shared
    # 1 pair kept of 2 and 1, of 6 pairs
    assert scores["ARI"] == pytest.approx(100.0 * (1 - 2 * 1 / 6) / (1.5 - 2 * 1 / 6))
    assert scores["AMI"] < scores["NMI"]


@pytest.mark.parametrize(
    ("name", "num_classes", "ks", "expected"),
    [
        ("Pets", 37, (), ["k=37 (classes)"]),
        ("CIFAR-10", 10, (), ["k=10 (classes)", "k=47 (as published for ViTs)"]),
        ("CIFAR-10", 10, (20, 47, 10, 20), ["k=10 (classes)", "k=47 (as published for ViTs)", "k=20"]),
        ("CIFAR-100", 100, (47,), ["k=100 (classes)", "k=47"]),
    ],
)
def test_every_number_of_clusters_is_tried_once_under_its_name(
    name: str, num_classes: int, ks: tuple[int, ...], expected: list[str]
) -> None:
    numbers = cluster_numbers(name, num_classes=num_classes, ks=ks)
    assert list(map(str, numbers.values())) == expected
    assert all(setting.k == number for number, setting in numbers.items())


@pytest.mark.parametrize(("per_centroid", "num_points"), [(3, 12), (256, 40), (0, 40)])
def test_at_most_so_many_points_per_cluster_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, per_centroid: int, num_points: int
) -> None:
    seen: list[Tensor] = []

    def spying_kmeans(rows: Tensor, **named: Any) -> Clusters:
        seen.append(rows)
        return spherical_kmeans(rows, **named)

    monkeypatch.setattr(clustering, "spherical_kmeans", spying_kmeans)
    train = draw(40, 5, seed=0)
    settings = ClusteringSettings(subsample_per_centroid=per_centroid)
    cluster(train, train, num_clusters=4, settings=settings)
    cluster(train, train, num_clusters=4, settings=settings.model_copy(update={"seed": 1}))
    rows = [tuple(row) for row in seen[0].tolist()]
    assert len(rows) == num_points
    assert len(set(rows) & {tuple(row) for row in train.tolist()}) == num_points  # distinct rows of the training set
    assert torch.equal(seen[0], seen[1]) is (num_points == 40)  # another seed chooses others


def test_settings_reach_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def spying_kmeans(rows: Tensor, **named: Any) -> Clusters:
        seen.append(named)
        return spherical_kmeans(rows, **named)

    monkeypatch.setattr(clustering, "spherical_kmeans", spying_kmeans)
    train = draw(20, 3, seed=1)
    cluster(train, train, num_clusters=3, settings=ClusteringSettings())
    cluster(train, train, num_clusters=3, settings=ClusteringSettings(num_iterations=7, num_restarts=2, seed=5))
    assert [(named["num_iterations"], named["num_restarts"], named["key"][0]) for named in seen] == [
        (100, 10, 1234),
        (7, 2, 5),
    ]


def test_more_clusters_than_images_are_refused_with_advice() -> None:
    with pytest.raises(
        EvaluationError,
        match=r"4 clusters.* --clustering\.ks",
    ):
        cluster(draw(3, 2, seed=0), draw(3, 2, seed=1), num_clusters=4, settings=ClusteringSettings())


# ---- the protocol, on features that are planted instead of extracted -------------------------------------------------


def source(labels: Tensor | None, name: str, *, num_images: int) -> ArraySource:
    return ArraySource(
        name=name,
        pixels=np.zeros((num_images, 2, 2), np.uint8),
        labels=None if labels is None else labels.numpy(),
        class_names=None if labels is None else ("a", "b", "c", "d"),
        key_prefix=name,
    )


def planted_extractor(rows: dict[str, Tensor]) -> Any:
    """Gives known features for the view and feature that the protocol names, and for no others."""

    def features(images: ArraySource, *, view: object, feature: str) -> LabelledFeatures:
        assert view == CentreView(size=32, filter="bilinear")
        assert feature == "cls"
        labels = torch.tensor([-1 if label is None else label for label in map(images.label_of, range(len(images)))])
        return LabelledFeatures(rows=rows[images.name], labels=labels, name=images.name)

    return SimpleNamespace(features=features, device=torch.device("cpu"), centre_view=partial(CentreView, size=32))


def planted_rows(labels: Tensor, *, seed: int) -> Tensor:
    """Four classes at right angles, hidden in dimensions of tiny scale beside one of large scale and one that does not
    vary.
    """
    rows = torch.zeros(len(labels), 7)
    rows[:, :4] = 1e-3 * (torch.eye(4)[labels] + 0.1 * draw(len(labels), 4, seed=seed))
    rows[:, 4] = 100.0 + 10.0 * draw(len(labels), seed=seed + 1)
    rows[:, 5] = 7.0
    return rows


@pytest.fixture
def world(tmp_path: Path) -> tuple[Any, EvaluationData]:
    train_labels, test_labels = torch.arange(80) % 4, torch.arange(40) % 4
    rows = {"train": planted_rows(train_labels, seed=0), "test": planted_rows(test_labels, seed=10)}
    data = EvaluationData(
        name="CIFAR-10",
        train=source(None, "train", num_images=80),
        test=source(test_labels, "test", num_images=40),
        output=tmp_path,
    )
    return planted_extractor(rows), data


def test_planted_classes_are_found_without_labels_of_training_images(world: tuple[Any, EvaluationData]) -> None:
    found = list(measure_clustering(*world, ClusteringSettings()))
    assert [(str(m.setting), m.metric) for m in found] == [
        (setting, metric)
        for setting in ("k=4 (classes)", "k=47 (as published for ViTs)")
        for metric in ("NMI", "AMI", "ARI")
    ]
    assert [m.value for m in found[:3]] == pytest.approx([100.0] * 3)
    assert found[5].value < 60.0  # 47 clusters of four classes
    assert {(m.data, m.num_samples) for m in found} == {("CIFAR-10", 40)}
    assert found == list(measure_clustering(*world, ClusteringSettings()))


def test_a_test_set_without_labels_is_refused_before_any_work(
    world: tuple[Any, EvaluationData], tmp_path: Path
) -> None:
    extractor, data = world
    unlabelled = EvaluationData(name="x", train=data.train, test=source(None, "test", num_images=40), output=tmp_path)
    with pytest.raises(DataError, match="test has no labels"):
        list(measure_clustering(SimpleNamespace(), unlabelled, ClusteringSettings()))  # type: ignore[arg-type]
    labels = torch.arange(40) % 4
    labels[:2] = -1
    partly = EvaluationData(name="x", train=data.train, test=source(labels, "test", num_images=40), output=tmp_path)
    with pytest.raises(DataError, match="2 of 40 images of test have no label"):
        list(measure_clustering(extractor, partly, ClusteringSettings()))
