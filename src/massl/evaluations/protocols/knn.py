"""Weighted k-NN classification (Wu et al., 2018), as in DINO, iBOT and CARP."""

from collections.abc import Iterator

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from massl.config import Settings
from massl.evaluations.base import EvaluationData, ProtocolEntry, require_same_classes
from massl.evaluations.features import Extractor
from massl.evaluations.measurement import Measurement, Setting
from massl.ops.scoring.neighbours import cosine_topk, weighted_vote

_MAX_SIMILARITIES = 1 << 28  # at once: 1 GiB, or 209 queries against the 1.28 million images of ImageNet
_NUM_GUESSES = 5


class KnnSettings(Settings):
    ks: tuple[PositiveInt, ...] = Field((10, 20, 100, 200), min_length=1, description="numbers of neighbours")
    temperature: float = Field(0.07, gt=0, description="neighbours vote with weight exp(similarity / temperature)")


def knn_scores(
    train: Tensor, train_labels: Tensor, test: Tensor, *, num_classes: int, ks: tuple[int, ...], temperature: float
) -> dict[int, Tensor]:  # [M, D], [M], [Q, D] -> k -> [Q, num_classes]
    """Class scores of the test rows for each k; a larger k than the number of training rows takes all of them."""
    chunk_rows = min(4096, max(1, _MAX_SIMILARITIES // len(train)))
    similarities, indices = cosine_topk(test, train, num_neighbours=min(max(ks), len(train)), chunk_rows=chunk_rows)
    neighbour_labels = train_labels[indices]
    return {
        k: weighted_vote(similarities[:, :k], neighbour_labels[:, :k], num_classes=num_classes, temperature=temperature)
        for k in ks
    }


def top_accuracy(scores: Tensor, labels: Tensor, *, num_best: int) -> float:  # [Q, C], [Q] -> percent
    """Percentage of labels among the `num_best` highest scores; of equal scores the lower class comes first.

    A score that is not a number is never right: it is neither above nor below the others.
    """
    own = scores.gather(1, labels[:, None])
    comes_first = torch.arange(scores.shape[1], device=scores.device) < labels[:, None]
    num_before = ((scores > own) | ((scores == own) & comes_first)).sum(dim=1)
    return 100.0 * float(((num_before < num_best) & ~own.isnan()[:, 0]).double().mean())


def settings_of_ks(ks: tuple[int, ...], *, num_train: int, name: str = "") -> dict[int, Setting]:
    """Each k once -> its setting. Of those that take all training images only the smallest, and a note says so."""
    settings: dict[int, Setting] = {}
    for k in sorted(set(ks)):
        settings[k] = Setting(name=name, k=k, note=f"all {num_train} images" if k > num_train else "")
        if k >= num_train:
            break
    return settings


def measure_knn(extractor: Extractor, data: EvaluationData, settings: KnnSettings) -> Iterator[Measurement]:
    """Top-1 and top-5 accuracy for every k, and the best top-1, with k chosen on the test images.

    Five guesses among five classes are always right: no top-5 for fewer than six.
    """
    assert data.train is not None
    assert data.test is not None
    num_classes = require_same_classes(data.train, data.test)
    view = extractor.centre_view()
    train, test = (extractor.features(source, view=view, feature="cls") for source in (data.train, data.test))
    on_device = [tensor.to(extractor.device) for tensor in (train.rows, train.labels, test.rows)]
    by_k = settings_of_ks(settings.ks, num_train=len(train))
    scores = knn_scores(*on_device, num_classes=num_classes, ks=tuple(by_k), temperature=settings.temperature)
    labels = test.labels.to(extractor.device)
    top1 = {k: top_accuracy(scores[k], labels, num_best=1) for k in by_k}
    for k, setting in by_k.items():
        yield Measurement(data=data.name, setting=setting, metric="top1", value=top1[k], num_samples=len(test))
        if num_classes > _NUM_GUESSES:
            # as in CARP: one neighbour makes one guess, not five
            top5 = top_accuracy(scores[k], labels, num_best=min(_NUM_GUESSES, k, len(train)))
            yield Measurement(data=data.name, setting=setting, metric="top5", value=top5, num_samples=len(test))
    if len(by_k) > 1:
        best = max(top1, key=lambda k: top1[k])  # the smallest of several
        setting = Setting(name=f"best k ({by_k[best]})")
        yield Measurement(data=data.name, setting=setting, metric="top1", value=top1[best], num_samples=len(test))


PROTOCOL = ProtocolEntry(
    measure=measure_knn,
    settings_type=KnnSettings,
    needs=("train", "test"),
    summary="weighted k-nearest-neighbour classification",
    unremarked=frozenset({"ks"}),
)
