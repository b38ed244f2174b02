"""The interface of image sources, and the parsing of their URIs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol, cast, get_args, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from massl.config import MasslError
from massl.data.sources.rules import DEFAULT_RULES, ReadRules

Pixels = NDArray[np.uint8]
# of image files: turned upright by EXIF, or as stored, which published evaluations use
Orientation = Literal["exif", "stored"]
MAX_CLASSES: Final = 1_000_000  # named by numbers; a label beyond is rather a damaged one


class DataError(MasslError, ValueError):
    """The images cannot be used; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class EncodedImage:
    """One image as stored, with its label and key."""

    data: bytes | Pixels  # the bytes of a file, or raw pixels [H, W] or [H, W, 3]
    label: int | None
    key: str  # a readable name: a path relative to the root, "train/123"
    turn_upright: bool = True  # by the EXIF orientation of the file
    rules: ReadRules = DEFAULT_RULES  # limits on size, and the range of values


@dataclass(frozen=True)
class Contents:
    """What a source holds, equal for equal images wherever they are stored and whenever they were copied there."""

    reading: str  # how the images are read (labels, orientation), or a digest of the pixels if they are in memory
    files: bytes = b""  # "SIZE NAME\0" of every image file, in order; names are relative


class ImageSource(Protocol):
    """Indexed images of one storage; thread-safe."""

    @property
    def name(self) -> str:
        """The URI it was opened from, for messages."""
        ...

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Label -> name; None if the images have no labels."""
        ...

    @property
    def pixels(self) -> Pixels | None:
        """All images as one array [N, H, W] or [N, H, W, 3], if the source has one: batches are then slices of it."""
        ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> EncodedImage:
        """May raise OSError, for example if a file was deleted."""
        ...

    def label_of(self, index: int) -> int | None:
        """The label alone, without reading pixels."""
        ...

    def key_of(self, index: int) -> str:
        """The key alone, without reading pixels."""
        ...

    def fingerprint(self) -> str:
        """Digest that changes with any image, its index or its label: features cached under it are never stale."""
        ...

    def contents(self) -> Contents:
        """Names and sizes of the images; no image file is read. Unlike the fingerprint it survives a move or a copy."""
        ...


@runtime_checkable
class ImageFiles(Protocol):
    """A source that reads files of unknown origin."""

    rules: ReadRules  # to be set before the first image is read
    maybe_deep: Sequence[int]  # images that may have more than 8 bits, by their suffix

    @property
    def name(self) -> str: ...

    def path_of(self, index: int) -> Path: ...

    def read(self, index: int) -> EncodedImage: ...


def numbered_classes(num_classes: int, *, name: str) -> tuple[str, ...] | None:
    """Class names "0", "1", ... for labels without names; None if no image has a label."""
    if num_classes > MAX_CLASSES:
        raise DataError(
            f"{name}: label {num_classes - 1} asks for more than {MAX_CLASSES:,} classes; number the classes from 0, "
            "e.g. by numpy.unique(labels, return_inverse=True)[1]"
        )
    return tuple(map(str, range(num_classes))) if num_classes > 0 else None


def known_orientation(orientation: str, *, name: str) -> Orientation:
    for known in get_args(Orientation):
        if orientation == known:
            return cast(Orientation, known)
    raise DataError(f"{name}: orientation={orientation} is unknown; use orientation=exif or orientation=stored")


def split_query(location: str) -> tuple[str, dict[str, str]]:
    """'photos?labels=none' -> ('photos', {'labels': 'none'}). Nothing is percent-decoded: paths stay as typed."""
    if "?" not in location:
        return location, {}
    path, _, query = location.rpartition("?")
    parameters = {}
    for assignment in query.split("&"):
        key, equals, value = assignment.partition("=")
        if not key or not equals:
            raise DataError(f"{location}: {assignment!r} after '?' is not of the form key=value")
        parameters[key] = value
    return path, parameters
