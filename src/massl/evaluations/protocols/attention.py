"""Self-attention maps of the class token in the last block, as in DINO and iBOT, and how concentrated they are."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from massl import distributed, keyed_random
from massl.config import Settings
from massl.data.evaluation.views import SquareView, whole_patches
from massl.data.sources.base import ImageSource
from massl.evaluations.base import EvaluationData, ProtocolEntry, require_finite
from massl.evaluations.features import Extractor
from massl.evaluations.measurement import Measurement, Setting
from massl.files import replacing, write_atomically
from massl.nn.token_readout import class_attention, require_patches
from massl.ops.scoring.attention_maps import attention_tiles, mass_mask
from massl.weights.models import LoadedModel

_PUBLISHED_SIZE, _PUBLISHED_IMAGE_SIZE = 480, 224


class AttentionSettings(Settings):
    num_images: int = Field(100, gt=0, description="most test images that are used, chosen by key")
    size: int | None = Field(None, gt=0, description="side of the square views; default: 480 * image size / 224")
    mass: float = Field(0.6, gt=0, lt=1, description="share of the attention whose patches are counted and coloured")
    num_figures: int = Field(8, ge=0, description="images whose maps are drawn")
    seed: int = Field(
        0, ge=-keyed_random.MAX_SEED, le=keyed_random.MAX_SEED, description="decides which images are chosen"
    )


@dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """Images as the network saw them, and its attention."""

    indices: Tensor  # [B] in the source
    views: Tensor  # [B, 3, S, S], normalised
    maps: Tensor  # [B, heads, g, g] float32

    def tiles(self, number: int, model: LoadedModel, *, mass: float) -> list[Tensor]:  # -> uint8 [S, S, 3] each
        """The published strip of an image: itself, its colour map and a heat map for each head."""
        patch = self.views.shape[2] // self.maps.shape[2]
        return attention_tiles(
            self.views[number], self.maps[number], patch=patch, mean=model.mean, std=model.std, mass=mass
        )


def attention_size(model: LoadedModel, size: int | None, *, option: str, purpose: str = "an attention map") -> int:
    """The requested size, or the published one scaled to the model's image size; a multiple of the patch."""
    patch = require_patches(model.backbone, purpose=purpose)
    if size is not None:
        return whole_patches(size, patch, option=option)
    return max(1, round(_PUBLISHED_SIZE * model.image_size / _PUBLISHED_IMAGE_SIZE / patch)) * patch


def attention_maps(
    extractor: Extractor, source: ImageSource, indices: Tensor, *, size: int
) -> Iterator[AttentionBatch]:
    """Maps of these images, resized to squares of `size` pixels, in their order."""
    # Images larger than the model's own come in smaller batches, which hold the same number of tokens.
    batch_size = max(1, int(extractor.settings.batch_size * min(1.0, (extractor.model.image_size / size) ** 2)))
    num_done = 0
    view = SquareView(size=size, filter="bilinear")
    for batch in extractor.views(source, list(torch.split(indices, batch_size)), view=view):
        (views,) = batch.groups
        with extractor.inference():
            maps = class_attention(extractor.model.backbone, views)
        require_finite(maps, name=source.name)
        yield AttentionBatch(indices=batch.indices, views=views, maps=maps)
        num_done += len(batch.indices)
        extractor.progress(f"attention maps of {source.name}", num_done, len(indices))


_SMALLEST_HEIGHT = 200  # pixels of a figure; smaller ones are enlarged by a whole factor


def measure_attention(extractor: Extractor, data: EvaluationData, settings: AttentionSettings) -> Iterator[Measurement]:
    """Share of an image's patches that hold 60 % of a head's attention, for each head: the smaller, the more selective.

    The published protocol is only the figures, which go to `output`/attention.
    """
    assert data.test is not None
    source = data.test
    size = attention_size(extractor.model, settings.size, option="--attention.size")
    chosen = keyed_random.permutation(len(source), settings.seed, "attention images")[: settings.num_images]
    folder = data.output / "attention"
    shares: list[Tensor] = []
    captions: list[dict[str, object]] = []
    for batch in attention_maps(extractor, source, chosen, size=size):
        shares.append(mass_mask(batch.maps, mass=settings.mass).double().mean(dim=(2, 3)))
        for number in range(min(len(batch.indices), settings.num_figures - len(captions))):
            name = f"{len(captions):03d}.png"
            if distributed.is_main():
                strip = torch.cat(batch.tiles(number, extractor.model, mass=settings.mass), dim=1)
                times = -(-_SMALLEST_HEIGHT // len(strip))
                save_picture(folder / name, strip.repeat_interleave(times, dim=0).repeat_interleave(times, dim=1))
            captions.append({"file": name, "image": source.key_of(int(batch.indices[number]))})
    if captions and distributed.is_main():
        save_captions(folder, captions, model=extractor.model.name, size=size, mass=settings.mass)
    percent = 100 * torch.cat(shares).mean(dim=0)  # [heads]
    names = [*(f"head {number}" for number in range(len(percent))), "mean of heads"]
    for name, value in zip(names, [*percent.tolist(), float(percent.mean())], strict=True):
        metric = f"patches holding {settings.mass:.0%} of attention"
        yield Measurement(
            data=data.name, setting=Setting(name=name), metric=metric, value=value, num_samples=len(chosen)
        )


def save_picture(path: Path, picture: Tensor) -> None:  # uint8 [H, W, 3]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        Image.fromarray(picture.cpu().numpy()).save(partial, format="PNG")


def save_captions(folder: Path, figures: list[dict[str, object]], **common: object) -> None:
    """Write figures.json: what each figure of the folder shows, and what `common` says of all."""
    write_atomically(folder / "figures.json", json.dumps({**common, "figures": figures}, indent=2) + "\n")


PROTOCOL = ProtocolEntry(
    measure=measure_attention,
    settings_type=AttentionSettings,
    needs=("test",),
    summary="self-attention of the class token, with figures",
    unremarked=frozenset({"num_figures"}),
    uses_centre_crop=False,
)
