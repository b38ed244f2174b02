"""Reads the header of a JPEG file: enough to choose a decoder without decoding."""

import struct
from typing import Final, NamedTuple

_SEGMENT: Final = struct.Struct(">BBH")  # 0xFF, marker, length of what follows with these two bytes
_FRAME: Final = struct.Struct(">BHHB")  # bits per sample, height, width, number of components
_BASELINE, _PROGRESSIVE = 0xC0, 0xC2
_FRAME_MARKERS: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # Huffman, reserved, arithmetic tables
_BARE_MARKERS: Final = frozenset({0x00, 0x01, 0xFF, *range(0xD0, 0xDA)})  # without a length; not valid before a scan
_SCAN, _APP1, _APP14 = 0xDA, 0xE1, 0xEE
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_YCBCR_COMPONENTS: Final = (b"\1\2\3", b"\0\1\2")  # component numbers; b"RGB" means that colours are stored as RGB
_UNCLEAR: Final = 0
MAX_SEGMENTS: Final = 10_000  # before the first scan; photographs have about 20


class JpegHeader(NamedTuple):
    """The frame of a JPEG and its orientation."""

    height: int
    width: int
    num_components: int  # 1: grey, 3: colour, 4: print colours
    bits_per_sample: int
    is_baseline: bool  # and in one scan
    is_progressive: bool  # neither: extended, lossless, hierarchical or arithmetic coding
    is_ycbcr: bool  # three components that are certainly luma and chroma
    orientation: int  # EXIF 1 to 8, 1 when there is none; 0: metadata that only a full reader understands

    @property
    def is_plain(self) -> bool:
        """Upright 8-bit grey or YCbCr in a common coding: what all decoders agree on."""
        is_common = self.bits_per_sample == 8 and (self.is_baseline or self.is_progressive)
        has_known_colours = self.num_components == 1 or self.is_ycbcr
        return is_common and has_known_colours and self.height > 0 and self.width > 0 and self.orientation == 1


def read_jpeg_header(data: bytes) -> JpegHeader | None:
    """The header, or None if `data` is not a JPEG, damaged or unusual. Takes 4 us for a photograph of ImageNet."""
    if data[:2] != b"\xff\xd8":
        return None
    header, orientation, adobe_transform = None, None, None
    position = 2
    try:
        for _ in range(MAX_SEGMENTS):
            lead, marker, length = _SEGMENT.unpack_from(data, position)
            if lead != 0xFF or marker in _BARE_MARKERS:
                return None
            if marker == _SCAN:
                num_in_scan = data[position + 4]
                break
            if marker in _FRAME_MARKERS:
                if header is not None:
                    return None
                header = _read_frame(data, position + 4, marker)
            elif marker == _APP1:
                orientation = _orientation(data[position + 4 : position + 2 + length], before=orientation)
            elif marker == _APP14 and data[position + 4 : position + 9] == b"Adobe":
                adobe_transform = data[position + 15]
            position += 2 + length
        else:
            return None
    except (struct.error, IndexError):  # the file ends inside its header
        return None
    if header is None:
        return None
    return header._replace(
        is_baseline=header.is_baseline and num_in_scan == header.num_components,
        is_ycbcr=header.is_ycbcr and adobe_transform in (None, 1),
        orientation=1 if orientation is None else orientation,
    )


def _read_frame(data: bytes, position: int, marker: int) -> JpegHeader:
    bits_per_sample, height, width, num_components = _FRAME.unpack_from(data, position)
    component_numbers = data[position + 6 : position + 6 + 3 * num_components : 3]
    return JpegHeader(
        height=height,
        width=width,
        num_components=num_components,
        bits_per_sample=bits_per_sample,
        is_baseline=marker == _BASELINE,
        is_progressive=marker == _PROGRESSIVE,
        is_ycbcr=component_numbers in _YCBCR_COMPONENTS,
        orientation=1,
    )


def _orientation(segment: bytes, *, before: int | None) -> int | None:
    """The orientation in an APP1 segment; `before` comes from an earlier segment."""
    if segment.startswith(_XMP):
        return _UNCLEAR if b"tiff:Orientation" in segment else before
    if not segment.startswith(_EXIF):
        return before
    if before is not None:
        return _UNCLEAR  # two EXIF segments, or one split in two
    byte_order = {b"II*\0": "<", b"MM\0*": ">"}.get(segment[6:10])
    if byte_order is None:
        return _UNCLEAR
    try:
        (directory,) = struct.unpack_from(f"{byte_order}I", segment, 10)
        (num_entries,) = struct.unpack_from(f"{byte_order}H", segment, 6 + directory)
        for entry in range(num_entries):
            position = 6 + directory + 2 + 12 * entry
            tag, kind, count, value, _ = struct.unpack_from(f"{byte_order}HHIHH", segment, position)
            if tag == 0x0112:
                return int(value) if (kind, count) == (3, 1) and 1 <= value <= 8 else _UNCLEAR
    except struct.error:  # damaged: Pillow has rules for that
        return _UNCLEAR
    return 1
