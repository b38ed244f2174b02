"""torch.hub entry points of a backbone that massl exported. They need torch and timm; massl need not be installed.

model = torch.hub.load("FOLDER", "backbone", source="local")       # images [B, 3, H, W] -> features [B, D]
transform = torch.hub.load("FOLDER", "transform", source="local")  # a Pillow image -> its input [3, S, S]
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file
from timm.data.transforms_factory import create_transform
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

dependencies = ["torch", "timm", "safetensors"]
_CUBIC = -0.75  # torch's coefficient of bicubic interpolation


def backbone() -> nn.Module:
    """The trained network in eval mode: a timm model. Vision transformers accept any size of at least one patch."""
    config = _config()
    options = config["model_args"] | ({"dynamic_img_size": True} if config["is_transformer"] else {})
    model: Any = timm.create_model(config["architecture"], **options)
    if config["stem"] == "small":
        _use_small_stem(model)
    model.load_state_dict(load_file(Path(__file__).with_name("model.safetensors")))
    if config["position_resampling"] == "dino":  # the other rule is timm's own
        model.__class__ = _AnySizeTransformer
    if config["is_transformer"]:
        model.patch_embed.register_forward_pre_hook(_whole_patches)
    return model.eval()  # type: ignore[no-any-return]


def transform() -> Callable[[Any], Tensor]:
    """A Pillow image -> the input [3, S, S] of the network, by timm: as in training, but for rounding to 8 bits."""
    prepared: Callable[[Any], Tensor] = create_transform(**_config()["transform"])
    return prepared


class _AnySizeTransformer(VisionTransformer):
    """timm's model with the position embeddings of training: timm resamples them by another rule."""

    def _pos_embed(self, x: Tensor) -> Tensor:  # [B, height, width, D] -> [B, prefix + height * width, D]
        prefix = [token.expand(x.shape[0], -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        num_prefix = 0 if self.no_embed_class else self.num_prefix_tokens
        table: Any = self.pos_embed
        patches = resampled_positions(table[:, num_prefix:], *x.shape[1:3])
        tokens = x.flatten(1, 2)
        if self.no_embed_class:
            return self.pos_drop(torch.cat([*prefix, tokens + patches], dim=1))  # type: ignore[no-any-return]
        positions = torch.cat([table[:, :num_prefix], patches], dim=1)
        return self.pos_drop(torch.cat([*prefix, tokens], dim=1) + positions)  # type: ignore[no-any-return]


# [1, n * n, D] -> [1, height * width, D]
def resampled_positions(positions: Tensor, height: int, width: int) -> Tensor:
    """Position embeddings of a square grid on another grid, by DINO's rule; unchanged on their own grid.

    Bicubic by (n_new + 0.1) / n_old on each axis, without antialias. All numbers are tensors, so that torch.export
    keeps height and width variable.
    """
    side = round(positions.shape[1] ** 0.5)
    new = [torch.scalar_tensor(number, dtype=torch.float64, device=positions.device) for number in (height, width)]
    is_own_grid = (new[0] == side) & (new[1] == side)
    # float32 after the division, as torch computes
    steps = [torch.where(is_own_grid, 1.0, side / (number + 0.1)).float() for number in new]
    rows, columns = (_weights(size, side, step) for size, step in zip((height, width), steps, strict=True))
    grid = positions.float().reshape(side, side, -1)
    resampled = torch.einsum("hr,rcd,wc->hwd", rows, grid, columns)
    return resampled.flatten(0, 1)[None].to(positions.dtype)


def _weights(new_size: int, old_size: int, step: Tensor) -> Tensor:  # -> [new_size, old_size]
    """Bicubic weights of the old positions for each new one; beyond the border the outermost one counts."""
    places = step * (torch.arange(new_size, device=step.device) + 0.5) - 0.5
    first = places.floor()
    old = torch.arange(old_size, device=step.device)
    weights = torch.zeros(new_size, old_size, device=step.device)
    for offset in (-1, 0, 1, 2):
        distance = (places - first - offset).abs()
        near = ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance**2 + 1
        far = ((_CUBIC * distance - 5 * _CUBIC) * distance + 8 * _CUBIC) * distance - 4 * _CUBIC
        taken = (first + offset).clamp(0, old_size - 1)[:, None] == old
        weights = weights + taken * (near if offset in (0, 1) else far)[:, None]
    return weights


def _whole_patches(patch_embed: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:  # [B, 3, H, W]
    """Pixels beyond the last whole patch are ignored, as in training; timm refuses such images."""
    (images,) = inputs
    height, width = patch_embed.patch_size  # type: ignore[misc]
    return (images[..., : images.shape[2] // height * height, : images.shape[3] // width * width],)


def _use_small_stem(model: Any) -> None:
    """A ResNet for small images: a 3 x 3 convolution of stride 1, and no pooling after it."""
    first = model.conv1
    model.conv1 = nn.Conv2d(first.in_channels, first.out_channels, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()


def _config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads(Path(__file__).with_name("config.json").read_text(encoding="utf-8"))
    return config
