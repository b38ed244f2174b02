"""Reads tokens of the last blocks and the class token's attention from a backbone, for evaluations."""

import torch
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.eva import EvaAttention, EvaBlock
from torch import Tensor, nn

from massl.config import MasslError
from massl.nn.backbone import Backbone
from massl.nn.transformer.plain import PlainBlock, has_plain_attention
from massl.nn.transformer.tokens import (
    Tokens,
    Transformer,
    embed_images,
    is_transformer,
    normed_tokens,
    pools_class_token,
)


class UnsuitableModel(MasslError, ValueError):
    """The model lacks something that an evaluation needs."""


def patch_size(backbone: Backbone) -> int | None:
    """Side of a patch in pixels; None for networks without patches."""
    return backbone.patch_size if backbone.is_transformer else None


def has_class_token(backbone: Backbone) -> bool:
    return is_transformer(backbone.model) and pools_class_token(backbone.model)


def require_class_token(backbone: Backbone, *, purpose: str) -> Transformer:
    """The transformer; `purpose` names the caller in the error message."""
    model = backbone.model
    if not is_transformer(model) or not pools_class_token(model):
        raise UnsuitableModel(
            f"{purpose} needs a class token, which {backbone.model_name} does not have; choose a vision transformer "
            "with one; for features of the network as it is, choose --feature pooled"
        )
    return model


def require_patches(backbone: Backbone, *, purpose: str) -> int:
    """Side of a patch in pixels; `purpose` names the caller in the error message."""
    side = patch_size(backbone)
    if side is None:
        name = backbone.model_name
        raise UnsuitableModel(f"{purpose} needs patch tokens, which {name} does not have; choose a vision transformer")
    return side


def require_size(backbone: Backbone, image_size: int) -> None:
    if reason := problem_with_size(backbone, image_size):
        raise UnsuitableModel(f"{backbone.model_name} takes no images of {image_size} px ({reason}); omit --image_size")


@torch.no_grad()
def problem_with_size(backbone: Backbone, image_size: int) -> str | None:
    """Why an empty image of this size fails: BEiT and Swin take one size only, no ViT less than a patch."""
    was_training = backbone.training
    backbone.eval()
    try:
        backbone(torch.zeros(1, 3, image_size, image_size, device=next(backbone.parameters()).device))
    except (AssertionError, RuntimeError, ValueError) as error:
        return str(error).rstrip(".") or type(error).__name__
    finally:
        backbone.train(was_training)
    return None


def last_layers(backbone: Backbone, images: Tensor, *, num_layers: int) -> list[Tokens]:  # [B, 3, H, W]
    """Tokens after each of the last `num_layers` blocks, in order, each through the final norm as in DINO and iBOT.

    Other networks have one layer: their pooled features.
    """
    model = backbone.model
    if not is_transformer(model):
        if num_layers != 1:
            raise UnsuitableModel(
                f"features of the last {num_layers} blocks need a vision transformer, which {backbone.model_name} is "
                "not; choose --feature pooled"
            )
        return [backbone(images)]
    if num_layers > len(model.blocks):
        num_blocks = len(model.blocks)
        raise UnsuitableModel(f"{num_layers} of {num_blocks} transformer blocks requested; choose another --feature")
    tokens, rotations = embed_images(model, images), backbone.rotations(images)
    layers = []
    for number, block in enumerate(model.blocks):
        tokens = block(tokens) if rotations is None else block(tokens, rope=rotations)
        if number >= len(model.blocks) - num_layers:
            layers.append(normed_tokens(model, tokens))
    return layers


# [B, 3, H, W] -> [B, heads, grid height, grid width]
def class_attention(backbone: Backbone, images: Tensor) -> Tensor:
    """The class token's attention to the patches in the last block: softmax(q k' / sqrt(d)) without prefix tokens.

    The rows do not sum to 1: the attention to the class token itself (and to registers) is missing.
    """
    model = require_class_token(backbone, purpose="an attention map")
    block: PlainBlock = model.blocks[-1]
    is_rotated = type(block.attn) is EvaAttention and block.attn.qkv is not None and isinstance(block, EvaBlock)
    if not has_plain_attention(block) and not (is_rotated and isinstance(block.attn.q_norm, nn.Identity)):
        raise UnsuitableModel(f"the attention of {backbone.model_name} is not timm's plain one and cannot be read")
    tokens, rotations = embed_images(model, images), backbone.rotations(images)
    for earlier in model.blocks[:-1]:
        tokens = earlier(tokens) if rotations is None else earlier(tokens, rope=rotations)
    attention = block.attn
    num_images, num_tokens, _ = tokens.shape
    qkv = attention.qkv(block.norm1(tokens))
    if is_rotated and attention.q_bias is not None:
        qkv = qkv + torch.cat([attention.q_bias, attention.k_bias, attention.v_bias])
    qkv = qkv.view(num_images, num_tokens, 3, attention.num_heads, -1)
    query, key = qkv[:, 0, 0].float(), qkv[:, :, 1].float()  # [B, heads, d], [B, tokens, heads, d]
    if rotations is not None:  # of patches; class and register tokens have no place
        prefix, patches = key.tensor_split([model.num_prefix_tokens], dim=1)
        rotated = apply_rot_embed_cat(patches.transpose(1, 2), rotations, half=attention.rotate_half)
        key = torch.cat([prefix, rotated.transpose(1, 2)], dim=1)
    with torch.autocast(images.device.type, enabled=False):  # float32 even where the network runs in bfloat16
        logits = torch.einsum("bhd,bthd->bht", query, key) * query.shape[-1] ** -0.5
    grid = (images.shape[2] // backbone.patch_size, images.shape[3] // backbone.patch_size)
    maps: Tensor = logits.softmax(dim=-1)[:, :, model.num_prefix_tokens :].unflatten(-1, grid)
    return maps
