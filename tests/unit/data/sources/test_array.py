from pathlib import Path

import numpy as np
import pytest

from massl.data.sources import open_source
from massl.data.sources.array import digest_of_arrays
from massl.data.sources.base import DataError


def test_an_archive_gives_its_rows_and_labels(tmp_path: Path) -> None:
    images = np.arange(3 * 2 * 4 * 3, dtype=np.uint8).reshape(3, 2, 4, 3)
    np.savez(tmp_path / "birds.npz", images=images, labels=np.array([2, -1, 0]))
    source = open_source(tmp_path / "birds.npz")
    assert len(source) == 3
    assert [source.label_of(index) for index in range(3)] == [2, None, 0]
    assert source.class_names == ("0", "1", "2")
    image = source.read(2)
    assert isinstance(image.data, np.ndarray)
    assert (image.data == images[2]).all()
    assert (image.key, image.label) == ("birds/2", 0)
    assert source.pixels is not None
    assert not source.pixels.flags.writeable


def test_an_archive_without_labels_is_unlabelled(tmp_path: Path) -> None:
    np.savez(tmp_path / "grey.npz", images=np.zeros((2, 4, 4), dtype=np.uint8))
    source = open_source(str(tmp_path / "grey.npz"))
    assert source.class_names is None
    assert source.label_of(1) is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pictures": np.zeros((2, 4, 4), dtype=np.uint8)}, "no array 'images'"),
        ({"images": np.zeros((2, 4, 4), dtype=np.float32)}, "float32"),
        ({"images": np.zeros((2, 3, 4, 4), dtype=np.uint8)}, r"expected uint8 \[N, H, W\]"),
        ({"images": np.zeros((0, 4, 4), dtype=np.uint8)}, "N > 0"),
        ({"images": np.zeros((2, 4, 4), dtype=np.uint8), "labels": np.zeros(3, dtype=np.int64)}, "each of 2 images"),
        ({"images": np.zeros((2, 4, 4), dtype=np.uint8), "labels": np.zeros(2)}, "'labels' is float64"),
        ({"images": np.array([object()])}, "plain arrays"),
    ],
)
def test_an_archive_that_does_not_fit_is_refused_with_what_was_expected(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    np.savez(tmp_path / "bad.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=message):
        open_source(tmp_path / "bad.npz")


def test_a_missing_or_damaged_archive_is_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        open_source(tmp_path / "missing.npz")
    (tmp_path / "damaged.npz").write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(DataError, match=r"not a \.npz archive"):
        open_source(tmp_path / "damaged.npz")
    (tmp_path / "empty.npz").write_bytes(b"")
    with pytest.raises(DataError, match=r"not a \.npz archive"):
        open_source(tmp_path / "empty.npz")
    np.save(tmp_path / "single.npy", np.zeros(3))
    (tmp_path / "single.npy").rename(tmp_path / "single.npz")
    with pytest.raises(DataError, match=r"not a \.npz archive"):
        open_source(tmp_path / "single.npz")


def test_the_fingerprint_tells_pixels_shapes_and_labels_apart(tmp_path: Path) -> None:
    images = np.arange(2 * 4 * 6, dtype=np.uint8).reshape(2, 4, 6)
    other = images.copy()
    other[1, 3, 5] += 1
    contents = [
        {"images": images, "labels": np.array([0, 1])},
        {"images": other, "labels": np.array([0, 1])},
        {"images": images, "labels": np.array([1, 0])},
        {"images": images},
        {"images": images.reshape(2, 6, 4), "labels": np.array([0, 1])},
    ]
    fingerprints = set()
    for number, arrays in enumerate(contents):
        np.savez(tmp_path / f"{number}.npz", **arrays)  # type: ignore[arg-type]
        fingerprints.add(open_source(tmp_path / f"{number}.npz").fingerprint())
    assert len(fingerprints) == len(contents)
    np.savez(tmp_path / "elsewhere.npz", images=images, labels=np.array([0, 1], dtype=np.uint8))
    # where and how it is stored does not matter
    assert open_source(tmp_path / "elsewhere.npz").fingerprint() in fingerprints


def test_an_array_in_another_order_of_memory_has_the_same_fingerprint() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (1500, 3, 4, 3), dtype=np.uint8)
    turned = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1)
    assert digest_of_arrays(pixels, None) == digest_of_arrays(turned, None)
    assert digest_of_arrays(pixels, None) != digest_of_arrays(pixels[::-1], None)
