"""`demo:train`, `demo:test`: 8,000 and 2,000 Fashion-MNIST images of the package (Xiao et al., 2017; MIT licence)."""

from functools import lru_cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from massl.config import closest
from massl.data.sources.array import ArraySource
from massl.data.sources.base import DataError, Pixels

_SPLITS = ("train", "test")
_CLASS_NAMES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


@lru_cache(maxsize=len(_SPLITS))
def _load(split: str) -> tuple[Pixels, NDArray[np.uint8]]:
    with (
        (resources.files("massl.data.sources") / "fashion_mnist_subset.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as archive,
    ):
        images, labels = archive[f"{split}_images"], archive[f"{split}_labels"]
    images.setflags(write=False)  # shared by all sources of the split
    labels.setflags(write=False)
    return images, labels


def open_demo(location: str, *, name: str) -> ArraySource:
    if location not in _SPLITS:
        raise DataError(f"{name}: unknown split {location!r}.{closest(location, _SPLITS)} Use demo:train or demo:test")
    images, labels = _load(location)
    return ArraySource(name=name, pixels=images, labels=labels, class_names=_CLASS_NAMES, key_prefix=location)
