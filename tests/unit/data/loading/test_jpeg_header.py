import io
import struct
from typing import Any

import numpy as np
import pytest
from PIL import Image

from massl.data.loading.jpeg_header import JpegHeader, read_jpeg_header


def jpeg(mode: str = "RGB", size: tuple[int, int] = (40, 24), **options: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def header_of(data: bytes) -> JpegHeader:
    header = read_jpeg_header(data)
    assert header is not None
    return header


def with_segment(data: bytes, marker: int, content: bytes) -> bytes:
    """The file with one more segment at its beginning."""
    return data[:2] + struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content + data[2:]


def exif(orientation: int) -> bytes:
    metadata = Image.Exif()
    metadata[0x0112] = orientation
    return metadata.tobytes()


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_size_and_coding_are_read(subsampling: int, progressive: bool) -> None:
    header = header_of(jpeg(size=(41, 23), subsampling=subsampling, progressive=progressive))
    assert (header.width, header.height, header.num_components, header.bits_per_sample) == (41, 23, 3, 8)
    assert (header.is_baseline, header.is_progressive) == (not progressive, progressive)
    assert header.is_plain


def test_grey_is_plain_and_print_colours_are_not() -> None:
    grey, cmyk = header_of(jpeg("L")), header_of(jpeg("CMYK"))
    assert (grey.num_components, grey.is_plain) == (1, True)
    assert (cmyk.num_components, cmyk.is_plain) == (4, False)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("big_endian", [False, True])
def test_every_exif_orientation_is_read(orientation: int, big_endian: bool) -> None:
    order = ">" if big_endian else "<"
    directory = struct.pack(f"{order}H", 2) + struct.pack(f"{order}HHIHH", 0x010F, 3, 1, 7, 0)
    directory += struct.pack(f"{order}HHIHH", 0x0112, 3, 1, orientation, 0) + bytes(4)
    own = b"Exif\0\0" + (b"MM\0*" if big_endian else b"II*\0") + struct.pack(f"{order}I", 8) + directory
    for data in (jpeg(exif=exif(orientation)), with_segment(jpeg(), 0xE1, own)):
        header = header_of(data)
        assert header.orientation == orientation
        assert header.is_plain == (orientation == 1)
    with Image.open(io.BytesIO(with_segment(jpeg(), 0xE1, own))) as picture:
        assert picture.getexif()[0x0112] == orientation


def test_metadata_without_an_orientation_leaves_an_image_plain() -> None:
    metadata = Image.Exif()
    metadata[0x010F] = "maker"
    xmp = b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta/>"
    for data in (
        jpeg(exif=metadata.tobytes()),
        with_segment(jpeg(), 0xE1, xmp),
        with_segment(jpeg(), 0xFE, b"a comment"),
    ):
        assert header_of(data).is_plain


@pytest.mark.parametrize(
    "content",
    [
        b"Exif\0\0nonsense",
        b"Exif\0\0MM\0*\xff\xff\xff\xff",
        b"Exif\0\0MM\0*\0\0\0\x08\0\x09",
        b"Exif\0\0II*\0" + struct.pack("<IHHHIHH", 8, 1, 0x0112, 3, 1, 9, 0),
        b'http://ns.adobe.com/xap/1.0/\0<rdf tiff:Orientation="6"/>',
    ],
)
def test_metadata_that_needs_a_full_reader_is_not_plain(content: bytes) -> None:
    assert not header_of(with_segment(jpeg(), 0xE1, content)).is_plain


def test_two_exif_segments_are_not_plain() -> None:
    assert not header_of(with_segment(jpeg(exif=exif(1)), 0xE1, exif(1))).is_plain


def test_sixteen_bit_quantisation_tables_do_not_hide_the_frame() -> None:
    header = header_of(with_segment(jpeg(), 0xDB, b"\x10" + bytes(128)))
    assert (header.width, header.height) == (40, 24)


def test_colours_stored_as_rgb_are_not_plain() -> None:
    data = jpeg(keep_rgb=True)
    assert b"Adobe" in data
    assert not header_of(data).is_plain
    start = jpeg().index(b"\xff\xc0")
    renamed = bytearray(jpeg())
    renamed[start + 10 : start + 19 : 3] = b"RGB"
    assert not header_of(bytes(renamed)).is_plain


@pytest.mark.parametrize(("transform", "is_plain"), [(0, False), (1, True), (2, False)])
def test_adobes_marker_says_how_colours_are_stored(transform: int, is_plain: bool) -> None:
    marker = b"Adobe" + struct.pack(">HHHB", 100, 0, 0, transform)
    assert header_of(with_segment(jpeg(), 0xEE, marker)).is_plain is is_plain


@pytest.mark.parametrize(
    ("field", "value"), [("marker", 0xC1), ("marker", 0xC3), ("marker", 0xC9), ("bits", 12), ("height", 0)]
)
def test_unusual_frames_are_not_plain(field: str, value: int) -> None:
    data = bytearray(jpeg())
    start = data.index(b"\xff\xc0")
    if field == "marker":
        data[start + 1] = value
    elif field == "bits":
        data[start + 4] = value
    else:
        data[start + 5 : start + 7] = bytes(2)
    assert not header_of(bytes(data)).is_plain


def test_other_files_and_cut_headers_have_no_header() -> None:
    data = jpeg(exif=exif(3))
    scan = data.index(b"\xff\xda")
    assert all(read_jpeg_header(data[:length]) is None for length in range(scan + 5))
    assert read_jpeg_header(data[: scan + 5]) is not None
    assert read_jpeg_header(b"\x89PNG\r\n\x1a\n" + bytes(50)) is None
    assert read_jpeg_header(b"\xff\xd8\xff\xe0\0\0" + bytes(50)) is None  # a segment shorter than its own length field


def test_random_bytes_never_raise() -> None:
    rng = np.random.default_rng(1)
    data = jpeg(exif=exif(6))
    for _ in range(2000):
        changed = bytearray(data)
        for position in rng.integers(2, 250, 3):
            changed[position] = rng.integers(256)
        read_jpeg_header(bytes(changed))
