"""Images of every mode and bit depth: the brightness of a ramp survives, or the image is refused with a reason."""

import io
from typing import Any

import numpy as np
from PIL import Image

from massl.data.loading.decode import UnreadableImage, decode
from massl.data.loading.range_sample import settle_ranges
from massl.data.sources import open_source
from massl.data.sources.base import DataError
from massl.data.sources.rules import PixelRanges, ReadRules
from tests.reliability.frame import Case, Wrong, fault_class

_EIGHT_BITS = (
    *[("PNG", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")],
    *[("TIFF", mode) for mode in ("1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB")],
    *[("JPEG", mode) for mode in ("L", "RGB", "CMYK", "YCbCr")],
    *[("WEBP", mode) for mode in ("L", "RGB", "RGBA")],
    *[("BMP", mode) for mode in ("1", "L", "P", "RGB")],
    *[("GIF", mode) for mode in ("L", "P", "RGB")],
    *[("PPM", mode) for mode in ("1", "L", "RGB")],
)
_DEEP = (
    *[("uint16", bits, suffix) for bits in (8, 10, 12, 14, 16) for suffix in ("png", "tif", "pgm")],
    *[("int32", bits, "tif") for bits in (10, 12, 16, 24)],
    ("float", 1, "tif"),
    ("float", 255, "tif"),
    ("float", 4095, "tif"),
    ("float", 16, "tif"),
)


def _ramp(case: Case) -> np.ndarray:
    height, width = (int(side) for side in case.random.integers(1, 60, 2))
    low, high = sorted(case.random.random(2))
    return np.linspace(low, high, height * width).reshape(height, width)


@fault_class("images of every mode")
def every_mode(case: Case) -> None:
    file_format, mode = case.pick(_EIGHT_BITS)
    ramp = _ramp(case)
    picture = Image.fromarray(np.rint(ramp * 255).astype(np.uint8))
    picture = (picture.convert("RGB") if mode in ("CMYK", "YCbCr", "LAB") else picture).convert(mode)
    if mode == "LAB":
        picture = Image.merge(
            "LAB", [Image.fromarray(np.rint(ramp * 255).astype(np.uint8)), *[Image.new("L", ramp.shape[::-1], 128)] * 2]
        )
    if mode == "1":  # black and white dots: of a small image their mean is not the ramp's
        ramp = np.asarray(picture.convert("L")) / 255
    options: dict[str, Any] = {"lossless": True} if file_format == "WEBP" else {}
    buffer = io.BytesIO()
    picture.save(buffer, file_format, **options)
    (case.folder / "photos").mkdir()
    (case.folder / "photos" / f"a.{'tif' if file_format == 'TIFF' else file_format.lower()}").write_bytes(
        buffer.getvalue()
    )
    source = open_source(case.folder / "photos")
    if settle_ranges(source):
        raise Wrong("an image of 8 bits was taken for a deeper one")
    _compare(source, ramp, allowed=0.12 if mode == "LAB" else 0.03)


@fault_class("images of more than 8 bits")
def more_bits(case: Case) -> None:
    kind, bits, suffix = case.pick(_DEEP)
    high = bits if kind == "float" else 2**bits - 1
    ramp = _ramp(case)
    ramp = ramp - ramp.min()  # black to white, so that a sample knows the range
    ramp = ramp / ramp.max() if ramp.max() > 0 else np.ones_like(ramp)
    values = (ramp * high).astype({"uint16": np.uint16, "int32": np.int32, "float": np.float32}[kind])
    folder = case.folder / "photos"
    folder.mkdir()
    for number, scale in enumerate((1.0, float(case.random.random()))):
        scaled = (values * scale).astype(values.dtype)
        if suffix == "pgm":
            header = f"P5 {values.shape[1]} {values.shape[0]} {max(high, 256)}\n".encode()
            (folder / f"{number}.pgm").write_bytes(header + scaled.astype(">u2").tobytes())
        else:
            Image.fromarray(scaled).save(folder / f"{number}.{suffix}")
    is_unusual = kind == "float" and bits in (16, 4095)
    try:
        source = open_source(folder)
        settle_ranges(source)
        if is_unusual:
            raise Wrong("a range was guessed")
    except DataError as error:
        if not is_unusual or "pixel_range" not in str(error):
            raise Wrong(f"refused: {error}") from error
        source = open_source(folder, rules=ReadRules(ranges=PixelRanges(stated=(0, high))))
        settle_ranges(source)
    _compare(source, ramp, allowed=0.01)


def _compare(source: Any, ramp: np.ndarray, *, allowed: float) -> None:
    try:
        pixels = decode(source.read(0), max_side=1024).float() / 255
    except UnreadableImage as error:
        raise Wrong(f"unreadable: {error}") from error
    assert tuple(pixels.shape) == (3, *ramp.shape)
    difference = abs(float(pixels.mean()) - float(ramp.mean()))
    if difference > allowed + 0.5 / ramp.size:
        raise Wrong(f"brightness {float(pixels.mean()):.3f} instead of {float(ramp.mean()):.3f}")
