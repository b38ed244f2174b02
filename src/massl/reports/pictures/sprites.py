"""Pictures inside a page: small files as data URIs, and thumbnails side by side in one file, of which a script cuts out
what it shows.
"""

import base64
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from massl.reports.pictures.sheets import Pixels, fitted

_PHOTO_QUALITY = 82  # of WebP; above it files grow faster than what can be seen
_QUALITIES = (82, 65, 45)  # tried in this order, before thumbnails are made smaller
_SMALLEST_SIDE = 16  # pixels of a thumbnail: below that nothing is recognised


@dataclass(frozen=True, kw_only=True)
class SpriteSheet:
    """Square thumbnails in rows, number i in row i // num_columns."""

    uri: str
    side: int  # pixels of a thumbnail
    num_columns: int


def photo_uri(picture: Pixels, *, max_side: int) -> str:  # [H, W, 3]
    """A photograph, reduced where it is larger than `max_side` pixels."""
    height, width, _ = picture.shape
    image = (
        fitted(picture, (max_side, max_side), smooth=True)
        if max(height, width) > max_side
        else Image.fromarray(picture)
    )
    return _uri(_webp(image, quality=_PHOTO_QUALITY), kind="webp")


def exact_uri(picture: Pixels) -> str:  # [H, W, 3]
    """A drawing or a map of few pixels, each of which counts."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="PNG", optimize=True)
    return _uri(buffer.getvalue(), kind="png")


def sprite_sheet(thumbnails: Pixels, *, max_bytes: int) -> SpriteSheet:  # [N, S, S, 3]
    """One file of at most `max_bytes` as it stands in the page: first of less quality, then of smaller thumbnails, if
    that is needed.
    """
    num_columns = math.ceil(math.sqrt(len(thumbnails)))
    for side, quality in _attempts(thumbnails.shape[1]):
        sheet = _joined(
            [fitted(thumbnail, (side, side), smooth=True) for thumbnail in thumbnails],
            num_columns=num_columns,
            side=side,
        )
        uri = _uri(_webp(sheet, quality=quality), kind="webp")
        if len(uri) <= max_bytes:
            return SpriteSheet(uri=uri, side=side, num_columns=num_columns)
    raise ValueError(
        f"{len(thumbnails)} thumbnails do not fit {max_bytes} bytes even at {_SMALLEST_SIDE} px; show fewer"
    )


def _attempts(side: int) -> Iterator[tuple[int, int]]:
    """(side, quality), best first; never larger than the thumbnails are."""
    sides = [side]
    while sides[-1] > _SMALLEST_SIDE:
        sides.append(max(_SMALLEST_SIDE, sides[-1] * 3 // 4))
    return ((tried, quality) for tried in sides for quality in _QUALITIES)


def _joined(thumbnails: Sequence[Image.Image], *, num_columns: int, side: int) -> Image.Image:
    num_rows = -(-len(thumbnails) // num_columns)
    canvas = np.zeros((num_rows * side, num_columns * side, 3), dtype=np.uint8)
    for number, thumbnail in enumerate(thumbnails):
        top, left = side * (number // num_columns), side * (number % num_columns)
        canvas[top : top + side, left : left + side] = np.asarray(thumbnail)
    return Image.fromarray(canvas)


def _webp(image: Image.Image, *, quality: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="WEBP", quality=quality)
    return buffer.getvalue()


def _uri(content: bytes, *, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
