"""The markup of the pictures of a report: sheets, pairs, the map of the features, and a panel for each run."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined

from massl.reports.pictures.embedding_map import WIDTH, Positions, class_groups, height_of
from massl.reports.pictures.sprites import SpriteSheet

# Circle, triangle, square and diamond of about one area around 0, 0. Classes that share a shape differ in colour for
# every eye.
SHAPES = (
    "M-7 0A7 7 0 1 0 7 0A7 7 0 1 0-7 0Z",
    "M0-9.6L8.3 4.8L-8.3 4.8Z",
    "M-6.2-6.2H6.2V6.2H-6.2Z",
    "M0-8.8L8.8 0L0 8.8L-8.8 0Z",
)


@dataclass(frozen=True, kw_only=True)
class PagePicture:
    """A picture of a sheet and what stands below it."""

    uri: str
    alt: str
    captions: tuple[str, ...] = ()
    mark: Literal["", "right", "wrong"] = ""  # framed so, and said in the alternative text by whoever makes it
    sharp: bool = False  # enlarged in sharp squares: a map of patches


@dataclass(frozen=True, kw_only=True)
class EmbeddingMap:
    """Images as dots, and what is shown of the one pointed at."""

    positions: Positions  # [N, 2]
    labels: tuple[int, ...]  # empty without class names
    predictions: tuple[int, ...]  # of the k-NN classifier; empty without class names
    class_names: tuple[str, ...] | None
    keys: tuple[str, ...]  # names of the images
    sprites: SpriteSheet


def style_text() -> str:
    return _page_file("figures_pictures.css")


def script_text() -> str:
    return _page_file("figures_pictures.js")


def sheet_markup(
    rows: Sequence[Sequence[PagePicture]], *, headings: Sequence[str], first_is_apart: bool = False
) -> str:
    """Pictures in rows and columns; on a narrow screen they scroll inside their box."""
    return _render("figures_sheet.html.j2", rows=rows, headings=headings, first_is_apart=first_is_apart)


def pairs_markup(kinds: Mapping[str, Sequence[PagePicture]]) -> str:
    """Wide pictures under a heading for each kind, as many beside each other as there is room for."""
    return _render("figures_pairs.html.j2", kinds=kinds)


def map_markup(drawn: EmbeddingMap, *, title: str) -> str:
    """The map as it is printed; the script adds what happens when a dot is pointed at."""
    groups = class_groups(drawn.labels or (0,) * len(drawn.keys), drawn.class_names)
    is_wrong = [label != guess for label, guess in zip(drawn.labels, drawn.predictions, strict=True)] or [False] * len(
        drawn.keys
    )
    facts = {
        "order": [number for group in groups for number in group.images],
        "keys": drawn.keys,
        "labels": drawn.labels,
        "predictions": drawn.predictions,
        "names": drawn.class_names or (),
        "side": drawn.sprites.side,
        "columns": drawn.sprites.num_columns,
        "sprite": sprite_id(drawn.sprites),
    }
    legend = [
        {
            "name": group.name,
            "look": "other" if group.style is None else group.style,
            "shape": 0 if group.style is None else group.style % len(SHAPES),
            "dots": [(*drawn.positions[number].tolist(), is_wrong[number]) for number in group.images],
            "right": f"{sum(not is_wrong[number] for number in group.images) / len(group.images):.0%}".replace(
                "%", " %"
            ),
        }
        for group in groups
    ]
    return _render(
        "figures_map.html.j2",
        groups=legend,
        facts=facts,
        title=title,
        width=WIDTH,
        height=height_of(drawn.positions),
        has_labels=bool(drawn.labels),
        num_wrong=sum(is_wrong),
    )


def sprite_id(sprites: SpriteSheet) -> str:
    """The same for maps of the same images, which share the file."""
    return f"fig-sprite-{hashlib.sha256(sprites.uri.encode()).hexdigest()[:12]}"


def sprites_markup(sheets: Sequence[SpriteSheet]) -> str:
    """What all maps of a section take their pictures from: each sheet once, and the shapes of the dots."""
    return _render("figures_sprites.html.j2", sprites={sprite_id(sheet): sheet.uri for sheet in sheets}, shapes=SHAPES)


def panels_markup(panels: Mapping[str, str], *, note: str) -> str:
    """Run -> its ready markup. Of several runs a selector shows one at a time; on paper and without a script all follow
    each other.
    """
    return _render("figures_panels.html.j2", panels=panels, note=note)


def sentence_markup(sentence: str) -> str:
    return _render("figures_sentence.html.j2", sentence=sentence)


def _render(template: str, **values: object) -> str:
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("massl.reports.page", "assets"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.policies["json.dumps_function"] = _dense_json
    environment.policies["json.dumps_kwargs"] = {}
    return environment


def _dense_json(values: object) -> str:
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False)


def _page_file(name: str) -> str:
    return (resources.files("massl.reports.page") / "assets" / name).read_text(encoding="utf-8")
