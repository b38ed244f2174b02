"""Fonts for names in any script: file and class names may be Chinese, Japanese, Korean, Arabic or Greek."""

import functools
from pathlib import Path

# Parts of file names of common fonts with Chinese, Japanese and Korean characters, on Linux, Windows and macOS.
_WIDE_FONTS = (
    "notosanscjk",
    "notoserifcjk",
    "sourcehan",
    "droidsansfallback",
    "wqy",
    "uming",
    "ukai",
    "ipag",
    "takao",
    "nanum",
    "msyh",
    "simsun",
    "simhei",
    "meiryo",
    "msgothic",
    "yugoth",
    "malgun",
    "pingfang",
    "hiragino",
    "applesdgothic",
    "arialuni",
    "arial unicode",
    "unifont",
)


def font_for(text: str) -> Path | None:
    """The font that can show most of the text; None for plain ASCII, which the default font shows.

    DejaVu Sans, which Matplotlib brings, is preferred; then the system's fonts for Chinese, Japanese and Korean, then
    all others.
    """
    wanted = {character for character in text if not character.isascii()}
    if not wanted:
        return None
    best, num_best = _dejavu(), -1
    for file in (_dejavu(), *_system_fonts()):
        num_shown = len(wanted & _characters(file))
        if num_shown > num_best:
            best, num_best = file, num_shown
        if num_shown == len(wanted):
            break
    return best


def drawable(text: str) -> str:
    """The text with an escape such as \\u72ac for each character that no font here can show, instead of a box."""
    file = font_for(text)
    if file is None:
        return text
    shown = _characters(file)
    return "".join(
        character if character.isascii() or character in shown else character.encode("unicode_escape").decode()
        for character in text
    )


@functools.cache
def _dejavu() -> Path:
    from matplotlib import get_data_path  # here: Matplotlib takes 0.7 s to load, and plain names need no such font

    return Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")


@functools.cache
def _system_fonts() -> tuple[Path, ...]:
    """Upright fonts of the system, those for Chinese, Japanese and Korean first."""
    from matplotlib.font_manager import findSystemFonts

    files = sorted(Path(file) for file in findSystemFonts() if not file.lower().endswith("emoji.ttf"))
    return tuple(sorted(files, key=_rank))


def _rank(file: Path) -> tuple[bool, bool]:
    name = file.name.lower()
    is_wide = any(part in name.replace("-", "").replace("_", "") for part in _WIDE_FONTS)
    return not is_wide, any(style in name for style in ("bold", "italic", "oblique", "thin", "light", "black"))


@functools.cache
def _characters(file: Path) -> frozenset[str]:
    """The characters that a font has; none if it cannot be read."""
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(map(chr, FT2Font(str(file)).get_charmap()))
    except (OSError, RuntimeError, ValueError):
        return frozenset()
