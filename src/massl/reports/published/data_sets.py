"""Recognises the data sets of public tables by the names of image sources."""

import re
from pathlib import PurePosixPath
from typing import NamedTuple

from massl.config import MasslError


class DataSet(NamedTuple):
    """A data set that public tables are about."""

    folder: str  # a regular expression for the names of its folders and archives, in lower case
    torchvision: str  # its class there, "" if there is none
    num_train: int  # images
    num_test: int


DATA_SETS: dict[str, DataSet] = {
    "CIFAR-10": DataSet(r"cifar[-_]?10(-batches-py)?", "CIFAR10", 50_000, 10_000),
    "CIFAR-100": DataSet(r"cifar[-_]?100(-python)?", "CIFAR100", 50_000, 10_000),
    "Imagenette": DataSet(r"imagenette2?([-_](160|320))?", "Imagenette", 9_469, 3_925),
    "ImageNet-100": DataSet(r"imagenet[-_]?100", "", 126_689, 5_000),
    "ImageNet": DataSet(r"imagenet([-_]?(1k|2012))?|ilsvrc([-_]?2012)?", "ImageNet", 1_281_167, 50_000),
}
# Folder names of other data sets that would be mistaken for one of those above.
_OTHERS = {"Tiny-ImageNet": r"tiny[-_]?imagenet([-_]?\d+)?", "Imagewoof": r"imagewoof2?([-_](160|320))?"}
_FOLDERS = {**{name: data.folder for name, data in DATA_SETS.items()}, **_OTHERS}
_SPLIT = r"([-_.](train|training|test|val|valid|validation))?"
_MENTIONED = re.compile(r"cifar|imagenet|imagewoof|ilsvrc", re.IGNORECASE)  # "imagenette" holds "imagenet"


def require_known(data_set: str | None) -> None:
    """Raise if no public table is about this --data_set."""
    if data_set is not None and data_set not in DATA_SETS:
        raise MasslError(f"no public table is about {data_set!r}; --data_set may be {', '.join(DATA_SETS)}")


def data_set_named(source: str) -> str | None:
    """The data set that a source is by its name, of public tables or another; None if the name does not tell.

    torchvision:CIFAR10?root=data and /data/cifar-10/train.npz are CIFAR-10. The innermost part of a path that mentions
    a set counts, and it must be the whole name: cifar10-project/photos may be anything. All parts of joined sources
    must be the same set.
    """
    scheme, colon, location = source.partition(":")
    if colon and scheme == "joined":
        named = {data_set_named(part.strip()) for part in location.split("|")}
        return named.pop() if len(named) == 1 else None
    if colon and scheme == "demo":
        return "Fashion-MNIST"
    if colon and scheme == "torchvision":
        own = location.partition("?")[0]
        return next((name for name, data in DATA_SETS.items() if data.torchvision == own), own)
    path = location.rpartition("?")[0] or location if colon and scheme == "folder" else source
    innermost = next((part for part in reversed(PurePosixPath(path).parts) if _MENTIONED.search(part)), None)
    return None if innermost is None else _whole_name(innermost)


def _whole_name(part: str) -> str | None:
    stem = part.lower().removesuffix(".npz")
    return next((name for name, folder in _FOLDERS.items() if re.fullmatch(rf"({folder}){_SPLIT}", stem)), None)
