"""Pairs of pictures with lines between the patches that the features take for the same."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from massl.data.sources.base import ImageSource, Pixels
from massl.evaluations.features import Extractor
from massl.evaluations.protocols.correspondence import (
    CorrespondenceSettings,
    correspondence_size,
    describe_pairs,
    open_points_model,
    pair_pictures,
    pairs_to_draw,
)

PairKind = Literal["instance", "class"]  # two views of an image, or two images of a class
_PAIR_GAP = 4  # pixels of white between the two pictures of a pair


@dataclass(frozen=True, kw_only=True)
class PairDrawing:
    """Both pictures of a pair side by side."""

    shows: PairKind
    images: tuple[int, int]  # indices in the source
    picture: Pixels  # [H, W, 3]
    success: str  # how many patches were matched exactly; "" for images of a class, which have no true matches


def draw_pairs(extractor: Extractor, source: ImageSource, settings: CorrespondenceSettings) -> Iterator[PairDrawing]:
    """Pairs of views of an image, then, if there are labels, as many pairs of images of a class."""
    model, num_points = extractor.model, settings.num_points
    size = correspondence_size(model, settings.size, option="size")
    points_model = open_points_model(extractor, settings.points_model)
    for batch in pairs_to_draw(extractor, source, settings, size=size):
        pictures = pair_pictures(batch, model=model, points_model=points_model, num_points=num_points, gap=_PAIR_GAP)
        facts = describe_pairs(batch, source)
        for picture, (first, second), fact in zip(pictures, batch.indices.tolist(), facts, strict=True):
            shows: PairKind = "class"
            success = ""
            if fact["kind"] == "instance":
                shows = "instance"
                success = f"{fact['matched exactly']} of {fact['overlapping patches']} shared patches matched exactly"
            yield PairDrawing(shows=shows, images=(first, second), picture=picture.numpy(), success=success)
