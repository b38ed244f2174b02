"""Image files with changed bytes, of every format that is read."""

import functools
import io
import re
import struct
import zlib

import numpy as np
import torch
from PIL import Image

from massl.data.loading.decode import UnreadableImage, _decode_plain_jpeg, _decode_with_pillow, decode
from massl.data.loading.image_reader import ImageReader
from massl.data.sources import open_source
from massl.data.sources.base import EncodedImage
from massl.data.sources.formats import has_avif
from tests.reliability.frame import Case, Wrong, fault_class
from tests.reliability.mutations import mutated

_MAX_SIDES = (48, 64)  # some images are reduced, some are not


@functools.cache
def _files() -> list[tuple[str, bytes]]:
    """Suffix and bytes of small images, in the kinds of each format that a decoder treats differently."""
    rows, columns, bands = np.ogrid[:40, :56, :3]
    values = ((rows * 7919 + columns * 104729 + bands * 1299709) % 257 % 256).astype(np.uint8)
    colour = Image.fromarray(values)
    grey, palette, transparent = colour.convert("L"), colour.quantize(16), colour.copy()
    transparent.putalpha(grey)
    deep = Image.fromarray(values[..., 0].astype(np.uint16) * 257)
    floats = Image.fromarray(values[..., 0].astype(np.float32) / 255)
    exif = Image.Exif()
    exif[0x0112] = 6
    pages = {"save_all": True, "append_images": [colour.rotate(90), colour.rotate(180)]}
    kinds: list[tuple[str, Image.Image, dict[str, object]]] = [
        *[("jpg", colour, {"quality": 70, "subsampling": kind}) for kind in (0, 2)],
        *[("jpg", colour, options) for options in ({"progressive": True}, {"exif": exif.tobytes()})],
        *[("jpg", picture, {}) for picture in (grey, colour.convert("CMYK"))],
        *[("png", picture, {}) for picture in (colour, transparent, grey, deep)],
        *[("png", picture, options) for picture, options in ((palette, {"transparency": 3}), (colour, {"exif": exif}))],
        *[("gif", palette, options) for options in ({}, pages)],
        *[("webp", colour, options) for options in ({}, {"lossless": True}, pages)],
        *[("tif", colour, {"compression": name}) for name in (None, "tiff_lzw", "tiff_deflate", "jpeg", "packbits")],
        *[("tif", picture, {}) for picture in (deep, floats, palette)],
        ("tif", colour, pages),
        *[("bmp", picture, {}) for picture in (colour, palette)],
        *[("ppm", picture, {}) for picture in (colour, grey)],
        *([("avif", colour, {"speed": 10})] if has_avif() else []),
    ]
    found = []
    for suffix, picture, options in kinds:
        buffer = io.BytesIO()
        Image.init()
        picture.save(buffer, Image.EXTENSION[f".{suffix}"], **options)  # type: ignore[arg-type]
        found.append((suffix, buffer.getvalue()))
    return found


@fault_class("images with changed bytes", mib=200, quick=120, more=2000)
def changed_image(case: Case) -> None:
    """The reader gives an image of the right shape, or counts the file as unreadable; both decoders agree."""
    suffix, whole = case.pick(_files())
    max_side = _MAX_SIDES[case.random.integers(2)]
    if suffix == "png" and case.random.random() < 0.7:
        data = _png_with_other_chunks(whole, case.random)
    else:
        data = mutated(whole, case.random, header=200)
    image = EncodedImage(data=data, label=None, key=f"a.{suffix}", turn_upright=bool(case.number % 3))
    try:
        pixels = decode(image, max_side=max_side)
    except UnreadableImage as error:
        _check_counted(case, suffix, data, max_side)
        if not str(error):
            raise Wrong("no reason is given") from error
        return
    _check_shape(pixels, max_side)
    if not torch.equal(pixels, decode(image, max_side=max_side)):
        raise Wrong("the same bytes give other pixels")
    _check_decoders(image, max_side)


def _png_with_other_chunks(data: bytes, random: np.random.Generator) -> bytes:
    """Chunks are changed, dropped, doubled or moved; their checksums are right, so that the damage gets through."""
    chunks, position = [], 8
    while position < len(data):
        (length,) = struct.unpack_from(">I", data, position)
        chunks.append((data[position + 4 : position + 8], data[position + 8 : position + 8 + length]))
        position += 12 + length
    at, to = random.integers(len(chunks), size=2)
    name, content = chunks[at]
    match random.integers(4):
        case 0:
            chunks.insert(to, chunks.pop(at))
        case 1:
            chunks.insert(to, chunks[at])
        case 2:
            del chunks[at]
        case _:
            chunks[at] = name, mutated(content, random)
    return data[:8] + b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    )


def _check_shape(pixels: torch.Tensor, max_side: int) -> None:
    is_right = pixels.dtype == torch.uint8 and pixels.ndim == 3 and len(pixels) == 3
    if not is_right or not 1 <= min(pixels.shape) <= max(pixels.shape) <= max_side:
        raise Wrong(f"pixels are {tuple(pixels.shape)} {pixels.dtype}")


def _check_decoders(image: EncodedImage, max_side: int) -> None:
    """What the fast decoder reads is what Pillow reads."""
    assert isinstance(image.data, bytes)
    fast = _decode_plain_jpeg(image.data, max_side, image.turn_upright)
    if fast is not None and not torch.equal(fast, _decode_with_pillow(image.data, max_side, image.turn_upright)):
        raise Wrong("the two decoders give other pixels")


def _check_counted(case: Case, suffix: str, data: bytes, max_side: int) -> None:
    """In a folder, the file is counted, its reason kept, and the good one beside it read instead."""
    (case.folder / f"a.{suffix}").write_bytes(data)
    (case.folder / "b.png").write_bytes(next(data for suffix, data in _files() if suffix == "png"))
    reader = ImageReader(open_source(str(case.folder)), seed=0, max_side=max_side)
    image, tried = reader.read_or_replace(0)
    if image is None or image.index != 1 or not tried[0] or tried[1] is not None:
        raise Wrong(f"image {image}, tried {tried}")
    if re.search(r"[\x00-\x08\x0e-\x1f]", tried[0]):
        raise Wrong(f"the reason would disturb a terminal: {tried[0]!r}")
