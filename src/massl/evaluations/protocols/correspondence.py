"""Sparse correspondence (iBOT, Zhou et al., 2022): matching patches of two views of an image, or images of a class."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from massl import distributed, keyed_random
from massl.config import Settings
from massl.data.evaluation.views import SquareView, whole_patches
from massl.data.sources.base import ImageSource
from massl.data.views import ViewSettings, draw_parameters, make_views
from massl.evaluations.base import EvaluationData, ProtocolEntry, labels_of_images, require_finite
from massl.evaluations.features import Extractor
from massl.evaluations.measurement import EvaluationError, Measurement, Setting
from massl.evaluations.protocols.attention import save_captions, save_picture
from massl.keyed_random import Key
from massl.nn.token_readout import UnsuitableModel, class_attention, has_class_token, require_patches
from massl.ops.image_ops import normalise
from massl.ops.scoring.attention_maps import to_picture
from massl.ops.scoring.correspondence import (
    match_patches,
    match_picture,
    most_attended,
    overlap_mask,
    patch_centres,
    share_by_chance,
    share_within,
    true_matches,
)
from massl.weights.models import LoadedModel, open_model

_SMALLEST_PICTURE = 160  # side in pixels below which a drawn view is enlarged


class CorrespondenceSettings(Settings):
    num_images: int = Field(1000, gt=0, description="most test images whose views are matched, chosen by key")
    radii: tuple[int, ...] = Field((0, 1, 2), min_length=1, description="a match within so many patches counts")
    size: int | None = Field(None, gt=0, description="side of the views in pixels; default: that of the model's images")
    cosine: bool = Field(False, description="match by cosine instead of the published dot product")
    num_points: int = Field(12, gt=0, description="drawn matches: those of the patches with the most attention")
    points_model: str = Field(
        "",
        description="whose attention chooses the drawn patches; default: the model itself; published: DINO's ViT-B/8 "
        "for every model",
    )
    num_figures: int = Field(8, ge=0, description="pairs that are drawn, of each kind")
    seed: int = Field(
        1, ge=-keyed_random.MAX_SEED, le=keyed_random.MAX_SEED, description="decides images, views and pairs"
    )


@dataclass(frozen=True, kw_only=True)
class PairBatch:
    """Pairs of views, and the patch of the second that matches each patch of the first."""

    indices: Tensor  # [B, 2] of the images in the source
    first: Tensor  # [B, 3, S, S], normalised
    second: Tensor  # [B, 3, S, S]
    matches: Tensor  # [B, g * g] int64 on the CPU
    grid: int  # patches a side
    overlap: Tensor | None = None  # [B, g * g] bool; None for pairs of different images
    truth: Tensor | None = None  # [B, g * g] int64

    def __len__(self) -> int:
        return len(self.indices)


def correspondence_size(model: LoadedModel, size: int | None, *, option: str) -> int:
    """The requested size, or the model's; a multiple of the patch."""
    patch = require_patches(model.backbone, purpose="correspondence")
    if size is not None:
        return whole_patches(size, patch, option=option)
    return max(1, model.image_size // patch) * patch


def instance_pairs(
    extractor: Extractor, source: ImageSource, indices: Tensor, *, size: int, seed: int, cosine: bool = False
) -> Iterator[PairBatch]:
    """Two random views of each image: crops of 40 to 100 % of the area, flip and jitter as in training, no blur."""
    model = extractor.model
    settings = _view_settings(size, model)
    grid = size // require_patches(model.backbone, purpose="correspondence")
    num_done = 0
    for batch in extractor.images(source, list(torch.split(indices, max(1, extractor.settings.batch_size // 2)))):
        numbers, sizes = batch.indices, batch.images.sizes
        first, second = make_views(batch.images, numbers, settings, seed=seed, epoch=0).global_views
        drawn = draw_parameters(settings, sizes, numbers, seed=seed, epoch=0)  # the same key, the same views
        centres = [patch_centres(drawn.boxes[view], drawn.flipped[view], sizes, grid=grid) for view in (0, 1)]
        yield PairBatch(
            indices=numbers[:, None].expand(-1, 2),
            first=first,
            second=second,
            matches=_matches(extractor, first, second, cosine=cosine, name=source.name),
            grid=grid,
            overlap=overlap_mask(*centres),
            truth=true_matches(*centres),
        )
        num_done += len(numbers)
        extractor.progress(f"matches of {source.name}", num_done, len(indices))


def _view_settings(size: int, model: LoadedModel) -> ViewSettings:
    return ViewSettings(
        num_local=0,
        global_size=size,
        global_scale=(0.4, 1.0),
        first_global_blur_probability=0.0,
        second_global_blur_probability=0.0,
        solarise_probability=0.0,
        mean=model.mean,
        std=model.std,
    )


def class_pairs(
    extractor: Extractor, source: ImageSource, pairs: Tensor, *, size: int, cosine: bool = False
) -> Iterator[PairBatch]:
    """Matches of the pairs [P, 2] of images, each resized to a square."""
    grid = size // require_patches(extractor.model.backbone, purpose="correspondence")
    chunks = list(torch.split(pairs.flatten(), 2 * max(1, extractor.settings.batch_size // 2)))
    for batch in extractor.views(source, chunks, view=SquareView(size=size, filter="bilinear")):
        (views,) = batch.groups
        first, second = views[0::2], views[1::2]
        matches = _matches(extractor, first, second, cosine=cosine, name=source.name)
        yield PairBatch(indices=batch.indices.view(-1, 2), first=first, second=second, matches=matches, grid=grid)


# [N], -1: none -> [P, 2], P <= num_pairs
def same_class_pairs(labels: Tensor, *, num_pairs: int, key: Sequence[Key]) -> Tensor:
    """Random pairs of different images of one class; each image is in at most one pair."""
    order = keyed_random.permutation(len(labels), *key, "image")
    order = order[labels[order] >= 0]
    order = order[labels[order].argsort(stable=True)]
    classes = labels[order]
    place_in_class = torch.arange(len(order)) - torch.searchsorted(classes, classes)
    starts = ((place_in_class[:-1] % 2 == 0) & (classes[:-1] == classes[1:])).nonzero().flatten()
    starts = starts[keyed_random.permutation(len(starts), *key, "pair")][:num_pairs]
    return torch.stack([order[starts], order[starts + 1]], dim=1)


@torch.inference_mode()
# -> [B, g * g] on the CPU
def _matches(extractor: Extractor, first: Tensor, second: Tensor, *, cosine: bool, name: str) -> Tensor:
    tokens = []
    for views in (first, second):
        with extractor.inference():
            patches = extractor.model.backbone(views).patches
        require_finite(patches, name=name)
        tokens.append(patches.float())
    return match_patches(*tokens, cosine=cosine).cpu()


def open_points_model(extractor: Extractor, name: str) -> LoadedModel:
    """The model whose attention chooses the drawn patches: the named one, or the one under test."""
    if not name:
        if not has_class_token(extractor.model.backbone):
            raise UnsuitableModel(
                f"{extractor.model.name} has no class token, whose attention would choose the drawn patches; name "
                "another model with points_model, or leave the figures out with num_figures 0"
            )
        return extractor.model
    model = open_model(name)
    model.backbone.to(extractor.device)
    return model


@torch.inference_mode()
def pair_pictures(
    batch: PairBatch, *, model: LoadedModel, points_model: LoadedModel, num_points: int, gap: int = 0
) -> list[Tensor]:  # -> uint8 [zoom * S, 2 * zoom * S + gap, 3] each
    """Both views of each pair side by side; lines join the most attended patches of the first to their matches."""
    size = batch.first.shape[2]
    patch = require_patches(points_model.backbone, purpose="choosing points")
    whole_patches(size, patch, option=f"{points_model.name}, which chooses the drawn patches, would see views of")
    raw = normalise(
        batch.first, [-m / s for m, s in zip(model.mean, model.std, strict=True)], [1 / s for s in model.std]
    )
    attention = class_attention(points_model.backbone, normalise(raw, points_model.mean, points_model.std)).cpu()
    points = most_attended(attention, grid=batch.grid, num_points=num_points, overlap=batch.overlap)
    looks = [to_picture(views, mean=model.mean, std=model.std).cpu() for views in (batch.first, batch.second)]
    zoom = -(-_SMALLEST_PICTURE // size)
    return [
        match_picture(first, second, chosen, matches[chosen], patch=size // batch.grid, zoom=zoom, gap=gap)
        for first, second, chosen, matches in zip(*looks, points, batch.matches, strict=True)
    ]


def describe_pairs(batch: PairBatch, source: ImageSource) -> list[dict[str, object]]:
    """Captions of the pairs."""
    keys = [[source.key_of(index) for index in pair] for pair in batch.indices.tolist()]
    if batch.overlap is None or batch.truth is None:
        return [{"kind": "class", "images": pair} for pair in keys]
    hits = ((batch.matches == batch.truth) & batch.overlap).sum(dim=1).tolist()
    counts = batch.overlap.sum(dim=1).tolist()
    return [
        {"kind": "instance", "images": pair, "overlapping patches": count, "matched exactly": num_hits}
        for pair, count, num_hits in zip(keys, counts, hits, strict=True)
    ]


def pairs_to_draw(
    extractor: Extractor, source: ImageSource, settings: CorrespondenceSettings, *, size: int
) -> Iterator[PairBatch]:
    """The first instance pairs of the measurement, then, if there are labels, as many class pairs."""
    chosen = _chosen_images(source, settings)[: settings.num_figures]
    yield from instance_pairs(extractor, source, chosen, size=size, seed=settings.seed, cosine=settings.cosine)
    if source.class_names is not None:
        labels = labels_of_images(source)
        pairs = same_class_pairs(labels, num_pairs=settings.num_figures, key=(settings.seed, "class pairs"))
        if len(pairs):
            yield from class_pairs(extractor, source, pairs, size=size, cosine=settings.cosine)


def _chosen_images(source: ImageSource, settings: CorrespondenceSettings) -> Tensor:
    return keyed_random.permutation(len(source), settings.seed, "correspondence images")[: settings.num_images]


def measure_correspondence(
    extractor: Extractor, data: EvaluationData, settings: CorrespondenceSettings
) -> Iterator[Measurement]:
    """Share of patches matched within R patches of the truth in another view; figures go to `output`/correspondence.

    Each image has equal weight; in the published script, which averages over batches of two, larger overlaps count
    more. Images whose views do not overlap are left out. "chance" is the share for random matches.
    """
    assert data.test is not None
    size = correspondence_size(extractor.model, settings.size, option="--correspondence.size")
    points_model = open_points_model(extractor, settings.points_model) if settings.num_figures else None
    shares = _shares(extractor, data.test, settings, size=size)  # [images, 2, radii]
    if points_model is not None and distributed.is_main():
        _save_figures(extractor, data, settings, size=size, points_model=points_model)
    names = ("cosine" if settings.cosine else "dot product", "chance")
    for name, percents in zip(names, (100 * shares.mean(dim=0)).tolist(), strict=True):
        for radius, value in zip(settings.radii, percents, strict=True):
            setting, metric = Setting(name="instance", remarks=(name,)), f"matched within R={radius}"
            yield Measurement(data=data.name, setting=setting, metric=metric, value=value, num_samples=len(shares))


# -> [images, 2, radii]
def _shares(extractor: Extractor, source: ImageSource, settings: CorrespondenceSettings, *, size: int) -> Tensor:
    """For each image whose views overlap, and each radius: the share of matched patches, and the share by chance."""
    shares = []
    chosen = _chosen_images(source, settings)
    for batch in instance_pairs(extractor, source, chosen, size=size, seed=settings.seed, cosine=settings.cosine):
        assert batch.overlap is not None
        assert batch.truth is not None
        found, chance = [], []
        for radius in settings.radii:
            found.append(share_within(batch.matches, batch.truth, batch.overlap, grid=batch.grid, radius=radius))
            chance.append(share_by_chance(batch.truth, batch.overlap, grid=batch.grid, radius=radius))
        both = torch.stack([torch.stack(found, dim=1), torch.stack(chance, dim=1)], dim=1)
        shares.append(both[batch.overlap.any(dim=1)])
    if not any(len(part) for part in shares):
        raise EvaluationError(f"no two views of an image of {source.name} overlap; choose larger or more images")
    return torch.cat(shares)


def _save_figures(
    extractor: Extractor,
    data: EvaluationData,
    settings: CorrespondenceSettings,
    *,
    size: int,
    points_model: LoadedModel,
) -> None:
    assert data.test is not None
    folder = data.output / "correspondence"
    captions: list[dict[str, object]] = []
    for batch in pairs_to_draw(extractor, data.test, settings, size=size):
        pictures = pair_pictures(
            batch, model=extractor.model, points_model=points_model, num_points=settings.num_points
        )
        for picture, description in zip(pictures, describe_pairs(batch, data.test), strict=True):
            num_of_kind = sum(caption["kind"] == description["kind"] for caption in captions)
            captions.append({"file": f"{description['kind']}_{num_of_kind:03d}.png", **description})
            save_picture(folder / str(captions[-1]["file"]), picture)
    points_from = points_model.name
    save_captions(folder, captions, model=extractor.model.name, size=size, points_chosen_by_attention_of=points_from)


PROTOCOL = ProtocolEntry(
    measure=measure_correspondence,
    settings_type=CorrespondenceSettings,
    needs=("test",),
    summary="matching patches of two views, with figures",
    unremarked=frozenset({"radii", "cosine", "num_points", "points_model", "num_figures"}),
    uses_centre_crop=False,
)
