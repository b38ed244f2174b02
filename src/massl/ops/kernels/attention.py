"""Triton kernels for attention within many short sequences that are packed into one tensor.

Views of different sizes give sequences of different lengths (197 tokens and 37). Packed as rows of one tensor
[T, 3 * heads * dim] of queries, keys and values, they share all matrix products of a block; only attention treats each
sequence separately. The kernels read that tensor and write gradients in the same layout, so nothing is copied, stacked
or padded. They use no atomic additions, so results are deterministic.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)


class SequenceGroup(NamedTuple):
    """Adjacent sequences of one length."""

    num_sequences: int
    length: int


@triton.jit
def load_rows(ptr, rows, row_ok, stride, first_column, D: tl.constexpr, BLOCK_D: tl.constexpr):  # -> [rows, BLOCK_D]
    columns = tl.arange(0, BLOCK_D)
    mask = row_ok[:, None] & (columns < D)[None, :]
    return tl.load(ptr + rows.to(tl.int64)[:, None] * stride + first_column + columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(ptr, values, rows, row_ok, stride, first_column, D: tl.constexpr, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    mask = row_ok[:, None] & (columns < D)[None, :]
    at = rows.to(tl.int64)[:, None] * stride + first_column + columns[None, :]
    tl.store(ptr + at, values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _forward_tile(
    q, highest, total, out, qkv_ptr, start, keys, scale, head_column,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    key_ok = keys < LENGTH
    k = load_rows(qkv_ptr, start + keys, key_ok, 3 * WIDTH, WIDTH + head_column, D, BLOCK_D)
    v = load_rows(qkv_ptr, start + keys, key_ok, 3 * WIDTH, 2 * WIDTH + head_column, D, BLOCK_D)
    similarity = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        similarity = tl.where(key_ok[None, :], similarity, float("-inf"))
    to_log2 = scale * LOG2_E
    new_highest = tl.maximum(highest, tl.max(similarity, axis=1) * to_log2)
    weights = tl.exp2(similarity * to_log2 - new_highest[:, None])
    shrink = tl.exp2(highest - new_highest)
    total = total * shrink + tl.sum(weights, axis=1)
    out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new_highest, total, out


@triton.jit
def _forward_kernel(
    qkv_ptr, out_ptr, lse_ptr, first_token, num_tokens, scale,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr, INNER: tl.constexpr, WHOLE: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK queries of one head against all keys: WHOLE of them in tiles of INNER, the rest in one tile of TAIL."""
    sequence, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    start = first_token + sequence * LENGTH
    width: tl.constexpr = HEADS * D
    queries = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    query_ok = queries < LENGTH
    q = load_rows(qkv_ptr, start + queries, query_ok, 3 * width, head * D, D, BLOCK_D)
    highest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    out = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for first in range(0, WHOLE, INNER):
        highest, total, out = _forward_tile(
            q, highest, total, out, qkv_ptr, start, first + tl.arange(0, INNER), scale, head * D,
            LENGTH, width, D, BLOCK_D, False, PRECISION,
        )  # fmt: skip
    if TAIL > 0:
        highest, total, out = _forward_tile(
            q, highest, total, out, qkv_ptr, start, WHOLE + tl.arange(0, TAIL), scale, head * D,
            LENGTH, width, D, BLOCK_D, True, PRECISION,
        )  # fmt: skip
    store_rows(out_ptr, out / total[:, None], start + queries, query_ok, width, head * D, D, BLOCK_D)
    tl.store(lse_ptr + head.to(tl.int64) * num_tokens + start + queries, highest + tl.log2(total), mask=query_ok)


def packed_attention(qkv: Tensor, groups: Sequence[SequenceGroup], num_heads: int) -> tuple[Tensor, Tensor]:
    """Attention within each sequence and the base-2 logsumexp of its logits: [T, 3 * H * D] -> [T, H * D], [H, T]."""
    num_tokens, width = qkv.shape[0], qkv.shape[1] // 3
    out = torch.empty(num_tokens, width, dtype=qkv.dtype, device=qkv.device)
    lse = torch.empty(num_heads, num_tokens, device=qkv.device)
    first_token = 0
    for num_sequences, length in groups:
        block, inner = (64, 64) if length <= 64 else (128, 64)
        _forward_kernel[(num_sequences * num_heads, triton.cdiv(length, block))](
            qkv, out, lse, first_token, num_tokens, (width // num_heads) ** -0.5,
            **sizes_of(length, num_heads, width), **tiles_of(length, inner), BLOCK=block,
            num_warps=4, num_stages=1 if length <= 64 else 3,
        )  # fmt: skip
        first_token += num_sequences * length
    return out, lse


def sizes_of(length: int, num_heads: int, width: int) -> dict[str, int | str | bool]:
    dim = width // num_heads
    sizes = {"LENGTH": length, "HEADS": num_heads, "D": dim, "BLOCK_D": max(16, triton.next_power_of_2(dim))}
    return {**sizes, "PRECISION": "ieee", "enable_fp_fusion": True}  # ieee: float32 operands are not rounded to tf32


def tiles_of(length: int, inner: int) -> dict[str, int]:
    """A short last tile: 197 tokens are three tiles of 64 and one of 16; a fourth of 64 would cost a quarter more."""
    rest = length % inner
    return {"INNER": inner, "WHOLE": length - rest, "TAIL": 0 if rest == 0 else max(16, triton.next_power_of_2(rest))}
