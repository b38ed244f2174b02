"""Triton kernels for attention with one query per sequence: the class token in the last block.

One program per sequence and head holds all keys and values; reading them once takes most of the time.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from massl.ops.kernels.attention import SequenceGroup, load_rows, store_rows


@triton.jit
def _class_forward_kernel(
    q_ptr, kv_ptr, out_ptr, lse_ptr, first_sequence, first_token, scale,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    sequence = first_sequence + index
    start = first_token + index * LENGTH
    width: tl.constexpr = HEADS * D
    tokens, columns = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    ok, column_ok = tokens < LENGTH, columns < D
    at = sequence.to(tl.int64) * width + head * D + columns
    q = tl.load(q_ptr + at, mask=column_ok, other=0.0).to(tl.float32)
    k = load_rows(kv_ptr, start + tokens, ok, 2 * width, head * D, D, BLOCK_D).to(tl.float32)
    logits = tl.where(ok, tl.sum(q[None, :] * k, axis=1) * scale, float("-inf"))
    highest = tl.max(logits, axis=0)
    weights = tl.exp(logits - highest)
    total = tl.sum(weights, axis=0)
    v = load_rows(kv_ptr, start + tokens, ok, 2 * width, width + head * D, D, BLOCK_D).to(tl.float32)
    out = tl.sum(weights[:, None] * v, axis=0) / total
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=column_ok)
    tl.store(lse_ptr + sequence * HEADS + head, highest + tl.log(total))


@triton.jit
def _class_backward_kernel(
    q_ptr, kv_ptr, lse_ptr, grad_out_ptr, grad_q_ptr, grad_kv_ptr, first_sequence, first_token, scale,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    sequence = first_sequence + index
    start = first_token + index * LENGTH
    width: tl.constexpr = HEADS * D
    tokens, columns = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    ok, column_ok = tokens < LENGTH, columns < D
    at = sequence.to(tl.int64) * width + head * D + columns
    q = tl.load(q_ptr + at, mask=column_ok, other=0.0).to(tl.float32)
    grad_out = tl.load(grad_out_ptr + at, mask=column_ok, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + sequence * HEADS + head)
    k = load_rows(kv_ptr, start + tokens, ok, 2 * width, head * D, D, BLOCK_D).to(tl.float32)
    v = load_rows(kv_ptr, start + tokens, ok, 2 * width, width + head * D, D, BLOCK_D).to(tl.float32)
    weights = tl.where(ok, tl.exp(tl.sum(q[None, :] * k, axis=1) * scale - lse), 0.0)
    store_rows(
        grad_kv_ptr, weights[:, None] * grad_out[None, :], start + tokens, ok, 2 * width, width + head * D, D, BLOCK_D
    )
    grad_weights = tl.sum(grad_out[None, :] * v, axis=1)
    grad_logits = weights * (grad_weights - tl.sum(weights * grad_weights, axis=0)) * scale
    store_rows(grad_kv_ptr, grad_logits[:, None] * q[None, :], start + tokens, ok, 2 * width, head * D, D, BLOCK_D)
    grad_q = tl.sum(grad_logits[:, None] * k, axis=0)
    tl.store(grad_q_ptr + at, grad_q.to(grad_q_ptr.dtype.element_ty), mask=column_ok)


def class_attention(
    q: Tensor, kv: Tensor, groups: Sequence[SequenceGroup], num_heads: int
) -> tuple[Tensor, Tensor]:  # [R, HD], [T, 2HD] -> [R, HD], [R, H]
    """Attention of one query per sequence to the sequence's keys and values, and the logsumexp of its logits."""
    out, lse = torch.empty_like(q), torch.empty(len(q), num_heads, device=q.device)
    for operands, sizes, num_programs in _launches(q, groups, num_heads):
        _class_forward_kernel[(num_programs,)](q, kv, out, lse, *operands, **sizes)
    return out, lse


def class_attention_backward(
    q: Tensor, kv: Tensor, lse: Tensor, grad_out: Tensor, groups: Sequence[SequenceGroup], num_heads: int
) -> tuple[Tensor, Tensor]:  # -> [R, HD], [T, 2HD]
    grad_q, grad_kv = torch.empty_like(q), torch.empty_like(kv)
    for operands, sizes, num_programs in _launches(q, groups, num_heads):
        _class_backward_kernel[(num_programs,)](q, kv, lse, grad_out, grad_q, grad_kv, *operands, **sizes)
    return grad_q, grad_kv


def _launches(
    q: Tensor, groups: Sequence[SequenceGroup], num_heads: int
) -> list[tuple[tuple[int, int, float], dict[str, int], int]]:  # operands, sizes and number of programs of each group
    dim, first_sequence, first_token, launches = q.shape[1] // num_heads, 0, 0, []
    for num_sequences, length in groups:
        block = max(16, triton.next_power_of_2(length))
        sizes = {"LENGTH": length, "HEADS": num_heads, "D": dim, "BLOCK_D": max(16, triton.next_power_of_2(dim))}
        sizes |= {"BLOCK": block, "num_warps": 4 if block <= 128 else 8, "enable_fp_fusion": True}
        launches.append(((first_sequence, first_token, dim**-0.5), sizes, num_sequences * num_heads))
        first_sequence, first_token = first_sequence + num_sequences, first_token + num_sequences * length
    return launches
