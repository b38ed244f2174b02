"""Files that carry a digest of themselves, so that damage is found when they are read.

One rule for all of them: SHA-256, in blocks, of every byte of the file but the digest's own 64 digits. The digits
follow a mark: in the metadata of a .safetensors file, in the comment at the end of a zip file (what torch.save writes).
Files without a mark are older or of others; they are read without this check.
"""

import hashlib
import json
import mmap
import os
import struct
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_MARK = b"massl-sha256:"
_NUM_DIGITS = 64
_COMMENT_SIZE = len(_MARK) + _NUM_DIGITS
DIGEST_KEY = "massl_digest"  # in the metadata of a .safetensors file
DIGEST_TO_COME = {DIGEST_KEY: _MARK.decode() + "0" * _NUM_DIGITS}  # metadata that `seal_safetensors` fills in
_HEAD = b'{"__metadata__":{"'  # how a header with metadata begins
_SEALED_HEAD = _HEAD + DIGEST_KEY.encode() + b'":"' + _MARK
_BLOCK = 4 << 20  # bytes hashed at once by one thread: 2 ms
_MAX_HEADER = 100 << 20  # as safetensors allows
_ZIP_BEGIN = b"PK\3\4"
_ZIP_END, _ZIP_END_SIZE = b"PK\5\6", 22  # the record at the end of a zip file, and its size without a comment
_ZIP64_SIZE = 56 + 20  # of the two records before it in a zip64 file, which torch.save writes
_MAX_ENTRIES = 20_000  # of a zip file: a tensor each; torch.load needs minutes for ten times as many
_DOS_DIRECTORY = 0x10  # attribute of a zip entry, for which torch.load leaves the memory of a tensor as it was

ReadAt = Callable[[int, int], bytes | bytearray]  # (first byte, number of bytes)


class DamagedFile(OSError):
    """The content of a file is not what was written."""


def seal_safetensors(content: bytearray | mmap.mmap) -> None:
    """Put the digest first among the metadata and the others in the order of their names.

    safetensors writes metadata in a random order; sealed files of equal content are equal.
    """
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    metadata = header["__metadata__"]
    header["__metadata__"] = DIGEST_TO_COME | dict(sorted(metadata.items()))
    text = json.dumps({"__metadata__": None} | header, separators=(",", ":"), ensure_ascii=False).encode()
    assert text.startswith(_SEALED_HEAD)
    assert len(text) <= end - 8, "only the order may change"
    content[8:end] = text.ljust(end - 8)
    at = 8 + len(_SEALED_HEAD)
    content[at : at + _NUM_DIGITS] = _digits(lambda begin, size: content[begin : begin + size], len(content), at=at)


def seal_safetensors_file(path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        seal_safetensors(content)


def seal_zip(path: Path) -> None:
    """Append the digest to a zip file as its comment; the file stays a zip file that torch.load opens."""
    with path.open("r+b") as file:  # buffered: an unbuffered write on a full disk may write less, without an error
        size = file.seek(0, os.SEEK_END)
        file.seek(size - 2)
        file.write(_COMMENT_SIZE.to_bytes(2, "little") + _MARK)
        file.flush()
        at = size + len(_MARK)
        file.write(_digits(_reader(file.fileno()), at, at=at))


def check_digest(path: Path) -> bool:
    """Raise DamagedFile if the file does not match its digest; False if it has none."""
    with path.open("rb", buffering=0) as file:
        read_at, size = _reader(file.fileno()), os.fstat(file.fileno()).st_size
        at = _place_of_digits(read_at, size)
        if at is None:
            return False
        if read_at(at, _NUM_DIGITS) != _digits(read_at, size, at=at):
            raise DamagedFile("it is damaged: its content does not match its digest")
    return True


def is_zip(path: Path) -> bool:
    """As torch.load decides, by the first bytes. zipfile also looks at the end, where other bytes may follow."""
    with path.open("rb") as file:
        return file.read(len(_ZIP_BEGIN)) == _ZIP_BEGIN


def check_zip(path: Path) -> None:
    """Raise DamagedFile if a zip file does not match its digest or, without one, the check sums of its entries."""
    is_sealed = check_digest(path)
    _refuse_packed(path)
    if is_sealed:
        return
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()  # torch.load does not verify check sums: zeros would load silently
        for entry in archive.infolist():
            if entry.is_dir() or entry.external_attr & _DOS_DIRECTORY:
                damaged = entry.filename
    if damaged is not None:
        raise DamagedFile(f"{damaged} is damaged")


def _refuse_packed(path: Path) -> None:
    """torch.save stores its entries as they are; one that is compressed or stored twice could fill the memory."""
    _refuse_second_directory(path)
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if len(entries) > _MAX_ENTRIES:
        raise DamagedFile(f"its {len(entries):,} entries are more than the {_MAX_ENTRIES:,} allowed")
    is_packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
    if len({entry.filename for entry in entries}) < len(entries):
        raise DamagedFile("two of its entries have one name, which torch.save never does")
    if is_packed or sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise DamagedFile("its entries are compressed or overlap, which torch.save never does")


def _refuse_second_directory(path: Path) -> None:
    """The list of entries must end where the end record begins: there zipfile looks for it, torch.load at its offset.

    A file with two lists would show one to the checks and the other to torch.load.
    """
    with path.open("rb", buffering=0) as file:
        read_at, size = _reader(file.fileno()), os.fstat(file.fileno()).st_size
        first = max(0, size - (1 << 16) - _ZIP_END_SIZE)  # a comment has less than 64 KiB
        place = first + read_at(first, size - first).rfind(_ZIP_END)
        end = read_at(max(0, place), _ZIP_END_SIZE)
        if place < first or len(end) < _ZIP_END_SIZE:
            raise DamagedFile("it is damaged: its end is missing")
        found, offset_at = struct.unpack("<LL", end[12:20]), place
        before = read_at(max(0, place - _ZIP64_SIZE), min(place, _ZIP64_SIZE))
        if before[-20:-16] == b"PK\6\7":
            offset_at = place - _ZIP64_SIZE
            found64 = struct.unpack("<QQ", before[40:56]) if before.startswith(b"PK\6\6") else (0, 0)
            at = int.from_bytes(before[-12:-4], "little")
            is_same = all(short in (long, 0xFFFFFFFF) for short, long in zip(found, found64, strict=True))
            found = found64 if at == offset_at and is_same else (0, 0)
    if sum(found) != offset_at:
        raise DamagedFile("its list of entries is not where torch.save writes it")


def _place_of_digits(read_at: ReadAt, size: int) -> int | None:
    """First byte of the digits; None: the file has no digest."""
    if read_at(0, len(_ZIP_BEGIN)) == _ZIP_BEGIN:
        tail = read_at(max(0, size - _ZIP_END_SIZE - _COMMENT_SIZE), _ZIP_END_SIZE + _COMMENT_SIZE)
        end = tail.rfind(_ZIP_END)
        if end >= 0 and tail[end + 20 : end + 22] == _COMMENT_SIZE.to_bytes(2, "little"):
            return size - len(tail) + end + _ZIP_END_SIZE + len(_MARK)
        return size - _NUM_DIGITS if tail[-_COMMENT_SIZE:].startswith(_MARK) else None
    header_size = int.from_bytes(read_at(0, 8), "little")
    if not 0 < header_size <= min(size - 8, _MAX_HEADER):
        return None
    header = read_at(8, header_size)
    at = header.find(_MARK) + len(_MARK)
    # Also where damage has hit the mark: half of it is enough to tell that the file is sealed.
    pairs = zip(header[len(_HEAD) : len(_SEALED_HEAD)], _SEALED_HEAD[len(_HEAD) :], strict=False)
    if sum(one == other for one, other in pairs) > (len(_SEALED_HEAD) - len(_HEAD)) // 2:
        at = len(_SEALED_HEAD)
    return 8 + at if at >= len(_MARK) else None


def _digits(read_at: ReadAt, size: int, *, at: int) -> bytes:
    """The digest of all bytes but the digits at `at`, in hexadecimal."""
    blocks = [
        (begin, min(_BLOCK, end - begin))
        for first, end in ((0, at), (at + _NUM_DIGITS, size))
        for begin in range(first, end, _BLOCK)
    ]

    def hash_of(block: tuple[int, int]) -> bytes:
        content = read_at(*block)
        if len(content) != block[1]:
            raise DamagedFile("it is damaged: its end is missing")
        return hashlib.sha256(content).digest()

    if len(blocks) <= 2:
        hashes = [*map(hash_of, blocks)]
    else:  # hashing releases the interpreter's lock
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            hashes = [*pool.map(hash_of, blocks)]
    return hashlib.sha256(b"".join(hashes)).hexdigest().encode()


def _reader(descriptor: int) -> ReadAt:
    """Read by system calls, not a memory map: a bad sector then raises an OSError instead of ending the process."""
    return lambda begin, size: os.pread(descriptor, size, begin)
