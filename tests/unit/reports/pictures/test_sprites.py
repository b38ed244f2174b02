import base64
import io

import numpy as np
import pytest
from PIL import Image

from massl.reports.pictures.sprites import exact_uri, photo_uri, sprite_sheet


def decoded(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB")


def test_each_thumbnail_is_found_at_its_place_in_the_sheet() -> None:
    generator = np.random.default_rng(0)
    colours = generator.integers(0, 256, (11, 1, 1, 3))
    sheet = sprite_sheet((colours + np.zeros((1, 16, 16, 1), dtype=int)).astype(np.uint8), max_bytes=100_000)
    picture = np.asarray(decoded(sheet.uri)).astype(int)
    assert (sheet.side, sheet.num_columns) == (16, 4)
    assert picture.shape == (3 * 16, 4 * 16, 3)
    for number, colour in enumerate(colours[:, 0, 0]):
        top, left = 16 * (number // 4), 16 * (number % 4)
        assert np.abs(picture[top + 4 : top + 12, left + 4 : left + 12] - colour).mean() < 12


def test_a_sheet_that_is_too_large_loses_quality_and_then_size() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 48, 48, 3)).astype(np.uint8)
    full, coarse, small = (sprite_sheet(noise, max_bytes=limit) for limit in (1_000_000, 120_000, 30_000))
    assert full.side == coarse.side == 48
    assert len(coarse.uri) <= 120_000 < len(full.uri)
    assert len(small.uri) <= 30_000
    assert 16 <= small.side < 48
    assert decoded(small.uri).width == 8 * small.side
    with pytest.raises(ValueError, match="64 thumbnails do not fit 1000 bytes"):
        sprite_sheet(noise, max_bytes=1000)


def test_photographs_are_reduced_but_not_enlarged() -> None:
    photo = np.random.default_rng(0).integers(0, 256, (40, 80, 3)).astype(np.uint8)
    assert decoded(photo_uri(photo, max_side=20)).size == (20, 10)
    assert decoded(photo_uri(photo, max_side=200)).size == (80, 40)


def test_a_map_of_few_pixels_is_kept_exactly() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (5, 4, 3)).astype(np.uint8)
    assert np.array_equal(np.asarray(decoded(exact_uri(picture))), picture)
