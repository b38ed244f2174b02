"""First layers for small images."""

import torch
from timm.models.resnet import ResNet
from torch import nn

from massl import keyed_random
from massl.config import RecipeError


def use_small_image_stem(model: nn.Module, *, name: str, seed: int) -> None:
    """Replace a ResNet's first two downsamplings by a 3 x 3 convolution of stride 1 (He et al., 2016, section 4.2).

    The usual stem reduces a 32-px image to 8 x 8 positions, and to 1 x 1 in the last stage.
    """
    if not isinstance(model, ResNet) or not isinstance(model.conv1, nn.Conv2d):
        kind = "has a deep stem of several convolutions" if isinstance(model, ResNet) else "is not a ResNet"
        raise RecipeError(f"backbone.stem small needs a ResNet such as resnet18 or resnet50, but {name} {kind}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed_random.seed_from(seed, "stem"))
        stem = nn.Conv2d(model.conv1.in_channels, model.conv1.out_channels, kernel_size=3, padding=1, bias=False)
        # as timm initialises the other convolutions
        nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    model.register_module("conv1", stem)
    model.register_module("maxpool", nn.Identity())
