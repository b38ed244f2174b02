"""What the class token looks at: self-attention maps of the last block, as DINO and iBOT show them, and how
concentrated they are.
"""

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
from massl.nn.token_readout import class_attention, require_patches
from massl.ops.scoring.attention_maps import attention_tiles, mass_mask
from massl.weights.models import LoadedModel

_PUBLISHED_SIZE, _PUBLISHED_IMAGE_SIZE = 480, 224


class AttentionSettings(Settings):
    num_images: int = Field(
        100, gt=0, description="test images that are looked at (a keyed choice); all where there are fewer"
    )
    size: int | None = Field(
        None,
        gt=0,
        description="side of the square the images are resized to; default: 480 for a model of 224 px, others in proportion",
    )
    mass: float = Field(0.6, gt=0, lt=1, description="share of the attention whose patches are counted and coloured")
    num_figures: int = Field(8, ge=0, description="images whose maps are drawn")
    seed: int = Field(0, description="decides which images are chosen")


@dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """Images as the network saw them, and its attention."""

    indices: Tensor  # [B] their numbers in the source
    views: Tensor  # [B, 3, S, S], normalised
    maps: Tensor  # [B, heads, g, g] float32

    def tiles(self, number: int, model: LoadedModel, *, mass: float) -> list[Tensor]:  # -> uint8 [S, S, 3] each
        """The published strip of an image: itself, its colour map and a heat map for each head."""
        patch = self.views.shape[2] // self.maps.shape[2]
        return attention_tiles(
            self.views[number], self.maps[number], patch=patch, mean=model.mean, std=model.std, mass=mass
        )


def attention_size(model: LoadedModel, size: int | None, *, option: str) -> int:
    """The size asked for, if it is one of whole patches; else the published one in proportion to the model's images, in
    whole patches.
    """
    patch = require_patches(model.backbone, purpose="an attention map")
    if size is not None:
        return whole_patches(size, patch, option=option)
    return max(1, round(_PUBLISHED_SIZE * model.image_size / _PUBLISHED_IMAGE_SIZE / patch)) * patch


def attention_maps(
    extractor: Extractor, source: ImageSource, indices: Tensor, *, size: int
) -> Iterator[AttentionBatch]:
    """Maps of these images, pressed into a square of `size` pixels, in their order."""
    # Larger images than the model's own come in smaller batches, so that a batch holds as many tokens as elsewhere.
    batch_size = max(1, int(extractor.settings.batch_size * min(1.0, (extractor.model.image_size / size) ** 2)))
    num_done = 0
    for batch in extractor.views(
        source, list(torch.split(indices, batch_size)), view=SquareView(size=size, filter="bilinear")
    ):
        (views,) = batch.groups
        is_16_bit = extractor.settings.precision == "bf16"
        with torch.inference_mode(), torch.autocast(views.device.type, dtype=torch.bfloat16, enabled=is_16_bit):
            maps = class_attention(extractor.model.backbone, views)
        require_finite(maps, name=source.name)
        yield AttentionBatch(indices=batch.indices, views=views, maps=maps)
        num_done += len(batch.indices)
        extractor.progress(f"attention maps of {source.name}", num_done, len(indices))


_SMALLEST_HEIGHT = 200  # pixels of a figure; those of small images are enlarged as often as that takes


def measure_attention(extractor: Extractor, data: EvaluationData, settings: AttentionSettings) -> Iterator[Measurement]:
    """Share of an image's patches that hold 60 % of a head's attention, for each head; figures go to
    `output`/attention.

    The figures are the published protocol; the share puts a number on them: the smaller, the more a head singles
    something out.
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
    Image.fromarray(picture.cpu().numpy()).save(path)


def save_captions(folder: Path, figures: list[dict[str, object]], **common: object) -> None:
    """`figures.json`: what the figures of a folder show; `common` holds for all of them."""
    (folder / "figures.json").write_text(json.dumps({**common, "figures": figures}, indent=2) + "\n", encoding="utf-8")


PROTOCOL = ProtocolEntry(
    measure=measure_attention,
    settings_type=AttentionSettings,
    needs=("test",),
    summary="self-attention of the class token, with figures",
    unremarked=frozenset({"num_figures"}),
    uses_centre_crop=False,
)
