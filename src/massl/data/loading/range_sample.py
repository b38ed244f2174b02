"""Samples a source once for the range of its images with more than 8 bits."""

import io
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import IO, Final

from PIL import Image

from massl import keyed_random
from massl.data.loading.decode import UnreadableImage, refuse_excess
from massl.data.loading.file_limits import excess_before_opening
from massl.data.loading.pixel_values import extremes, look, usual_range
from massl.data.sources import files_of
from massl.data.sources.base import DataError, ImageFiles, ImageSource
from massl.data.sources.formats import pillow_formats
from massl.data.sources.rules import PixelRanges, Range

_NUM_HEADERS, _NUM_IMAGES = 256, 64  # looked at, and decoded
_HEADER_BYTES: Final = 1 << 20
_DARK: Final = 63  # of the upper 8 of 16 bits: all images together use a quarter of the range or less
_HOW: Final = "say which values are black and white: --data.pixel_range LOW HIGH (embed and others: --pixel_range)"

Found = dict[str, tuple[int, float, float]]  # kind -> number of images, smallest and largest value


def settle_ranges(source: ImageSource) -> list[str]:
    """Give the files of a source the range of their deep images, unless they have one; says which.

    Of a source of JPEGs no file is read, of 8-bit images only some headers.
    """
    parts = files_of(source)
    known = next((part.rules.ranges for part in parts if part.rules.ranges != PixelRanges()), None)
    if not parts or (known is not None and known.stated is None):
        return []
    found = _sampled(parts)
    stated = None if known is None else known.stated
    _require_colours_in_range(found.pop("colours", None), stated, name=source.name)
    if stated is not None or not found:
        return []
    usual_ranges: dict[str, Range] = {}
    remarks = []
    for kind, (num, low, high) in sorted(found.items()):
        usual = usual_range(kind, low, high)
        values = f"values from {low:,g} to {high:,g} in {num} sampled images"
        if usual is None:
            raise DataError(f"{source.name}: {_WORDS[kind]} have {values}, which is no usual range; {_HOW}")
        usual_ranges[kind] = usual
        bits = f"{(int(usual[1]) + 1).bit_length() - 1} bits, " if kind == "integers" else ""
        read_as = f"read as {bits}{usual[0]:,g} to {usual[1]:,g}"
        remarks.append(f"{source.name}: {_WORDS[kind]}: {values}; {read_as}; the option pixel_range sets that")
    ranges = PixelRanges(integers=usual_ranges.get("integers"), floats=usual_ranges.get("floats"))
    for part in parts:
        part.rules = replace(part.rules, ranges=ranges)
    return remarks


_WORDS: Final = {"integers": "images with more than 8 bits", "floats": "images of floats"}


def _sampled(parts: list[ImageFiles]) -> Found:
    lows, highs = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for part, index in _deep_images(parts):
        try:
            data = part.read(index).data
            assert isinstance(data, bytes)
            refuse_excess(data, part.rules)
            seen = extremes(data, pillow_formats())
        except MemoryError:
            raise
        except Exception:  # unreadable: training and evaluation will name it
            continue
        if seen is not None:
            lows[seen[0]].append(seen[1])
            highs[seen[0]].append(seen[2])
    return {kind: (len(lows[kind]), min(lows[kind]), max(highs[kind])) for kind in lows}


def _deep_images(parts: list[ImageFiles]) -> Iterator[tuple[ImageFiles, int]]:
    """A keyed sample of the images whose headers say that they have more than 8 bits."""
    of_parts = [part.maybe_deep for part in parts]
    ends = list(accumulate(map(len, of_parts)))
    order = keyed_random.permutation(ends[-1], 0, "pixel range sample")[:_NUM_HEADERS].tolist() if ends[-1] else []
    num_deep = 0
    for number in order:
        at = bisect_right(ends, number)
        part, index = parts[at], of_parts[at][number - ends[at]]  # counted from the end of the part
        try:
            with _header_of(part.path_of(index)) as file, Image.open(file, formats=pillow_formats()) as picture:
                is_deep = look(picture) is not None
        except Exception:  # unreadable
            continue
        if is_deep and num_deep < _NUM_IMAGES:
            num_deep += 1
            yield part, index


@contextmanager
def _header_of(path: Path) -> Iterator[IO[bytes]]:
    """What Pillow reads to open an image: of a PNG file its beginning, which may not hold countless chunks."""
    with path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
        if not head.startswith(b"\x89PNG"):
            file.seek(0)
            yield file
        elif excess := excess_before_opening(head):
            raise UnreadableImage(excess)
        else:
            yield io.BytesIO(head)


def _require_colours_in_range(
    found: tuple[int, float, float] | None, stated: tuple[float, float] | None, *, name: str
) -> None:
    """Pillow keeps the upper 8 of 16 bits of colour images, so that only their full range can be read."""
    if found is None or stated == (0, 65535):
        return
    num, _, high = found
    if stated is not None:
        raise DataError(
            f"{name} holds colour images of 16 bits, of which only the range 0 65535 can be read, not "
            f"{stated[0]:g} {stated[1]:g}; save them with 8 bits"
        )
    if high <= _DARK:
        values = f"values up to about {256 * int(high) + 255:,} instead of 65,535"
        raise DataError(
            f"{name}: {num} sampled colour images of 16 bits have {values} and would be almost black; save them with 8 "
            "bits, or set the option pixel_range to 0 65535 if they are so dark"
        )
