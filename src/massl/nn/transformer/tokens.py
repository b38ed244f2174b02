"""From images to the tokens of a vision transformer: timm's `VisionTransformer`, and `Eva` as DINOv3 uses it."""

from dataclasses import dataclass
from typing import TypeGuard

import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from massl.nn.positions import model_positions
from massl.nn.transformer.plain import embed_patches

Transformer = VisionTransformer | Eva


@dataclass(frozen=True, kw_only=True)
class Tokens:
    pooled: Tensor  # [B, D]: the class token after the final norm, or a network's pooled features
    patches: Tensor | None  # [B, N, D] after the final norm; None if the network has no patch tokens


def is_transformer(model: nn.Module) -> TypeGuard[Transformer]:
    """Whether Backbone computes the model token by token, for images of any size.

    Of timm's `Eva` only models for any size whose rotary positions are fixed, as DINOv3's; the others are treated as
    networks with pooled features.
    """
    if not isinstance(model, Eva):
        return isinstance(model, VisionTransformer)
    rotates = model.rope is None or not any(True for _ in model.rope.parameters())
    is_pooled_alike = model.attn_pool is None and model.global_pool in ("token", "avg")
    return bool(model.dynamic_img_size and rotates and is_pooled_alike and model.patch_drop is None)


def pools_class_token(model: Transformer) -> bool:
    """Whether the class token is the feature of an image; otherwise the mean of the patch tokens."""
    return model.cls_token is not None and (isinstance(model, VisionTransformer) or model.global_pool == "token")


def embed_images(
    model: Transformer, images: Tensor, masks: Tensor | None = None, mask_token: Tensor | None = None
) -> Tensor:  # [B, 3, H, W], [B, patches] bool, [D] -> [B, prefix + patches, D]
    """The input of the first block; where `masks` is true, `mask_token` replaces the embedded patch.

    Pixels beyond the last whole patch are ignored.
    """
    grid = model.patch_embed.proj(images)
    patches = model.patch_embed.norm(grid.flatten(2).transpose(1, 2))
    if masks is not None:
        assert mask_token is not None
        patches = torch.where(masks[..., None], mask_token.to(patches.dtype), patches)
    return model.norm_pre(embed_patches(model, patches, model_positions(model, *grid.shape[-2:])))  # type: ignore[no-any-return]


def normed_tokens(model: Transformer, tokens: Tensor) -> Tokens:  # [B, prefix + N, D] after the blocks
    normed = model.norm(tokens)
    num_prefix = model.num_prefix_tokens
    pooled = normed[:, 0] if pools_class_token(model) else normed[:, num_prefix:].mean(dim=1)
    return Tokens(pooled=model.fc_norm(pooled), patches=normed[:, num_prefix:])


def rotations_of(model: Transformer, height: int, width: int) -> Tensor | None:  # -> [height * width, 2 * head_dim]
    """Sines and cosines by which every block rotates queries and keys of a grid of patches; None: it has no rotations.

    They follow from the grid alone, so no position table is resampled.
    """
    if not isinstance(model, Eva) or model.rope is None:
        return None
    with torch.inference_mode(False), torch.no_grad():  # later calls may need gradients
        return model.rope.get_embed(shape=[height, width])  # type: ignore[no-any-return, operator]
