"""What the class token attends to in the last block, as pictures."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from massl.data.sources.base import ImageSource, Pixels
from massl.evaluations.features import Extractor
from massl.evaluations.protocols.attention import attention_maps
from massl.ops.scoring.attention_maps import colour_map, heat_map, to_picture


@dataclass(frozen=True, kw_only=True)
class AttentionDrawing:
    """An image as the network saw it, and its attention. Heat maps have one pixel per patch."""

    index: int  # of the image in its source
    photo: Pixels  # [S, S, 3]
    colours: Pixels  # [S, S, 3] each patch in the colour of its strongest head
    mean: Pixels  # [S / patch, S / patch, 3] heat map of the mean over heads
    heads: tuple[Pixels, ...]  # [S / patch, S / patch, 3] heat map of each head
    patch: int  # pixels


def draw_attention(
    extractor: Extractor, source: ImageSource, indices: Tensor, *, size: int
) -> Iterator[AttentionDrawing]:
    """A drawing of each of these images, resized to a square of `size` pixels."""
    for batch in attention_maps(extractor, source, indices, size=size):
        photos = to_picture(batch.views, mean=extractor.model.mean, std=extractor.model.std).cpu().numpy()
        for index, view, photo, maps in zip(batch.indices.tolist(), batch.views, photos, batch.maps, strict=True):
            patch = size // maps.shape[1]
            yield AttentionDrawing(
                index=index,
                photo=photo,
                colours=colour_map(view, maps, patch=patch).cpu().numpy(),
                mean=heat_map(maps.mean(dim=0), patch=1).cpu().numpy(),
                heads=tuple(heat_map(head, patch=1).cpu().numpy() for head in maps),
                patch=patch,
            )
