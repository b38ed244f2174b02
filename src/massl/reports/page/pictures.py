"""Pictures as markup: sheets, pairs, the map of the features, and a panel for each run."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from markupsafe import Markup

from massl.reports.page.templates import rendered
from massl.reports.pictures.embedding_map import THUMBNAIL, WIDTH, Positions, class_groups, height_of, with_room
from massl.reports.pictures.sprites import SpriteSheet

Mark = Literal["", "right", "wrong"]
# Circle, triangle, square and diamond of about one area around 0, 0. Everybody can tell the colours of classes with
# the same shape apart, also colour-blind readers.
SHAPES = (
    "M-7 0A7 7 0 1 0 7 0A7 7 0 1 0-7 0Z",
    "M0-9.6L8.3 4.8L-8.3 4.8Z",
    "M-6.2-6.2H6.2V6.2H-6.2Z",
    "M0-8.8L8.8 0L0 8.8L-8.8 0Z",
)


@dataclass(frozen=True, kw_only=True)
class PagePicture:
    """A picture of a sheet and its captions."""

    uri: str
    alt: str
    captions: tuple[str, ...] = ()
    mark: Mark = ""  # its frame; the alternative text must say it too
    sharp: bool = False  # enlarged in sharp squares: a map of patches


@dataclass(frozen=True, kw_only=True)
class EmbeddingMap:
    """Images as dots, without labels as thumbnails where there is room, and what is shown of the one pointed at."""

    positions: Positions  # [N, 2]
    labels: tuple[int, ...]  # empty without class names
    predictions: tuple[int, ...]  # of the k-NN classifier; empty without class names
    class_names: tuple[str, ...] | None
    keys: tuple[str, ...]  # names of the images
    sprites: SpriteSheet


def sheet_markup(
    rows: Sequence[Sequence[PagePicture]], *, headings: Sequence[str], first_is_apart: bool = False
) -> Markup:
    """Pictures in rows and columns; on a narrow screen they scroll inside their box."""
    return rendered("figures_sheet.html.j2", {"rows": rows, "headings": headings, "first_is_apart": first_is_apart})


def pairs_markup(groups: Mapping[str, Sequence[PagePicture]]) -> Markup:
    """Heading -> wide pictures below it, as many side by side as there is room for."""
    return rendered("figures_pairs.html.j2", {"kinds": groups})


def map_markup(drawn: EmbeddingMap, *, title: str) -> Markup:
    """The map as it is printed; the script shows the image that the reader points at."""
    groups = class_groups(drawn.labels or (0,) * len(drawn.keys), drawn.class_names)
    wrong = [label != guess for label, guess in zip(drawn.labels, drawn.predictions, strict=True)]
    is_wrong = wrong or [False] * len(drawn.keys)
    facts: dict[str, Any] = {
        "order": [number for group in groups for number in group.images],
        "keys": drawn.keys,
        "labels": drawn.labels,
        "predictions": drawn.predictions,
        "names": drawn.class_names or (),
        "side": drawn.sprites.side,
        "columns": drawn.sprites.num_columns,
        "sprite": _sprite_id(drawn.sprites),
        "thumbnail": THUMBNAIL,
        "thumbnails": [] if drawn.labels else with_room(drawn.positions),
    }
    legend = []
    for group in groups:
        share_right = sum(not is_wrong[number] for number in group.images) / len(group.images)
        legend.append(
            {
                "name": group.name,
                "look": "other" if group.style is None else group.style,
                "shape": 0 if group.style is None else group.style % len(SHAPES),
                "dots": [(*drawn.positions[number].tolist(), is_wrong[number]) for number in group.images],
                "right": f"{share_right:.0%}".replace("%", " %"),
            }
        )
    values = {
        "groups": legend,
        "facts": facts,
        "title": title,
        "width": WIDTH,
        "height": height_of(drawn.positions),
        "has_labels": bool(drawn.labels),
        "num_wrong": sum(is_wrong),
        "thumbnail": THUMBNAIL,
        "thumbnails": [_thumbnail(drawn, number) for number in facts["thumbnails"]],
    }
    return rendered("figures_map.html.j2", values)


def _thumbnail(drawn: EmbeddingMap, number: int) -> tuple[int, int, str]:
    """Left and top in the drawing, and the part of the sheet that shows the image."""
    sprites, (x, y) = drawn.sprites, drawn.positions[number].tolist()
    row, column = divmod(number, sprites.num_columns)
    part = f"{column * sprites.side} {row * sprites.side} {sprites.side} {sprites.side}"
    return x - THUMBNAIL // 2, y - THUMBNAIL // 2, part


def _sprite_id(sprites: SpriteSheet) -> str:
    """Equal for maps of the same images, which share the file."""
    return f"fig-sprite-{hashlib.sha256(sprites.uri.encode()).hexdigest()[:12]}"


def sprites_markup(sheets: Sequence[SpriteSheet]) -> Markup:
    """The pictures of all maps of a section, each sheet once, and the shapes of the dots."""
    sprites = {_sprite_id(sheet): sheet for sheet in sheets}
    return rendered("figures_sprites.html.j2", {"sprites": sprites, "shapes": SHAPES})


def panels_markup(panels: Mapping[str, str], *, note: str) -> Markup:
    """Label of a run -> its markup. A selector shows one of several runs; in print and without a script all show."""
    return rendered("figures_panels.html.j2", {"panels": panels, "note": note})


def sentence_markup(sentence: str) -> Markup:
    return rendered("figures_sentence.html.j2", {"sentence": sentence})
