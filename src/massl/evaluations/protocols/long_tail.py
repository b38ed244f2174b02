"""Linear probe on unbalanced classes: ImageNet-LT (Liu et al., 2019), or a long tail cut from a balanced set.

The test set is balanced. Sampling and loss are not re-weighted: the published protocol is that of the linear probe.
"""

import math
from collections.abc import Iterator

import torch
from pydantic import Field
from torch import Tensor

from massl.config import Settings
from massl.data.evaluation.subsets import long_tail_choice, long_tail_counts
from massl.data.sources.base import ImageSource
from massl.data.sources.subset import SubsetSource
from massl.evaluations.base import EvaluationData, ProtocolEntry, required_labels
from massl.evaluations.features import Extractor
from massl.evaluations.measurement import Measurement
from massl.evaluations.protocols.linear import PROTOCOL as LINEAR
from massl.evaluations.protocols.linear import (
    LinearProbe,
    LinearSettings,
    forget,
    held_out_of,
    prepare_probe,
    train_heads,
)
from massl.evaluations.protocols.linear_training import ChosenHead
from massl.ops.scoring.linear_heads import classify, matrix_products

# Classes by their number of training images, (fewest, most), as Liu et al. divide them.
_GROUPS: dict[str, tuple[float, float]] = {"many": (101, math.inf), "medium": (20, 100), "few": (0, 19)}


class LongTailSettings(Settings):
    make: bool = Field(False, description="cut a long tail from balanced training images; false: they have one")
    largest: int = Field(1280, gt=0, description="images of the most frequent class where the tail is made")
    smallest: int = Field(5, gt=0, description="images of the least frequent class where the tail is made")
    linear: LinearSettings = LinearSettings()


def measure_long_tail(extractor: Extractor, data: EvaluationData, settings: LongTailSettings) -> Iterator[Measurement]:
    """Top-1 accuracy by each way of choosing a head; for heads chosen over all epochs also by class frequency."""
    assert data.train is not None
    probe = prepare_probe(extractor, data, settings.linear)
    train = _long_tail_of(data.train, settings, num_classes=probe.num_classes) if settings.make else data.train
    tail = (f"{settings.largest} to {settings.smallest} images per class",) if settings.make else ()
    trained = train_heads(probe, train, held_out=held_out_of(probe, train))
    num_train_images = torch.bincount(required_labels(train), minlength=probe.num_classes)
    for selection, top1 in trained.top1().items():
        found = {"": (top1, len(probe.test))}
        if selection in trained.chosen:
            found |= _group_scores(probe, trained.chosen[selection], num_train_images)
        for group, (value, num_samples) in found.items():
            setting = probe.setting(selection, remarks=(*filter(None, [group]), *tail))
            yield Measurement(data=data.name, setting=setting, metric="top1", value=value, num_samples=num_samples)
    forget([trained])


def _long_tail_of(train: ImageSource, settings: LongTailSettings, *, num_classes: int) -> SubsetSource:
    counts = long_tail_counts(num_classes, largest=settings.largest, smallest=settings.smallest)
    chosen = long_tail_choice(required_labels(train), counts, key=(settings.linear.seed, "long tail"))
    return SubsetSource(train, chosen, name=f"long tail of {train.name}")


def _group_scores(probe: LinearProbe, head: ChosenHead, num_train_images: Tensor) -> dict[str, tuple[float, int]]:
    device = probe.extractor.device
    with matrix_products(allow_tf32=probe.allow_tf32):
        predicted = classify(head.weights.to(device), head.bias.to(device), probe.test.rows.to(device)).cpu()
    return accuracy_by_group(predicted, probe.test.labels, num_train_images)


# [N], [N], [C]
def accuracy_by_group(predicted: Tensor, labels: Tensor, num_train_images: Tensor) -> dict[str, tuple[float, int]]:
    """Group of classes -> accuracy in percent and number of test images; groups without test images are left out."""
    frequencies = num_train_images[labels]
    scores = {}
    for group, (fewest, most) in _GROUPS.items():
        correct = (predicted == labels)[(frequencies >= fewest) & (frequencies <= most)]
        if len(correct) > 0:
            scores[group] = (100.0 * float(correct.double().mean()), len(correct))
    return scores


PROTOCOL = ProtocolEntry(
    measure=measure_long_tail,
    settings_type=LongTailSettings,
    needs=("train", "test"),
    summary="linear probe on unbalanced classes",
    unremarked=LINEAR.unremarked | {"make", "largest", "smallest"},
)
