"""How image files of unknown origin are read: limits on their size, and the range of values beyond 8 bits."""

import errno
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from massl.files import read_limited

MAX_FILE_MIB: Final = 512
MAX_MEGAPIXELS: Final = 100  # a panorama of 12,000 x 6,000 has 72; 100 take 0.8 GiB while they are decoded

_MIN_SPAN, _MAX_SPAN = 1e-6, 2.0**32  # of a range; beyond them values are no pixels
_MIN_SHARE = 1e-5  # span / largest value; float32 has no 256 steps in less

Range = tuple[float, float]  # the values of black and white


def require_range(low: float, high: float) -> None:
    """Raise ValueError for a range in which all images would look the same."""
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError("LOW must be below HIGH, e.g. 0 4095")
    if not max(_MIN_SPAN, _MIN_SHARE * max(abs(low), abs(high))) <= high - low <= _MAX_SPAN:
        raise ValueError(f"HIGH - LOW is {high - low:g}, which is no range of pixel values; give one like 0 4095")


@dataclass(frozen=True, kw_only=True)
class PixelRanges:
    """Which values are black and white in images of more than 8 bits. No 8-bit image is touched."""

    stated: Range | None = None  # by the user, for all of them; values outside are clipped
    integers: Range | None = None  # found in a sample of the source; an image with values outside is refused
    floats: Range | None = None
    of_each_image: bool = False  # guessed for each image, as runs did that began before ranges were sampled

    def __post_init__(self) -> None:
        for span in filter(None, (self.stated, self.integers, self.floats)):
            require_range(*span)

    @property
    def key(self) -> str:
        """What changes pixels; "" for ranges that leave all images as they were read before."""
        return "" if self.of_each_image or self == PixelRanges() else f" {json.dumps(self.as_json(), sort_keys=True)}"

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "PixelRanges":
        def named(name: str) -> Range | None:
            return (float(values[name][0]), float(values[name][1])) if name in values else None

        each = bool(values.get("of_each_image", False))
        return cls(stated=named("stated"), integers=named("integers"), floats=named("floats"), of_each_image=each)


@dataclass(frozen=True, kw_only=True)
class ReadRules:
    max_file_mib: int = MAX_FILE_MIB
    max_megapixels: int = MAX_MEGAPIXELS
    ranges: PixelRanges = field(default_factory=PixelRanges)

    @property
    def key(self) -> str:
        """What decides which images can be read, and their pixels; "" for the default rules."""
        limits = (self.max_file_mib, self.max_megapixels)
        return self.ranges.key + ("" if limits == (MAX_FILE_MIB, MAX_MEGAPIXELS) else f" limits {limits}")

    @property
    def max_pixels(self) -> int:
        return self.max_megapixels * 1_000_000


DEFAULT_RULES: Final = ReadRules()


def read_file(path: Path, rules: ReadRules) -> bytes:
    """The bytes of a file; OSError if it is larger than allowed, or no file any more. A FIFO does not block."""
    try:
        return read_limited(path, max_bytes=rules.max_file_mib * 2**20)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise OSError(errno.EFBIG, f"{error.strerror}; the option max_file_mib sets that") from None
        raise
