from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from massl.data.loading.decode import decode
from massl.data.loading.given_images import given_source
from massl.data.sources import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (3, 10, 12, 3), dtype=np.uint8)


def test_rows_of_an_array_are_images() -> None:
    source = given_source(PIXELS)
    assert len(source) == 3
    assert source.key_of(2) == "image/2"
    assert source.label_of(2) is None
    assert np.array_equal(source.read(1).data, PIXELS[1])


def test_a_list_holds_paths_pictures_and_arrays_of_any_size(tmp_path: Path) -> None:
    Image.fromarray(PIXELS[0]).save(tmp_path / "a.png")
    source = given_source([tmp_path / "a.png", Image.fromarray(PIXELS[1]), PIXELS[2, :5], PIXELS[2, ..., 0]])
    assert [source.key_of(index) for index in range(4)] == [str(tmp_path / "a.png"), "image/1", "image/2", "image/3"]
    found = [decode(source.read(index), max_side=100).permute(1, 2, 0).numpy() for index in range(4)]
    grey = np.repeat(PIXELS[2, ..., :1], 3, axis=2)
    for pixels, expected in zip(found, [PIXELS[0], PIXELS[1], PIXELS[2, :5], grey], strict=True):
        assert np.array_equal(pixels, expected)


def test_the_fingerprint_changes_with_any_image(tmp_path: Path) -> None:
    Image.fromarray(PIXELS[0]).save(tmp_path / "a.png")
    first = given_source([tmp_path / "a.png", PIXELS[1]]).fingerprint()
    assert given_source([tmp_path / "a.png", PIXELS[1].copy()]).fingerprint() == first
    assert given_source([tmp_path / "a.png", PIXELS[2]]).fingerprint() != first
    Image.fromarray(PIXELS[1]).save(tmp_path / "a.png")
    assert given_source([tmp_path / "a.png", PIXELS[1]]).fingerprint() != first


@pytest.mark.parametrize(
    "images",
    [PIXELS[0], PIXELS / 255, PIXELS[:0], [], [PIXELS[0] / 255], [None], [PIXELS], None, iter([PIXELS[0]])],
    ids=["one image", "floats", "empty array", "empty list", "list of floats", "None", "4 dims", "nothing", "iterator"],
)
def test_what_is_no_set_of_images_is_refused_by_name(images: object) -> None:
    with pytest.raises(DataError, match="data"):
        given_source(images)  # type: ignore[arg-type]
