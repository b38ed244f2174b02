"""Features by name, read from a backbone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn.functional import interpolate

from massl.nn.backbone import Backbone, Tokens
from massl.nn.token_readout import last_layers, require_class_token, require_patches
from massl.nn.transformer.plain import why_not_fused

_SCALES = (1.0, 2**-0.5, 0.5)  # of retrieval's three passes


@dataclass(frozen=True)
class Feature:
    """How a feature vector is computed from the tokens of the last blocks."""

    num_layers: int
    needs_class_token: bool
    combine: Callable[[list[Tokens]], Tensor]
    summary: str


def _patches(tokens: Tokens) -> Tensor:  # -> [B, N, D]
    assert tokens.patches is not None, "features with patch tokens are read from transformers only"
    return tokens.patches


def generalised_mean(patches: Tensor, *, exponent: float = 4.0) -> Tensor:  # [B, N, D] -> [B, D]
    """GeM pooling (Radenović et al., 2018)."""
    return patches.clamp_min(1e-6).pow(exponent).mean(dim=1).pow(1 / exponent)


FEATURES: dict[str, Feature] = {
    "cls": Feature(1, True, lambda layers: layers[-1].pooled, "class token of the last block"),
    "pooled": Feature(1, False, lambda layers: layers[-1].pooled, "the network's own pooled features"),
    "cls_last4": Feature(
        4,
        True,
        lambda layers: torch.cat([layer.pooled for layer in layers], dim=1),
        "class tokens of the last 4 blocks",
    ),
    "cls_mean": Feature(
        1,
        True,
        lambda layers: torch.cat([layers[-1].pooled, _patches(layers[-1]).mean(dim=1)], dim=1),
        "class token and mean patch token",
    ),
    "cls_gem": Feature(
        1,
        True,
        lambda layers: torch.cat([layers[-1].pooled, generalised_mean(_patches(layers[-1]))], dim=1),
        "class token and GeM of patches",
    ),
    "cls_multiscale": Feature(1, True, lambda layers: layers[-1].pooled, "mean class token of three scales"),
}
FEATURE_LINES = "".join(f"\n  {name}: {feature.summary}" for name, feature in FEATURES.items())  # for --help

PATCHES = "patches"  # [H, W, D] of an image, by `read_patches`; every feature of the table is one vector
# other names of features in papers and other projects; files and results hold the names of the table
_OTHER_NAMES = {"last4": "cls_last4", "cls_patch_mean": "cls_mean"}


def own_name(feature: str) -> str:
    """The name of a feature here, if another name of it is given."""
    return _OTHER_NAMES.get(feature, feature)


def read_patches(backbone: Backbone, images: Tensor, *, precision: Literal["fp32", "bf16"]) -> Tensor:
    """Normalised images [B, 3, H, W] -> patch tokens after the final norm [B, H / patch, W / patch, D] float32."""
    patch = require_patches(backbone, purpose=f"the feature {PATCHES!r}")
    with exact_convolutions(), torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        tokens = _patches(_layers(backbone, images, 1)[-1]).float().contiguous()
    return tokens.view(len(images), images.shape[2] // patch, images.shape[3] // patch, -1)


def read_feature(backbone: Backbone, images: Tensor, name: str, *, precision: Literal["fp32", "bf16"]) -> Tensor:
    """Normalised images [B, 3, H, W] of one size -> [B, D] float32."""
    feature = FEATURES[name]
    if feature.needs_class_token:
        require_class_token(backbone, purpose=f"the feature {name!r}")
    with exact_convolutions(), torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        if name == "cls_multiscale":
            return torch.stack([_class_token(backbone, _rescaled(images, scale)) for scale in _SCALES]).mean(dim=0)
        if name in ("cls", "pooled"):
            return _class_token(backbone, images)
        return feature.combine(_layers(backbone, images, feature.num_layers)).float()


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """Float32 convolutions without TF32, which rounds the operands of the patch embedding to 11 bits on a GPU."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _is_fused(backbone: Backbone, images: Tensor) -> bool:
    """Whether our 16-bit kernels support the model; otherwise autocast runs timm's modules."""
    return images.is_cuda and torch.is_autocast_enabled("cuda") and why_not_fused(backbone.model) is None


def _class_token(backbone: Backbone, images: Tensor) -> Tensor:  # -> [B, D] float32
    if not _is_fused(backbone, images):
        return backbone.pooled([images]).float()
    from massl.nn.transformer.inference import class_token  # here: needs Triton

    assert isinstance(backbone.model, VisionTransformer)
    return class_token(backbone.model, images, dtype=torch.bfloat16)


def _layers(backbone: Backbone, images: Tensor, num_layers: int) -> list[Tokens]:
    if not _is_fused(backbone, images):
        return last_layers(backbone, images, num_layers=num_layers)
    from massl.nn.transformer.inference import token_layers  # here: needs Triton

    assert isinstance(backbone.model, VisionTransformer)
    layers = token_layers(backbone.model, images, num_layers=num_layers, dtype=torch.bfloat16)
    return [
        Tokens(pooled=layer[:, 0].float(), patches=layer[:, backbone.model.num_prefix_tokens :].float())
        for layer in layers
    ]


def _rescaled(images: Tensor, scale: float) -> Tensor:
    return images if scale == 1.0 else interpolate(images, scale_factor=scale, mode="bilinear", align_corners=False)
