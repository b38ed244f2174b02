"""A subset of another source."""

import hashlib
from array import array
from functools import cached_property

import torch
from torch import Tensor

from massl.data.sources.base import DataError, EncodedImage, ImageSource, Pixels


class SubsetSource:
    """Image i is image `indices[i]` of `source`, with its label and key there."""

    def __init__(self, source: ImageSource, indices: Tensor, *, name: str) -> None:  # indices: integers [n]
        if indices.ndim != 1 or indices.is_floating_point() or indices.dtype == torch.bool:
            found = f"{indices.dtype} {list(indices.shape)}"
            raise DataError(f"{name}: the indices of a subset must be integers [n], not {found}")
        if len(indices) == 0:
            raise DataError(f"{name} selects no image of {source.name}")
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= len(source):
            index = low if low < 0 else high
            raise DataError(f"{name} selects image {index} of {source.name}, which has {len(source)}")
        self.name = name
        self.class_names = source.class_names
        self._source = source
        # Python integers: the labels of a million images are read one by one
        self._indices = array("q", indices.tolist())

    @cached_property
    def pixels(self) -> Pixels | None:
        if self._source.pixels is None:
            return None
        chosen: Pixels = self._source.pixels[self._indices]
        chosen.setflags(write=False)
        return chosen

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, index: int) -> EncodedImage:
        return self._source.read(self._indices[index])

    def label_of(self, index: int) -> int | None:
        return self._source.label_of(self._indices[index])

    def key_of(self, index: int) -> str:
        return self._source.key_of(self._indices[index])

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self._source.fingerprint().encode())
        digest.update(self._indices)
        return digest.hexdigest()
