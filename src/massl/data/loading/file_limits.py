"""What is checked before a file of unknown origin is decoded, so that memory and time stay bounded.

The number of pixels bounds what decoders do in C. Pillow reads headers and metadata in Python, a microsecond for each
segment, chunk or comment, and joins some of them; the entries of a TIFF or EXIF directory may all point at the same
bytes; and a JPEG may pass over the same pixels any number of times.
"""

import re
import struct
from collections.abc import Iterator
from typing import Any, Final

from massl.data.loading.jpeg_header import MAX_SEGMENTS, read_jpeg_header

_MAX_DIRECTORY_BYTES: Final = 2**26  # of all values in a TIFF or EXIF directory, beyond those the file has room for
_MAX_NUMBERS: Final = 2**20  # of one entry of a directory: strips, tiles
_MAX_CHUNKS: Final = 10_000  # of a PNG, besides one for every KiB
_MAX_BLOCKS: Final = 4_000  # of 255 bytes in a GIF before its first image; Pillow copies all of them for each
_MAX_TEXT_BYTES, _MAX_COMMENTS = 2**23, 100  # of a PPM in plain text, which Pillow reads in Python: 5 s
_MAX_SCANS: Final = 100  # of a JPEG; encoders write about 10
_MAX_SCANNED_PIXELS: Final = 2_000_000_000  # scans times pixels: about 10 s
_BYTES_OF_TYPE: Final = (0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8, 8, 8)
_OF_BYTES: Final = (1, 2, 6, 7)  # types whose values stay bytes in Python
_APP1, _SCAN = 0xE1, 0xDA
_EXIF: Final = b"Exif\0\0"
_JPEG, _PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"


def excess_before_opening(data: bytes) -> str:
    """Why a file is refused before Pillow reads its metadata; "" if it is not."""
    if data.startswith(_JPEG):
        return _excess_of_jpeg(data)
    if data.startswith(_PNG):
        return "" if _has_few_chunks(data) else "too many chunks of metadata"
    if data.startswith(b"GIF8"):
        return "" if _has_few_blocks(data) else "too many blocks of metadata"
    if data[:2] in (b"P1", b"P2", b"P3", b"P4", b"P5", b"P6", b"Pf"):
        return _excess_of_ppm(data)
    if data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+") and not is_bounded_directory(data):
        return "a directory of metadata larger than the file"
    return ""


def excess_of_scans(data: bytes, num_pixels: int) -> str:
    """Why a JPEG of so many pixels is refused; "" if it is not."""
    if not data.startswith(_JPEG):
        return ""
    header = read_jpeg_header(data)
    if header is not None and header.is_baseline:  # decoders stop after its only scan
        return ""
    num_scans = data.count(b"\xff\xda")
    if num_scans > _MAX_SCANS or (num_scans > 1 and num_scans * num_pixels > _MAX_SCANNED_PIXELS):
        return f"{num_scans:,} scans of {num_pixels:,} pixels"
    return ""


def _excess_of_jpeg(data: bytes) -> str:
    """Pillow joins the EXIF segments, however many there are. One alone is too short to do harm: 64 KiB."""
    found = []
    for number, (marker, start, end) in enumerate(_segments(data)):
        if number > MAX_SEGMENTS:
            return f"more than {MAX_SEGMENTS:,} segments before the image"
        if marker == _APP1 and data[start : start + 6] == _EXIF:
            found.append(data[start + 6 : end])
    is_bounded = len(found) < 2 or is_bounded_directory(b"".join(found))
    return "" if is_bounded else "a directory of metadata larger than the file"


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, start and end of each segment before the first scan; a fill byte counts as one."""
    position = 2
    while position + 4 <= len(data) and data[position] == 0xFF and data[position + 1] != _SCAN:
        if data[position + 1] == 0xFF:
            yield 0xFF, position, position
            position += 1
            continue
        end = position + 2 + max(2, int.from_bytes(data[position + 2 : position + 4], "big"))
        yield data[position + 1], position + 4, end
        position = end


def _has_few_chunks(data: bytes) -> bool:
    position, num_chunks, most = len(_PNG), 0, _MAX_CHUNKS + len(data) // 1024
    while position + 8 <= len(data) and num_chunks <= most:
        position += 12 + int.from_bytes(data[position : position + 4], "big")
        num_chunks += 1
    return num_chunks <= most


def _has_few_blocks(data: bytes) -> bool:
    """Walks the extensions of a GIF up to the first image."""
    has_palette, size = data[10] & 0x80 if len(data) > 10 else 0, data[10] & 7 if len(data) > 10 else 0
    position, num_blocks = 13 + (3 << (size + 1) if has_palette else 0), 0
    while position + 2 < len(data) and data[position] != 0x2C and num_blocks <= _MAX_BLOCKS:
        is_extension = data[position] == 0x21  # Pillow skips other bytes one by one
        position += 2 if is_extension else 1
        num_blocks += 1
        while is_extension and position < len(data) and data[position] and num_blocks <= _MAX_BLOCKS:
            position += 1 + data[position]
            num_blocks += 1
        position += is_extension
    return num_blocks <= _MAX_BLOCKS


def _excess_of_ppm(data: bytes) -> str:
    if data[:2] in (b"P1", b"P2", b"P3") and (len(data) > _MAX_TEXT_BYTES or data.count(b"#") > _MAX_COMMENTS):
        return f"a PPM in plain text of more than {_MAX_TEXT_BYTES:,} bytes or {_MAX_COMMENTS} comments"
    header = re.sub(rb"#[^\r\n]*", b"", data[: 2**16])
    return "" if len(data) < 2**16 or len(header.split(maxsplit=3)) == 4 else "a header of more than 64 KiB"


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
            if number > _MAX_NUMBERS and kind not in _OF_BYTES:
                return False
        return total <= len(data) + _MAX_DIRECTORY_BYTES and num_entries <= 2**16
    except struct.error:  # the directory lies outside of the file: Pillow says so
        return True


def exif_bytes(info: dict[Any, Any]) -> bytes:
    """The EXIF of an opened picture, as Pillow will read it."""
    found = info.get("exif") or b""
    if not found and isinstance(raw := info.get("Raw profile type exif"), str):
        found = bytes.fromhex("".join(raw.split("\n")[3:]))
    return found.removeprefix(_EXIF) if isinstance(found, bytes) else b""
