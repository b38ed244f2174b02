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
from massl.ops.scoring.finite import num_not_finite


@dataclass(frozen=True, kw_only=True)
class EvaluationData:
    """The images of one evaluation. `ProtocolEntry.needs` says which parts a protocol requires."""

    name: str
    train: ImageSource | None = None
    test: ImageSource | None = None
    validation: ImageSource | None = None  # for choosing rates honestly; default: part of `train` is held out
    folder: Path | None = None  # data set in its published layout: retrieval, copy detection, ImageNet-9
    output: Path  # for heads and figures


@dataclass(frozen=True, kw_only=True)
class LabelledFeatures:
    """Features of a source, in its order."""

    rows: Tensor  # [N, D] float32 on the CPU
    labels: Tensor  # [N] int64 on the CPU, -1 where unlabelled
    name: str  # of the source, for messages

    def __len__(self) -> int:
        return len(self.rows)


def labels_of_images(source: ImageSource) -> Tensor:  # -> [N] int64 on the CPU, -1 where unlabelled
    """The labels of all images of a source, without reading the images."""
    labels = map(source.label_of, range(len(source)))
    return torch.tensor([-1 if label is None else label for label in labels], dtype=torch.int64)


def required_labels(source: ImageSource) -> Tensor:  # -> [N] int64 on the CPU
    """The labels of all images; raises if some have none."""
    labels = labels_of_images(source)
    num_unlabelled = int((labels < 0).sum())
    if source.class_names is None or num_unlabelled:
        some = f"{num_unlabelled} of {len(labels)} images of {source.name} have no label"
        problem = f"{source.name} has no labels" if source.class_names is None else some
        raise DataError(f"{problem}; this protocol needs class folders or a labelled set")
    return labels


def require_same_classes(train: ImageSource, test: ImageSource) -> int:
    """The number of classes. Raises unless both sources have the same classes and labels, and `train` shows each class.

    Reads only labels, so that it can be called before hours are spent on features. A class without test images is
    accepted: results are means over images.
    """
    train_labels, _ = required_labels(train), required_labels(test)
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
        raise DataError(f"class names of {train.name} and {test.name} differ: {first[0]!r} and {first[1]!r}{advice}")
    counts = torch.bincount(train_labels, minlength=len(train.class_names))
    empty = [name for name, count in zip(train.class_names, counts.tolist(), strict=False) if count == 0]
    if empty:
        problem = f"{train.name} has no image of {len(empty)} of its {len(train.class_names)} classes"
        raise DataError(f"{problem} ({_first_few(empty)}); add some, or remove the classes")
    return len(train.class_names)


def _empty_folders_of(source: ImageSource) -> str:
    """The usual reason for different classes: class folders without images, which do not count as classes."""
    if not isinstance(source, FolderSource) or not source.empty_class_folders:
        return ""
    empty = _first_few(source.empty_class_folders)
    return f". These folders of {source.name} hold no images: {empty}; fill or remove them"


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")


def require_finite(rows: Tensor, *, name: str) -> None:  # [N, ...]
    num_broken = num_not_finite(rows)
    if num_broken:
        raise EvaluationError(
            f"features of {num_broken} of {len(rows)} images of {name} are not finite: the weights are damaged, or "
            "their training diverged; choose other weights"
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
