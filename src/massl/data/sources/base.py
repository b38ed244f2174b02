"""What every image source offers, and how the URI that names one is taken apart."""

from dataclasses import dataclass
from typing import Literal, Protocol, cast, get_args

import numpy as np
from numpy.typing import NDArray

from massl.config import MasslError

Pixels = NDArray[np.uint8]
# Of image files. exif: turned as the camera was held; stored: as Pillow loads them, which published evaluations use.
Orientation = Literal["exif", "stored"]


class DataError(MasslError, ValueError):
    """The images cannot be used as asked; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class EncodedImage:
    """One image as it is stored, with what is known about it."""

    data: bytes | Pixels  # the bytes of a file, or raw pixels [H, W] or [H, W, 3]
    label: int | None
    key: str  # names the image to a person: a path relative to the root, "train/123"
    turn_upright: bool = True  # by the EXIF orientation of the file


class ImageSource(Protocol):
    """Numbered images of one storage. All methods may be called from several threads at once."""

    @property
    def name(self) -> str:
        """The URI it was opened from, for messages."""
        ...

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Label -> name; None when the images carry no labels."""
        ...

    @property
    def pixels(self) -> Pixels | None:
        """All images as one array [N, H, W] or [N, H, W, 3] where the source holds them so: whole batches are then cut
        out of it.
        """
        ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> EncodedImage:
        """May raise OSError, for example when a file has vanished."""
        ...

    def label_of(self, index: int) -> int | None:
        """The label alone, without reading pixels."""
        ...

    def key_of(self, index: int) -> str:
        """The key alone, without reading pixels."""
        ...

    def fingerprint(self) -> str:
        """Digest that changes whenever an image, its place or its label does: features kept under it are never stale."""
        ...


def known_orientation(orientation: str, *, name: str) -> Orientation:
    for known in get_args(Orientation):
        if orientation == known:
            return cast(Orientation, known)
    raise DataError(f"{name}: orientation={orientation} is unknown; use orientation=exif or orientation=stored")


def split_query(location: str) -> tuple[str, dict[str, str]]:
    """'photos?labels=none' -> ('photos', {'labels': 'none'}). Nothing is percent-decoded: paths stay as the user typed
    them.
    """
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
