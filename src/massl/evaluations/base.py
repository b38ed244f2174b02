"""What protocols take: images, labelled features, and checks of both."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from massl.config import Settings
from massl.data.sources.base import DataError, ImageSource
from massl.data.sources.folder import FolderSource
from massl.evaluations.measurement import EvaluationError, Measurement


@dataclass(frozen=True, kw_only=True)
class EvaluationData:
    """The images of one evaluation. `ProtocolEntry.needs` says which parts a protocol requires."""

    name: str
    train: ImageSource | None = None
    test: ImageSource | None = None
    validation: ImageSource | None = None  # for choosing rates honestly; without it part of `train` is held out
    folder: Path | None = None  # for protocols with a layout of their own: retrieval, copy detection, ImageNet-9
    output: Path  # where heads and figures may be left


@dataclass(frozen=True, kw_only=True)
class LabelledFeatures:
    """Features of a source, in its order."""

    rows: Tensor  # [N, D] float32 on the CPU
    labels: Tensor  # [N] int64 on the CPU, -1 where unlabelled
    name: str  # the source's, for messages

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: Tensor) -> "LabelledFeatures":
        return LabelledFeatures(rows=self.rows[indices], labels=self.labels[indices], name=self.name)


def labels_of_images(source: ImageSource) -> Tensor:  # -> [N] int64 on the CPU, -1 where unlabelled
    """The labels of all images of a source, without reading them."""
    return torch.tensor(
        [-1 if label is None else label for label in map(source.label_of, range(len(source)))], dtype=torch.int64
    )


def require_labels(features: LabelledFeatures) -> None:
    """All images labelled, or an error that says how many are not."""
    _require_labelled(features.labels, name=features.name)


def _require_labelled(labels: Tensor, *, name: str) -> None:  # [N]
    num_unlabelled = int((labels < 0).sum())
    if num_unlabelled:
        raise DataError(
            f"{num_unlabelled} of {len(labels)} images of {name} have no label; this protocol needs class folders or a labelled set"
        )


def require_same_classes(train: ImageSource, test: ImageSource) -> int:
    """The number of classes, provided that both sources number the same ones, label all images, and `train` shows each
    class.

    Looks at labels only, so that it can be asked before hours are spent on features. A class without test images is no
    obstacle: what is reported is a mean over images.
    """
    for source in (train, test):
        if source.class_names is None:
            raise DataError(f"{source.name} has no labels; this protocol needs class folders or a labelled set")
    assert train.class_names is not None
    assert test.class_names is not None
    advice = _empty_folders_of(train) + _empty_folders_of(test)
    if len(train.class_names) != len(test.class_names):
        raise DataError(
            f"{train.name} has {len(train.class_names)} classes, {test.name} has {len(test.class_names)}; "
            f"both must have the same ones{advice}"
        )
    if train.class_names != test.class_names:
        first = next(pair for pair in zip(train.class_names, test.class_names, strict=True) if pair[0] != pair[1])
        raise DataError(
            f"class names of {train.name} and {test.name} differ: {first[0]!r} stands against {first[1]!r}{advice}"
        )
    train_labels = labels_of_images(train)
    for labels, source in ((train_labels, train), (labels_of_images(test), test)):
        _require_labelled(labels, name=source.name)
    require_every_class(train_labels, len(train.class_names), name=train.name, class_names=train.class_names)
    return len(train.class_names)


def _empty_folders_of(source: ImageSource) -> str:
    """The usual reason why classes disagree, in words: class folders without images, which are not counted as classes."""
    if not isinstance(source, FolderSource) or not source.empty_class_folders:
        return ""
    return f". No images lie in these folders of {source.name}: {_first_few(source.empty_class_folders)}; fill or remove them"


# [N]
def require_every_class(
    labels: Tensor, num_classes: int, *, name: str, class_names: tuple[str, ...] | None = None
) -> None:
    """At least one image of every class, or an error that names the empty ones."""
    empty = (torch.bincount(labels, minlength=num_classes) == 0).nonzero().flatten().tolist()
    if empty:
        shown = _first_few([str(label) if class_names is None else class_names[label] for label in empty])
        raise DataError(
            f"{name} has no image of {len(empty)} of its {num_classes} classes ({shown}); "
            "add some, or drop the classes and number the others from 0 without gaps"
        )


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")


def require_finite(rows: Tensor, *, name: str) -> None:  # [N, ...]
    num_broken = int((~rows.isfinite()).flatten(1).any(dim=1).sum())
    if num_broken:
        raise EvaluationError(
            f"features of {num_broken} of {len(rows)} images of {name} are not finite; the weights are damaged, or the training "
            "they come from has diverged: choose other weights"
        )


ProtocolFunction = Callable[[Any, EvaluationData, Any], Iterator[Measurement]]  # (Extractor, data, settings)


@dataclass(frozen=True, kw_only=True)
class ProtocolEntry:
    """What `massl evaluate` must know of a protocol."""

    measure: ProtocolFunction
    settings_type: type[Settings]
    needs: tuple[str, ...]  # fields of EvaluationData that are required: "train", "test", "folder"
    summary: str
    unremarked: frozenset[str] = frozenset()  # settings omitted from automatic remarks: no effect, or named in results
    uses_centre_crop: bool = True  # False: --crop_ratio has no effect
