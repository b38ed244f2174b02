"""From a stored image to pixels: whatever the file holds becomes upright 8-bit RGB."""

import io
from typing import Final

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from massl.data.sources.base import EncodedImage

MAX_PIXELS: Final = 178_956_970  # Pillow's bound for decompression bombs: a quarter of a GiB of RGB
FORMATS: Final = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # not all of Pillow's: its EPS reader starts Ghostscript

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


class UnreadableImage(Exception):
    """The bytes are no image that can be decoded; the message is the reason."""


def decode(image: EncodedImage, *, max_side: int) -> Tensor:  # -> [3, H, W] uint8
    """The image in RGB, transparent parts on white; a longer side above `max_side` is reduced to it."""
    try:
        data = image.data
        picture = _open_upright(data, max_side) if isinstance(data, bytes) else _reduced(Image.fromarray(data), max_side)
        bands = picture.split()  # splitting in Pillow is twice as fast as transposing [H, W, 3] in numpy
        return torch.from_numpy(np.stack([np.asarray(band) for band in bands * (3 // len(bands))]))
    except UnreadableImage:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage(f"no image in a known format ({' '.join(FORMATS)})") from None
    except MemoryError:
        raise
    except Exception as error:  # on damaged files Pillow raises OSError, SyntaxError, ValueError, struct.error, KeyError ...
        raise UnreadableImage(f"{type(error).__name__}: {error}") from None


def _open_upright(data: bytes, max_side: int) -> Image.Image:
    with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
        width, height = picture.size  # from the header: nothing is decoded yet
        if width * height > MAX_PIXELS:
            raise UnreadableImage(f"{width} x {height} pixels are more than the {MAX_PIXELS:,} allowed")
        if max(width, height) > max_side:
            scale = max_side / max(width, height)
            picture.draft(None, (max(1, round(width * scale)), max(1, round(height * scale))))  # JPEG decodes at 1/2, 1/4 or 1/8
        picture.load()
        upright = _TURN_UPRIGHT.get(_orientation(picture))
        reduced = _reduced(_as_rgb(picture), max_side)
        return reduced if upright is None else reduced.transpose(upright)


def _orientation(picture: Image.Image) -> int:
    """The EXIF orientation. Ask after loading: PNG may store it behind the pixels, and TIFF is turned while it loads."""
    try:
        return int(picture.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:  # damaged metadata, in any of Pillow's many errors, is no reason to lose the image
        return 1


def _as_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode[0] in "IF":
        return _eight_bit(picture)
    if picture.has_transparency_data:
        with_alpha = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", with_alpha.size, "white"), with_alpha).convert("RGB")
    return picture if picture.mode in ("L", "RGB") else picture.convert("RGB")


def _eight_bit(picture: Image.Image) -> Image.Image:
    """Grey of 16 or 32 bits or floats, scaled: Pillow's own conversion clips at 255, which turns such images white."""
    values = np.asarray(picture).astype(np.float32)
    values = np.where(np.isfinite(values), values, np.float32(0))
    low, high = float(values.min()), float(values.max())
    ranges = (1.0, 255.0) if picture.mode == "F" else (65535.0,)  # usual ranges of floats; "I" mostly holds 16-bit files
    if low >= 0:
        low, high = 0.0, next((upper for upper in ranges if high <= upper), high)
    return Image.fromarray(np.rint((values - low) * (255.0 / max(high - low, 1e-12))).astype(np.uint8))


def _reduced(picture: Image.Image, max_side: int) -> Image.Image:
    if max(picture.size) <= max_side:
        return picture
    picture.thumbnail((max_side, max_side), Image.Resampling.LANCZOS, reducing_gap=2.0)  # a box filter to twice the size, then Lanczos
    return picture
