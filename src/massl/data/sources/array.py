"""Images of one size in an in-memory array, read from a .npz archive."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from massl.data.sources.base import Contents, DataError, EncodedImage, Pixels, numbered_classes
from massl.data.sources.npz import read_npz

_HASHED_AT_ONCE = 1024  # images
_SCALE_THEM = "Scale values to 0 ... 255, by (images / HIGHEST * 255).astype(numpy.uint8) or the like"


@dataclass(frozen=True, kw_only=True, eq=False)
class ArraySource:
    """Images as rows of one array; a negative label means unlabelled."""

    name: str
    pixels: Pixels  # [N, H, W] or [N, H, W, 3]
    labels: NDArray[np.integer] | None  # [N]
    class_names: tuple[str, ...] | None
    key_prefix: str

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, index: int) -> EncodedImage:
        return EncodedImage(data=self.pixels[index], label=self.label_of(index), key=self.key_of(index))

    def label_of(self, index: int) -> int | None:
        return None if self.labels is None or self.labels[index] < 0 else int(self.labels[index])

    def key_of(self, index: int) -> str:
        return f"{self.key_prefix}/{index}"

    def fingerprint(self) -> str:
        return self._digest

    def contents(self) -> Contents:
        return Contents(self._digest)  # the pixels are in memory

    @cached_property
    def _digest(self) -> str:
        return digest_of_arrays(self.pixels, self.labels)


def digest_of_arrays(pixels: Pixels, labels: NDArray[np.integer] | None) -> str:
    """Digest of all values and shapes; 1 GiB takes one to three seconds."""
    digest = hashlib.sha256(f"{pixels.shape}".encode())
    # in parts: a non-contiguous array is copied
    for start in range(0, len(pixels), _HASHED_AT_ONCE):
        digest.update(np.ascontiguousarray(pixels[start : start + _HASHED_AT_ONCE]).data)
    digest.update(b"" if labels is None else labels.astype(np.int64).data)
    return digest.hexdigest()


def open_npz(path: Path, *, name: str) -> ArraySource:
    """An archive with `images` and optional integer `labels`."""
    arrays = read_npz(path, {"images": "biufc", "labels": "biufc"})
    images, labels = arrays.get("images"), arrays.get("labels")
    if images is None:
        raise DataError(f"{path} has no array 'images'; write it with numpy.savez(path, images=..., labels=...)")
    has_image_shape = images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)
    if images.dtype != np.uint8 or not has_image_shape or images.size == 0:
        found = f"{images.dtype} {list(images.shape)}"
        raise DataError(
            f"{path}: 'images' is {found}; expected uint8 [N, H, W] or [N, H, W, 3] with N > 0"
            + ("" if images.dtype == np.uint8 else f". {_SCALE_THEM}")
        )
    if labels is not None and (labels.shape != images.shape[:1] or labels.dtype.kind not in "iu"):
        found = f"{labels.dtype} {list(labels.shape)}"
        raise DataError(f"{path}: 'labels' is {found}; expected one integer for each of {len(images)} images")
    class_names = None if labels is None else numbered_classes(int(labels.max()) + 1, name=str(path))
    images.setflags(write=False)
    labels = None if labels is None else labels.astype(np.int64)
    return ArraySource(name=name, pixels=images, labels=labels, class_names=class_names, key_prefix=path.stem)
