"""The pictures of a report: how the features of runs lie in the plane, and what their backbones find similar, attend to
and match.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from massl.commands.report.figure_model import Device, FigureSubject, opened_subject
from massl.config import MasslError
from massl.data.sources.base import DataError, ImageSource
from massl.evaluations.protocols.attention import attention_maps, attention_size
from massl.evaluations.protocols.correspondence import (
    CorrespondenceSettings,
    correspondence_size,
    describe_pairs,
    open_points_model,
    pair_pictures,
    pairs_to_draw,
)
from massl.ops.scoring.attention_maps import colour_map, heat_map, to_picture
from massl.reports.page.section import Section
from massl.reports.page.sections.figures import (
    EmbeddingMap,
    PagePicture,
    map_markup,
    pairs_markup,
    panels_markup,
    script_text,
    sentence_markup,
    sheet_markup,
    sprites_markup,
    style_text,
)
from massl.reports.pictures.embedding_map import plane_positions
from massl.reports.pictures.sprites import SpriteSheet, exact_uri, photo_uri, sprite_sheet

NUM_IMAGES = 1500  # dots of a map
_NUM_QUERIES, _NUM_SHOWN = 10, 8  # rows of the sheet of neighbours, and how many are shown of each
_NUM_ATTENDED, _NUM_PAIRS = 6, 4  # images with maps of attention; pairs of each kind
# pixels at most: of a dot's image, of a picture on a sheet, of a pair
_THUMBNAIL_SIDE, _TILE_SIDE, _PAIR_WIDTH = 64, 96, 460
# as they stand in the page: of one map, of all
_SPRITE_BYTES, _ALL_SPRITES_BYTES, _FEWEST_SPRITE_BYTES = 2_400_000, 5_000_000, 400_000
_PAIRS = {"instance": "Two views of an image", "class": "Two images of a class"}
_PAIR_GAP = 4  # pixels between the two pictures of a pair
_MENDABLE = (MasslError, OSError, torch.OutOfMemoryError)  # what becomes a sentence; anything else is a bug


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """A picture of one run, ready for the page."""

    markup: str
    sprites: SpriteSheet | None = None


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A row of the table of pictures."""

    title: str
    note: str
    draw: Callable[[FigureSubject, int], _Drawn]  # (run, bytes for its thumbnails)


def figures_of(
    runs: Mapping[str, Path],  # name on the page -> folder
    *,
    data: str | None = None,
    device: Device = "auto",
    num_images: int = NUM_IMAGES,
) -> list[Section]:
    """One section for each kind of picture, with a selector where there are several runs. What cannot be drawn is a
    sentence there.

    The images are those that the probe of training classified, or `data`. Runs on the same images show the same choice
    of them.
    """
    sprite_bytes = max(_FEWEST_SPRITE_BYTES, min(_SPRITE_BYTES, _ALL_SPRITES_BYTES // max(1, len(runs))))
    drawn: dict[str, dict[str, _Drawn]] = {kind: {} for kind in KINDS}
    unopened: dict[str, str] = {}  # run -> why there are no pictures of it
    for name, folder in runs.items():
        try:
            with opened_subject(folder, data=data, device=device, num_images=num_images) as subject:
                for kind, entry in KINDS.items():
                    drawn[kind][name] = _drawn_or_said(entry, subject, sprite_bytes)
        except _MENDABLE as error:
            advice = "; other images can be named with --data" if isinstance(error, DataError) else ""
            unopened[name] = _sentence("No pictures", error, advice=advice)
    if len(unopened) == len(runs):
        return [
            _section(
                "figures",
                "Pictures",
                {name: _Drawn(markup=sentence_markup(said)) for name, said in unopened.items()},
                note="",
            )
        ]
    for of_kind in drawn.values():
        of_kind.update({name: _Drawn(markup=sentence_markup(said)) for name, said in unopened.items()})
    return [
        # in the order of the runs
        _section(kind, entry.title, {name: drawn[kind][name] for name in runs}, note=entry.note)
        for kind, entry in KINDS.items()
    ]


def _drawn_or_said(kind: _Kind, subject: FigureSubject, sprite_bytes: int) -> _Drawn:
    try:
        return kind.draw(subject, sprite_bytes)
    except _MENDABLE as error:
        return _Drawn(markup=sentence_markup(_sentence("Not drawn", error)))


def _sentence(beginning: str, error: BaseException, *, advice: str = "") -> str:
    return f"{beginning}: {' '.join(str(error).split()).rstrip('.')}{advice}."


def _section(kind: str, title: str, drawn: Mapping[str, _Drawn], *, note: str) -> Section:
    sheets = [part.sprites for part in drawn.values() if part.sprites is not None]
    before = sprites_markup(sheets) if sheets else ""
    panels = panels_markup({name: part.markup for name, part in drawn.items()}, note=note)
    return Section(id=kind, title=title, html=before + panels, style=style_text(), script=script_text())


# ---- the map ---------------------------------------------------------------------------------------------------------


def _draw_map(subject: FigureSubject, sprite_bytes: int) -> _Drawn:
    queries = subject.sample.queries
    positions = plane_positions(subject.query_rows.numpy())
    thumbnails = subject.thumbnails(queries, torch.arange(len(queries)), max_side=_THUMBNAIL_SIDE)
    drawn = EmbeddingMap(
        positions=positions,
        labels=tuple(subject.labels),
        predictions=tuple(subject.predictions),
        class_names=queries.class_names,
        keys=tuple(map(queries.key_of, range(len(queries)))),
        sprites=sprite_sheet(thumbnails, max_bytes=sprite_bytes),
    )
    said = f"{len(queries):,} images of {queries.name}."
    if drawn.labels:
        num_wrong = sum(label != guess for label, guess in zip(drawn.labels, drawn.predictions, strict=True))
        said += (
            f" Outlined are the {num_wrong:,} ({num_wrong / len(queries):.1%}) whose class the k-NN classifier misses "
            f"(k = {subject.neighbours.indices.shape[1]}, among {_database_in_words(subject)})."
        ).replace("%", " %")
    title = f"Map of the features: {said}"
    return _Drawn(markup=sentence_markup(said) + map_markup(drawn, title=title), sprites=drawn.sprites)


def _database_in_words(subject: FigureSubject) -> str:
    database = subject.sample.database
    return (
        f"{len(database) - 1:,} other images"
        if subject.sample.is_own
        else f"{len(database):,} images of {database.name}"
    )


# ---- neighbours ------------------------------------------------------------------------------------------------------


def _draw_neighbours(subject: FigureSubject, sprite_bytes: int) -> _Drawn:
    queries, database = subject.sample.queries, subject.sample.database
    chosen = subject.examples(_NUM_QUERIES)
    similarities, indices = (
        part[chosen, :_NUM_SHOWN] for part in (subject.neighbours.similarities, subject.neighbours.indices)
    )
    query_pictures = subject.thumbnails(queries, chosen, max_side=_TILE_SIDE)
    found = iter(subject.thumbnails(database, indices.flatten(), max_side=_TILE_SIDE))
    rows = []
    for picture, query, near, values in zip(
        query_pictures, chosen.tolist(), indices.tolist(), similarities.tolist(), strict=True
    ):
        name = _name(queries, query)
        row = [PagePicture(uri=photo_uri(picture, max_side=_TILE_SIDE), alt=f"query: {name}", captions=(name,))]
        for other, value in zip(near, values, strict=True):
            uri = photo_uri(next(found), max_side=_TILE_SIDE)
            row.append(
                _neighbour(uri, _name(database, other), value, is_right=_is_same_class(queries, query, database, other))
            )
        rows.append(row)
    headings = ["image", *(str(number + 1) for number in range(indices.shape[1]))]
    said = f"Looked for among {_database_in_words(subject)}."
    return _Drawn(markup=sentence_markup(said) + sheet_markup(rows, headings=headings, first_is_apart=True))


def _neighbour(uri: str, name: str, similarity: float, *, is_right: bool | None) -> PagePicture:
    if is_right is None:
        return PagePicture(uri=uri, alt=f"{name}, similarity {similarity:.3f}", captions=(name, f"{similarity:.3f}"))
    sign, verdict = ("✓", "same class") if is_right else ("✗", "another class")
    return PagePicture(
        uri=uri,
        alt=f"{name}, {verdict}, similarity {similarity:.3f}",
        captions=(f"{sign} {name}", f"{similarity:.3f}"),
        mark="right" if is_right else "wrong",
    )


def _is_same_class(source: ImageSource, index: int, database: ImageSource, other: int) -> bool | None:
    return None if source.class_names is None else source.label_of(index) == database.label_of(other)


def _name(source: ImageSource, index: int) -> str:
    """The class of an image, or where there is none its key."""
    label = source.label_of(index)
    return source.key_of(index) if label is None or source.class_names is None else source.class_names[label]


# ---- attention -------------------------------------------------------------------------------------------------------


def _draw_attention(subject: FigureSubject, sprite_bytes: int) -> _Drawn:
    extractor, queries = subject.extractor, subject.sample.queries
    size = attention_size(extractor.model, None, option="size")
    rows = []
    for batch in attention_maps(extractor, queries, subject.examples(_NUM_ATTENDED), size=size):
        photos = to_picture(batch.views, mean=extractor.model.mean, std=extractor.model.std).cpu()
        for index, view, photo, maps in zip(batch.indices.tolist(), batch.views, photos, batch.maps, strict=True):
            name, patch = _name(queries, index), size // maps.shape[1]
            colours = colour_map(view, maps, patch=patch).cpu().numpy()
            heads = {f"head {number}": head for number, head in enumerate(maps)}
            rows.append(
                [
                    PagePicture(uri=photo_uri(photo.numpy(), max_side=2 * _TILE_SIDE), alt=name, captions=(name,)),
                    PagePicture(
                        uri=photo_uri(colours, max_side=2 * _TILE_SIDE), alt=f"{name}: the strongest head of each patch"
                    ),
                    _heat(maps.mean(dim=0), alt=f"{name}: mean attention of all heads"),
                    *(_heat(head, alt=f"{name}: attention of {title}") for title, head in heads.items()),
                ]
            )
    return _Drawn(
        markup=sheet_markup(
            rows, headings=["image", "all heads", "mean", *(f"head {n}" for n in range(len(rows[0]) - 3))]
        )
    )


def _heat(attention: Tensor, *, alt: str) -> PagePicture:  # [h, w]
    return PagePicture(uri=exact_uri(heat_map(attention, patch=1).cpu().numpy()), alt=alt, sharp=True)


# ---- correspondence --------------------------------------------------------------------------------------------------


def _draw_correspondence(subject: FigureSubject, sprite_bytes: int) -> _Drawn:
    model, queries = subject.extractor.model, subject.sample.queries
    settings = CorrespondenceSettings(num_images=_NUM_PAIRS, num_figures=_NUM_PAIRS)
    size = correspondence_size(model, None, option="size")
    points_model = open_points_model(subject.extractor, "")
    kinds: dict[str, list[PagePicture]] = {}
    for batch in pairs_to_draw(subject.extractor, queries, settings, size=size):
        pictures = pair_pictures(
            batch, model=model, points_model=points_model, num_points=settings.num_points, gap=_PAIR_GAP
        )
        for picture, pair, facts in zip(pictures, batch.indices.tolist(), describe_pairs(batch, queries), strict=True):
            kind, name = _PAIRS[str(facts["kind"])], _name(queries, pair[0])
            alt = f"{kind.lower()}, {name}, with lines between matched patches"
            uri = photo_uri(picture.numpy(), max_side=_PAIR_WIDTH)
            kinds.setdefault(kind, []).append(PagePicture(uri=uri, alt=alt, captions=(name, *_success(facts))))
    return _Drawn(markup=pairs_markup(kinds))


def _success(facts: Mapping[str, object]) -> tuple[str, ...]:
    """Of two views of an image it is known which patches are the same."""
    if facts["kind"] != "instance":
        return ()
    return (f"{facts['matched exactly']} of {facts['overlapping patches']} shared patches matched exactly",)


KINDS: dict[str, _Kind] = {
    "embedding-map": _Kind(
        title="Map of the features",
        note="Each dot is an image; images with similar features lie close together (PCA, then t-SNE). Distances between far groups "
        "and the sizes of groups mean little.",
        draw=_draw_map,
    ),
    "neighbours": _Kind(
        title="Nearest neighbours",
        note="The most similar images by the cosine of their features, nearest first.",
        draw=_draw_neighbours,
    ),
    "attention": _Kind(
        title="Attention maps",
        note="What the class token attends to in the last block. All heads: each patch in the colour of its strongest head; each other "
        "map has a scale of its own, from violet (least) to yellow (most).",
        draw=_draw_attention,
    ),
    "correspondence": _Kind(
        title="Matched patches",
        note="Lines join the patches the class token attends to most with those that the features take for the same in the second picture.",
        draw=_draw_correspondence,
    ),
}
