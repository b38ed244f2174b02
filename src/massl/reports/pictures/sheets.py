"""Sheets of pictures: tiles in rows and columns with captions, frames and headings, on white."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from massl.data.sources.base import Pixels
from massl.reports.fonts import drawable, font_for

Colour = tuple[int, int, int]

GREEN: Colour = (30, 150, 70)
RED: Colour = (205, 45, 45)
GREY: Colour = (150, 150, 150)
_WHITE: Colour = (255, 255, 255)
_INK: Colour = (40, 40, 40)
_MARGIN, _GAP, _FRAME = 16, 8, 4  # pixels: around the sheet, between tiles, of a frame's line
_TEXT_SIZE = 13  # pixels, on tiles of up to 260 px; it grows with them
_LINE_SPACING, _TITLE_SCALE = 1.35, 1.3  # height of a line / size of its text; size of a title / size of other text
SMALLEST_TILE = 160  # pixels: a smaller one shows little

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A picture and what is written below it."""

    picture: Pixels  # [H, W, 3]
    captions: tuple[str, ...] = ()  # one per line, shortened to the width of the tile
    frame: Colour | None = None
    smooth: bool = True  # how it is enlarged: a photograph smoothly, a map of patches in sharp squares


def tile_side(size: int) -> int:
    """A side of at least 160 px, `size` times or divided by a whole number, so that patches stay equal."""
    return size // (size // SMALLEST_TILE) if size >= SMALLEST_TILE else size * -(-SMALLEST_TILE // size)


def fitted(picture: Pixels, box: tuple[int, int], *, smooth: bool) -> Image.Image:
    """The picture at the largest size that fits the box (width, height), with its aspect ratio."""
    image = Image.fromarray(picture)
    scale = min(box[0] / image.width, box[1] / image.height)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    if size == image.size:
        return image
    if scale > 1:
        return image.resize(size, Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST)
    return image.resize(size, Image.Resampling.LANCZOS if smooth else Image.Resampling.BOX)


def sheet(
    rows: Sequence[Sequence[Tile]],
    *,
    box: tuple[int, int],
    title: str = "",
    headings: Sequence[str] = (),
    rule_after_first: bool = False,
) -> Image.Image:
    """Tiles of at most box = (width, height) pixels; `rule_after_first` draws a line after the first column."""
    text_size = max(_TEXT_SIZE, box[1] // 20)
    title_font = _font(title, round(_TITLE_SCALE * text_size))
    line, title_line = round(_LINE_SPACING * text_size), round(_LINE_SPACING * _TITLE_SCALE * text_size)
    num_columns = max(len(headings), *(len(row) for row in rows))
    extra = 2 * _GAP if rule_after_first else 0
    lefts = [_MARGIN + number * (box[0] + _GAP) + (extra if number else 0) for number in range(num_columns)]
    width = lefts[-1] + box[0] + _MARGIN
    title_lines = _wrapped(drawable(title), title_font, width - 2 * _MARGIN)
    first_top = _MARGIN + len(title_lines) * title_line + (_GAP if title_lines else 0)
    tops = [first_top + (line if headings else 0)]
    for row in rows:
        num_lines = max(len(tile.captions) for tile in row)
        tops.append(tops[-1] + box[1] + (num_lines * line + _GAP // 2 if num_lines else 0) + _GAP)
    canvas = Image.new("RGB", (width, tops[-1] - _GAP + _MARGIN), _WHITE)
    draw = ImageDraw.Draw(canvas)
    for number, words in enumerate(title_lines):
        draw.text((_MARGIN, _MARGIN + number * title_line), words, fill=_INK, font=title_font)
    for left, heading in zip(lefts, headings, strict=False):
        _write_centred(draw, heading, (left, first_top), box[0], text_size)
    for top, row in zip(tops, rows, strict=False):
        for left, tile in zip(lefts, row, strict=False):
            _place(canvas, draw, tile, (left, top), box, text_size=text_size, line=line)
    if rule_after_first:
        x = lefts[0] + box[0] + (extra + _GAP) // 2
        draw.line((x, first_top, x, tops[-1] - _GAP), fill=GREY, width=1)
    return canvas


def _place(
    canvas: Image.Image,
    draw: Any,
    tile: Tile,
    corner: tuple[int, int],
    box: tuple[int, int],
    *,
    text_size: int,
    line: int,
) -> None:
    """A tile with its captions, centred in its box."""
    left, top = corner
    inner = 0 if tile.frame is None else _FRAME + 1  # a pixel of white between frame and picture
    picture = fitted(tile.picture, (box[0] - 2 * inner, box[1] - 2 * inner), smooth=tile.smooth)
    x, y = left + (box[0] - picture.width) // 2, top + (box[1] - picture.height) // 2
    if tile.frame is not None:
        corners = (x - inner, y - inner, x + picture.width + inner - 1, y + picture.height + inner - 1)
        draw.rectangle(corners, outline=tile.frame, width=_FRAME)
    canvas.paste(picture, (x, y))
    for number, caption in enumerate(tile.captions):
        _write_centred(draw, caption, (left, top + box[1] + _GAP // 2 + number * line), box[0], text_size)


def _font(text: str, size: int) -> Font:
    """A font that can show the text."""
    file = font_for(text)
    return ImageFont.load_default(size) if file is None else ImageFont.truetype(file, size)


def _write_centred(draw: Any, line: str, corner: tuple[int, int], width: int, text_size: int) -> None:
    font = _font(line, text_size)
    short = _shortened(drawable(line), font, width)
    draw.text((corner[0] + (width - font.getlength(short)) / 2, corner[1]), short, fill=_INK, font=font)


def _shortened(line: str, font: Font, width: int) -> str:
    """The line without its middle if it is too wide; both ends of a file name matter."""
    if font.getlength(line) <= width:
        return line
    for num_kept in range(len(line) - 1, 0, -1):
        short = f"{line[: -(-num_kept // 2)]}...{line[len(line) - num_kept // 2 :]}"
        if font.getlength(short) <= width:
            return short
    return ""


def _wrapped(text: str, font: Font, width: int) -> list[str]:
    """The words in lines of at most `width` pixels; a word that is wider alone is shortened."""
    lines: list[str] = []
    for word in text.split():
        if lines and font.getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(_shortened(word, font, width))
    return lines
