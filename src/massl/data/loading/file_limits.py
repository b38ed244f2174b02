"""What is checked before a file of unknown origin is decoded, so that memory and time stay bounded.

The number of pixels bounds most decoders. These do more work than that: TIFF and EXIF directories, whose entries may
all point at the same bytes, and JPEGs, which may pass over the same pixels any number of times.
"""

import struct
from typing import Any, Final

from massl.data.loading.jpeg_header import read_jpeg_header

_MAX_DIRECTORY_BYTES: Final = 2**26  # of all values in a TIFF or EXIF directory, beyond those the file has room for
_MAX_SCANS: Final = 100  # of a JPEG; encoders write about 10
_MAX_SCANNED_PIXELS: Final = 2_000_000_000  # scans times pixels: about 10 s
_BYTES_OF_TYPE: Final = (0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8, 8, 8)
_APP1, _SCAN = 0xE1, 0xDA
_EXIF: Final = b"Exif\0\0"


def excess_before_opening(data: bytes) -> str:
    """Why a file is refused before Pillow reads its metadata; "" if it is not."""
    directory = data
    if data[:2] == b"\xff\xd8":
        directory = _exif_of_jpeg(data)
    elif data[:4] not in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return ""
    return "" if is_bounded_directory(directory) else "a directory of metadata larger than the file"


def excess_of_scans(data: bytes, num_pixels: int) -> str:
    """Why a JPEG of so many pixels is refused; "" if it is not."""
    if data[:2] != b"\xff\xd8":
        return ""
    header = read_jpeg_header(data)
    if header is not None and header.is_baseline:  # decoders stop after its only scan
        return ""
    num_scans = data.count(b"\xff\xda")
    if num_scans > _MAX_SCANS or (num_scans > 1 and num_scans * num_pixels > _MAX_SCANNED_PIXELS):
        return f"{num_scans:,} scans of {num_pixels:,} pixels"
    return ""


def _exif_of_jpeg(data: bytes) -> bytes:
    """Pillow joins the EXIF segments, however many there are. One alone is too short to do harm: 64 KiB."""
    found, position = [], 2
    while position + 4 <= len(data) and data[position] == 0xFF and data[position + 1] != _SCAN:
        if data[position + 1] == 0xFF:  # a fill byte
            position += 1
            continue
        length = int.from_bytes(data[position + 2 : position + 4], "big")
        if data[position + 1] == _APP1 and data[position + 4 : position + 10] == _EXIF:
            found.append((position + 10, position + 2 + length))
        position += 2 + max(2, length)
    return b"".join(data[start:end] for start, end in found) if len(found) > 1 else b""


def is_bounded_directory(data: bytes) -> bool:
    """Whether the values of the first TIFF directory together are hardly larger than `data`."""
    order = {b"II": "<", b"MM": ">"}.get(data[:2])
    if order is None:
        return True
    try:
        is_big = struct.unpack_from(f"{order}H", data, 2)[0] == 43
        count, entry, position = ("Q", "HHQ", 8) if is_big else ("H", "HHI", 4)
        position = struct.unpack_from(f"{order}{'Q' if is_big else 'I'}", data, position)[0]
        num_entries = struct.unpack_from(order + count, data, position)[0]
        first, step = position + struct.calcsize(order + count), 20 if is_big else 12
        held = memoryview(data)[first : first + min(num_entries, 2**16) * step]
        total = 0
        for offset in range(0, len(held) - step + 1, step):
            _, kind, number = struct.unpack_from(order + entry, held, offset)
            total += number * (_BYTES_OF_TYPE[kind] if kind < len(_BYTES_OF_TYPE) else 8)
        return total <= len(data) + _MAX_DIRECTORY_BYTES and num_entries <= 2**16
    except struct.error:  # the directory lies outside of the file: Pillow says so
        return True


def exif_bytes(info: dict[Any, Any]) -> bytes:
    """The EXIF of an opened picture, as Pillow will read it."""
    found = info.get("exif") or b""
    if not found and isinstance(raw := info.get("Raw profile type exif"), str):
        found = bytes.fromhex("".join(raw.split("\n")[3:]))
    return found.removeprefix(_EXIF) if isinstance(found, bytes) else b""
