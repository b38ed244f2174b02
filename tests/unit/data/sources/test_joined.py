from pathlib import Path

import numpy as np
import pytest

from massl.data.sources import open_source
from massl.data.sources.base import DataError


@pytest.fixture
def archives(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "one.npz", tmp_path / "two.npz"]
    for path, num_images in zip(paths, (3, 4), strict=True):
        images = np.random.default_rng(num_images).integers(0, 256, (num_images, 5, 6, 3), dtype=np.uint8)
        np.savez(path, images=images, labels=np.arange(num_images)[::-1] % 3)
    return paths


def test_images_labels_and_keys_follow_one_another(archives: list[Path]) -> None:
    joined = open_source(f"joined:{archives[0]}|{archives[1]}")
    parts = [open_source(path) for path in archives]
    assert len(joined) == 7
    expected = [(part, index) for part in parts for index in range(len(part))]
    for index, (part, place) in enumerate(expected):
        np.testing.assert_array_equal(joined.read(index).data, part.read(place).data)
        assert joined.label_of(index) == part.label_of(place)
        assert joined.key_of(index) == part.key_of(place)
    assert joined.pixels is not None
    np.testing.assert_array_equal(joined.pixels[3], parts[1].read(0).data)
    assert joined.class_names == ("0", "1", "2")


def test_the_fingerprint_tells_order_and_content(archives: list[Path]) -> None:
    there, back = (open_source(f"joined:{a}|{b}").fingerprint() for a, b in (archives, archives[::-1]))
    assert there != back
    assert there == open_source(f"joined:{archives[0]} | {archives[1]}").fingerprint()


def test_other_classes_and_single_sources_are_refused(archives: list[Path], tmp_path: Path) -> None:
    np.savez(tmp_path / "five.npz", images=np.zeros((5, 5, 6, 3), dtype=np.uint8), labels=np.arange(5))
    with pytest.raises(DataError, match="different classes"):
        open_source(f"joined:{archives[0]}|{tmp_path / 'five.npz'}")
    with pytest.raises(DataError, match="joins fewer than two"):
        open_source(f"joined:{archives[0]}")


def test_images_of_several_sizes_are_read_one_by_one(archives: list[Path], tmp_path: Path) -> None:
    np.savez(tmp_path / "large.npz", images=np.zeros((3, 8, 8, 3), dtype=np.uint8), labels=np.arange(3))
    joined = open_source(f"joined:{archives[0]}|{tmp_path / 'large.npz'}")
    assert joined.pixels is None
    assert joined.read(3).data.shape == (8, 8, 3)  # type: ignore[union-attr]


@pytest.mark.parametrize("uri", ["joined:" * 3000, "joined:" * 3000 + "a|b", "joined:demo:test|joined:demo:test"])
def test_joined_sources_are_not_joined_again(uri: str) -> None:
    with pytest.raises(DataError, match="joined:URI"):
        open_source(uri)
