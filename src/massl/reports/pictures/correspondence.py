"""Pairs of pictures with lines between the patches that the features take for the same."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from massl.data.sources.base import ImageSource, Pixels
from massl.evaluations.features import Extractor
from massl.evaluations.protocols.correspondence import (
    CorrespondenceSettings,
    describe_pairs,
    pair_pictures,
    pairs_to_draw,
)
from massl.weights.models import LoadedModel

_PAIR_GAP = 4  # pixels of white between the two pictures of a pair


@dataclass(frozen=True, kw_only=True)
class PairDrawing:
    """Both pictures of a pair side by side."""

    shows: Literal["instance", "class"]  # two views of an image, or two images of a class
    images: tuple[int, int]  # indices in the source
    picture: Pixels  # [H, W, 3]
    success: str  # how many patches were matched exactly; "" for two images of a class, where nobody knows


def draw_pairs(
    extractor: Extractor,
    source: ImageSource,
    settings: CorrespondenceSettings,
    *,
    size: int,
    points_model: LoadedModel,
) -> Iterator[PairDrawing]:
    """Pairs of views of an image, then, where there are labels, as many pairs of images of a class.

    The attention of `points_model` chooses the patches whose matches are drawn.
    """
    for batch in pairs_to_draw(extractor, source, settings, size=size):
        pictures = pair_pictures(
            batch,
            model=extractor.model,
            points_model=points_model,
            num_points=settings.num_points,
            gap=_PAIR_GAP,
        )
        facts = describe_pairs(batch, source)
        for picture, (first, second), fact in zip(pictures, batch.indices.tolist(), facts, strict=True):
            yield PairDrawing(
                shows="class" if fact["kind"] == "class" else "instance",
                images=(first, second),
                picture=picture.numpy(),
                success=""
                if fact["kind"] == "class"
                else f"{fact['matched exactly']} of {fact['overlapping patches']} shared patches matched exactly",
            )
