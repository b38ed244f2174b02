"""Which timm transformers are the plain ViT that our shortcuts know, and the last block computed for the class token
alone.
"""

from typing import Any

import torch
from timm.layers.attention import Attention
from timm.layers.mlp import Mlp
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from massl.config import RecipeError

PlainBlock = Any  # timm's Block: to mypy, whatever hangs on a module is a tensor or a module
_HEAD_DIMS = (16, 32, 64)  # 128 would need more shared memory than most cards have: 164 KB in the backward pass


# [B, N, D] -> [B, prefix + N, D]
def embed_patches(model: VisionTransformer, patch_tokens: Tensor, positions: Tensor | None) -> Tensor:
    """Class and register tokens in front, position embeddings added where the model has them."""
    prefix = [
        token.expand(patch_tokens.shape[0], -1, -1) for token in (model.cls_token, model.reg_token) if token is not None
    ]
    if positions is None:
        return torch.cat([*prefix, patch_tokens], dim=1)
    if model.no_embed_class:
        return torch.cat([*prefix, patch_tokens + positions], dim=1)
    return torch.cat([*prefix, patch_tokens], dim=1) + positions


def has_plain_attention(block: PlainBlock) -> bool:
    """Whether `block` is timm's pre-norm block with ordinary attention, so that one of its tokens can be computed
    alone.
    """
    if type(block) is not Block or type(block.attn) is not Attention:
        return False
    attention = block.attn
    return (
        getattr(attention, "gate", None) is None
        and isinstance(attention.q_norm, nn.Identity)
        and isinstance(attention.norm, nn.Identity)
        and attention.attn_drop.p == 0.0
    )


def class_token_of_last_block(block: PlainBlock, tokens: Tensor) -> Tensor:  # [B, N, D] -> [B, 1, D]
    """The first token of block(tokens). Only keys and values need the others: a sixth of the block's work."""
    attention = block.attn
    num_images, num_tokens, _ = tokens.shape
    heads, dim = attention.num_heads, attention.head_dim
    normed = block.norm1(tokens)
    weight, bias = attention.qkv.weight, attention.qkv.bias
    width = heads * dim
    query = linear(normed[:, :1], weight[:width], None if bias is None else bias[:width]).view(
        num_images, 1, heads, dim
    )
    pairs = linear(normed, weight[width:], None if bias is None else bias[width:]).view(
        num_images, num_tokens, 2, heads, dim
    )
    key, value = pairs.permute(2, 0, 3, 1, 4).unbind()
    attended = scaled_dot_product_attention(query.transpose(1, 2), key, value).reshape(num_images, 1, width)
    first = tokens[:, :1] + block.drop_path1(block.ls1(attention.proj_drop(attention.proj(attended))))
    result: Tensor = first + block.drop_path2(block.ls2(block.mlp(block.norm2(first))))
    return result


def refuse_unknown_transformer(model: nn.Module) -> None:
    """Transformers whose features would differ between this wrapper and the plain timm model that users receive."""
    if not isinstance(model, VisionTransformer):
        return
    if model.attn_pool is not None or (model.cls_token is not None and model.global_pool != "token"):
        raise RecipeError(
            "this vision transformer pools its patch tokens; massl trains the class token. Choose one with global_pool 'token', "
            "e.g. vit_small_patch16_224, or set it in backbone.timm_options"
        )
    if isinstance(model, VisionTransformerDistilled):
        raise RecipeError(
            "distilled transformers carry a second class token, which massl does not train; choose the plain model"
        )


def why_not_fused(model: nn.Module) -> str | None:
    """What keeps the fused kernels from computing this model, in words; None where nothing does."""
    if not isinstance(model, VisionTransformer):
        return "the backbone is no vision transformer"
    if (
        model.cls_token is None
        or not isinstance(model.norm_pre, nn.Identity)
        or not isinstance(model.fc_norm, nn.Identity)
    ):
        return "the transformer has no class token or an extra norm"
    projection = model.patch_embed.proj
    is_plain = (
        isinstance(projection, nn.Conv2d)
        and projection.bias is not None
        and projection.stride == projection.kernel_size
    )
    if not is_plain or not isinstance(model.patch_embed.norm, nn.Identity):
        return "the patch embedding is not a plain convolution"
    if not isinstance(model.patch_drop, nn.Identity) or model.pos_drop.p > 0.0 or len(model.blocks) < 2:
        return "the transformer drops tokens or has a single block"
    if not isinstance(model.norm, nn.LayerNorm) or model.norm.bias is None:
        return "its last norm is not a plain LayerNorm"
    return next((reason for block in model.blocks if (reason := _why_not_fused_block(block)) is not None), None)


def _why_not_fused_block(block: PlainBlock) -> str | None:
    if not has_plain_attention(block):
        return "its blocks are not timm's plain pre-norm blocks"
    attention, mlp = block.attn, block.mlp
    if type(mlp) is not Mlp or not isinstance(mlp.act, nn.GELU) or getattr(mlp.act, "approximate", "none") != "none":
        return "its blocks have another MLP than Linear, GELU, Linear"
    if any(not isinstance(part, nn.Identity) for part in (block.ls1, block.ls2, mlp.norm)):
        return "its blocks have layer scale or further norms"
    if any(part.p > 0.0 for part in (attention.proj_drop, mlp.drop1, mlp.drop2)):
        return "its blocks use dropout"
    if any(layer.bias is None for layer in (attention.qkv, attention.proj, mlp.fc1, mlp.fc2)):
        return "its blocks have layers without bias"
    if not all(
        isinstance(norm, nn.LayerNorm) and norm.elementwise_affine and norm.bias is not None
        for norm in (block.norm1, block.norm2)
    ):
        return "its norms are not plain LayerNorm"
    if attention.head_dim not in _HEAD_DIMS:
        return f"its attention heads have {attention.head_dim} dimensions; the kernels know {', '.join(map(str, _HEAD_DIMS))}"
    return None
