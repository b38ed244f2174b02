"""Pictures as files: each is written whole; many rows go on several sheets."""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

from PIL import Image

from massl import distributed
from massl.files import replacing
from massl.reports.pictures.sheets import Tile

_ROWS_PER_SHEET = 16  # more go on further sheets, which stay small enough to open


def save_picture(picture: Image.Image, path: Path) -> Path:
    if distributed.is_main():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            picture.save(partial, format="PNG")
    return path


def save_pages(
    rows: Iterable[list[Tile]], page_of: Callable[[list[list[Tile]]], Image.Image], path: Path
) -> list[Path]:
    """The rows on one sheet, or on several numbered ones."""
    remaining = iter(rows)
    pages: list[Path] = []
    while page := list(itertools.islice(remaining, _ROWS_PER_SHEET)):
        pages.append(save_picture(page_of(page), path.with_stem(f"{path.stem}_{len(pages) + 1}") if pages else path))
    return pages
