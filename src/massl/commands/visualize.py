"""Pictures of what a model sees: self-attention maps, patch correspondences, nearest neighbours."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from PIL import Image
from pydantic import Field
from torch import Tensor

from massl import distributed, keyed_random
from massl.commands.arguments import parse
from massl.commands.console import require_writable
from massl.commands.model import ModelSettings, model_on_device
from massl.config import merge, validate
from massl.data.evaluation.views import CentreView, ThumbnailView, whole_patches
from massl.data.sources import open_source
from massl.data.sources.base import DataError, ImageSource, Pixels
from massl.evaluations.features import Extractor
from massl.evaluations.protocols.attention import AttentionSettings, attention_maps, attention_size
from massl.evaluations.protocols.correspondence import (
    CorrespondenceSettings,
    correspondence_size,
    describe_pairs,
    open_points_model,
    pair_pictures,
    pairs_to_draw,
)
from massl.nn.token_readout import has_class_token, patch_size
from massl.ops.scoring.attention_maps import to_picture
from massl.ops.scoring.neighbours import cosine_topk
from massl.reports.pictures.sheets import GREEN, GREY, RED, SMALLEST_TILE, Colour, Tile, sheet, tile_side
from massl.weights.models import LoadedModel

Kind = Literal["attention", "correspondence", "neighbours"]
_ROWS_PER_SHEET = 16  # more go on further sheets, which stay small enough to open
_PAIRS = {"instance": "two views of an image", "class": "two images of a class"}
_PAIR_GAP = 4  # pixels of white between the two pictures of a pair
_CHUNK_ROWS = 1 << 16  # of the database compared at once


DESCRIPTION = """Draw what a model sees, as the paper shows it.

massl visualize runs/a attention --data photos/ --output figures"""


class VisualizeSettings(ModelSettings):
    """What is drawn, and of which images."""

    kind: tyro.conf.Positional[Kind] = Field(description="what is drawn")
    data: str = Field(description="images to draw: a folder, archive or URI, as in pretrain's --data.source")
    output: str = Field(description="folder for the pictures; those of the same name are replaced")
    num_images: int = Field(
        16, gt=0, description="images that are drawn (a keyed choice); correspondence: pairs of each kind"
    )
    image_size: int | None = Field(
        None,
        gt=0,
        description="side of the images the network sees, a multiple of its patch; default: the model's own, for attention 480 / 224 of it",
    )
    num_neighbours: int = Field(8, gt=0, description="neighbours: how many are shown of each image")
    database: str = Field(
        "", description="neighbours: among which images they are looked for; default: data, without the image itself"
    )
    points_model: str = Field(
        "", description="correspondence: whose attention chooses the drawn patches; default: the model itself"
    )
    cosine: bool = Field(False, description="correspondence: match by cosine instead of the published dot product")
    cache: str = Field(
        "", description="neighbours: folder in which features are kept for the next time; default: they are not kept"
    )
    seed: int = Field(0, description="decides which images are chosen and how their views are cut")


def visualize(
    model: str | Path,
    kind: Kind,
    *,
    data: str | Path,
    output: str | Path,
    num_images: int = 16,
    image_size: int | None = None,
    num_neighbours: int = 8,
    database: str | Path = "",
    seed: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    overrides: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Draw what a model sees in some images; returns the files written, sheets first.

    `kind` is "attention" (what each head of the class token looks at), "correspondence" (which patches of a second view
    or image are taken for those of a first) or "neighbours" (the most similar images). `model` is a run of massl, a
    weights file or a timm name; `overrides` sets what else `massl visualize --help` lists, e.g. {"cosine": True}.
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
    return run_visualization(validate(VisualizeSettings, merge(values, overrides or {}), origin="visualize"))


def main(arguments: Sequence[str]) -> int:
    for path in run_visualization(parse(VisualizeSettings, "visualize", DESCRIPTION, arguments)):
        print(path)
    return 0


def run_visualization(settings: VisualizeSettings) -> list[Path]:
    """`visualize` with all settings in one object, as the command line gives them."""
    source = open_source(settings.data)
    folder = Path(settings.output).expanduser()
    require_writable(folder)
    cache = Path(settings.cache).expanduser() if settings.cache else None
    with model_on_device(settings, cache=cache) as (extractor, _):
        return DRAWERS[settings.kind](_Job(extractor=extractor, source=source, settings=settings, folder=folder))


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What a drawer needs."""

    extractor: Extractor
    source: ImageSource
    settings: VisualizeSettings
    folder: Path

    @property
    def model(self) -> LoadedModel:
        return self.extractor.model

    def chosen_images(self) -> Tensor:
        """The images to draw, in the order of the source."""
        order = keyed_random.permutation(len(self.source), self.settings.seed, "images to draw")
        return order[: self.settings.num_images].sort().values


# ---- attention -------------------------------------------------------------------------------------------------------


def _draw_attention(job: _Job) -> list[Path]:
    """For each image a strip of itself, all heads in colours, and a heat map of each head; and all strips on sheets."""
    size = attention_size(job.model, job.settings.image_size, option="--image_size")
    strips: list[Path] = []

    def headings(row: Sequence[Tile]) -> list[str]:
        return ["image", "all heads", *(f"head {number}" for number in range(len(row) - 2))]

    def rows() -> Iterator[list[Tile]]:
        side = max(size, tile_side(size))
        for batch in attention_maps(job.extractor, job.source, job.chosen_images(), size=size):
            for number, index in enumerate(batch.indices.tolist()):
                photo, *maps = (tile.numpy() for tile in batch.tiles(number, job.model, mass=AttentionSettings().mass))
                row = [
                    Tile(picture=photo, captions=(job.source.key_of(index),)),
                    *(Tile(picture=part, smooth=False) for part in maps),
                ]
                picture = sheet([row], box=(side, side), headings=headings(row))
                strips.append(_save(picture, job.folder / "attention" / f"{len(strips):03d}.png"))
                yield row

    def page_of(rows_of_page: list[list[Tile]]) -> Image.Image:
        title = (
            f"Attention of the class token, last block: {job.model.name}. Colours: patches that hold 60 % of a head's attention, "
            "head 0 blue, 1 red, 2 yellow ...; each heat map has a scale of its own"
        )
        return sheet(
            rows_of_page, box=(tile_side(size), tile_side(size)), title=title, headings=headings(rows_of_page[0])
        )

    sheets = _save_pages(rows(), page_of, job.folder / "attention.png")
    return [*sheets, *strips]


# ---- correspondence --------------------------------------------------------------------------------------------------


def _draw_correspondence(job: _Job) -> list[Path]:
    """Pairs of views of an image, and where there are labels pairs of images of a class, with lines between matching
    patches.
    """
    num, seed = job.settings.num_images, job.settings.seed
    settings = CorrespondenceSettings(num_images=num, num_figures=num, cosine=job.settings.cosine, seed=seed)
    size = correspondence_size(job.model, job.settings.image_size, option="--image_size")
    points_model = open_points_model(job.extractor, job.settings.points_model)
    tiles: dict[str, list[Tile]] = {}
    pictures: list[Path] = []
    for batch in pairs_to_draw(job.extractor, job.source, settings, size=size):
        drawn = pair_pictures(
            batch, model=job.model, points_model=points_model, num_points=settings.num_points, gap=_PAIR_GAP
        )
        for picture, pair, description in zip(
            drawn, batch.indices.tolist(), describe_pairs(batch, job.source), strict=True
        ):
            kind = str(description["kind"])
            tile = Tile(picture=picture.numpy(), captions=_pair_captions(job.source, pair, description))
            path = job.folder / "correspondence" / f"{kind}_{len(tiles.setdefault(kind, [])):03d}.png"
            pictures.append(_save(Image.fromarray(tile.picture), path))
            tiles[kind].append(tile)
    sheets: list[Path] = []
    for kind, of_kind in tiles.items():
        chooser = "" if points_model is job.model else f" of {points_model.name}"
        title = f"Matched patches in {_PAIRS[kind]}: {job.model.name}. Drawn are those the class token{chooser} attends to most"
        height, width, _ = of_kind[0].picture.shape
        page_of = functools.partial(sheet, box=(width, height), title=title)
        sheets += _save_pages(
            (of_kind[at : at + 2] for at in range(0, len(of_kind), 2)),
            page_of,
            job.folder / f"correspondence_{kind}.png",
        )
    return [*sheets, *pictures]


def _pair_captions(source: ImageSource, pair: list[int], description: Mapping[str, object]) -> tuple[str, ...]:
    first, second = (source.key_of(index) for index in pair)
    if description["kind"] == "class":
        return (f"{_class_name(source, pair[0])}: {first} and {second}",)
    return (
        first,
        f"{description['matched exactly']} of {description['overlapping patches']} shared patches matched exactly",
    )


# ---- neighbours ------------------------------------------------------------------------------------------------------


def _draw_neighbours(job: _Job) -> list[Path]:
    """For each image its nearest neighbours by cosine, framed green where they are of its class and red where not."""
    is_own = job.settings.database in ("", job.settings.data)
    database = job.source if is_own else open_source(job.settings.database)
    chosen = job.chosen_images()
    similarities, neighbours = _nearest(job, chosen, database, is_own=is_own)

    def rows() -> Iterator[list[Tile]]:
        for start in range(0, len(chosen), _ROWS_PER_SHEET):
            page = slice(start, start + _ROWS_PER_SHEET)
            queries = _pictures(job.extractor, job.source, chosen[page])
            found = iter(_pictures(job.extractor, database, neighbours[page].flatten()))
            for query, index, near, values in zip(
                queries, chosen[page].tolist(), neighbours[page], similarities[page], strict=True
            ):
                row = [Tile(picture=query, captions=(_name(job.source, index),), frame=GREY)]
                for other, value in zip(near.tolist(), values.tolist(), strict=True):
                    captions = (f"{value:.3f}", _name(database, other))
                    row.append(
                        Tile(picture=next(found), captions=captions, frame=_verdict(job.source, index, database, other))
                    )
                yield row

    def page_of(rows_of_page: list[list[Tile]]) -> Image.Image:
        title = f"Nearest neighbours in {database.name} by cosine similarity: {job.model.name}. Green: same class, red: another"
        headings = ["image", *(str(number + 1) for number in range(neighbours.shape[1]))]
        return sheet(
            rows_of_page, box=(SMALLEST_TILE, SMALLEST_TILE), title=title, headings=headings, rule_after_first=True
        )

    return _save_pages(rows(), page_of, job.folder / "neighbours.png")


def _verdict(source: ImageSource, index: int, database: ImageSource, other: int) -> Colour:
    """Green: of one class; red: of different ones; grey: who knows."""
    names = _class_name(source, index), _class_name(database, other)
    return GREY if "" in names else GREEN if names[0] == names[1] else RED


# -> [Q, k], [Q, k] on the CPU
def _nearest(job: _Job, chosen: Tensor, database: ImageSource, *, is_own: bool) -> tuple[Tensor, Tensor]:
    """Similarities and numbers of the nearest images of the database, an image itself not being among its own."""
    num = min(job.settings.num_neighbours, len(database) - is_own)
    if num < 1:
        raise DataError(f"{database.name} holds no other image; neighbours need at least two, or a --database")
    extractor, backbone = job.extractor, job.model.backbone
    size = job.settings.image_size or job.model.image_size
    view = CentreView(
        size=whole_patches(size, patch_size(backbone), option="--image_size"), crop_ratio=job.extractor.crop_ratio
    )
    feature = extractor.chosen_feature("cls" if has_class_token(backbone) else "pooled")
    rows = extractor.features(database, view=view, feature=feature).rows
    if is_own:
        queries = rows[chosen].to(extractor.device)
    else:
        chunks = list(torch.split(chosen, extractor.settings.batch_size))
        queries = torch.cat(
            [extractor.read(batch.groups, feature) for batch in extractor.views(job.source, chunks, view=view)]
        )
    similarities, indices = nearest_rows(queries, rows, num_neighbours=num + is_own)
    if is_own:
        similarities = similarities.masked_fill(indices == chosen.to(indices.device)[:, None], -math.inf)
        similarities, places = similarities.topk(num, dim=1)
        indices = indices.gather(1, places)
    return similarities.cpu(), indices.cpu()


# [Q, D], [M, D] -> [Q, k], [Q, k]
def nearest_rows(queries: Tensor, rows: Tensor, *, num_neighbours: int) -> tuple[Tensor, Tensor]:
    """`cosine_topk` for rows that lie on the CPU and may be too many for the queries' device: they go there in chunks."""
    best_values = queries.new_empty(len(queries), 0)
    best_indices = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = rows[start : start + _CHUNK_ROWS].to(queries.device)
        values, indices = cosine_topk(queries, chunk, num_neighbours=min(num_neighbours, len(chunk)))
        values, indices = torch.cat([best_values, values], dim=1), torch.cat([best_indices, indices + start], dim=1)
        best_values, places = values.topk(min(num_neighbours, values.shape[1]), dim=1)
        best_indices = indices.gather(1, places)
    return best_values, best_indices


def _pictures(extractor: Extractor, source: ImageSource, indices: Tensor) -> list[Pixels]:  # of [H, W, 3] each
    """The images as they are, reduced where they are larger than a tile shows."""
    chunks = list(torch.split(indices, extractor.settings.batch_size))
    return [
        to_picture(image, mean=extractor.model.mean, std=extractor.model.std).cpu().numpy()
        for batch in extractor.views(source, chunks, view=ThumbnailView(max_side=2 * SMALLEST_TILE))
        for group in batch.groups
        for image in group
    ]


# ---- files -----------------------------------------------------------------------------------------------------------


def _class_name(source: ImageSource, index: int) -> str:
    label = source.label_of(index)
    return "" if label is None or source.class_names is None else source.class_names[label]


def _name(source: ImageSource, index: int) -> str:
    return _class_name(source, index) or source.key_of(index)


def _save(picture: Image.Image, path: Path) -> Path:
    if distributed.is_main():
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    return path


def _save_pages(
    rows: Iterable[list[Tile]], page_of: Callable[[list[list[Tile]]], Image.Image], path: Path
) -> list[Path]:
    """The rows on one sheet, or on several numbered ones."""
    remaining = iter(rows)
    pages: list[Path] = []
    while page := list(itertools.islice(remaining, _ROWS_PER_SHEET)):
        pages.append(_save(page_of(page), path.with_stem(f"{path.stem}_{len(pages) + 1}") if pages else path))
    return pages


DRAWERS: dict[str, Callable[[_Job], list[Path]]] = {
    "attention": _draw_attention,
    "correspondence": _draw_correspondence,
    "neighbours": _draw_neighbours,
}
