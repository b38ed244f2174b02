"""From an image to the input of a trained network."""

from dataclasses import dataclass

import torch
from torch import Tensor

from massl.data.evaluation.views import MAX_SIDE, CentreView
from massl.data.loading.given_images import GivenImage, read_given
from massl.data.sources.rules import PixelRanges, ReadRules
from massl.ops.image_ops import RaggedImages, normalise


@dataclass(frozen=True, kw_only=True)
class ImageTransform:
    """An image -> the input [3, S, S] of the network, exactly as `massl embed` sees it.

    The image is a path, a Pillow image or a uint8 array [H, W, 3]. One image of more than 8 bits does not tell what is
    white: it is read by its full depth, or by `pixel_range` (`dataclasses.replace(transform, pixel_range=(0, 4095))`).
    """

    image_size: int
    crop_ratio: float  # centre crop / shorter side
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    pixel_range: tuple[float, float] | None = None  # values of black and white

    def __call__(self, image: GivenImage) -> Tensor:
        rules = ReadRules(ranges=PixelRanges(stated=self.pixel_range))
        images = RaggedImages.from_list([read_given(image, max_side=MAX_SIDE, rules=rules)])
        (resized,) = CentreView(size=self.image_size, crop_ratio=self.crop_ratio).apply(images, torch.zeros(1))
        return normalise(resized, self.mean, self.std)[0]
