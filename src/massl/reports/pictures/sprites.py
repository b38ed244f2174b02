"""Pictures inside a page as data URIs; sprite sheets hold many thumbnails, of which a script shows one."""

import base64
import io
import itertools
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from massl.data.sources.base import Pixels
from massl.reports.pictures.sheets import fitted

_QUALITIES = (82, 65, 45)  # of WebP, tried in this order; above 82 files grow without a visible gain
_SMALLEST_SIDE = 16  # pixels of a thumbnail: below that nothing is recognisable


@dataclass(frozen=True, kw_only=True)
class SpriteSheet:
    """Square thumbnails in rows, number i in row i // num_columns."""

    uri: str
    side: int  # pixels of a thumbnail
    num_columns: int
    num_rows: int


def photo_uri(picture: Pixels, *, max_side: int) -> str:  # [H, W, 3]
    """A photograph, reduced if a side is longer than `max_side` pixels."""
    is_large = max(picture.shape[:2]) > max_side
    image = fitted(picture, (max_side, max_side), smooth=True) if is_large else Image.fromarray(picture)
    return _uri(image, "WEBP", quality=_QUALITIES[0])


def exact_uri(picture: Pixels) -> str:  # [H, W, 3]
    """A map of few pixels, without loss."""
    return _uri(Image.fromarray(picture), "PNG", optimize=True)


def sprite_sheet(thumbnails: Pixels, *, max_bytes: int) -> SpriteSheet:  # [N, S, S, 3]
    """One file of at most `max_bytes` in the page; if needed at lower quality, then with smaller thumbnails."""
    sides = [thumbnails.shape[1]]
    while sides[-1] > _SMALLEST_SIDE:
        sides.append(max(_SMALLEST_SIDE, sides[-1] * 3 // 4))
    num_columns = math.ceil(math.sqrt(len(thumbnails)))
    for side, quality in itertools.product(sides, _QUALITIES):
        uri = _uri(_joined(thumbnails, num_columns=num_columns, side=side), "WEBP", quality=quality)
        if len(uri) <= max_bytes:
            num_rows = -(-len(thumbnails) // num_columns)
            return SpriteSheet(uri=uri, side=side, num_columns=num_columns, num_rows=num_rows)
    raise ValueError(
        f"{len(thumbnails)} thumbnails do not fit {max_bytes} bytes even at {_SMALLEST_SIDE} px; show fewer"
    )


def _joined(thumbnails: Pixels, *, num_columns: int, side: int) -> Image.Image:
    num_rows = -(-len(thumbnails) // num_columns)
    canvas = np.zeros((num_rows * side, num_columns * side, 3), dtype=np.uint8)
    for number, thumbnail in enumerate(thumbnails):
        top, left = side * (number // num_columns), side * (number % num_columns)
        canvas[top : top + side, left : left + side] = np.asarray(fitted(thumbnail, (side, side), smooth=True))
    return Image.fromarray(canvas)


def _uri(image: Image.Image, file_format: str, **options: int) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format=file_format, **options)
    return f"data:image/{file_format.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
