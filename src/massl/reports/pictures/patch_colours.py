"""Images beside the principal components of their patches."""

from dataclasses import dataclass

import torch
from torch import Tensor

from massl.data.evaluation.views import SquareView
from massl.data.sources.base import ImageSource, Pixels
from massl.evaluations.base import require_finite
from massl.evaluations.features import Extractor
from massl.evaluations.named_features import read_patches
from massl.ops.scoring.attention_maps import to_picture
from massl.ops.scoring.patch_colours import patch_colours

PURPOSE = "a picture of principal components"


@dataclass(frozen=True, kw_only=True)
class ComponentDrawings:
    """Images as the network saw them, and one pixel for each of their patches."""

    photos: Pixels  # [N, S, S, 3]
    colours: Pixels  # [N, S / patch, S / patch, 3]
    explained: float  # share of the variance that the colours show
    share_shown: float  # of the patches; the others are background


def draw_components(
    extractor: Extractor, source: ImageSource, indices: Tensor, *, size: int, threshold: float | None = None
) -> ComponentDrawings:
    """These images, resized to squares of `size` pixels; their patches share the components, so colours compare."""
    batch_size = max(1, int(extractor.settings.batch_size * min(1.0, (extractor.model.image_size / size) ** 2)))
    photos, patches = [], []
    view = SquareView(size=size, filter="bilinear")
    for batch in extractor.views(source, list(torch.split(indices, batch_size)), view=view):
        (views,) = batch.groups
        with torch.inference_mode():
            found = read_patches(extractor.model.backbone, views, precision=extractor.settings.precision).cpu()
        require_finite(found.flatten(1), name=source.name)
        patches.append(found)
        photos.append(to_picture(views, mean=extractor.model.mean, std=extractor.model.std).cpu())
    drawn = patch_colours(torch.cat(patches), threshold=threshold)
    return ComponentDrawings(
        photos=torch.cat(photos).numpy(),
        colours=drawn.colours.numpy(),
        explained=drawn.explained,
        share_shown=float(drawn.is_shown.double().mean()),
    )
