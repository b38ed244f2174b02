"""Decodes any stored image to 8-bit RGB, turned upright unless its source wants it as stored.

Torchvision decodes plain JPEGs, Pillow everything else. Both give the same pixels: they are compared at the first
image, and if they differ (builds with other JPEG libraries) Pillow decodes everything. Torchvision scales better with
threads: for 500 x 375 pixels it holds the interpreter lock for 15 us, Pillow for 250 us (in its header parser, `split`
and `tobytes`). At 3,000 images/s that is 5 % of the lock against 75 %.
"""

import contextlib
import importlib.util
import io
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from massl.data.loading.jpeg_header import read_jpeg_header
from massl.data.sources.base import EncodedImage, Pixels
from massl.data.sources.formats import pillow_formats

MAX_PIXELS: Final = 178_956_970  # Pillow's limit against decompression bombs: half a GiB of RGB

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
    return _decode_with_pillow(data, max_side, turn_upright) if pixels is None else pixels


def is_plain_jpeg(data: bytes, *, max_side: int, for_gpu: bool = False, turn_upright: bool = True) -> bool:
    """Whether every JPEG decoder gives the wanted pixels: nothing to turn, reduce, refuse or convert."""
    header = read_jpeg_header(data)
    if header is not None and not turn_upright:
        header = header._replace(orientation=1)  # whatever it says
    if header is None or not header.is_plain or (for_gpu and not (header.is_baseline and header.is_ycbcr)):
        return False
    return max(header.height, header.width) <= max_side and header.height * header.width <= MAX_PIXELS


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


def _decode_with_pillow(data: bytes | Pixels, max_side: int, turn_upright: bool = True) -> Tensor:  # -> [3, H, W] uint8
    try:
        if isinstance(data, bytes):
            picture = _open(data, max_side, turn_upright)
        else:
            picture = _reduced(Image.fromarray(data), max_side)
        bands = picture.split()  # splitting in Pillow is twice as fast as transposing [H, W, 3] in numpy
        return torch.from_numpy(np.stack([np.asarray(band) for band in bands * (3 // len(bands))]))
    except (UnreadableImage, MemoryError):
        raise
    except UnidentifiedImageError:
        raise UnreadableImage(f"no image in a known format ({' '.join(pillow_formats())})") from None
    except Exception as error:  # for damaged files Pillow raises OSError, SyntaxError, struct.error, KeyError ...
        raise UnreadableImage(f"{type(error).__name__}: {error}") from None


def _open(data: bytes, max_side: int, turn_upright: bool) -> Image.Image:
    with Image.open(io.BytesIO(data), formats=pillow_formats()) as picture:
        width, height = picture.size  # from the header: nothing is decoded yet
        if width * height > MAX_PIXELS:
            raise UnreadableImage(f"{width} x {height} pixels are more than the {MAX_PIXELS:,} allowed")
        if max(width, height) > max_side:
            scale = max_side / max(width, height)
            # JPEG decodes at 1/2, 1/4 or 1/8
            picture.draft(None, (max(1, round(width * scale)), max(1, round(height * scale))))
        return upright_rgb(picture, max_side=max_side, turn_upright=turn_upright)


def upright_rgb(picture: Image.Image, *, max_side: int, turn_upright: bool = True) -> Image.Image:
    """An opened picture in mode RGB or L, as `decode` gives it."""
    picture.load()
    turn = _TURN_UPRIGHT.get(_orientation(picture)) if turn_upright else None
    reduced = _reduced(_as_rgb(picture), max_side)
    return reduced if turn is None else reduced.transpose(turn)


def _orientation(picture: Image.Image) -> int:
    """The EXIF orientation. Call after loading: PNG may store it after the pixels, and TIFF is turned while loading."""
    try:
        return int(picture.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:  # damaged metadata, for which Pillow has many errors, is no reason to lose the image
        return 1


def _as_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode[0] in "IF":
        return _eight_bit(picture)
    if picture.has_transparency_data:
        with_alpha = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", with_alpha.size, "white"), with_alpha).convert("RGB")
    return picture if picture.mode in ("L", "RGB") else picture.convert("RGB")


def _eight_bit(picture: Image.Image) -> Image.Image:
    """Scales grey values of 16 or 32 bits or floats: Pillow's conversion clips at 255, so such images turn white."""
    values = np.asarray(picture).astype(np.float32)
    values = np.where(np.isfinite(values), values, np.float32(0))
    low, high = float(values.min()), float(values.max())
    ranges = (1.0, 255.0) if picture.mode == "F" else (65535.0,)  # usual for floats; "I" is mostly 16-bit files
    if low >= 0:
        low, high = 0.0, next((upper for upper in ranges if high <= upper), high)
    return Image.fromarray(np.rint((values - low) * (255.0 / max(high - low, 1e-12))).astype(np.uint8))


def _reduced(picture: Image.Image, max_side: int) -> Image.Image:
    if max(picture.size) > max_side:  # a box filter to twice the size, then Lanczos
        picture.thumbnail((max_side, max_side), Image.Resampling.LANCZOS, reducing_gap=2.0)
    return picture
