"""A plain vision transformer computed by fused kernels: features of views of several sizes in one pass.

The model and its parameters are timm's own. The tokens of all views are stacked, so each matrix product of a block runs
once for all views. If only the class token of a view is needed, the last block is computed for it alone.
"""

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import linear

from massl.nn.drop_path import KeyedDropPath
from massl.nn.positions import model_positions
from massl.nn.transformer.plain import KernelOptions, PlainBlock, embed_patches
from massl.ops.kernels.attention import SequenceGroup
from massl.ops.kernels.fused_block import BlockWeights, Operands, Stream, attend_from_class, settle, transformer_block
from massl.ops.kernels.tokens import cut_into_patches, pack_tokens


def class_features(
    model: VisionTransformer, view_groups: list[Tensor], scales: Tensor | None, options: KernelOptions
) -> Tensor:  # groups of [R_i, 3, H_i, W_i], [num_drop_paths, sum R_i] -> [sum R_i, D]
    """The class token of every view after the final norm; `scales` are the drop-path scales per layer and view."""
    tokens, groups = packed_tokens(model, view_groups, options.dtype, options.stream_dtype)
    blocks: list[PlainBlock] = list(model.blocks)
    stream = through_blocks(blocks[:-1], Stream(tokens), scales, groups, options)
    return model.norm(class_token_after_last_block(blocks[-1], stream, scales, groups, options.dtype))  # type: ignore[no-any-return]


def class_and_patch_features(
    model: VisionTransformer,
    view_groups: list[Tensor],
    scales: Tensor | None,
    options: KernelOptions,
    *,
    masks: Tensor | None,
    mask_token: Tensor | None,
) -> tuple[Tensor, Tensor]:  # as class_features, [R_0, N] bool, [D] -> [sum R_i, D] float32, [R_0, N, D] in `dtype`
    """The class token of every view and the patch tokens of the first group; see Backbone.class_and_patches."""
    dtype = options.dtype
    tokens, groups = packed_tokens(model, view_groups, dtype, options.stream_dtype, masks=masks, mask_token=mask_token)
    blocks: list[PlainBlock] = list(model.blocks)
    stream = through_blocks(blocks[:-1], Stream(tokens), scales, groups, options)
    # The last block in full for the first group only: of the others (half the tokens with ten small views) the class
    # token is enough.
    parts = [part for part in (groups[:1], groups[1:]) if part]
    whole, *further = _split_stream(
        stream, [sum(group.num_sequences * group.length for group in part) for part in parts]
    )
    whole_scales, further_scales = None, None
    if scales is not None:
        whole_scales, further_scales = torch.tensor_split(scales, [groups[0].num_sequences], dim=1)
    whole = through_blocks(blocks[-1:], whole, whole_scales, groups[:1], options)
    total, normed = _final_norm(model, whole, dtype)
    first = _first_tokens(total, groups[:1]).float()  # few, so not rounded to 16 bits like the patch tokens
    others = [class_token_after_last_block(blocks[-1], part, further_scales, groups[1:], dtype) for part in further]
    return model.norm(torch.cat([first, *others])), normed.view(*groups[0], -1)[:, model.num_prefix_tokens :]


def visible_features(
    model: VisionTransformer, images: Tensor, kept: Tensor, scales: Tensor | None, options: KernelOptions
) -> Tensor:  # [R, 3, H, W], [R, n] int64, [num_drop_paths, R] -> [R, prefix + n, D] in `dtype`
    """Prefix tokens and the patch tokens indexed by `kept`, after the final norm; see Backbone.visible."""
    tokens = _visible_tokens(model, images, kept, options.dtype).to(options.stream_dtype)
    groups = [SequenceGroup(*tokens.shape[:2])]
    stream = through_blocks(list(model.blocks), Stream(tokens.flatten(0, 1)), scales, groups, options)
    return _final_norm(model, stream, options.dtype)[1].view(*groups[0], -1)


def through_blocks(
    blocks: list[PlainBlock],
    stream: Stream,
    scales: Tensor | None,
    groups: list[SequenceGroup],
    options: KernelOptions,
) -> Stream:
    token_scales = None if scales is None else _per_token(scales, groups)
    for block, block_operands in zip(blocks, operands_of(blocks, options.dtype), strict=True):
        stream = transformer_block(
            stream,
            weights_of(block),
            block_operands,
            attention_scale=_scale_of(block.drop_path1, token_scales),
            branch_scale=_scale_of(block.drop_path2, token_scales),
            groups=groups,
            num_heads=block.attn.num_heads,
            epsilons=(block.norm1.eps, block.norm2.eps),
            memory_lean=options.memory_lean,
        )
    return stream


def _split_stream(stream: Stream, nums_tokens: list[int]) -> list[Stream]:
    """Parts with these numbers of tokens; all of them share the bias."""
    assert stream.branch is not None
    scales = [None] * len(nums_tokens) if stream.scale is None else torch.split(stream.scale, nums_tokens)
    parts = zip(torch.split(stream.x, nums_tokens), torch.split(stream.branch, nums_tokens), scales, strict=True)
    return [Stream(x, branch, stream.bias, scale) for x, branch, scale in parts]


# -> [T, D], [T, D] in `dtype`
def _final_norm(model: VisionTransformer, stream: Stream, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    norm: PlainBlock = model.norm
    return settle(stream, norm.weight, norm.bias, epsilon=norm.eps, dtype=dtype)


def packed_tokens(
    model: VisionTransformer,
    view_groups: list[Tensor],
    dtype: torch.dtype,
    stream_dtype: torch.dtype,
    *,
    masks: Tensor | None = None,
    mask_token: Tensor | None = None,
) -> tuple[Tensor, list[SequenceGroup]]:  # groups of [R_i, 3, H_i, W_i], [R_0, N] bool, [D] -> [T, D]
    """Patch embedding as a matrix product: a convolution without overlap has a slow backward pass."""
    projection = model.patch_embed.proj
    weight = projection.weight.flatten(1).to(dtype).t()
    patches, tables, groups = [], [], []
    for views in view_groups:
        height, width = views.shape[2] // projection.kernel_size[0], views.shape[3] // projection.kernel_size[1]
        patches.append(cut_into_patches(views, projection.kernel_size, dtype) @ weight)
        shared = projection.bias.expand(1, height * width, -1)
        tables.append(embed_patches(model, shared, model_positions(model, height, width))[0])
        groups.append(SequenceGroup(len(views), len(tables[-1])))
    # the table adds the bias of the patch embedding to every patch, but a masked one has none
    stand_in = None if mask_token is None else mask_token - projection.bias
    return pack_tokens(patches, tables, model.num_prefix_tokens, stream_dtype, masks=masks, stand_in=stand_in), groups


# -> [R, prefix + n, D] float32
def _visible_tokens(model: VisionTransformer, images: Tensor, kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Embeds only the patches in `kept`, usually a quarter of them."""
    projection = model.patch_embed.proj
    height, width = images.shape[2] // projection.kernel_size[0], images.shape[3] // projection.kernel_size[1]
    pixels = cut_into_patches(images, projection.kernel_size, dtype).view(len(images), height * width, -1)
    chosen = pixels.gather(1, kept[..., None].expand(-1, -1, pixels.shape[2]))
    patches = linear(chosen, projection.weight.flatten(1).to(dtype), projection.bias.to(dtype)).float()
    positions = model_positions(model, height, width)
    no_patches, of_prefix = patches.new_empty(1, 0, patches.shape[2]), None
    if positions is not None:
        of_prefix, of_patches = torch.tensor_split(positions, [positions.shape[1] - height * width], dim=1)
        patches = patches + of_patches[0][kept]  # by indexing: the backward pass of other gathers adds in any order
    return torch.cat([embed_patches(model, no_patches, of_prefix).expand(len(images), -1, -1), patches], dim=1)


def class_token_after_last_block(
    block: PlainBlock, stream: Stream, scales: Tensor | None, groups: list[SequenceGroup], dtype: torch.dtype
) -> Tensor:  # -> [R, D]
    attention = block.attn
    total, normed = settle(stream, block.norm1.weight, block.norm1.bias, epsilon=block.norm1.eps, dtype=dtype)
    width = attention.num_heads * attention.head_dim
    weight, bias = attention.qkv.weight.to(dtype), attention.qkv.bias.to(dtype)
    query = linear(_first_tokens(normed, groups), weight[:width], bias[:width])
    attended = attend_from_class(query, linear(normed, weight[width:], bias[width:]), groups, attention.num_heads)
    # from here on one token per view, so float32 sums cost nothing
    first = _first_tokens(total, groups).float()
    first = first + _scaled(block.drop_path1, block.ls1(attention.proj(attended)), scales)
    return first + _scaled(block.drop_path2, block.ls2(block.mlp(block.norm2(first))), scales)


def _first_tokens(rows: Tensor, groups: list[SequenceGroup]) -> Tensor:  # [T, D] -> [R, D]
    parts = torch.split(rows, [group.num_sequences * group.length for group in groups])
    return torch.cat([part.view(*group, -1)[:, 0] for part, group in zip(parts, groups, strict=True)])


def _per_token(scales: Tensor, groups: list[SequenceGroup]) -> Tensor:  # [layers, R] -> [layers, T]
    parts = zip(torch.split(scales, [group.num_sequences for group in groups], dim=1), groups, strict=True)
    return torch.cat([part[:, :, None].expand(-1, -1, group.length).flatten(1) for part, group in parts], dim=1)


def _scale_of(drop_path: nn.Module, scales: Tensor | None) -> Tensor | None:
    return scales[drop_path.layer] if scales is not None and isinstance(drop_path, KeyedDropPath) else None


def _scaled(drop_path: nn.Module, branch: Tensor, scales: Tensor | None) -> Tensor:
    scale = _scale_of(drop_path, scales)
    return branch if scale is None else branch * scale[:, None]


def weights_of(block: PlainBlock) -> BlockWeights:
    """The parameters of a block. Layer scale is multiplied into the last layer of its branch, weight and bias alike:
    the kernels need not know it, and gradients reach both factors.
    """
    attention, mlp = block.attn, block.mlp
    proj_weight, proj_bias = _layer_scaled(block.ls1, attention.proj)
    fc2_weight, fc2_bias = _layer_scaled(block.ls2, mlp.fc2)
    return BlockWeights(
        block.norm1.weight,
        block.norm1.bias,
        attention.qkv.weight,
        attention.qkv.bias,
        proj_weight,
        proj_bias,
        block.norm2.weight,
        block.norm2.bias,
        mlp.fc1.weight,
        mlp.fc1.bias,
        fc2_weight,
        fc2_bias,
    )


def _layer_scaled(layer_scale: PlainBlock, last: PlainBlock) -> tuple[Tensor, Tensor]:
    if isinstance(layer_scale, nn.Identity):
        return last.weight, last.bias
    return layer_scale.gamma[:, None] * last.weight, layer_scale.gamma * last.bias


@torch.no_grad()
def operands_of(blocks: list[PlainBlock], dtype: torch.dtype) -> list[Operands]:
    """Weights in the precision of the products, all cast in one launch instead of hundreds."""
    sources = [getattr(weights_of(block), name) for block in blocks for name in Operands._fields]
    cast = [torch.empty_like(source, dtype=dtype) for source in sources]
    torch._foreach_copy_(cast, sources)
    num = len(Operands._fields)
    return [Operands(*cast[start : start + num]) for start in range(0, len(cast), num)]
