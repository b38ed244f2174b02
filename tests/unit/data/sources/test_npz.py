import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from massl.data.sources import open_source
from massl.data.sources.base import DataError
from massl.data.sources.files import FileListSource

IMAGES = np.arange(4 * 6 * 5 * 3, dtype=np.uint8).reshape(4, 6, 5, 3)


def npy(descr: str, shape: tuple[int, ...], *, is_fortran: bool = False, content: bytes = b"") -> bytes:
    header = repr({"descr": descr, "fortran_order": is_fortran, "shape": shape}).encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


def archive(path: Path, *members: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, content in members:
            file.writestr(name, content)
    return path


def stored(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_numpy_writes_is_read_as_numpy_reads_it(tmp_path: Path, save: Callable[..., None]) -> None:
    labels = np.array([3, -1, 0, 2], dtype=">i2")
    for number, images in enumerate((IMAGES, np.asfortranarray(IMAGES), IMAGES[..., 0], IMAGES[:, ::-1])):
        save(tmp_path / f"{number}.npz", images=images, labels=labels)
        source = open_source(tmp_path / f"{number}.npz")
        assert source.pixels is not None
        assert np.array_equal(source.pixels, images)
        assert [source.label_of(index) for index in range(4)] == [3, None, 0, 2]


def test_a_label_of_four_billion_is_refused_instead_of_naming_as_many_classes(tmp_path: Path) -> None:
    for labels in (np.array([0, 1, 2, 2**32 - 1]), np.array([0, 1, 2, 2**64 - 1], dtype=np.uint64)):
        np.savez(tmp_path / "x.npz", images=IMAGES, labels=labels)
        with pytest.raises(DataError, match=rf"x\.npz.*{labels[3]}.*numpy\.unique"):
            open_source(tmp_path / "x.npz")
    (tmp_path / "a.jpg").write_bytes(b"")
    with pytest.raises(DataError, match="4294967295"):
        FileListSource(tmp_path, ["a.jpg"], labels=[2**32 - 1], name="list")


@pytest.mark.parametrize(
    "content",
    [
        npy("|u1", (2**40, 64, 64, 3)),
        npy("|u1", (2**62, 2**62, 2**62)),
        npy("|u1", (1, 10**6, 10**6), content=bytes(100)),
        npy("|u1", (-1, 4, 4), content=bytes(64)),
        npy("|u1", (True, 4, 4), content=bytes(16)),
        npy("|O", (4, 6, 5), content=b"cos\nsystem\n(S'true'\ntR."),
        npy("|V8", (4, 6, 5), content=bytes(960)),
        npy("<M8[s]", (4, 6, 5), content=bytes(960)),
        npy("|u1", (4, 6, 5), content=bytes(119)),
        npy("|u1", (4, 6, 5), content=bytes(121)),
        npy("(", (4, 6, 5), content=bytes(120)),
        b"\x93NUMPY\x01\x00\x08\x00{'a: \n'\x00",
        b"\x93NUMPY\x01\x00\x60\x00" + b"[" * 0x60,
        b"\x93NUMPY\x09\x00",
        b"",
    ],
)
def test_a_member_that_claims_what_it_does_not_hold_is_named(tmp_path: Path, content: bytes) -> None:
    path = archive(tmp_path / "x.npz", ("images.npy", content))
    with pytest.raises(DataError, match=r"x\.npz.*'images'"):
        open_source(path)


def test_an_archive_that_grows_beyond_measure_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez_compressed(tmp_path / "x.npz", images=np.zeros((64, 256, 256), dtype=np.uint8))  # 4 MiB in 4 KiB
    assert len(open_source(tmp_path / "x.npz")) == 64  # black images, but few
    monkeypatch.setattr("massl.data.sources.npz._SMALL_BYTES", 2**20)
    with pytest.raises(DataError, match=r"x\.npz.*'images'.*4,194,304"):
        open_source(tmp_path / "x.npz")


def test_two_members_of_one_name_and_methods_that_numpy_does_not_write_are_refused(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate"):
        path = archive(tmp_path / "x.npz", ("images.npy", stored(IMAGES)), ("images.npy", stored(IMAGES)))
    with pytest.raises(DataError, match="two arrays named 'images'"):
        open_source(path)
    with pytest.raises(DataError, match=r"x\.npz.*'images'"):
        open_source(archive(tmp_path / "x.npz", ("images.npy", stored(IMAGES)), method=zipfile.ZIP_LZMA))


def test_damage_that_zlib_or_the_checksum_finds_names_the_member(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    noise = random.integers(0, 40, (50, 8, 8), dtype=np.uint8)
    whole = archive(tmp_path / "x.npz", ("images.npy", stored(noise))).read_bytes()
    found = set()
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[random.integers(60, len(whole) - 140)] ^= 1 << random.integers(8)
        (tmp_path / "x.npz").write_bytes(damaged)
        with pytest.raises(DataError, match="'images'") as caught:
            open_source(tmp_path / "x.npz")
        found.add(str(caught.value).partition("(")[2][:5])
    assert len(found) == 2  # "error" is zlib.error, which numpy.load passes on


def test_a_fifo_or_a_folder_named_npz_is_no_archive(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    (tmp_path / "folder.npz").mkdir()
    for name in ("pipe.npz", "folder.npz"):
        with pytest.raises(DataError, match=f"{name} is not a file"):
            open_source(tmp_path / name)
