import io
import resource
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from massl import digests
from massl.digests import DIGEST_TO_COME, DamagedFile, check_digest, check_zip, seal_safetensors, seal_zip


def sealed_arrays(path: Path, *, num_values: int = 1000) -> Path:
    arrays = {"rows": np.arange(num_values, dtype=np.float32), "names": np.frombuffer("é\n日".encode(), dtype=np.uint8)}
    metadata = {**DIGEST_TO_COME, "about": 'a "name" of 日 \n \x01', "zeta": "1"}
    content = bytearray(safetensors.numpy.save(arrays, metadata))
    seal_safetensors(content)
    path.write_bytes(content)
    return path


def sealed_zip(path: Path, *, num_values: int = 1000) -> Path:
    with path.open("wb") as file:
        torch.save({"weight": torch.arange(num_values), "step": 3}, file)
    seal_zip(path)
    return path


SEALED = pytest.mark.parametrize("write", [sealed_arrays, sealed_zip])


@SEALED
@pytest.mark.parametrize("num_values", [1, 100_000])
def test_what_was_written_matches_its_digest(tmp_path: Path, write: object, num_values: int) -> None:
    assert callable(write)
    assert check_digest(write(tmp_path / "a", num_values=num_values))


@SEALED
def test_blocks_do_not_change_the_verdict(tmp_path: Path, write: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(write)
    monkeypatch.setattr(digests, "_BLOCK", 64)  # many threads' worth of blocks
    path = write(tmp_path / "a")
    assert check_digest(path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)
    with pytest.raises(DamagedFile):
        check_digest(path)


@SEALED
def test_equal_content_gives_equal_files(tmp_path: Path, write: object) -> None:
    assert callable(write)
    assert len({write(tmp_path / str(number)).read_bytes() for number in range(10)}) == 1


def test_every_changed_byte_of_a_checkpoint_is_found_or_harmless(tmp_path: Path) -> None:
    path = sealed_zip(tmp_path / "a.pt", num_values=3)
    intact = path.read_bytes()
    for at in range(len(intact)):
        content = bytearray(intact)
        content[at] ^= 1 << (at % 8)
        path.write_bytes(content)
        with pytest.raises((DamagedFile, zipfile.BadZipFile)):
            check_zip(path)


def test_every_changed_byte_of_an_array_file_is_found_or_harmless(tmp_path: Path) -> None:
    path = sealed_arrays(tmp_path / "a.safetensors", num_values=3)
    intact = path.read_bytes()
    for at in range(len(intact)):
        content = bytearray(intact)
        content[at] ^= 1 << (at % 8)
        path.write_bytes(content)
        with pytest.raises((DamagedFile, safetensors.SafetensorError)):
            check_digest(path) or safetensors.numpy.load(bytes(content))


def test_damage_of_the_mark_does_not_hide_other_damage(tmp_path: Path) -> None:
    path = sealed_arrays(tmp_path / "a.safetensors")
    content = bytearray(path.read_bytes())
    for at in (content.index(b"massl_digest"), content.index(b"massl-sha256") + 3, len(content) - 10):
        content[at] ^= 4
    path.write_bytes(content)
    with pytest.raises(DamagedFile):
        check_digest(path)


def test_a_file_that_others_have_written_anew_with_the_old_digest_is_refused(tmp_path: Path) -> None:
    path = sealed_arrays(tmp_path / "a.safetensors")
    with safetensors.safe_open(path, framework="np") as file:
        metadata = file.metadata()
    for _ in range(8):  # safetensors writes metadata in a random order
        safetensors.numpy.save_file({"rows": np.zeros(3)}, path, metadata)
        with pytest.raises(DamagedFile):
            check_digest(path)


def test_a_sealed_checkpoint_is_still_a_zip_file_that_torch_opens(tmp_path: Path) -> None:
    path = sealed_zip(tmp_path / "a.pt")
    assert zipfile.ZipFile(path).testzip() is None
    assert torch.equal(torch.load(path, weights_only=True)["weight"], torch.arange(1000))
    assert torch.equal(torch.load(path, weights_only=True, mmap=True)["weight"], torch.arange(1000))


def test_files_without_a_digest_are_not_checked(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"rows": np.zeros(3)}, tmp_path / "a.safetensors")
    torch.save({"weight": torch.zeros(3)}, tmp_path / "a.pt")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "short").write_bytes(b"PK\3\4")
    (tmp_path / "text").write_bytes(b"massl-sha256:" * 10)
    assert not any(check_digest(path) for path in tmp_path.iterdir())
    check_zip(tmp_path / "a.pt")


@pytest.mark.parametrize("is_sealed", [True, False])
def test_an_entry_that_claims_to_be_a_folder_is_refused(tmp_path: Path, is_sealed: bool) -> None:
    """torch.load would leave the tensor's memory as it happened to be."""
    path = tmp_path / "a.pt"
    with path.open("wb") as file:
        torch.save({"weight": torch.arange(1000)}, file)
    if is_sealed:
        seal_zip(path)
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\1\2", content.index(b"PK\1\2") + 4)
    while content[entry + 46 : entry + 46 + 14] != b"archive/data/0":
        entry = content.index(b"PK\1\2", entry + 4)
    content[entry + 38] |= 0x10  # external attributes: a directory of DOS
    path.write_bytes(content)
    torch.load(path, weights_only=True)  # without a word
    with pytest.raises(DamagedFile):
        check_zip(path)


def test_a_full_disk_within_the_digest_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save({"weight": torch.zeros(3)}, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 30, limits[1]))  # ends among the digits
    try:
        with pytest.raises(OSError, match="File too large"):
            seal_zip(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_second_list_of_entries_for_torch_alone_is_refused(tmp_path: Path) -> None:
    """zipfile reads the list just before the end record, torch.load the one at its offset."""
    shown, hidden = _plain_zip(zipfile.ZIP_STORED), _plain_zip(zipfile.ZIP_DEFLATED, num_values=9000)
    (shown_size, shown_begin), (size, begin) = (struct.unpack("<LL", each[-10:-2]) for each in (shown, hidden))
    assert size == shown_size
    listed, at = bytearray(shown[shown_begin : shown_begin + size]), 0
    while at < size:
        (place,) = struct.unpack("<L", listed[at + 42 : at + 46])
        listed[at + 42 : at + 46] = struct.pack("<L", place + begin - shown_begin)  # zipfile adds the rest
        at += 46 + sum(struct.unpack("<3H", listed[at + 28 : at + 34]))
    path = tmp_path / "a.pt"
    path.write_bytes(hidden[:-22] + shown[:shown_begin] + listed + hidden[-22:])
    with zipfile.ZipFile(path) as archive:
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
    assert torch.load(path, weights_only=True)["weight"].shape == (9000,)  # from the other list
    with pytest.raises(DamagedFile, match="list of entries"):
        check_zip(path)


def _plain_zip(compression: int, *, num_values: int = 1000) -> bytes:
    """What torch.save writes, without zip64."""
    saved, plain = io.BytesIO(), io.BytesIO()
    torch.save({"weight": torch.rand(num_values)}, saved)
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(plain, "w", compression) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    return plain.getvalue()


@pytest.mark.parametrize("at", [-22 - 12, -22 - 76 + 48, -22 + 16])
def test_places_in_the_end_records_must_agree(tmp_path: Path, at: int) -> None:
    """Of the zip64 record, of the list in it, and of the list in the plain record."""
    path = tmp_path / "a.pt"
    torch.save({"weight": torch.zeros(1000)}, path)
    check_zip(path)
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises((DamagedFile, zipfile.BadZipFile)):
        check_zip(path)


def test_a_plain_zip_file_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(_plain_zip(zipfile.ZIP_STORED))
    check_zip(tmp_path / "a.pt")


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.pt"
    torch.save({"x": torch.zeros(3)}, path)
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr(archive.namelist()[-1], b"other")
    with pytest.raises(DamagedFile, match="one name"):
        check_zip(path)


def test_an_archive_of_countless_entries_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "many.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(20_001):
            archive.writestr(f"a/{number}", b"")
    with pytest.raises(DamagedFile, match="20,001 entries"):
        check_zip(path)
