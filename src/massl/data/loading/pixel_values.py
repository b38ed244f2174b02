"""Images with more than 8 bits: which values are black and white.

The range comes from the user, from the file's own bit depth, or from a sample of the source, never from one image:
two photographs of one camera must not be scaled differently.
"""

import io
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from massl.data.sources.rules import PixelRanges, Range

_BITS: Final = (8, 10, 12, 14, 16, 24, 32)  # of cameras and scanners
_OVERSHOOT: Final = 0.05  # of the range: what a resampling filter adds to floats
_FULL: Final[dict[str, Range]] = {"integers": (0.0, 65535.0), "floats": (0.0, 1.0)}  # unless a sample says otherwise
_TIFF_BITS, _TIFF_MIN, _TIFF_MAX = 258, 280, 281


class OutOfRange(Exception):
    """Values that the range of the source does not cover."""


class DeepImage(NamedTuple):
    """What the header of a picture says about values beyond 8 bits."""

    kind: str  # "integers", "floats", or "colours", whose upper 8 bits Pillow takes
    own: Range | None  # the range, where the file itself knows it
    is_scaled: bool  # by Pillow to `own` already, so that it cannot be stated


def look(picture: Image.Image) -> DeepImage | None:
    """Call before loading. None: no more than 8 bits."""
    raw_mode, *others = _decoder_arguments(picture)
    if picture.mode[0] not in "IF":
        return DeepImage("colours", None, True) if ";16" in str(raw_mode) else None
    if picture.mode == "F":
        return DeepImage("floats", None, False)
    if picture.format == "PPM" and others and others[0] != 65535:  # maxval: Pillow scales to 65535
        return DeepImage("integers", (0.0, 65535.0), True)
    return DeepImage("integers", _tiff_range(picture), False)


def _decoder_arguments(picture: Image.Image) -> tuple[Any, ...]:
    tile: Any = getattr(picture, "tile", None)
    if not tile:
        return ("",)  # given in Python, or loaded
    arguments = tile[0][3]
    return arguments if isinstance(arguments, tuple) and arguments else (arguments,)


def _tiff_range(picture: Image.Image) -> Range | None:
    """By fewer than 16 bits a sample, or by a largest value such as 4095. Other statistics are no bit depth."""
    tags: Any = getattr(picture, "tag_v2", None) or {}
    bits, low, high = (tags.get(tag) for tag in (_TIFF_BITS, _TIFF_MIN, _TIFF_MAX))
    bits = bits[0] if isinstance(bits, tuple) and bits else bits
    if isinstance(bits, int) and 8 < bits < 16:
        return 0.0, 2.0**bits - 1
    high = high[0] if isinstance(high, tuple) and high else high
    if high in {2**depth - 1 for depth in range(9, 16)} and low in (None, 0, (0,)):
        return 0.0, float(high)
    return None


def eight_bit(picture: Image.Image, deep: DeepImage, ranges: PixelRanges) -> Image.Image:
    """A loaded picture of kind "integers" or "floats", scaled to grey values of 8 bits."""
    values = np.asarray(picture).astype(np.float32)
    values = np.where(np.isfinite(values), values, np.float32(0))
    if ranges.of_each_image:
        return _scaled(values, _guessed(values, deep.kind))
    if ranges.stated is not None and not deep.is_scaled:
        return _scaled(values, ranges.stated)
    low, high = deep.own or getattr(ranges, deep.kind) or _FULL[deep.kind]
    smallest, largest = float(values.min()), float(values.max())
    allowed = _OVERSHOOT * (high - low) if deep.kind == "floats" else 0.0
    if smallest < low - allowed or largest > high + allowed:
        raise OutOfRange(
            f"values from {smallest:g} to {largest:g}, but images of this source are read from {low:g} to {high:g}; "
            "the option pixel_range LOW HIGH sets that"
        )
    return _scaled(values, (low, high))


def _scaled(values: NDArray[np.float32], wanted: Range) -> Image.Image:
    low, high = wanted
    scaled = np.rint((values - low) * (255.0 / max(high - low, 1e-12)))
    return Image.fromarray(np.clip(scaled, 0, 255).astype(np.uint8))


def _guessed(values: NDArray[np.float32], kind: str) -> Range:
    """For runs that began before ranges were sampled."""
    low, high = float(values.min()), float(values.max())
    usual = (1.0, 255.0) if kind == "floats" else (65535.0,)
    return (0.0, next((upper for upper in usual if high <= upper), high)) if low >= 0 else (low, high)


def usual_range(kind: str, low: float, high: float) -> Range | None:
    """The range that values from `low` to `high`, found in a sample, most likely have; None: no usual one."""
    if kind == "integers":
        bits = next((bits for bits in _BITS if high < 2**bits), None)
        return None if low < 0 or bits is None else (0.0, 2.0**bits - 1) if high > 0 else _FULL[kind]
    if low >= -_OVERSHOOT and high <= 1 + _OVERSHOOT:
        return 0.0, 1.0
    # above half of it: values up to 2 or 20 are neither 0 ... 1 nor 0 ... 255
    return (0.0, 255.0) if low >= -255 * _OVERSHOOT and 128 <= high <= 255 * (1 + _OVERSHOOT) else None


def extremes(data: bytes, formats: tuple[str, ...]) -> tuple[str, float, float] | None:
    """Kind, smallest and largest value of a deep image whose file does not know its range; None for any other."""
    with Image.open(io.BytesIO(data), formats=formats) as picture:
        deep = look(picture)
        if deep is None or deep.own is not None:
            return None
        picture.load()
        values = np.asarray(picture)
    values = values[np.isfinite(values)]
    return (deep.kind, float(values.min()), float(values.max())) if values.size else None
