"""First layers for images of few pixels."""

import torch
from timm.models.resnet import ResNet
from torch import nn

from massl import keyed_random
from massl.config import RecipeError


def use_small_image_stem(model: nn.Module, *, name: str, seed: int) -> None:
    """A 3 x 3 convolution that keeps every pixel in place of a ResNet's first two halvings (He et al., 2016, section
    4.2).

    The usual first layers would leave 8 x 8 positions of a 32-px image, and 1 x 1 in the last stage.
    """
    if not isinstance(model, ResNet):
        raise RecipeError(
            f"backbone.stem small is for ResNets such as resnet18 or resnet50, and {name} is none; leave backbone.stem out"
        )
    if not isinstance(model.conv1, nn.Conv2d):
        raise RecipeError(
            f"backbone.stem small replaces a single first convolution, and {name} has a deep stem of several; "
            "choose a ResNet without one, such as resnet18 or resnet50, or leave backbone.stem out"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed_random.seed_from(seed, "stem"))
        stem = nn.Conv2d(model.conv1.in_channels, model.conv1.out_channels, kernel_size=3, padding=1, bias=False)
        # as timm starts the other convolutions
        nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    model.register_module("conv1", stem)
    model.register_module("maxpool", nn.Identity())
