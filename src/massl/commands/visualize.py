"""Pictures of what a model sees: self-attention maps, principal components and matches of patches, neighbours."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import tyro
from PIL import Image
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from massl import distributed, keyed_random
from massl.commands.arguments import parse
from massl.commands.console import message_console, print_line, require_writable
from massl.commands.device import Device
from massl.commands.images import UnreadableLeftOut, open_images
from massl.commands.model import ModelSettings, model_on_device
from massl.commands.picture_files import save_pages, save_picture
from massl.config import merge, validate
from massl.data.keys import stored_key
from massl.data.sources.base import ImageSource
from massl.evaluations.features import Extractor
from massl.evaluations.protocols.attention import attention_size
from massl.evaluations.protocols.correspondence import CorrespondenceSettings
from massl.reports.pictures.attention import AttentionDrawing, draw_attention
from massl.reports.pictures.correspondence import draw_pairs
from massl.reports.pictures.images import class_name, whole_images
from massl.reports.pictures.neighbours import ShownImage, neighbour_rows, neighbours_of
from massl.reports.pictures.patch_colours import PURPOSE, draw_components
from massl.reports.pictures.sheets import GREEN, GREY, RED, SMALLEST_TILE, Tile, sheet, tile_side

PictureKind = Literal["attention", "pca", "correspondence", "neighbours", "neighbors"]
_PAIRS_PER_ROW = 3  # images beside their principal components
_FRAMES = {True: GREEN, False: RED, None: GREY}  # of neighbours of the same class, of another, of an unknown one
_OF_ONE_KIND = {
    "threshold": "pca",
    "num_neighbours": "neighbours",
    "database": "neighbours",
    "cache": "neighbours",
    "feature": "neighbours",
    "crop_ratio": "neighbours",
    "cosine": "correspondence",
    "points_model": "correspondence",
}
_PAIRS = {"instance": "two views of an image", "class": "two images of a class"}


DESCRIPTION = """Draw what a model sees, as the paper shows it.

massl visualize runs/a attention --data photos/ --output figures
massl visualize runs/a pca --data photos/ --output figures --threshold 0.5"""


class VisualizeSettings(ModelSettings):
    """What to draw, and of which images."""

    kind: tyro.conf.Positional[PictureKind] = Field(description="what to draw")
    data: str = Field(description="images to draw: a folder, archive or URI, as in pretrain")
    output: str = Field(description="folder for the pictures; existing ones of the same name are replaced")
    num_images: int = Field(16, gt=0, description="images to draw, chosen by seed; correspondence: pairs of each kind")
    image_size: int | None = Field(
        None,
        gt=0,
        description="side of the images, whole patches; default: the model's, for attention and pca 480 / 224 of it",
    )
    threshold: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="pca: patches whose first component, from 0 to 1, is below it are background; default: all shown",
    )
    num_neighbours: int = Field(8, gt=0, description="neighbours: how many to show of each image")
    database: str = Field("", description="neighbours: images to search; default: data, without the image itself")
    points_model: str = Field(
        "", description="correspondence: the model whose attention chooses the drawn patches; default: the model itself"
    )
    cosine: bool = Field(False, description="correspondence: match by cosine instead of the published dot product")
    cache: str = Field("", description="neighbours: folder that keeps features for the next time; default: none")
    seed: int = Field(
        0,
        ge=-keyed_random.MAX_SEED,
        le=keyed_random.MAX_SEED,
        description="decides which images are chosen and how their views are cropped",
    )

    @field_validator("kind")
    @classmethod
    def _in_one_spelling(cls, kind: PictureKind) -> PictureKind:
        return "neighbours" if kind == "neighbors" else kind

    @model_validator(mode="after")
    def _options_are_of_this_kind(self) -> Self:
        for option, kind in _OF_ONE_KIND.items():
            if kind != self.kind and getattr(self, option) != type(self).model_fields[option].default:
                raise ValueError(f"{option} has no effect on {self.kind}, only on {kind}; leave it out")
        return self

    @property
    def folder(self) -> Path:
        return Path(self.output).expanduser()


def visualize(
    model: str | Path,
    kind: PictureKind,
    *,
    data: str | Path,
    output: str | Path,
    num_images: int = 16,
    image_size: int | None = None,
    num_neighbours: int = 8,
    database: str | Path = "",
    seed: int = 0,
    device: Device = "auto",
    overrides: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Draw what a model sees in some images; returns the files written, sheets first.

    `kind` is "attention" (what each head of the class token looks at), "pca" (principal components of the patches as
    colours), "correspondence" (which patches of a second view or image are taken for those of a first) or "neighbours"
    (the most similar images). `model` is a run of massl, a weights file or a timm name; `overrides` sets what else
    `massl visualize --help` lists, e.g. {"cosine": True}.
    """
    values = {
        "model": str(model),
        "kind": kind,
        "data": str(data),
        "output": str(output),
        "num_images": num_images,
        "image_size": image_size,
        "num_neighbours": num_neighbours,
        "database": str(database),
        "seed": seed,
        "device": device,
    }
    merged = merge(values, overrides or {}, VisualizeSettings)
    return run_visualization(validate(VisualizeSettings, merged, origin="visualize"))


def main(arguments: Sequence[str]) -> int:
    for path in run_visualization(parse(VisualizeSettings, "visualize", DESCRIPTION, arguments)):
        print(path)
    return 0


def run_visualization(settings: VisualizeSettings) -> list[Path]:
    """`visualize` with all settings in one object, as the command line gives them."""
    source = open_images(settings.data, rules=settings.rules(), may_download=True)
    database = source
    if settings.kind == "neighbours" and settings.database not in ("", settings.data):
        database = open_images(settings.database, rules=settings.rules(), may_download=True)
    require_writable(settings.folder)
    cache = Path(settings.cache).expanduser() if settings.cache else None
    with model_on_device(settings, cache=cache) as (extractor, console):
        draw = functools.partial(_draw, extractor, settings)
        return UnreadableLeftOut(console).run(draw, source, *(() if database is source else (database,)))


def _draw(
    extractor: Extractor, settings: VisualizeSettings, source: ImageSource, database: ImageSource | None = None
) -> list[Path]:
    if settings.kind == "neighbours":
        return _save_neighbours(extractor, source, settings, database=source if database is None else database)
    return _DRAWERS[settings.kind](extractor, source, settings)


def _chosen_images(source: ImageSource, settings: VisualizeSettings) -> Tensor:
    """The images to draw, in the order of the source."""
    order = keyed_random.permutation(len(source), settings.seed, "images to draw")
    return order[: settings.num_images].sort().values


def _drawn_size(extractor: Extractor, settings: VisualizeSettings, *, purpose: str) -> int:
    """The side of the squares that whole images are resized to, which is said: it is not the model's own."""
    size = attention_size(extractor.model, settings.image_size, option="--image_size", purpose=purpose)
    num_patches = size // extractor.model.backbone.patch_size
    said = f"drawn at {size} x {size} px, {num_patches} x {num_patches} patches: whole images, resized to squares"
    print_line(message_console(quiet=not distributed.is_main()), said)
    return size


# ---- attention -------------------------------------------------------------------------------------------------------


def _save_attention(extractor: Extractor, source: ImageSource, settings: VisualizeSettings) -> list[Path]:
    """For each image a strip of itself, all heads in colours, and a heat map of each head; and all strips on sheets."""
    size = _drawn_size(extractor, settings, purpose="an attention map")
    title = (
        f"Attention of the class token, last block: {extractor.model.name}. Colours: patches that hold 60 % of a "
        "head's attention, head 0 blue, 1 red, 2 yellow ...; each heat map has a scale of its own"
    )
    strips: list[Path] = []

    def strip_sheet(rows: list[list[Tile]], side: int, title: str = "") -> Image.Image:
        headings = ["image", "all heads", *(f"head {number}" for number in range(len(rows[0]) - 2))]
        return sheet(rows, box=(side, side), title=title, headings=headings)

    def rows() -> Iterator[list[Tile]]:
        for drawing in draw_attention(extractor, source, _chosen_images(source, settings), size=size):
            row = _attention_tiles(drawing, stored_key(source.key_of(drawing.index)))
            picture = strip_sheet([row], max(size, tile_side(size)))
            strips.append(save_picture(picture, settings.folder / "attention" / f"{len(strips):03d}.png"))
            yield row

    page_of = functools.partial(strip_sheet, side=tile_side(size), title=title)
    return [*save_pages(rows(), page_of, settings.folder / "attention.png"), *strips]


def _attention_tiles(drawing: AttentionDrawing, caption: str) -> list[Tile]:
    maps = [head.repeat(drawing.patch, axis=0).repeat(drawing.patch, axis=1) for head in drawing.heads]
    photo = Tile(picture=drawing.photo, captions=(caption,))
    return [photo, *(Tile(picture=picture, smooth=False) for picture in (drawing.colours, *maps))]


# ---- principal components --------------------------------------------------------------------------------------------


def _save_components(extractor: Extractor, source: ImageSource, settings: VisualizeSettings) -> list[Path]:
    """Each image beside its patches, whose first three principal components are red, green and blue."""
    size = _drawn_size(extractor, settings, purpose=PURPOSE)
    chosen = _chosen_images(source, settings)
    drawn = draw_components(extractor, source, chosen, size=size, threshold=settings.threshold)
    title = (
        f"First three principal components of the patch features as red, green and blue: {extractor.model.name}. Equal "
        f"colours mean similar features, in all images. They hold {drawn.explained:.0%} of the variance"
    ).replace("%", " %")
    if settings.threshold is not None:
        title += f" of the {drawn.share_shown:.0%} of the patches that are not background".replace("%", " %")
    pairs = []
    for index, photo, colours in zip(chosen.tolist(), drawn.photos, drawn.colours, strict=True):
        photo_tile = Tile(picture=photo, captions=(stored_key(source.key_of(index)),))
        pairs.append([photo_tile, Tile(picture=colours, smooth=False)])
    box = (max(size, tile_side(size)),) * 2
    strips = [
        save_picture(sheet([pair], box=box), settings.folder / "pca" / f"{number:03d}.png")
        for number, pair in enumerate(pairs)
    ]
    rows = (list(itertools.chain(*pairs[at : at + _PAIRS_PER_ROW])) for at in range(0, len(pairs), _PAIRS_PER_ROW))
    page_of = functools.partial(sheet, box=(tile_side(size),) * 2, title=title)
    return [*save_pages(rows, page_of, settings.folder / "pca.png"), *strips]


# ---- correspondence --------------------------------------------------------------------------------------------------


def _save_correspondence(extractor: Extractor, source: ImageSource, settings: VisualizeSettings) -> list[Path]:
    """Each pair as a picture, and sheets of the pairs of an image and of the pairs of a class."""
    pairs = CorrespondenceSettings(
        num_images=settings.num_images,
        num_figures=settings.num_images,
        cosine=settings.cosine,
        points_model=settings.points_model,
        seed=settings.seed,
    )
    tiles: dict[str, list[Tile]] = {}
    pictures: list[Path] = []
    for drawing in draw_pairs(extractor, source, pairs):
        alike = tiles.setdefault(drawing.shows, [])
        path = settings.folder / "correspondence" / f"{drawing.shows}_{len(alike):03d}.png"
        pictures.append(save_picture(Image.fromarray(drawing.picture), path))
        first, second = (stored_key(source.key_of(index)) for index in drawing.images)
        both = f"{class_name(source, drawing.images[0])}: {first} and {second}"
        captions = (first, drawing.success) if drawing.shows == "instance" else (both,)
        alike.append(Tile(picture=drawing.picture, captions=captions))
    sheets: list[Path] = []
    chooser = f" of {settings.points_model}" if settings.points_model else ""
    for shows, alike in tiles.items():
        title = (
            f"Matched patches in {_PAIRS[shows]}: {extractor.model.name}. "
            f"Drawn are those the class token{chooser} attends to most"
        )
        height, width, _ = alike[0].picture.shape
        page_of = functools.partial(sheet, box=(width, height), title=title)
        rows = (alike[at : at + 2] for at in range(0, len(alike), 2))
        sheets += save_pages(rows, page_of, settings.folder / f"correspondence_{shows}.png")
    return [*sheets, *pictures]


# ---- neighbours ------------------------------------------------------------------------------------------------------


def _save_neighbours(
    extractor: Extractor, source: ImageSource, settings: VisualizeSettings, *, database: ImageSource
) -> list[Path]:
    """For each image its nearest neighbours by cosine, framed green if they are of its class and red if not."""
    chosen = _chosen_images(source, settings)
    neighbours = neighbours_of(extractor, source, chosen, database, num_neighbours=settings.num_neighbours)
    pictures = functools.partial(whole_images, extractor, max_side=2 * SMALLEST_TILE)
    page_of = functools.partial(
        sheet,
        box=(SMALLEST_TILE, SMALLEST_TILE),
        title=f"Nearest neighbours in {database.name} by cosine similarity: {extractor.model.name}"
        + (". Green: same class, red: another" if source.class_names and database.class_names else ""),
        headings=["image", *(str(number + 1) for number in range(neighbours.indices.shape[1]))],
        rule_after_first=True,
    )
    rows = itertools.starmap(_neighbour_tiles, neighbour_rows(source, chosen, database, neighbours, pictures))
    return save_pages(rows, page_of, settings.folder / "neighbours.png")


def _neighbour_tiles(query: ShownImage, found: Sequence[ShownImage]) -> list[Tile]:
    tiles = [Tile(picture=query.picture, captions=_names(query), frame=GREY)]
    for near in found:
        captions, frame = (f"{near.similarity:.3f}", *_names(near)), _FRAMES[near.same_class]
        tiles.append(Tile(picture=near.picture, captions=captions, frame=frame))
    return tiles


def _names(shown: ShownImage) -> tuple[str, ...]:
    """Class and file, or the key of an image without a class. The names may be a stranger's."""
    return tuple(stored_key(name) for name in (shown.name, shown.file) if name)


_DRAWERS: dict[PictureKind, Callable[[Extractor, ImageSource, VisualizeSettings], list[Path]]] = {
    "attention": _save_attention,
    "pca": _save_components,
    "correspondence": _save_correspondence,
}
