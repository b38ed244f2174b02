"""Images handed over in Python: arrays, Pillow images and paths of files."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from massl.data.loading.decode import UnreadableImage, decode, upright_rgb
from massl.data.loading.pixel_values import OutOfRange
from massl.data.sources.array import ArraySource, digest_of_arrays
from massl.data.sources.base import Contents, DataError, EncodedImage, ImageSource, Pixels
from massl.data.sources.formats import DEEP_SUFFIXES
from massl.data.sources.rules import DEFAULT_RULES, PixelRanges, ReadRules, read_file

GivenImage = str | Path | Image.Image | Pixels  # arrays: uint8 [H, W, 3] or [H, W]
_NAME = "the given images"


def given_source(images: Pixels | Sequence[GivenImage], *, rules: ReadRules = DEFAULT_RULES) -> ImageSource:
    """A source of a uint8 array [N, H, W, 3], or of a list of paths, Pillow images and arrays of any size."""
    if isinstance(images, np.ndarray):
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or images.size == 0:
            found = f"{images.dtype} {list(images.shape)}"
            raise DataError(f"data is an array {found}; give uint8 [N, H, W, 3] with N > 0, or a list of images")
        return ArraySource(name=_NAME, pixels=images, labels=None, class_names=None, key_prefix="image")
    if not isinstance(images, Sequence):
        raise DataError(
            f"data is a {type(images).__name__}; give a folder, a uint8 array [N, H, W, 3] or a list of images"
        )
    return GivenSource(images, rules=rules)


def read_given(image: GivenImage, *, max_side: int, rules: ReadRules = DEFAULT_RULES) -> Tensor:  # -> [3, H, W] uint8
    """The pixels of one image in RGB, turned upright."""
    _require_image(image, name="the image")
    try:
        return decode(_encoded(image, key="image", rules=rules), max_side=max_side)
    except (OSError, UnreadableImage) as error:
        raise DataError(f"the image {_key(image, 'given')} cannot be read: {error}") from None


class GivenSource:
    """Images of a list, without labels. A path is its image's key; other images are numbered."""

    name = _NAME
    class_names = None
    pixels = None

    def __init__(self, images: Sequence[GivenImage], *, rules: ReadRules = DEFAULT_RULES) -> None:
        self._images = list(images)
        self.rules = rules
        if not self._images:
            raise DataError("data is an empty list; give at least one image")
        for number, image in enumerate(self._images):
            _require_image(image, name=f"data[{number}]")

    def __len__(self) -> int:
        return len(self._images)

    def read(self, index: int) -> EncodedImage:
        return _encoded(self._images[index], key=self.key_of(index), rules=self.rules)

    @property
    def maybe_deep(self) -> Sequence[int]:
        """Only files are sampled: the caller knows the pictures that are open."""
        paths = [(index, image) for index, image in enumerate(self._images) if isinstance(image, str | Path)]
        return [index for index, path in paths if str(path).lower().endswith(DEEP_SUFFIXES)]

    def path_of(self, index: int) -> Path:
        return _path(self.key_of(index))

    def label_of(self, index: int) -> int | None:
        return None

    def key_of(self, index: int) -> str:
        return _key(self._images[index], f"image/{index}")

    def fingerprint(self) -> str:
        return self._digest

    def contents(self) -> Contents:
        return Contents(self._digest)

    @cached_property
    def _digest(self) -> str:
        ranges = self.rules.ranges
        images = [f"{self.key_of(index)} {_stamp(image, ranges)}\n" for index, image in enumerate(self._images)]
        return hashlib.sha256("".join([*images, ranges.key]).encode(errors="surrogateescape")).hexdigest()


def _stamp(image: GivenImage, ranges: PixelRanges) -> str:
    """Changes with the image. Files are not read: their size and time of modification stand for them."""
    if isinstance(image, str | Path):
        status = _path(image).stat()
        return f"{status.st_size} {status.st_mtime_ns}"
    try:
        pixels = image if isinstance(image, np.ndarray) else np.asarray(_upright(image, ranges))
    except UnreadableImage as error:
        return str(error)
    return digest_of_arrays(pixels, None)


def _key(image: GivenImage, otherwise: str) -> str:
    return str(image) if isinstance(image, str | Path) else otherwise


def _path(image: str | Path) -> Path:
    return Path(image).expanduser()


def _require_image(image: object, *, name: str) -> None:
    if isinstance(image, str | Path):
        if not _path(image).is_file():
            raise DataError(f"{name} is {str(image)!r}, which is no file; give the path of an image")
        return
    if isinstance(image, Image.Image):
        return
    if not isinstance(image, np.ndarray):
        raise DataError(f"{name} is a {type(image).__name__}; give a path, a Pillow image or a uint8 array [H, W, 3]")
    has_image_shape = image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 3)
    if image.dtype != np.uint8 or not has_image_shape or image.size == 0:
        raise DataError(f"{name} is an array {image.dtype} {list(image.shape)}; give uint8 [H, W, 3] or [H, W]")


def _encoded(image: GivenImage, *, key: str, rules: ReadRules) -> EncodedImage:
    if isinstance(image, str | Path):
        return EncodedImage(data=read_file(_path(image), rules), label=None, key=key, rules=rules)
    pixels = image if isinstance(image, np.ndarray) else np.asarray(_upright(image, rules.ranges))
    return EncodedImage(data=pixels, label=None, key=key)


def _upright(picture: Image.Image, ranges: PixelRanges) -> Image.Image:
    try:
        # never reduced: that would change the caller's picture
        return upright_rgb(picture, max_side=max(picture.size), ranges=ranges)
    except OutOfRange as error:
        raise UnreadableImage(str(error)) from None
    except Exception as error:  # a damaged file that Pillow reads only now: OSError, SyntaxError, struct.error ...
        raise UnreadableImage(f"{type(error).__name__}: {error}") from None
