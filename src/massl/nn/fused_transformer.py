"""A plain vision transformer computed by fused kernels: class-token features of views of several sizes, in one pass.

The model stays timm's own, its parameters are read where they are. Tokens of all views lie one below the other, so that each matrix
product of a block runs once for all of them, and the last block is computed for the class tokens alone.
"""

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import linear

from massl.nn.drop_path import KeyedDropPath
from massl.nn.plain_transformer import PlainBlock, embed_patches
from massl.nn.positions import model_positions
from massl.ops.attention_kernels import Run
from massl.ops.fused_block import BlockWeights, Operands, Stream, attend_from_class, settle, transformer_block
from massl.ops.token_kernels import cut_into_patches, pack_tokens


def class_features(
    model: VisionTransformer,
    view_groups: list[Tensor],
    scales: Tensor | None,
    *,
    dtype: torch.dtype,
    stream_dtype: torch.dtype,
    memory_lean: bool,
) -> Tensor:  # groups of [R_i, 3, H_i, W_i], [num_drop_paths, sum R_i] -> [sum R_i, D]
    """The class token after the final norm of every view. `scales` are those of stochastic depth, one per layer and view.

    `dtype` is that of the products, `stream_dtype` that of the residual stream between blocks.
    """
    tokens, runs = packed_tokens(model, view_groups, dtype, stream_dtype)
    token_scales = None if scales is None else _per_token(scales, runs)
    blocks: list[PlainBlock] = list(model.blocks)
    operands = operands_of(blocks[:-1], dtype)
    stream = Stream(tokens)
    for block, block_operands in zip(blocks[:-1], operands, strict=True):
        stream = transformer_block(
            stream,
            weights_of(block),
            block_operands,
            attention_scale=_scale_of(block.drop_path1, token_scales),
            branch_scale=_scale_of(block.drop_path2, token_scales),
            runs=runs,
            num_heads=block.attn.num_heads,
            epsilons=(block.norm1.eps, block.norm2.eps),
            memory_lean=memory_lean,
        )
    return model.norm(class_token_after_last_block(blocks[-1], stream, scales, runs, dtype))  # type: ignore[no-any-return]


def packed_tokens(
    model: VisionTransformer, view_groups: list[Tensor], dtype: torch.dtype, stream_dtype: torch.dtype
) -> tuple[Tensor, list[Run]]:  # groups of [R_i, 3, H_i, W_i] -> [T, D]
    """Patch embedding as a matrix product: patches do not overlap, and a convolution of this shape is slow to differentiate."""
    projection = model.patch_embed.proj
    weight = projection.weight.flatten(1).to(dtype).t()
    patches, tables, runs = [], [], []
    for views in view_groups:
        height, width = views.shape[2] // projection.kernel_size[0], views.shape[3] // projection.kernel_size[1]
        patches.append(cut_into_patches(views, projection.kernel_size, dtype) @ weight)
        shared = projection.bias.expand(1, height * width, -1)
        tables.append(embed_patches(model, shared, model_positions(model, height, width))[0])
        runs.append(Run(len(views), len(tables[-1])))
    return pack_tokens(patches, tables, model.num_prefix_tokens, stream_dtype), runs


def class_token_after_last_block(
    block: PlainBlock, stream: Stream, scales: Tensor | None, runs: list[Run], dtype: torch.dtype
) -> Tensor:  # -> [R, D]
    attention = block.attn
    total, normed = settle(stream, block.norm1.weight, block.norm1.bias, epsilon=block.norm1.eps, dtype=dtype)
    width = attention.num_heads * attention.head_dim
    weight, bias = attention.qkv.weight.to(dtype), attention.qkv.bias.to(dtype)
    query = linear(_first_tokens(normed, runs), weight[:width], bias[:width])
    attended = attend_from_class(query, linear(normed, weight[width:], bias[width:]), runs, attention.num_heads)
    # From here on one token per view: small, so float32 sums cost nothing.
    first = _first_tokens(total, runs).float()
    first = first + _scaled(block.drop_path1, attention.proj(attended), scales)
    return first + _scaled(block.drop_path2, block.mlp(block.norm2(first)), scales)


def _first_tokens(rows: Tensor, runs: list[Run]) -> Tensor:  # [T, D] -> [R, D]
    parts = torch.split(rows, [run.num_sequences * run.length for run in runs])
    return torch.cat([part.view(*run, -1)[:, 0] for part, run in zip(parts, runs, strict=True)])


def _per_token(scales: Tensor, runs: list[Run]) -> Tensor:  # [layers, R] -> [layers, T]
    parts = torch.split(scales, [run.num_sequences for run in runs], dim=1)
    return torch.cat([part[:, :, None].expand(-1, -1, run.length).flatten(1) for part, run in zip(parts, runs, strict=True)], dim=1)


def _scale_of(drop_path: nn.Module, token_scales: Tensor | None) -> Tensor | None:
    return token_scales[drop_path.layer] if token_scales is not None and isinstance(drop_path, KeyedDropPath) else None


def _scaled(drop_path: nn.Module, branch: Tensor, scales: Tensor | None) -> Tensor:
    return branch * scales[drop_path.layer][:, None] if scales is not None and isinstance(drop_path, KeyedDropPath) else branch


def weights_of(block: PlainBlock) -> BlockWeights:
    attention, mlp = block.attn, block.mlp
    return BlockWeights(
        block.norm1.weight,
        block.norm1.bias,
        attention.qkv.weight,
        attention.qkv.bias,
        attention.proj.weight,
        attention.proj.bias,
        block.norm2.weight,
        block.norm2.bias,
        mlp.fc1.weight,
        mlp.fc1.bias,
        mlp.fc2.weight,
        mlp.fc2.bias,
    )


@torch.no_grad()
def operands_of(blocks: list[PlainBlock], dtype: torch.dtype) -> list[Operands]:
    """Weights in the precision of the products, all cast together: one launch for hundreds of tensors instead of one each."""
    sources = [getattr(weights_of(block), name) for block in blocks for name in Operands._fields]
    cast = [torch.empty_like(source, dtype=dtype) for source in sources]
    torch._foreach_copy_(cast, sources)
    num = len(Operands._fields)
    return [Operands(*cast[start : start + num]) for start in range(0, len(cast), num)]
