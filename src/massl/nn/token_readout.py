"""What evaluations read from a backbone: tokens of its last blocks, and the attention of its class token."""

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from massl.config import MasslError
from massl.nn.backbone import Backbone, Tokens, embed_images
from massl.nn.transformer.plain import PlainBlock, has_plain_attention


class UnsuitableModel(MasslError, ValueError):
    """The model lacks what an evaluation reads; the message says what and what to choose instead."""


def patch_size(backbone: Backbone) -> int | None:
    """Side of a patch in pixels; None for networks without patches."""
    model = backbone.model
    return int(model.patch_embed.patch_size[0]) if isinstance(model, VisionTransformer) else None


def has_class_token(backbone: Backbone) -> bool:
    return isinstance(backbone.model, VisionTransformer) and backbone.model.cls_token is not None


def require_class_token(backbone: Backbone, *, purpose: str) -> VisionTransformer:
    """The transformer, or an error that names what asked for it."""
    model = backbone.model
    if not isinstance(model, VisionTransformer) or model.cls_token is None:
        raise UnsuitableModel(
            f"{purpose} needs a class token, which {backbone.timm_arguments['model_name']} does not have; choose a vision transformer with "
            "one, or ask for the network's own pooled features with --feature pooled"
        )
    return model


def require_patches(backbone: Backbone, *, purpose: str) -> int:
    """Side of a patch in pixels, or an error that names what asked for patches."""
    side = patch_size(backbone)
    if side is None:
        raise UnsuitableModel(
            f"{purpose} needs patch tokens, which {backbone.timm_arguments['model_name']} does not have; choose a vision transformer"
        )
    return side


def last_layers(backbone: Backbone, images: Tensor, *, num_layers: int) -> list[Tokens]:  # [B, 3, H, W]
    """Tokens after each of the last `num_layers` blocks, oldest first, each through the final norm as DINO and iBOT
    read them.

    Networks that are no vision transformers have one layer: their pooled features.
    """
    model = backbone.model
    if not isinstance(model, VisionTransformer):
        if num_layers != 1:
            raise UnsuitableModel(
                f"features of the last {num_layers} blocks exist in vision transformers only, and "
                f"{backbone.timm_arguments['model_name']} is none; ask for --feature pooled"
            )
        return [backbone(images)]
    if num_layers > len(model.blocks):
        raise UnsuitableModel(
            f"asked for the last {num_layers} blocks of a transformer with {len(model.blocks)}; choose another --feature"
        )
    tokens = embed_images(model, images)
    kept = []
    for number, block in enumerate(model.blocks):
        tokens = block(tokens)
        if number >= len(model.blocks) - num_layers:
            kept.append(_normalised(model, tokens))
    return kept


def _normalised(model: VisionTransformer, tokens: Tensor) -> Tokens:  # [B, prefix + N, D]
    normed = model.norm(tokens)
    num_prefix = model.num_prefix_tokens
    pooled = normed[:, 0] if model.cls_token is not None else normed[:, num_prefix:].mean(dim=1)
    return Tokens(pooled=model.fc_norm(pooled), patches=normed[:, num_prefix:])


# [B, 3, H, W] -> [B, heads, grid height, grid width]
def class_attention(backbone: Backbone, images: Tensor) -> Tensor:
    """How the class token of the last block attends to the patches: softmax(q k' / sqrt(d)), the columns of prefix
    tokens left out.

    The rows do not sum to 1: what the class token gives to itself (and to registers) is missing.
    """
    model, name = backbone.model, backbone.timm_arguments["model_name"]
    if not isinstance(model, VisionTransformer) or model.cls_token is None:
        raise UnsuitableModel(
            f"an attention map shows what the class token looks at, and {name} has none; choose a transformer with one"
        )
    block: PlainBlock = model.blocks[-1]
    if not has_plain_attention(block):
        raise UnsuitableModel(
            f"the attention of {name} is not timm's plain one, and its maps cannot be read; choose a plain transformer"
        )
    tokens = embed_images(model, images)
    for earlier in model.blocks[:-1]:
        tokens = earlier(tokens)
    attention = block.attn
    num_images, num_tokens, _ = tokens.shape
    qkv = attention.qkv(block.norm1(tokens)).view(num_images, num_tokens, 3, attention.num_heads, attention.head_dim)
    query, key = qkv[:, 0, 0].float(), qkv[:, :, 1].float()  # [B, heads, d], [B, tokens, heads, d]
    with torch.autocast(images.device.type, enabled=False):  # float32 even where the network runs in bfloat16
        logits = torch.einsum("bhd,bthd->bht", query, key) * attention.head_dim**-0.5
    side = require_patches(backbone, purpose="an attention map")
    grid = (images.shape[2] // side, images.shape[3] // side)
    maps: Tensor = logits.softmax(dim=-1)[:, :, model.num_prefix_tokens :].unflatten(-1, grid)
    return maps
