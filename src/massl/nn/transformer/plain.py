"""Which timm transformers are plain ViTs, as our fast paths need, and the last block for the class token only."""

from typing import Any, NamedTuple

import torch
from timm.layers.attention import Attention
from timm.layers.mlp import GluMlp, Mlp
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from massl.config import RecipeError

PlainBlock = Any  # timm's Block: to mypy, whatever hangs on a module is a tensor or a module
FUSED_HEAD_DIMS = (16, 32, 64)  # 128 would need 164 KB of shared memory in the backward pass, more than most cards have


class KernelOptions(NamedTuple):
    """How fused kernels compute a transformer."""

    dtype: torch.dtype  # of matrix products
    stream_dtype: torch.dtype  # of the residual stream between blocks
    memory_lean: bool  # recompute activations in the backward pass


# [B, N, D] -> [B, prefix + N, D]
def embed_patches(model: VisionTransformer | Eva, patch_tokens: Tensor, positions: Tensor | None) -> Tensor:
    """Prepends class and register tokens and adds position embeddings, if the model has them."""
    tokens = [token for token in (model.cls_token, model.reg_token) if token is not None]
    prefix = [token.expand(patch_tokens.shape[0], -1, -1) for token in tokens]
    if positions is None:
        return torch.cat([*prefix, patch_tokens], dim=1)
    if model.no_embed_class:
        return torch.cat([*prefix, patch_tokens + positions], dim=1)
    return torch.cat([*prefix, patch_tokens], dim=1) + positions


def has_plain_attention(block: PlainBlock) -> bool:
    """Whether `block` is timm's pre-norm block with ordinary attention, so that one token can be computed alone."""
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
    """The first token of block(tokens). Only keys and values need the other tokens: a sixth of the block's work."""
    attention = block.attn
    num_images, num_tokens, _ = tokens.shape
    heads, dim = attention.num_heads, attention.head_dim
    normed = block.norm1(tokens)
    weight, bias = attention.qkv.weight, attention.qkv.bias
    width = heads * dim
    query = linear(normed[:, :1], weight[:width], None if bias is None else bias[:width])
    query = query.view(num_images, 1, heads, dim).transpose(1, 2)
    pairs = linear(normed, weight[width:], None if bias is None else bias[width:])
    key, value = pairs.view(num_images, num_tokens, 2, heads, dim).permute(2, 0, 3, 1, 4).unbind()
    attended = scaled_dot_product_attention(query, key, value).reshape(num_images, 1, width)
    first = tokens[:, :1] + block.drop_path1(block.ls1(attention.proj_drop(attention.proj(attended))))
    result: Tensor = first + block.drop_path2(block.ls2(block.mlp(block.norm2(first))))
    return result


def refuse_unknown_transformer(model: nn.Module) -> None:
    """Refuses transformers whose features would differ between Backbone and the plain timm model that users get."""
    if not isinstance(model, VisionTransformer):
        return
    if model.attn_pool is not None or (model.cls_token is not None and model.global_pool != "token"):
        raise RecipeError(
            "this vision transformer pools its patch tokens, but massl trains the class token. Set global_pool: token "
            "in backbone.timm_options, or choose e.g. vit_small_patch16_224"
        )
    if isinstance(model, VisionTransformerDistilled):
        raise RecipeError("massl does not train the second class token of distilled transformers; choose a plain one")


def why_not_fused(model: nn.Module) -> str | None:
    """Why the fused kernels cannot compute this model; None if they can."""
    if isinstance(model, Eva):
        return "its blocks rotate queries and keys"
    if not isinstance(model, VisionTransformer):
        return "the backbone is no vision transformer"
    has_extra_norm = not (isinstance(model.norm_pre, nn.Identity) and isinstance(model.fc_norm, nn.Identity))
    if model.cls_token is None or has_extra_norm:
        return "the transformer has no class token or an extra norm"
    projection = model.patch_embed.proj
    is_plain = isinstance(projection, nn.Conv2d) and projection.stride == projection.kernel_size
    if not is_plain or projection.bias is None or not isinstance(model.patch_embed.norm, nn.Identity):
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
    if type(mlp) is GluMlp:
        return "its blocks have a SwiGLU MLP"
    if type(mlp) is not Mlp or not isinstance(mlp.act, nn.GELU) or getattr(mlp.act, "approximate", "none") != "none":
        return "its blocks have another MLP than Linear, GELU, Linear"
    if not isinstance(mlp.norm, nn.Identity):
        return "its blocks have further norms"
    if any(part.p > 0.0 for part in (attention.proj_drop, mlp.drop1, mlp.drop2)):
        return "its blocks use dropout"
    if any(layer.bias is None for layer in (attention.qkv, attention.proj, mlp.fc1, mlp.fc2)):
        return "its blocks have layers without bias"
    norms = (block.norm1, block.norm2)
    if not all(isinstance(norm, nn.LayerNorm) and norm.elementwise_affine and norm.bias is not None for norm in norms):
        return "its norms are not plain LayerNorm"
    if attention.head_dim not in FUSED_HEAD_DIMS:
        known = ", ".join(map(str, FUSED_HEAD_DIMS))
        return f"its attention heads have {attention.head_dim} dimensions; the kernels know {known}"
    return None
