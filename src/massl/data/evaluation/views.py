"""Image views for evaluation protocols. A view is a value: its fields decide the pixels, and they are cache keys."""

from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from massl.data.sources.base import DataError
from massl.data.views import ViewSettings, draw_parameters
from massl.ops.image_ops import Filter, RaggedImages, centre_view, crop_resize

PUBLISHED_CROP_RATIO = 224 / 256
MAX_SIDE = 1 << 15  # in effect no limit: images are not reduced before evaluation views


class EvaluationView(Protocol):
    """Images as stored -> what a network sees, before normalisation."""

    def apply(self, images: RaggedImages, indices: Tensor) -> list[Tensor]:
        """Groups of [b, 3, H, W] in [0, 1], in the order of the images; one group if all views have one size.

        `indices` of the images in their source are the keys of random views.
        """
        ...


def view_key(view: Any) -> dict[str, Any]:
    """Plain values that identify the view."""
    return {"view": type(view).__name__, **asdict(view)}


@dataclass(frozen=True, kw_only=True)
class CentreView:
    """Shorter side to size / crop_ratio, then the centre: the transform of DINO, iBOT and CARP (256, then 224)."""

    size: int
    crop_ratio: float = PUBLISHED_CROP_RATIO
    filter: Filter = "bicubic"

    def apply(self, images: RaggedImages, indices: Tensor) -> list[Tensor]:
        return [centre_view(images, size=self.size, crop_ratio=self.crop_ratio, filter=self.filter)]


@dataclass(frozen=True, kw_only=True)
class SquareView:
    """The whole image resized to a square, whatever its aspect ratio (copy detection, attention maps)."""

    size: int
    filter: Filter = "bicubic"

    def apply(self, images: RaggedImages, indices: Tensor) -> list[Tensor]:
        height, width = images.sizes.unbind(1)
        boxes = torch.stack([torch.zeros_like(height), torch.zeros_like(width), height, width], dim=1)
        flip = torch.zeros(1, len(images), dtype=torch.bool)
        return [crop_resize(images, boxes[None], size=self.size, flip=flip, filter=self.filter)[0]]


@dataclass(frozen=True, kw_only=True)
class StoredView:
    """The image as it is stored (ImageNet-9, whose images are 224 x 224)."""

    def apply(self, images: RaggedImages, indices: Tensor) -> list[Tensor]:
        pictures = [picture_of(images, number) for number in range(len(images))]
        if len({picture.shape for picture in pictures}) > 1:
            return [picture[None].float() / 255 for picture in pictures]
        return [torch.stack(pictures).float() / 255]


@dataclass(frozen=True, kw_only=True)
class ThumbnailView:
    """Longer side reduced to at most `max_side` by Pillow's `thumbnail`, whose rounding matters; never enlarged."""

    max_side: int

    def apply(self, images: RaggedImages, indices: Tensor) -> list[Tensor]:
        device = images.pixels.device
        return [self.shrink(picture_of(images, number)).to(device)[None] for number in range(len(images))]

    def shrink(self, picture: Tensor) -> Tensor:  # uint8 [3, H, W] -> float [3, h, w] in [0, 1]
        image = Image.fromarray(np.ascontiguousarray(picture.cpu().permute(1, 2, 0).numpy()))
        image.thumbnail((self.max_side, self.max_side), Image.Resampling.LANCZOS)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


@dataclass(frozen=True, kw_only=True)
class RandomCropView:
    """torchvision's RandomResizedCrop and horizontal flip, drawn by key."""

    size: int
    seed: int
    epoch: int
    scale: tuple[float, float] = (0.08, 1.0)
    filter: Filter = "bilinear"

    def apply(self, images: RaggedImages, indices: Tensor) -> list[Tensor]:
        settings = ViewSettings(num_local=0, global_scale=self.scale)
        first = draw_parameters(settings, images.sizes, indices, seed=self.seed, epoch=self.epoch).of_views(slice(1))
        return [crop_resize(images, first.boxes, size=self.size, flip=first.flipped, filter=self.filter)[0]]


def picture_of(images: RaggedImages, number: int) -> Tensor:  # -> uint8 [3, H, W]
    height, width = images.sizes[number].tolist()
    begin = int(images.offsets[number])
    return images.pixels[begin : begin + 3 * height * width].view(3, height, width)


def whole_patches(size: int, patch: int | None, *, option: str) -> int:
    """The size, or an error if it is not a multiple of the patch."""
    if patch is not None and size % patch:
        below = size // patch * patch
        choices = f"{below} or {below + patch}" if below > 0 else f"{patch}"
        raise DataError(f"{option} {size} is no multiple of the model's patch of {patch} px; choose {choices}")
    return size
