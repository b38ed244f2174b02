"""A subset of another source; the images left when some cannot be read."""

import hashlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from massl import keyed_random
from massl.data.keys import stored_key
from massl.data.sources.base import Contents, DataError, EncodedImage, ImageSource, Pixels


class SubsetSource:
    """Image i is image `indices[i]` of `source`, with its key and, unless `labelled` is False, its label there."""

    def __init__(
        self, source: ImageSource, indices: Tensor, *, name: str, labelled: bool = True
    ) -> None:  # indices: integers [n]
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
        self.class_names = source.class_names if labelled else None
        self._labelled = labelled
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
        image = self._source.read(self._indices[index])
        return image if self._labelled else replace(image, label=None)

    def label_of(self, index: int) -> int | None:
        return self._source.label_of(self._indices[index]) if self._labelled else None

    def key_of(self, index: int) -> str:
        return self._source.key_of(self._indices[index])

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self._source.fingerprint().encode())
        digest.update(self._indices)
        digest.update(b"" if self._labelled else b"without labels")
        return digest.hexdigest()

    def contents(self) -> Contents:
        whole = self._source.contents()
        return Contents(f"{hashlib.sha256(self._indices).hexdigest()} {whole.reading}", whole.files)

    def in_whole(self, indices: Iterable[int]) -> tuple[ImageSource, list[int]]:
        """The source that this is a subset of, and the indices there."""
        return self._source, [self._indices[index] for index in indices]


class UnreadableImages(DataError):
    """Some images of a source cannot be read; `without` gives the others."""

    def __init__(self, source: ImageSource, reasons: Mapping[int, str]) -> None:  # index -> reason
        self.source = source
        self.messages = [f"{stored_key(source.key_of(index))}: {reason}" for index, reason in sorted(reasons.items())]
        self._base, unreadable = _in_base(source, sorted(reasons))
        self._unreadable = set(unreadable)
        more = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        super().__init__(f"an image of {source.name} cannot be read: {self.messages[0]}{more}; repair or remove it")

    def without(self, source: ImageSource) -> ImageSource:
        """The images of a source that are not known to be unreadable; the source itself if it has no such image."""
        base, numbers = _in_base(source, range(len(source)))
        if base is not self._base:
            return source
        readable = [index for index, number in enumerate(numbers) if number not in self._unreadable]
        return (
            source if len(readable) == len(source) else SubsetSource(source, torch.tensor(readable), name=source.name)
        )


def _in_base(source: ImageSource, indices: Iterable[int]) -> tuple[ImageSource, list[int]]:
    """The source behind subsets of subsets, and the indices there."""
    numbers = list(indices)
    while isinstance(source, SubsetSource):
        source, numbers = source.in_whole(numbers)
    return source, numbers


def held_out(source: ImageSource, share: float) -> tuple[ImageSource, ImageSource]:
    """The images to train on and the held-out share, each in the order of the source.

    The choice depends only on the number of images: runs with other seeds hold out the same.
    """
    num_held = round(share * len(source))
    if not 0 < num_held < len(source):
        raise DataError(
            f"data.hold_out = {share} of {len(source)} images leaves none to train on or none to hold out; give a "
            "share like 0.1, or more images"
        )
    order = keyed_random.permutation(len(source), 0, "held out")
    training, held = order[num_held:].sort().values, order[:num_held].sort().values
    return (
        SubsetSource(source, training, name=f"{source.name} without held-out images"),
        SubsetSource(source, held, name=f"held-out images of {source.name}"),
    )
