"""Images as sheets and pages show them: their names, and their pixels at the size of a tile."""

import numpy as np
import torch
from torch import Tensor

from massl.data.evaluation.views import CentreView, ThumbnailView
from massl.data.sources.base import ImageSource, Pixels
from massl.evaluations.features import Extractor
from massl.ops.scoring.attention_maps import to_picture


def class_name(source: ImageSource, index: int) -> str:
    """The class of an image, "" if unknown."""
    label = source.label_of(index)
    return "" if label is None or source.class_names is None else source.class_names[label]


def image_name(source: ImageSource, index: int) -> str:
    """The class of an image, or its key if that is unknown."""
    return class_name(source, index) or source.key_of(index)


def file_name(source: ImageSource, index: int) -> str:
    """The last part of an image's key, to stand below its class; "" if `image_name` is the key already."""
    return source.key_of(index).rstrip("/").rpartition("/")[2] if class_name(source, index) else ""


def whole_images(extractor: Extractor, source: ImageSource, indices: Tensor, *, max_side: int) -> list[Pixels]:
    """The images [H, W, 3] as they are stored, reduced where a side is longer than `max_side`."""
    return [
        to_picture(image, mean=extractor.model.mean, std=extractor.model.std).cpu().numpy()
        for batch in extractor.views(source, _chunks(extractor, indices), view=ThumbnailView(max_side=max_side))
        for group in batch.groups
        for image in group
    ]


def centre_crops(
    extractor: Extractor, source: ImageSource, indices: Tensor, *, max_side: int
) -> Pixels:  # [n] -> [n, S, S, 3]
    """The part of each image that the network sees, at most at the network's resolution."""
    view = CentreView(size=min(max_side, extractor.model.image_size), crop_ratio=extractor.crop_ratio)
    batches = extractor.images(source, _chunks(extractor, indices))
    views = torch.cat([group for batch in batches for group in view.apply(batch.images, batch.indices)])
    pixels: Pixels = np.ascontiguousarray((255 * views).round().to(torch.uint8).movedim(1, -1).cpu().numpy())
    return pixels


def _chunks(extractor: Extractor, indices: Tensor) -> list[Tensor]:
    return list(torch.split(indices, extractor.settings.batch_size))
