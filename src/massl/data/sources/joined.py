"""`joined:URI|URI`: the images of several sources, one after another."""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np

from massl.data.sources.base import Contents, DataError, EncodedImage, ImageSource, Pixels


class JoinedSource:
    """Several sources in a row; their class names must be equal, so that labels mean the same in all of them."""

    def __init__(self, parts: Sequence[ImageSource], *, name: str) -> None:
        if len(parts) < 2:
            raise DataError(f"{name} joins fewer than two sources; write joined:URI|URI")
        for part in parts[1:]:
            if part.class_names != parts[0].class_names:
                names = f"{parts[0].name} and {part.name}"
                raise DataError(f"{names} have different classes; only sources with equal ones can be joined")
        self.name = name
        self.class_names = parts[0].class_names
        self.parts = tuple(parts)
        self._ends = list(accumulate(len(part) for part in parts))

    @cached_property
    def pixels(self) -> Pixels | None:
        arrays = [part.pixels for part in self.parts if part.pixels is not None]
        if len(arrays) < len(self.parts) or len({array.shape[1:] for array in arrays}) > 1:
            return None
        return np.concatenate(arrays)

    def __len__(self) -> int:
        return self._ends[-1]

    def _find(self, index: int) -> tuple[ImageSource, int]:
        number = bisect_right(self._ends, index)
        return self.parts[number], index - (self._ends[number - 1] if number else 0)

    def read(self, index: int) -> EncodedImage:
        part, place = self._find(index)
        return part.read(place)

    def label_of(self, index: int) -> int | None:
        part, place = self._find(index)
        return part.label_of(place)

    def key_of(self, index: int) -> str:
        part, place = self._find(index)
        return part.key_of(place)

    def fingerprint(self) -> str:
        return hashlib.sha256(" ".join(part.fingerprint() for part in self.parts).encode()).hexdigest()

    def contents(self) -> Contents:
        parts = [part.contents() for part in self.parts]
        return Contents(f"{self._ends} {[part.reading for part in parts]}", b"".join(part.files for part in parts))


def open_joined(location: str, *, name: str, open_part: Callable[[str], ImageSource]) -> JoinedSource:
    parts = [part.strip() for part in location.split("|")]
    if any(part.startswith("joined:") for part in parts):
        raise DataError(f"{name[:200]}: joined sources cannot be joined again; write joined:URI|URI|URI")
    return JoinedSource([open_part(part) for part in parts], name=name)
