"""Images handed over in Python: arrays, Pillow images and paths of files."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from massl.data.loading.decode import UnreadableImage, decode, upright_rgb
from massl.data.sources.array import ArraySource, digest_of_arrays
from massl.data.sources.base import DataError, EncodedImage, ImageSource, Pixels

GivenImage = str | Path | Image.Image | Pixels  # arrays: uint8 [H, W, 3] or [H, W]
_NAME = "the given images"


def given_source(images: Pixels | Sequence[GivenImage]) -> ImageSource:
    """A source of a uint8 array [N, H, W, 3], or of a list of paths, Pillow images and arrays of any size."""
    if isinstance(images, np.ndarray):
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or images.size == 0:
            found = f"{images.dtype} {list(images.shape)}"
            raise DataError(f"data is an array {found}; give uint8 [N, H, W, 3] with N > 0, or a list of images")
        return ArraySource(name=_NAME, pixels=images, labels=None, class_names=None, key_prefix="image")
    return GivenSource(images)


def read_given(image: GivenImage, *, max_side: int) -> Tensor:  # -> [3, H, W] uint8
    """The pixels of one image in RGB, turned upright."""
    try:
        return decode(_encoded(image, key="image"), max_side=max_side)
    except (OSError, UnreadableImage) as error:
        raise DataError(f"the image {_key(image, 'given')} cannot be read: {error}") from None


class GivenSource:
    """Images of a list, without labels. A path is its image's key; other images are numbered."""

    name = _NAME
    class_names = None
    pixels = None

    def __init__(self, images: Sequence[GivenImage]) -> None:
        self._images = list(images)
        if not self._images:
            raise DataError("data is an empty list; give at least one image")
        for number, image in enumerate(self._images):
            _require_image(image, name=f"data[{number}]")

    def __len__(self) -> int:
        return len(self._images)

    def read(self, index: int) -> EncodedImage:
        return _encoded(self._images[index], key=self.key_of(index))

    def label_of(self, index: int) -> int | None:
        return None

    def key_of(self, index: int) -> str:
        return _key(self._images[index], f"image/{index}")

    def fingerprint(self) -> str:
        return self._digest

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for index in range(len(self)):
            data = self.read(index).data
            digest.update(data if isinstance(data, bytes) else digest_of_arrays(data, None).encode())
            digest.update(self.key_of(index).encode())
        return digest.hexdigest()


def _key(image: GivenImage, otherwise: str) -> str:
    return str(image) if isinstance(image, str | Path) else otherwise


def _require_image(image: object, *, name: str) -> None:
    if isinstance(image, str | Path | Image.Image):
        return
    if not isinstance(image, np.ndarray):
        raise DataError(f"{name} is a {type(image).__name__}; give a path, a Pillow image or a uint8 array [H, W, 3]")
    has_image_shape = image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 3)
    if image.dtype != np.uint8 or not has_image_shape or image.size == 0:
        raise DataError(f"{name} is an array {image.dtype} {list(image.shape)}; give uint8 [H, W, 3] or [H, W]")


def _encoded(image: GivenImage, *, key: str) -> EncodedImage:
    _require_image(image, name=key)
    if isinstance(image, Image.Image):
        upright = upright_rgb(image, max_side=max(image.size))  # never reduced: that would change the caller's image
        return EncodedImage(data=np.asarray(upright), label=None, key=key)
    data = image if isinstance(image, np.ndarray) else Path(image).expanduser().read_bytes()
    return EncodedImage(data=data, label=None, key=key)
