"""The pictures of runs: how features lie in the plane, and what backbones find similar, attend to and match."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from massl.config import MasslError
from massl.data.sources.base import Pixels
from massl.evaluations.protocols.attention import attention_size
from massl.evaluations.protocols.correspondence import CorrespondenceSettings
from massl.nn.token_readout import UnsuitableModel
from massl.reports.page.pictures import (
    EmbeddingMap,
    Mark,
    PagePicture,
    map_markup,
    pairs_markup,
    panels_markup,
    sentence_markup,
    sheet_markup,
    sprites_markup,
)
from massl.reports.page.templates import Section, asset
from massl.reports.pictures.attention import draw_attention
from massl.reports.pictures.correspondence import draw_pairs
from massl.reports.pictures.embedding_map import plane_positions
from massl.reports.pictures.images import centre_crops, image_name
from massl.reports.pictures.neighbours import Neighbours, ShownImage, neighbour_rows
from massl.reports.pictures.patch_colours import PURPOSE, draw_components
from massl.reports.pictures.run_features import RunFeatures
from massl.reports.pictures.sprites import SpriteSheet, exact_uri, photo_uri, sprite_sheet

_NUM_QUERIES, _NUM_SHOWN = 10, 8  # rows of the sheet of neighbours, and how many are shown of each
_NUM_LINES = 8  # of a pair: more cannot be followed
_NUM_ATTENDED, _NUM_PAIRS = 6, 4  # images with attention maps; pairs of views, and of images of a class
_NUM_COLOURED, _PAIRS_PER_ROW = 12, 4  # images beside the principal components of their patches
_THUMBNAIL_SIDE, _TILE_SIDE, _PAIR_WIDTH = 64, 96, 460  # pixels at most: of a dot's image, of a tile, of a pair
_SPRITE_BYTES, _ALL_SPRITES_BYTES, _FEWEST_SPRITE_BYTES = 2_400_000, 5_000_000, 400_000  # of one map, of all maps
_PAIRS = {"instance": "Two views of an image", "class": "Two images of a class"}
_VERDICTS: dict[bool | None, tuple[Mark, str, str]] = {  # on neighbours: frame, sign and words
    True: ("right", "✓ ", ", same class"),
    False: ("wrong", "✗ ", ", another class"),
    None: ("", "", ""),
}

EXPECTED_FAILURES = (MasslError, OSError, torch.OutOfMemoryError)  # reported on the page; anything else is a bug


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A picture of one run, ready for the page."""

    markup: str
    sprites: SpriteSheet | None = None
    is_suitable: bool = True  # False: the network cannot have this picture, e.g. a ResNet attention maps


@dataclass(frozen=True, kw_only=True)
class PictureKind:
    """A row of the table of pictures."""

    title: str
    note: str
    draw: Callable[[RunFeatures, int], Drawn]  # (run, bytes allowed for its thumbnails)


def draw_pictures(run: RunFeatures, *, num_runs: int) -> dict[str, Drawn]:
    """Every kind of picture of one run, or a sentence that says why it cannot be drawn."""
    sprite_bytes = max(_FEWEST_SPRITE_BYTES, min(_SPRITE_BYTES, _ALL_SPRITES_BYTES // num_runs))
    drawn = {}
    for kind, entry in PICTURES.items():
        try:
            drawn[kind] = entry.draw(run, sprite_bytes)
        except UnsuitableModel as error:
            drawn[kind] = replace(failure("Not drawn", error), is_suitable=False)
        except EXPECTED_FAILURES as error:
            drawn[kind] = failure("Not drawn", error)
    return drawn


def failure(beginning: str, error: BaseException, *, advice: str = "") -> Drawn:
    """A sentence in place of a picture."""
    return Drawn(markup=sentence_markup(f"{beginning}: {' '.join(str(error).split()).rstrip('.')}{advice}."))


def picture_sections(drawn: Mapping[str, Mapping[str, Drawn] | Drawn]) -> list[Section]:
    """One section per kind of picture that suits any of the networks, with a selector if there are several runs.

    `drawn`: label of a run -> its pictures by kind, or one sentence in place of them all.
    """
    unopened = {name: of_run for name, of_run in drawn.items() if isinstance(of_run, Drawn)}
    if len(unopened) == len(drawn):
        return [_section("figures", "Pictures", unopened, note="")]
    sections = []
    for kind, entry in PICTURES.items():
        of_kind = {name: of_run if isinstance(of_run, Drawn) else of_run[kind] for name, of_run in drawn.items()}
        if any(part.is_suitable for part in of_kind.values()):
            sections.append(_section(kind, entry.title, of_kind, note=entry.note))
    return sections


def _section(section_id: str, title: str, drawn: Mapping[str, Drawn], *, note: str) -> Section:
    sheets = [part.sprites for part in drawn.values() if part.sprites is not None]
    before = sprites_markup(sheets) if sheets else ""
    panels = panels_markup({name: part.markup for name, part in drawn.items()}, note=note)
    style, script = asset("figures_pictures.css"), asset("figures_pictures.js")
    return Section(id=section_id, title=title, html=before + panels, style=style, script=script)


def _draw_map(run: RunFeatures, sprite_bytes: int) -> Drawn:
    queries = run.sample.queries
    positions = plane_positions(run.query_rows.numpy())
    thumbnails = centre_crops(run.extractor, queries, torch.arange(len(queries)), max_side=_THUMBNAIL_SIDE)
    drawn = EmbeddingMap(
        positions=positions,
        labels=tuple(run.labels),
        predictions=tuple(run.predictions),
        class_names=queries.class_names,
        keys=tuple(map(queries.key_of, range(len(queries)))),
        sprites=sprite_sheet(thumbnails, max_bytes=sprite_bytes),
    )
    said = f"{len(queries):,} images of {queries.name}."
    if drawn.labels:
        num_wrong = sum(label != guess for label, guess in zip(drawn.labels, drawn.predictions, strict=True))
        said += (
            f" Outlined are the {num_wrong:,} ({num_wrong / len(queries):.1%}) whose class the k-NN classifier misses "
            f"(k = {run.neighbours.indices.shape[1]}, among {run.sample.database_in_words})."
        ).replace("%", " %")
    else:
        said += " Without labels, thumbnails are drawn where there is room; every other image is a grey dot."
    markup = sentence_markup(said) + map_markup(drawn, title=f"Map of the features: {said}")
    return Drawn(markup=markup, sprites=drawn.sprites)


def _draw_neighbours(run: RunFeatures, sprite_bytes: int) -> Drawn:
    chosen = run.examples(_NUM_QUERIES)
    similarities, indices = run.neighbours.similarities[chosen], run.neighbours.indices[chosen]
    shown = Neighbours(similarities=similarities[:, :_NUM_SHOWN], indices=indices[:, :_NUM_SHOWN])
    pictures = functools.partial(centre_crops, run.extractor, max_side=_TILE_SIDE)
    rows = [
        [
            _photo(query.picture, max_side=_TILE_SIDE, alt=f"query: {query.name}", captions=(query.name,)),
            *map(_neighbour, found),
        ]
        for query, found in neighbour_rows(run.sample.queries, chosen, run.sample.database, shown, pictures)
    ]
    headings = ["image", *(str(number + 1) for number in range(shown.indices.shape[1]))]
    said = f"Searched among {run.sample.database_in_words}."
    return Drawn(markup=sentence_markup(said) + sheet_markup(rows, headings=headings, first_is_apart=True))


def _neighbour(near: ShownImage) -> PagePicture:
    mark, sign, verdict = _VERDICTS[near.same_class]
    return PagePicture(
        uri=photo_uri(near.picture, max_side=_TILE_SIDE),
        alt=f"{near.name}{verdict}, similarity {near.similarity:.3f}",
        captions=(f"{sign}{near.name}", f"{near.similarity:.3f}"),
        mark=mark,
    )


def _draw_attention(run: RunFeatures, sprite_bytes: int) -> Drawn:
    extractor, queries = run.extractor, run.sample.queries
    size = attention_size(extractor.model, None, option="size")
    rows = []
    for drawing in draw_attention(extractor, queries, run.examples(_NUM_ATTENDED), size=size):
        name, max_side = image_name(queries, drawing.index), 2 * _TILE_SIDE
        rows.append(
            [
                _photo(drawing.photo, max_side=max_side, alt=name, captions=(name,)),
                _photo(drawing.colours, max_side=max_side, alt=f"{name}: the strongest head of each patch"),
                _heat_map(drawing.mean, alt=f"{name}: mean attention of all heads"),
                *(_heat_map(head, alt=f"{name}: attention of head {n}") for n, head in enumerate(drawing.heads)),
            ]
        )
    headings = ["image", "all heads", "mean", *(f"head {number}" for number in range(len(rows[0]) - 3))]
    return Drawn(markup=sheet_markup(rows, headings=headings))


def _draw_components(run: RunFeatures, sprite_bytes: int) -> Drawn:
    extractor, queries = run.extractor, run.sample.queries
    size = attention_size(extractor.model, None, option="size", purpose=PURPOSE)
    chosen = run.examples(_NUM_COLOURED)
    drawn = draw_components(extractor, queries, chosen, size=size)
    pairs = []
    for index, photo, colours in zip(chosen.tolist(), drawn.photos, drawn.colours, strict=True):
        name = image_name(queries, index)
        pairs.append(
            [
                _photo(photo, max_side=2 * _TILE_SIDE, alt=name, captions=(name,)),
                _heat_map(colours, alt=f"{name}: principal components of its patches as colours"),
            ]
        )
    num_pairs = min(_PAIRS_PER_ROW, len(pairs))
    rows = [[tile for pair in pairs[at : at + num_pairs] for tile in pair] for at in range(0, len(pairs), num_pairs)]
    said = f"The three components hold {drawn.explained:.0%} of the variance of the patches shown.".replace("%", " %")
    return Drawn(markup=sentence_markup(said) + sheet_markup(rows, headings=["image", "patches"] * num_pairs))


def _draw_correspondence(run: RunFeatures, sprite_bytes: int) -> Drawn:
    queries = run.sample.queries
    settings = CorrespondenceSettings(num_images=_NUM_PAIRS, num_figures=_NUM_PAIRS, num_points=_NUM_LINES)
    groups: dict[str, list[PagePicture]] = {}
    for drawing in draw_pairs(run.extractor, queries, settings):
        heading, name = _PAIRS[drawing.shows], image_name(queries, drawing.images[0])
        alt = f"{heading.lower()}, {name}, with lines between matched patches"
        captions = (name, drawing.success) if drawing.success else (name,)
        groups.setdefault(heading, []).append(_photo(drawing.picture, max_side=_PAIR_WIDTH, alt=alt, captions=captions))
    return Drawn(markup=pairs_markup(groups))


def _photo(picture: Pixels, *, max_side: int, alt: str, captions: tuple[str, ...] = ()) -> PagePicture:
    return PagePicture(uri=photo_uri(picture, max_side=max_side), alt=alt, captions=captions)


def _heat_map(picture: Pixels, *, alt: str) -> PagePicture:
    return PagePicture(uri=exact_uri(picture), alt=alt, sharp=True)


PICTURES: dict[str, PictureKind] = {
    "embedding-map": PictureKind(
        title="Map of the features",
        note="Images with similar features lie close together (PCA, then t-SNE). Distances between far groups and the "
        "sizes of groups mean little.",
        draw=_draw_map,
    ),
    "neighbours": PictureKind(
        title="Nearest neighbours",
        note="The most similar images by the cosine of their features, nearest first.",
        draw=_draw_neighbours,
    ),
    "attention": PictureKind(
        title="Attention maps",
        note="What the class token attends to in the last block. All heads: each patch in the colour of its strongest "
        "head; each other map has a scale of its own, from violet (least) to yellow (most).",
        draw=_draw_attention,
    ),
    "components": PictureKind(
        title="Patch PCA",
        note="The first three principal components of the patch features as red, green and blue, computed over all "
        "these images together: equal colours mean similar features, also in different images.",
        draw=_draw_components,
    ),
    "correspondence": PictureKind(
        title="Matched patches",
        note="Lines join the patches that the class token attends to most with their matches in the second picture, "
        "by the similarity of the features.",
        draw=_draw_correspondence,
    ),
}
