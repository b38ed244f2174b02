"""Which image files can be read here, and what a user can do about the others."""

import importlib.util
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Final

from PIL import features

COMMON_SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
DEEP_SUFFIXES: Final = (".png", ".tif", ".tiff", ".ppm", ".pgm")  # may hold more than 8 bits a value
_HEIF_SUFFIXES: Final = (".heic", ".heif", ".hif")
_RAW_SUFFIXES: Final = (
    *(".3fr", ".arw", ".cr2", ".cr3", ".crw", ".dcr", ".dng", ".erf", ".iiq", ".kdc", ".mef", ".mos", ".mrw", ".nef"),
    *(".nrw", ".orf", ".pef", ".raf", ".raw", ".rw2", ".rwl", ".sr2", ".srf", ".srw", ".x3f"),
)
_ADVICE: Final = {
    **dict.fromkeys(_HEIF_SUFFIXES, "pip install pillow-heif reads them"),
    ".avif": "pip install -U pillow reads them",
    **dict.fromkeys((*_RAW_SUFFIXES, ".jxl", ".jp2", ".psd", ".exr"), "convert them to JPEG or PNG"),
}


@cache
def has_heif() -> bool:
    return importlib.util.find_spec("pillow_heif") is not None


@cache
def has_avif() -> bool:
    return "avif" in features.modules and bool(features.check("avif"))  # Pillow before 11.3 does not know the word


@cache
def readable_suffixes() -> tuple[str, ...]:
    """Of the files that a folder source lists, in lower case."""
    return COMMON_SUFFIXES + ((".avif",) if has_avif() else ()) + (_HEIF_SUFFIXES if has_heif() else ())


@cache
def pillow_formats() -> tuple[str, ...]:
    """Pillow's names of the formats to decode. Not EPS: Pillow would start Ghostscript."""
    formats = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM") + (("AVIF",) if has_avif() else ())
    if not has_heif():
        return formats
    import pillow_heif  # type: ignore[import-not-found,unused-ignore]  # optional

    pillow_heif.register_heif_opener()
    return (*formats, "HEIF")


def ignored_kind(file_name: str) -> str | None:
    """The suffix, as spelt, of an image file that cannot be read here; None for any other file."""
    dot = file_name.rfind(".")
    suffix = file_name[dot:].lower() if dot > 0 else ""
    return file_name[dot:] if suffix in _ADVICE and suffix not in readable_suffixes() else None


def describe_ignored(num_ignored: Mapping[str, int]) -> list[str]:
    """Sentences such as "ignored 3 .HEIC (pip install pillow-heif reads them)"; `num_ignored` by suffix as spelt."""
    totals: Counter[str] = Counter()
    spelling: dict[str, str] = {}
    for suffix, num in num_ignored.items():
        totals[suffix.lower()] += num
        spelling.setdefault(suffix.lower(), suffix)
    return [f"ignored {num:,} {spelling[suffix]} ({_ADVICE[suffix]})" for suffix, num in sorted(totals.items())]
