"""Weighted k-NN classification (Wu et al., 2018), as DINO, iBOT and CARP run it."""

from collections.abc import Iterator

import torch
from pydantic import Field
from torch import Tensor

from massl.config import Settings
from massl.data.evaluation_views import CentreView
from massl.evaluations.base import EvaluationData, Measurement, require_labels, require_same_classes
from massl.evaluations.features import Extractor
from massl.ops.neighbours import cosine_topk, weighted_vote


class KnnSettings(Settings):
    ks: tuple[int, ...] = Field((10, 20, 100, 200), min_length=1, description="numbers of neighbours, all reported")
    temperature: float = Field(0.07, gt=0, description="a neighbour at similarity s votes with weight exp(s / temperature)")


def knn_scores(
    train: Tensor, train_labels: Tensor, test: Tensor, *, num_classes: int, ks: tuple[int, ...], temperature: float
) -> dict[int, Tensor]:  # [M, D], [M], [Q, D] -> k -> [Q, num_classes]
    """Class scores of the test rows for each k; a k beyond the number of training rows takes all of them."""
    similarities, indices = cosine_topk(test, train, num_neighbours=min(max(ks), len(train)))
    neighbour_labels = train_labels[indices]
    return {k: weighted_vote(similarities[:, :k], neighbour_labels[:, :k], num_classes=num_classes, temperature=temperature) for k in ks}


def top_accuracy(scores: Tensor, labels: Tensor, *, num_best: int) -> float:  # [Q, C], [Q] -> percent
    """How often the label is among the `num_best` highest scores."""
    best = torch.topk(scores, min(num_best, scores.shape[1]), dim=1).indices
    return 100.0 * float((best == labels[:, None]).any(dim=1).double().mean())


def measure_knn(extractor: Extractor, data: EvaluationData, settings: KnnSettings) -> Iterator[Measurement]:
    """Top-1 and top-5 accuracy of the test images among the training images, for every k."""
    assert data.train is not None
    assert data.test is not None
    num_classes = require_same_classes(data.train, data.test)
    view = CentreView(size=extractor.model.image_size)
    train, test = (extractor.features(source, view=view, feature="cls") for source in (data.train, data.test))
    for features in (train, test):
        require_labels(features)
    on_device = [tensor.to(extractor.device) for tensor in (train.rows, train.labels, test.rows)]
    scores = knn_scores(*on_device, num_classes=num_classes, ks=settings.ks, temperature=settings.temperature)
    labels = test.labels.to(extractor.device)
    for k, k_scores in scores.items():
        for num_best in (1, 5):
            value = top_accuracy(k_scores, labels, num_best=min(num_best, k))
            yield Measurement(data=data.name, setting=f"k={k}", metric=f"top{num_best}", value=value, num_samples=len(test))
