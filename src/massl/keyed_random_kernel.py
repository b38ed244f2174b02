# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The hash of keyed_random as one Triton kernel instead of a hundred launches; the bits are the same."""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUM_SLOTS = 3  # for tensors, and for axes
_BLOCK = 256

# int64 throughout, as in keyed_random: words are below 2**32 and multipliers below 2**31, so no product overflows.


@triton.jit
def _mix32(word):
    word = word ^ (word >> 16)
    word = (word * 0x21F0AAAD) & 0xFFFFFFFF
    word = word ^ (word >> 15)
    word = (word * 0x735A2D97) & 0xFFFFFFFF
    return word ^ (word >> 15)


@triton.jit
def _absorb(first, second, part):
    low, high = part & 0xFFFFFFFF, (part >> 32) & 0xFFFFFFFF
    first = _mix32(((first ^ low) + high) & 0xFFFFFFFF)
    second = _mix32(((second + low) & 0xFFFFFFFF) ^ _mix32(first ^ high))
    return first, second


@triton.jit
def _absorb_both(
    first, second, tensor_ptr, stride0, stride1, stride2, plain, at0, at1, at2, mask, HAS_PLAIN: tl.constexpr
):
    part = tl.load(tensor_ptr + at0 * stride0 + at1 * stride1 + at2 * stride2, mask=mask, other=0)
    first, second = _absorb(first, second, part)
    if HAS_PLAIN:
        first, second = _absorb(first, second, tl.zeros_like(first) + plain)
    return first, second


@triton.jit(do_not_specialize=["prefix", "plain0", "plain1", "plain2"])
def _draw_kernel(
    out_ptr, num_keys, size1, size2, prefix,
    tensor0_ptr, stride00, stride01, stride02, plain0,
    tensor1_ptr, stride10, stride11, stride12, plain1,
    tensor2_ptr, stride20, stride21, stride22, plain2,
    NUM_TENSORS: tl.constexpr, HAS_PLAIN0: tl.constexpr, HAS_PLAIN1: tl.constexpr, HAS_PLAIN2: tl.constexpr,
    AS_UNIFORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_keys
    at0, at1, at2 = at // size2 // size1, at // size2 % size1, at % size2
    start = tl.zeros([BLOCK], dtype=tl.int64) + prefix
    first, second = (start >> 32) & 0xFFFFFFFF, start & 0xFFFFFFFF
    first, second = _absorb_both(
        first, second, tensor0_ptr, stride00, stride01, stride02, plain0, at0, at1, at2, mask, HAS_PLAIN0
    )
    if NUM_TENSORS > 1:
        first, second = _absorb_both(
            first, second, tensor1_ptr, stride10, stride11, stride12, plain1, at0, at1, at2, mask, HAS_PLAIN1
        )
    if NUM_TENSORS > 2:
        first, second = _absorb_both(
            first, second, tensor2_ptr, stride20, stride21, stride22, plain2, at0, at1, at2, mask, HAS_PLAIN2
        )
    word = _mix32(first ^ second)
    if AS_UNIFORM:
        tl.store(out_ptr + at, (word >> 8).to(tl.float32) * 5.9604644775390625e-08, mask=mask)  # 2**-24
    else:
        other_word = _mix32((first + second * 3) & 0xFFFFFFFF)
        tl.store(out_ptr + at, ((word & 0x7FFFFFFF) << 31) | (other_word & 0x7FFFFFFF), mask=mask)


def draw(first: int, second: int, parts: Sequence[int | Tensor], *, as_uniform: bool) -> Tensor:
    """`bits` (int64) or `uniform` (float32 in [0, 1)) of keys whose lanes are `first` and `second` before `parts`.

    `parts` are up to three int64 tensors that broadcast to at most three axes, each followed by at most one integer.
    """
    tensors = [part for part in parts if isinstance(part, Tensor)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    out = torch.empty(shape, dtype=torch.float32 if as_uniform else torch.int64, device=tensors[0].device)
    if out.numel() == 0:
        return out
    sizes = (1,) * (_NUM_SLOTS - len(shape)) + tuple(shape)
    operands: list[int | Tensor | None] = []
    has_plain: list[bool] = []
    for position, part in enumerate(parts):
        if isinstance(part, Tensor):
            following = parts[position + 1] if position + 1 < len(parts) else None
            has_plain.append(isinstance(following, int))
            operands += [part, *part.expand(sizes).stride(), following if isinstance(following, int) else 0]
    for _ in range(_NUM_SLOTS - len(tensors)):
        has_plain.append(False)
        operands += [None, 0, 0, 0, 0]
    prefix = (first << 32 | second) - (1 << 64 if first >> 31 else 0)  # both lanes in one signed word
    num_keys = math.prod(sizes)
    _draw_kernel[(triton.cdiv(num_keys, _BLOCK),)](
        out, num_keys, sizes[1], sizes[2], prefix, *operands,
        NUM_TENSORS=len(tensors), HAS_PLAIN0=has_plain[0], HAS_PLAIN1=has_plain[1], HAS_PLAIN2=has_plain[2],
        AS_UNIFORM=as_uniform, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out
