"""Some of the images of another source."""

import hashlib
from array import array
from functools import cached_property

import torch
from torch import Tensor

from massl.data.sources.base import DataError, EncodedImage, ImageSource, Pixels


class SubsetSource:
    """Image i is image `indices[i]` of `source`; labels, class names and keys are those it has there."""

    def __init__(self, source: ImageSource, indices: Tensor, *, name: str) -> None:  # indices: integers [n]
        if indices.ndim != 1 or indices.is_floating_point() or indices.dtype == torch.bool:
            raise DataError(
                f"{name}: a subset is chosen by a line of whole numbers, not by {indices.dtype} {list(indices.shape)}"
            )
        if len(indices) == 0:
            raise DataError(f"{name} chooses no image of {source.name}")
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= len(source):
            raise DataError(
                f"{name} chooses image {low if low < 0 else high} of {source.name}, which has {len(source)}"
            )
        self.name = name
        self.class_names = source.class_names
        self._source = source
        # plain numbers: labels of a million images are asked for one by one
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
