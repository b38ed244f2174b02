"""Decodes any stored image to 8-bit RGB, turned upright unless its source wants it as stored.

Torchvision decodes plain JPEGs, Pillow everything else. Both give the same pixels: they are compared at the first
image, and if they differ (builds with other JPEG libraries) Pillow decodes everything. Torchvision scales better with
threads: for 500 x 375 pixels it holds the interpreter lock for 15 us, Pillow for 250 us (in its header parser, `split`
and `tobytes`). At 3,000 images/s that is 5 % of the lock against 75 %.
"""

import contextlib
import importlib.util
import io
import math
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from massl.data.loading.file_limits import excess_before_opening, excess_of_scans, exif_bytes, is_bounded_directory
from massl.data.loading.jpeg_header import read_jpeg_header
from massl.data.loading.pixel_values import OutOfRange, eight_bit, look
from massl.data.sources.base import EncodedImage, Pixels
from massl.data.sources.formats import pillow_formats
from massl.data.sources.rules import DEFAULT_RULES, MAX_MEGAPIXELS, PixelRanges, ReadRules

_LARGE_PIXELS: Final = 50_000_000  # decoded one after another: each takes half a GiB or more
_STRIP_PIXELS: Final = 2**22  # of images with transparency, which need four copies of what is composed at once

_ORIENTATION_TAG: Final = 0x0112
_TURN_UPRIGHT: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_RGB_MODE: Final = 3  # torchvision's ImageReadMode.RGB
_PLAIN_PIXELS: Final = MAX_MEGAPIXELS * 1_000_000  # larger ones are left to Pillow, which knows the user's limit
_one_at_a_time = Lock()

# PyTorch warns once per process that the buffer is not writable; nothing here writes to it
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class UnreadableImage(Exception):
    """The bytes cannot be decoded; the message is the reason."""


def decode(image: EncodedImage, *, max_side: int) -> Tensor:  # -> [3, H, W] uint8, in memory [3, H, W] or [H, W, 3]
    """The image in RGB, transparent parts on white, reduced so that no side exceeds `max_side`."""
    data, turn_upright = image.data, image.turn_upright
    pixels = _decode_plain_jpeg(data, max_side, turn_upright) if isinstance(data, bytes) else None
    return _decode_with_pillow(data, max_side, turn_upright, image.rules) if pixels is None else pixels


def is_plain_jpeg(data: bytes, *, max_side: int, for_gpu: bool = False, turn_upright: bool = True) -> bool:
    """Whether every JPEG decoder gives the wanted pixels: nothing to turn, reduce, refuse or convert."""
    header = read_jpeg_header(data)
    if header is not None and not turn_upright:
        header = header._replace(orientation=1)  # whatever it says
    if header is None or not header.is_plain or (for_gpu and not (header.is_baseline and header.is_ycbcr)):
        return False
    num_pixels = header.height * header.width
    if max(header.height, header.width) > max_side or num_pixels > _PLAIN_PIXELS:
        return False
    return not header.is_progressive or not excess_of_scans(data, num_pixels)


def as_tensor(data: bytes) -> Tensor:  # -> [num_bytes] uint8
    """The bytes without a copy; read-only."""
    return torch.frombuffer(data, dtype=torch.uint8)


def _decode_plain_jpeg(data: bytes, max_side: int, turn_upright: bool = True) -> Tensor | None:
    """The fast path; None if it does not apply or fails: Pillow then decides whether and how the file is damaged."""
    if not is_plain_jpeg(data, max_side=max_side, turn_upright=turn_upright):
        return None
    decode_jpeg = _fast_jpeg_decoder()
    try:
        return None if decode_jpeg is None else decode_jpeg(as_tensor(data), _RGB_MODE, False)
    except RuntimeError:
        return None


@cache
def _fast_jpeg_decoder() -> Callable[[Tensor, int, bool], Tensor] | None:
    """Torchvision's operator, if it exists and agrees with Pillow.

    Not its wrapper `torchvision.io.decode_jpeg`, which since 0.29 gives a deprecation warning for every image.
    """
    try:
        _register_decode_jpeg()
        decode_jpeg: Callable[[Tensor, int, bool], Tensor] = torch.ops.image.decode_jpeg
        agrees = all(
            torch.equal(decode_jpeg(as_tensor(data), _RGB_MODE, False), _decode_with_pillow(data, 64))
            for data in _trial_jpegs()
        )
    except (ImportError, OSError, AttributeError, RuntimeError):
        return None
    return decode_jpeg if agrees else None


def _register_decode_jpeg() -> None:
    """Load only torchvision's library of image operators: 2 ms instead of 1.5 s for all of it, in each worker process.

    If the library is not found, torchvision is imported after all.
    """
    package = importlib.util.find_spec("torchvision")
    folders = (package.submodule_search_locations if package is not None else None) or ()
    for library in (library for folder in folders for library in Path(folder).glob("image*.so")):
        with contextlib.suppress(OSError):
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    try:
        _ = torch.ops.image.decode_jpeg
    except AttributeError:
        import torchvision.io  # noqa: F401


def _trial_jpegs() -> list[bytes]:
    """Small noisy images for what JPEG libraries do differently: chroma upsampling and the inverse transform."""
    rows, columns, bands = np.ogrid[:45, :53, :3]
    picture = Image.fromarray(((rows * 7919 + columns * 104729 + bands * 1299709) % 257 % 256).astype(np.uint8))
    options: list[dict[str, Any]] = [{"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}, {"progressive": True}]
    buffers = [io.BytesIO() for _ in options]
    for buffer, option in zip(buffers, options, strict=True):
        picture.save(buffer, "JPEG", quality=80, **option)
    return [buffer.getvalue() for buffer in buffers]


def _decode_with_pillow(
    data: bytes | Pixels, max_side: int, turn_upright: bool = True, rules: ReadRules = DEFAULT_RULES
) -> Tensor:  # -> [3, H, W] uint8
    try:
        if isinstance(data, bytes):
            picture = _open(data, max_side, turn_upright, rules)
        else:
            picture = _reduced(Image.fromarray(data), max_side)
        bands = picture.split()  # splitting in Pillow is twice as fast as transposing [H, W, 3] in numpy
        return torch.from_numpy(np.stack([np.asarray(band) for band in bands * (3 // len(bands))]))
    except (UnreadableImage, MemoryError):
        raise
    except OutOfRange as error:
        raise UnreadableImage(str(error)) from None
    except UnidentifiedImageError:
        raise UnreadableImage(f"no image in a known format ({' '.join(pillow_formats())})") from None
    except Exception as error:  # for damaged files Pillow raises OSError, SyntaxError, struct.error, KeyError ...
        raise UnreadableImage(f"{type(error).__name__}: {error}") from None


def image_size(image: EncodedImage) -> tuple[int, int]:
    """Height and width as stored, from the header alone; raises UnreadableImage."""
    if not isinstance(image.data, bytes):
        return image.data.shape[0], image.data.shape[1]
    header = read_jpeg_header(image.data)
    if header is not None and header.is_plain and header.height * header.width <= image.rules.max_pixels:
        return header.height, header.width
    try:
        with _opened(image.data, image.rules) as picture:
            return picture.height, picture.width
    except (UnreadableImage, MemoryError):
        raise
    except UnidentifiedImageError:
        raise UnreadableImage(f"no image in a known format ({' '.join(pillow_formats())})") from None
    except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error, KeyError ...
        raise UnreadableImage(f"{type(error).__name__}: {error}") from None


def refuse_excess(data: bytes, rules: ReadRules) -> None:
    """Raise UnreadableImage for a file that would take too much memory or time; only its headers are read."""
    with _opened(data, rules):
        pass


# Pillow warns of what `max_megapixels` refuses or allows anyway.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


@contextlib.contextmanager
def _opened(data: bytes, rules: ReadRules) -> Iterator[Image.Image]:
    """The picture with its header read, and nothing decoded."""
    if excess := excess_before_opening(data):
        raise UnreadableImage(excess)
    if Image.MAX_IMAGE_PIXELS is not None and rules.max_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = rules.max_pixels  # Pillow's own limit, which would come first
    with Image.open(io.BytesIO(data), formats=pillow_formats()) as picture:
        _refuse_pixels(data, picture, rules)
        yield picture


def _refuse_pixels(data: bytes, picture: Image.Image, rules: ReadRules) -> None:
    width, height = picture.size
    if width * height > rules.max_pixels:
        size = f"{width} x {height} pixels are more than the {rules.max_megapixels:,} million allowed"
        raise UnreadableImage(f"{size}; the option max_megapixels sets that")
    if excess := excess_of_scans(data, width * height):
        raise UnreadableImage(excess)


def _open(data: bytes, max_side: int, turn_upright: bool, rules: ReadRules) -> Image.Image:
    with _opened(data, rules) as picture:
        width, height = picture.size
        if max(width, height) > max_side:
            scale = max_side / max(width, height)
            # JPEG decodes at 1/2, 1/4 or 1/8
            picture.draft(None, (max(1, round(width * scale)), max(1, round(height * scale))))
        with _one_at_a_time if math.prod(picture.size) > _LARGE_PIXELS else contextlib.nullcontext():
            return upright_rgb(picture, max_side=max_side, turn_upright=turn_upright, ranges=rules.ranges)


def upright_rgb(
    picture: Image.Image, *, max_side: int, turn_upright: bool = True, ranges: PixelRanges = DEFAULT_RULES.ranges
) -> Image.Image:
    """An opened picture in mode RGB or L, as `decode` gives it."""
    deep = look(picture) if picture.mode[0] in "IF" else None
    picture.load()
    turn = _TURN_UPRIGHT.get(_orientation(picture)) if turn_upright else None
    eight_bits = _as_rgb(picture) if deep is None else eight_bit(picture, deep, ranges)
    reduced = _reduced(eight_bits, max_side)
    return reduced if turn is None else reduced.transpose(turn)


def _orientation(picture: Image.Image) -> int:
    """The EXIF orientation. Call after loading: PNG may store it after the pixels, and TIFF is turned while loading."""
    try:
        if not is_bounded_directory(exif_bytes(picture.info)):
            return 1
        return int(picture.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:  # damaged metadata, for which Pillow has many errors, is no reason to lose the image
        return 1


def _as_rgb(picture: Image.Image) -> Image.Image:
    if not picture.has_transparency_data:
        return picture if picture.mode in ("L", "RGB") else picture.convert("RGB")
    rows = max(1, _STRIP_PIXELS // picture.width)
    if picture.height <= rows:
        return _on_white(picture)
    opaque = Image.new("RGB", picture.size)
    for top in range(0, picture.height, rows):
        bottom = min(top + rows, picture.height)
        opaque.paste(_on_white(picture.crop((0, top, picture.width, bottom))), (0, top))
    return opaque


def _on_white(picture: Image.Image) -> Image.Image:
    with_alpha = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", with_alpha.size, "white"), with_alpha).convert("RGB")


def _reduced(picture: Image.Image, max_side: int) -> Image.Image:
    if max(picture.size) > max_side:  # a box filter to twice the size, then Lanczos
        picture.thumbnail((max_side, max_side), Image.Resampling.LANCZOS, reducing_gap=2.0)
    return picture
