"""Triton kernels for the gradients of `packed_attention`, one per range of sequence lengths."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from massl.ops.kernels.attention import LOG2_E, SequenceGroup, load_rows, sizes_of, store_rows, tiles_of
from massl.ops.kernels.reduce import sum_over_rows


@triton.jit
def _store_partial(ptr, values, row, first_column, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """This program's part of a bias gradient: the sum over tokens of a gradient [rows, BLOCK_D]."""
    columns = tl.arange(0, BLOCK_D)
    tl.store(ptr + row.to(tl.int64) * stride + first_column + columns, tl.sum(values, axis=0), mask=columns < D)


@triton.jit
def _backward_whole_kernel(
    qkv_ptr, out_ptr, lse_ptr, grad_out_ptr, grad_qkv_ptr, partial_ptr, first_token, first_partial, num_tokens, scale,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """For sequences that fit one tile: one program computes all gradients of a head."""
    sequence, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    start = first_token + sequence * LENGTH
    width: tl.constexpr = HEADS * D
    tokens = tl.arange(0, BLOCK)
    ok = tokens < LENGTH
    q = load_rows(qkv_ptr, start + tokens, ok, 3 * width, head * D, D, BLOCK_D)
    k = load_rows(qkv_ptr, start + tokens, ok, 3 * width, width + head * D, D, BLOCK_D)
    v = load_rows(qkv_ptr, start + tokens, ok, 3 * width, 2 * width + head * D, D, BLOCK_D)
    out = load_rows(out_ptr, start + tokens, ok, width, head * D, D, BLOCK_D)
    grad_out = load_rows(grad_out_ptr, start + tokens, ok, width, head * D, D, BLOCK_D)
    lse = tl.load(lse_ptr + head.to(tl.int64) * num_tokens + start + tokens, mask=ok, other=float("inf"))
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), axis=1)
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2_E)
    weights = tl.where(ok[None, :], tl.exp2(logits - lse[:, None]), 0.0)
    grad_v = tl.dot(tl.trans(weights.to(q.dtype)), grad_out, input_precision=PRECISION)
    grad_weights = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)
    grad_logits = (weights * (grad_weights - delta[:, None])).to(q.dtype)
    grad_q = tl.dot(grad_logits, k, input_precision=PRECISION) * scale
    grad_k = tl.dot(tl.trans(grad_logits), q, input_precision=PRECISION) * scale
    store_rows(grad_qkv_ptr, grad_q, start + tokens, ok, 3 * width, head * D, D, BLOCK_D)
    store_rows(grad_qkv_ptr, grad_k, start + tokens, ok, 3 * width, width + head * D, D, BLOCK_D)
    store_rows(grad_qkv_ptr, grad_v, start + tokens, ok, 3 * width, 2 * width + head * D, D, BLOCK_D)
    row = first_partial + sequence
    _store_partial(partial_ptr, grad_q, row, head * D, 3 * width, D, BLOCK_D)
    _store_partial(partial_ptr, grad_k, row, width + head * D, 3 * width, D, BLOCK_D)
    _store_partial(partial_ptr, grad_v, row, 2 * width + head * D, 3 * width, D, BLOCK_D)


@triton.jit
def _backward_keys_tile(
    k, v, grad_k, grad_v, qkv_ptr, out_ptr, lse_of_head, grad_out_ptr, start, queries, scale, head_column,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    ok = queries < LENGTH
    q = load_rows(qkv_ptr, start + queries, ok, 3 * WIDTH, head_column, D, BLOCK_D)
    grad_out = load_rows(grad_out_ptr, start + queries, ok, WIDTH, head_column, D, BLOCK_D)
    out = load_rows(out_ptr, start + queries, ok, WIDTH, head_column, D, BLOCK_D)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), axis=1)
    lse = tl.load(lse_of_head + queries, mask=ok, other=float("inf"))  # beyond the end: weight 0
    # Transposed, keys x queries, so that both sums over queries are plain products.
    weights = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * LOG2_E) - lse[None, :])
    grad_v += tl.dot(weights.to(q.dtype), grad_out, input_precision=PRECISION)
    grad_weights = tl.dot(v, tl.trans(grad_out), input_precision=PRECISION)
    grad_k += tl.dot((weights * (grad_weights - delta[None, :])).to(q.dtype), q, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit
def _backward_queries_tile(
    q, grad_out, delta, lse, grad_q, qkv_ptr, start, keys, scale, head_column,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    ok = keys < LENGTH
    k = load_rows(qkv_ptr, start + keys, ok, 3 * WIDTH, WIDTH + head_column, D, BLOCK_D)
    v = load_rows(qkv_ptr, start + keys, ok, 3 * WIDTH, 2 * WIDTH + head_column, D, BLOCK_D)
    weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2_E) - lse[:, None])
    if MASKED:
        weights = tl.where(ok[None, :], weights, 0.0)
    grad_weights = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)
    return grad_q + tl.dot((weights * (grad_weights - delta[:, None])).to(q.dtype), k, input_precision=PRECISION)


@triton.jit
def _backward_tiled_kernel(
    qkv_ptr, out_ptr, lse_ptr, grad_out_ptr, grad_qkv_ptr, partial_ptr, first_token, first_partial, num_tokens, scale,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr, INNER: tl.constexpr, WHOLE: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For longer sequences: a program takes BLOCK tokens, first as keys (summing over queries), then as queries."""
    sequence, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    start = first_token + sequence * LENGTH
    width: tl.constexpr = HEADS * D
    column = head * D
    lse_of_head = lse_ptr + head.to(tl.int64) * num_tokens + start
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = tokens < LENGTH
    row = first_partial + sequence * tl.num_programs(1) + tl.program_id(1)

    k = load_rows(qkv_ptr, start + tokens, ok, 3 * width, width + column, D, BLOCK_D)
    v = load_rows(qkv_ptr, start + tokens, ok, 3 * width, 2 * width + column, D, BLOCK_D)
    grad_k = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    grad_v = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for first in range(0, WHOLE, INNER):
        grad_k, grad_v = _backward_keys_tile(
            k, v, grad_k, grad_v, qkv_ptr, out_ptr, lse_of_head, grad_out_ptr, start, first + tl.arange(0, INNER),
            scale, column, LENGTH, width, D, BLOCK_D, PRECISION,
        )  # fmt: skip
    if TAIL > 0:
        grad_k, grad_v = _backward_keys_tile(
            k, v, grad_k, grad_v, qkv_ptr, out_ptr, lse_of_head, grad_out_ptr, start, WHOLE + tl.arange(0, TAIL),
            scale, column, LENGTH, width, D, BLOCK_D, PRECISION,
        )  # fmt: skip
    grad_k = tl.where(ok[:, None], grad_k * scale, 0.0)
    grad_v = tl.where(ok[:, None], grad_v, 0.0)
    store_rows(grad_qkv_ptr, grad_k, start + tokens, ok, 3 * width, width + column, D, BLOCK_D)
    store_rows(grad_qkv_ptr, grad_v, start + tokens, ok, 3 * width, 2 * width + column, D, BLOCK_D)
    _store_partial(partial_ptr, grad_k, row, width + column, 3 * width, D, BLOCK_D)
    _store_partial(partial_ptr, grad_v, row, 2 * width + column, 3 * width, D, BLOCK_D)

    q = load_rows(qkv_ptr, start + tokens, ok, 3 * width, column, D, BLOCK_D)
    grad_out = load_rows(grad_out_ptr, start + tokens, ok, width, column, D, BLOCK_D)
    out = load_rows(out_ptr, start + tokens, ok, width, column, D, BLOCK_D)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), axis=1)
    lse = tl.load(lse_of_head + tokens, mask=ok, other=float("inf"))
    grad_q = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for first in range(0, WHOLE, INNER):
        grad_q = _backward_queries_tile(
            q, grad_out, delta, lse, grad_q, qkv_ptr, start, first + tl.arange(0, INNER), scale, column,
            LENGTH, width, D, BLOCK_D, False, PRECISION,
        )  # fmt: skip
    if TAIL > 0:
        grad_q = _backward_queries_tile(
            q, grad_out, delta, lse, grad_q, qkv_ptr, start, WHOLE + tl.arange(0, TAIL), scale, column,
            LENGTH, width, D, BLOCK_D, True, PRECISION,
        )  # fmt: skip
    grad_q *= scale
    store_rows(grad_qkv_ptr, grad_q, start + tokens, ok, 3 * width, column, D, BLOCK_D)
    _store_partial(partial_ptr, tl.where(ok[:, None], grad_q, 0.0), row, column, 3 * width, D, BLOCK_D)


@triton.jit
def _backward_half(q, grad_out, delta, lse, grad_q, k, v, key_ok, scale, PRECISION: tl.constexpr):
    weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2_E) - lse[:, None])
    # a key beyond the end has logit 0, which may be far above the others
    weights = tl.where(key_ok[None, :], weights, 0.0)
    grad_v = tl.dot(tl.trans(weights.to(q.dtype)), grad_out, input_precision=PRECISION)
    grad_weights = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)
    grad_logits = (weights * (grad_weights - delta[:, None])).to(q.dtype)
    grad_k = tl.dot(tl.trans(grad_logits), q, input_precision=PRECISION)
    grad_q += tl.dot(grad_logits, k, input_precision=PRECISION)
    return grad_q, grad_k, grad_v


@triton.jit
def _backward_halves_kernel(
    qkv_ptr, out_ptr, lse_ptr, grad_out_ptr, grad_qkv_ptr, partial_ptr, first_token, first_partial, num_tokens, scale,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For sequences of up to two tiles of queries: one program computes all gradients of a head, keys by INNER."""
    sequence, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    start = first_token + sequence * LENGTH
    width: tl.constexpr = HEADS * D
    column = head * D
    lse_of_head = lse_ptr + head.to(tl.int64) * num_tokens + start
    first_rows = tl.arange(0, BLOCK)
    second_rows = BLOCK + tl.arange(0, BLOCK)
    first_ok, second_ok = first_rows < LENGTH, second_rows < LENGTH
    q0 = load_rows(qkv_ptr, start + first_rows, first_ok, 3 * width, column, D, BLOCK_D)
    q1 = load_rows(qkv_ptr, start + second_rows, second_ok, 3 * width, column, D, BLOCK_D)
    g0 = load_rows(grad_out_ptr, start + first_rows, first_ok, width, column, D, BLOCK_D)
    g1 = load_rows(grad_out_ptr, start + second_rows, second_ok, width, column, D, BLOCK_D)
    o0 = load_rows(out_ptr, start + first_rows, first_ok, width, column, D, BLOCK_D)
    delta0 = tl.sum(o0.to(tl.float32) * g0.to(tl.float32), axis=1)
    o1 = load_rows(out_ptr, start + second_rows, second_ok, width, column, D, BLOCK_D)
    delta1 = tl.sum(o1.to(tl.float32) * g1.to(tl.float32), axis=1)
    lse0 = tl.load(lse_of_head + first_rows, mask=first_ok, other=float("inf"))
    lse1 = tl.load(lse_of_head + second_rows, mask=second_ok, other=float("inf"))
    grad_q0 = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    grad_q1 = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    sum_k = tl.zeros([BLOCK_D], dtype=tl.float32)
    sum_v = tl.zeros([BLOCK_D], dtype=tl.float32)
    for first in range(0, LENGTH, INNER):
        keys = first + tl.arange(0, INNER)
        ok = keys < LENGTH
        k = load_rows(qkv_ptr, start + keys, ok, 3 * width, width + column, D, BLOCK_D)
        v = load_rows(qkv_ptr, start + keys, ok, 3 * width, 2 * width + column, D, BLOCK_D)
        grad_q0, grad_k0, grad_v0 = _backward_half(q0, g0, delta0, lse0, grad_q0, k, v, ok, scale, PRECISION)
        grad_q1, grad_k1, grad_v1 = _backward_half(q1, g1, delta1, lse1, grad_q1, k, v, ok, scale, PRECISION)
        grad_k = tl.where(ok[:, None], (grad_k0 + grad_k1) * scale, 0.0)
        grad_v = tl.where(ok[:, None], grad_v0 + grad_v1, 0.0)
        store_rows(grad_qkv_ptr, grad_k, start + keys, ok, 3 * width, width + column, D, BLOCK_D)
        store_rows(grad_qkv_ptr, grad_v, start + keys, ok, 3 * width, 2 * width + column, D, BLOCK_D)
        sum_k += tl.sum(grad_k, axis=0)
        sum_v += tl.sum(grad_v, axis=0)
    grad_q0 *= scale
    grad_q1 *= scale
    store_rows(grad_qkv_ptr, grad_q0, start + first_rows, first_ok, 3 * width, column, D, BLOCK_D)
    store_rows(grad_qkv_ptr, grad_q1, start + second_rows, second_ok, 3 * width, column, D, BLOCK_D)
    columns = tl.arange(0, BLOCK_D)
    partial = partial_ptr + (first_partial + sequence).to(tl.int64) * 3 * width + column + columns
    tl.store(partial, tl.sum(grad_q0, axis=0) + tl.sum(grad_q1, axis=0), mask=columns < D)
    tl.store(partial + width, sum_k, mask=columns < D)
    tl.store(partial + 2 * width, sum_v, mask=columns < D)


def packed_attention_backward(
    qkv: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, groups: Sequence[SequenceGroup], num_heads: int
) -> tuple[Tensor, Tensor]:  # -> [T, 3 * H * D], [3 * H * D]
    """Gradient of qkv, and its sum over tokens, which is the gradient of the bias."""
    num_tokens, width = out.shape
    grad_qkv = torch.empty_like(qkv)
    num_partials = [count * (1 if length <= 256 else triton.cdiv(length, 64)) for count, length in groups]
    partial = torch.empty(sum(num_partials), 3 * width, device=qkv.device)
    first_token = first_partial = 0
    for (num_sequences, length), num in zip(groups, num_partials, strict=True):
        scale = (width // num_heads) ** -0.5
        operands = (qkv, out, lse, grad_out, grad_qkv, partial, first_token, first_partial, num_tokens, scale)
        sizes = sizes_of(length, num_heads, width)
        if length <= 128:
            block = 64 if length <= 64 else 128
            _backward_whole_kernel[(num_sequences * num_heads,)](*operands, **sizes, BLOCK=block, num_warps=4)
        elif length <= 256:
            _backward_halves_kernel[(num_sequences * num_heads,)](
                *operands, **sizes, BLOCK=128, INNER=64, num_warps=8, num_stages=1
            )
        else:
            grid = (num_sequences * num_heads, num // num_sequences)
            _backward_tiled_kernel[grid](
                *operands, **sizes, **tiles_of(length, 64), BLOCK=64, num_warps=4, num_stages=1
            )
        first_token += num_sequences * length
        first_partial += num
    return grad_qkv, sum_over_rows(partial)
