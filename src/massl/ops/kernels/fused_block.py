"""A pre-norm transformer block from few large operations: cuBLAS matrix products and our own kernels between them.

All tokens of all views are rows of one [T, C] tensor. Between blocks the residual stream is kept as an unevaluated sum,
    stream = x + scale * (branch + bias),
because the next block's first kernel adds and normalises in one pass. The backward pass keeps the two sums, queries,
keys and values, the attention output and the hidden layer before its GELU: 10 C numbers per token. Norms and GELU are
recomputed by kernels that must read their inputs anyway. `memory_lean` keeps only one sum and repeats the forward pass.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from massl.ops.kernels.attention import SequenceGroup, packed_attention
from massl.ops.kernels.attention_backward import packed_attention_backward
from massl.ops.kernels.class_attention import class_attention, class_attention_backward
from massl.ops.kernels.gelu import bias_gelu, bias_gelu_backward
from massl.ops.kernels.norm import add_norm, add_norm_backward


class Stream(NamedTuple):
    """The residual stream between blocks: x + scale * (branch + bias), or x alone."""

    x: Tensor  # [T, C]
    branch: Tensor | None = None  # [T, C]
    bias: Tensor | None = None  # [C]
    scale: Tensor | None = None  # [T] float32 of stochastic depth; None: 1


class BlockWeights(NamedTuple):
    """float32 parameters of a block, in the order of the computation."""

    norm1_weight: Tensor
    norm1_bias: Tensor
    qkv_weight: Tensor
    qkv_bias: Tensor
    proj_weight: Tensor
    proj_bias: Tensor
    norm2_weight: Tensor
    norm2_bias: Tensor
    fc1_weight: Tensor
    fc1_bias: Tensor
    fc2_weight: Tensor
    fc2_bias: Tensor  # added by the next block, with the branch


class Operands(NamedTuple):
    """The matrices, and the one bias added inside a product, in the precision of the products."""

    qkv_weight: Tensor
    qkv_bias: Tensor
    proj_weight: Tensor
    fc1_weight: Tensor
    fc2_weight: Tensor


class _Shape(NamedTuple):
    groups: tuple[SequenceGroup, ...]
    num_heads: int
    epsilon1: float
    epsilon2: float
    memory_lean: bool


def transformer_block(
    stream: Stream,
    weights: BlockWeights,
    operands: Operands,
    *,
    attention_scale: Tensor | None,
    branch_scale: Tensor | None,
    groups: Sequence[SequenceGroup],
    num_heads: int,
    epsilons: tuple[float, float],
    memory_lean: bool = False,
) -> Stream:
    """The stream after the block; `attention_scale` and `branch_scale` [T] are those of stochastic depth."""
    shape = _Shape(tuple(groups), num_heads, *epsilons, memory_lean)
    x, branch = _Block.apply(*stream, attention_scale, shape, operands, *weights[:-1])
    return Stream(x, branch, weights.fc2_bias, branch_scale)


def settle(
    stream: Stream, weight: Tensor, shift: Tensor, *, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The stream's sum and its LayerNorm."""
    total, normed = _AddNorm.apply(*stream, weight, shift, epsilon, dtype)
    return total, normed


def attend_from_class(q: Tensor, kv: Tensor, groups: Sequence[SequenceGroup], num_heads: int) -> Tensor:
    """Attention of one query per sequence to all its tokens: [R, C], [T, 2 * C] -> [R, C]."""
    out: Tensor = _ClassAttention.apply(q, kv, tuple(groups), num_heads)
    return out


def _without_last_bias(weights: Sequence[Tensor]) -> BlockWeights:
    """The weights the block itself reads; the last bias is left empty."""
    return BlockWeights._make([*weights, weights[0].new_empty(0)])


class _Middle(NamedTuple):
    """Intermediate results of a block that the backward pass reads."""

    mean1: Tensor
    rstd1: Tensor
    qkv: Tensor
    attended: Tensor
    lse: Tensor
    total2: Tensor
    mean2: Tensor
    rstd2: Tensor
    hidden: Tensor


def _forward(
    stream: Stream, attention_scale: Tensor | None, shape: _Shape, operands: Operands, weights: BlockWeights
) -> tuple[Tensor, Tensor, _Middle]:
    """The first sum, the output branch and intermediate results; the stream after it is (middle.total2, branch)."""
    dtype = operands.qkv_weight.dtype
    total1, normed, mean1, rstd1 = add_norm(
        *stream, weights.norm1_weight, weights.norm1_bias, epsilon=shape.epsilon1, dtype=dtype
    )
    qkv = torch.addmm(operands.qkv_bias, normed, operands.qkv_weight.t())
    del normed
    attended, lse = packed_attention(qkv, shape.groups, shape.num_heads)
    projected = attended @ operands.proj_weight.t()
    stream = Stream(total1, projected, weights.proj_bias, attention_scale)
    total2, normed, mean2, rstd2 = add_norm(
        *stream, weights.norm2_weight, weights.norm2_bias, epsilon=shape.epsilon2, dtype=dtype
    )
    del projected, stream
    hidden = normed @ operands.fc1_weight.t()
    branch = bias_gelu(hidden, weights.fc1_bias) @ operands.fc2_weight.t()
    return total1, branch, _Middle(mean1, rstd1, qkv, attended, lse, total2, mean2, rstd2, hidden)


def _weight_gradient(grad_output: Tensor, operand: Tensor) -> Tensor:  # [T, out], [T, in] -> [out, in] float32
    if grad_output.dtype == torch.float32 or not grad_output.is_cuda:
        return grad_output.t().float() @ operand.float()
    # The product's own float32 sums; rounding them to 16 bits and back would cost accuracy and time.
    return torch.mm(grad_output.t(), operand, out_dtype=torch.float32)


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        bias: Tensor | None,
        scale: Tensor | None,
        attention_scale: Tensor | None,
        shape: _Shape,
        operands: Operands,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        named = _without_last_bias(weights)
        keep = any(ctx.needs_input_grad) and not shape.memory_lean
        total1, output, middle = _forward(Stream(x, branch, bias, scale), attention_scale, shape, operands, named)
        if any(ctx.needs_input_grad):
            kept = middle if keep else ()
            ctx.save_for_backward(total1, scale, attention_scale, *weights, *kept)
            ctx.shape, ctx.operands, ctx.has_branch = shape, operands, branch is not None
        return middle.total2, output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor, grad_branch: Tensor) -> tuple[Tensor | None, ...]:
        total1, scale, attention_scale, *rest = ctx.saved_tensors
        shape, operands = ctx.shape, ctx.operands
        num_weights = len(BlockWeights._fields) - 1
        weights = _without_last_bias(rest[:num_weights])
        if shape.memory_lean:
            middle = _forward(Stream(total1), attention_scale, shape, operands, weights)[2]
        else:
            middle = _Middle(*rest[num_weights:])

        # The transposed copy makes this product 13 % faster (both operands are then contiguous along the summed axis);
        # copying costs 1 %.
        grad_activated = grad_branch @ operands.fc2_weight.t().contiguous().t()
        grad_hidden, activated, grad_fc1_bias = bias_gelu_backward(middle.hidden, weights.fc1_bias, grad_activated)
        del grad_activated
        grad_fc2_weight = _weight_gradient(grad_branch, activated)
        del activated, grad_branch
        grad_normed = grad_hidden @ operands.fc1_weight
        grad_x, grad_projected, grad_norm2_weight, grad_norm2_bias, grad_proj_bias, normed = add_norm_backward(
            grad_normed, grad_x, middle.total2, middle.mean2, middle.rstd2,
            attention_scale, weights.norm2_weight, weights.norm2_bias,
        )  # fmt: skip
        grad_fc1_weight = _weight_gradient(grad_hidden, normed)
        del grad_hidden, grad_normed, normed
        grad_proj_weight = _weight_gradient(grad_projected, middle.attended)
        grad_attended = grad_projected @ operands.proj_weight
        grad_qkv, grad_qkv_bias = packed_attention_backward(
            middle.qkv, middle.attended, middle.lse, grad_attended, shape.groups, shape.num_heads
        )
        del grad_projected, grad_attended
        grad_normed = grad_qkv @ operands.qkv_weight
        grad_x, grad_before, grad_norm1_weight, grad_norm1_bias, grad_bias_before, normed = add_norm_backward(
            grad_normed, grad_x, total1, middle.mean1, middle.rstd1, scale, weights.norm1_weight, weights.norm1_bias
        )
        grad_qkv_weight = _weight_gradient(grad_qkv, normed)
        before = (grad_before, grad_bias_before) if ctx.has_branch else (None, None)
        return (
            grad_x, *before, None, None, None, None,
            grad_norm1_weight, grad_norm1_bias, grad_qkv_weight, grad_qkv_bias, grad_proj_weight, grad_proj_bias,
            grad_norm2_weight, grad_norm2_bias, grad_fc1_weight, grad_fc1_bias, grad_fc2_weight,
        )  # fmt: skip


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        bias: Tensor | None,
        scale: Tensor | None,
        weight: Tensor,
        shift: Tensor,
        epsilon: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        total, normed, mean, rstd = add_norm(x, branch, bias, scale, weight, shift, epsilon=epsilon, dtype=dtype)
        ctx.save_for_backward(total, mean, rstd, scale, weight, shift)
        ctx.has_branch = branch is not None
        if not ctx.has_branch:
            total = total.view_as(total)  # autograd: an input must not be returned itself
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, grad_normed: Tensor) -> tuple[Tensor | None, ...]:
        total, mean, rstd, scale, weight, shift = ctx.saved_tensors
        grad_x, grad_branch, grad_weight, grad_shift, grad_bias, _ = add_norm_backward(
            grad_normed.contiguous(), grad_total.contiguous(), total, mean, rstd, scale, weight, shift
        )
        before = (grad_branch, grad_bias) if ctx.has_branch else (None, None)
        return grad_x, *before, None, grad_weight, grad_shift, None, None


class _ClassAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, groups: tuple[SequenceGroup, ...], num_heads: int) -> Tensor:
        q = q.contiguous()
        out, lse = class_attention(q, kv, groups, num_heads)
        ctx.save_for_backward(q, kv, lse)
        ctx.groups, ctx.num_heads = groups, num_heads
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, kv, lse = ctx.saved_tensors
        grad_q, grad_kv = class_attention_backward(q, kv, lse, grad_out.contiguous(), ctx.groups, ctx.num_heads)
        return grad_q, grad_kv, None, None
