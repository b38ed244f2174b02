"""Triton kernels between images and tokens: cut views into patches, pack embedded patches into the token tensor."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from massl.ops.kernels.reduce import sum_over_rows

_SEQUENCES_PER_PROGRAM = 32  # per partial sum of the table's gradient in the backward kernel


@triton.jit
def _patches_kernel(
    views_ptr, out_ptr, height, width, image_height, image_width,
    PATCH_H: tl.constexpr, PATCH_W: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """One program per row of patches and channel, read as whole image rows."""
    view, channel, patch_row = tl.program_id(0) // height, tl.program_id(1), tl.program_id(0) % height
    line = tl.arange(0, BLOCK_H)
    for first in range(0, width * PATCH_W, BLOCK_W):
        pixel = first + tl.arange(0, BLOCK_W)
        mask = (line < PATCH_H)[:, None] & (pixel < width * PATCH_W)[None, :]
        source = ((view.to(tl.int64) * 3 + channel) * image_height + patch_row * PATCH_H + line)[
            :, None
        ] * image_width + pixel[None, :]
        patch = (view * height + patch_row).to(tl.int64) * width + pixel // PATCH_W
        target = (
            (patch[None, :] * 3 + channel) * (PATCH_H * PATCH_W)
            + (line * PATCH_W)[:, None]
            + (pixel % PATCH_W)[None, :]
        )
        tl.store(
            out_ptr + target, tl.load(views_ptr + source, mask=mask, other=0.0).to(out_ptr.dtype.element_ty), mask=mask
        )


@triton.jit
def _tokens_kernel(
    patches_ptr, table_ptr, masks_ptr, stand_in_ptr, out_ptr, first_token, num_tokens,
    LENGTH: tl.constexpr, PREFIX: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    HAS_MASKS: tl.constexpr,
):  # fmt: skip
    tokens, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    sequence, place = tokens // LENGTH, tokens % LENGTH
    mask = (tokens < num_tokens)[:, None] & (columns < D)[None, :]
    has_patch = mask & (place >= PREFIX)[:, None]
    patch = (sequence * (LENGTH - PREFIX) + place - PREFIX).to(tl.int64)
    value = tl.load(table_ptr + place[:, None] * D + columns[None, :], mask=mask, other=0.0)
    own = tl.load(patches_ptr + patch[:, None] * D + columns[None, :], mask=has_patch, other=0.0).to(tl.float32)
    if HAS_MASKS:
        is_masked = tl.load(masks_ptr + patch, mask=(tokens < num_tokens) & (place >= PREFIX), other=0) != 0
        stand_in = tl.load(stand_in_ptr + columns, mask=columns < D, other=0.0)
        own = tl.where(is_masked[:, None], stand_in[None, :], own)
    value += own
    at = (first_token + tokens).to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _tokens_backward_kernel(
    grad_ptr, masks_ptr, grad_patches_ptr, partial_ptr, masked_partial_ptr, first_token, num_sequences,
    LENGTH: tl.constexpr, PREFIX: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SEQUENCES: tl.constexpr,
    HAS_MASKS: tl.constexpr,
):  # fmt: skip
    place, columns = tl.program_id(0), tl.arange(0, BLOCK_D)
    column_ok = columns < D
    total = tl.zeros([4, BLOCK_D], dtype=tl.float32)
    masked_total = tl.zeros([4, BLOCK_D], dtype=tl.float32)
    for first in range(0, SEQUENCES, 4):
        sequence = tl.program_id(1) * SEQUENCES + first + tl.arange(0, 4)
        ok = (sequence < num_sequences)[:, None] & column_ok[None, :]
        token = (first_token + sequence * LENGTH + place).to(tl.int64)
        grad = tl.load(grad_ptr + token[:, None] * D + columns[None, :], mask=ok, other=0.0).to(tl.float32)
        total += grad
        if place >= PREFIX:
            patch = (sequence * (LENGTH - PREFIX) + place - PREFIX).to(tl.int64)
            if HAS_MASKS:
                is_masked = tl.load(masks_ptr + patch, mask=sequence < num_sequences, other=0) != 0
                masked_total += tl.where(is_masked[:, None], grad, 0.0)
                grad = tl.where(is_masked[:, None], 0.0, grad)
            tl.store(
                grad_patches_ptr + patch[:, None] * D + columns[None, :],
                grad.to(grad_patches_ptr.dtype.element_ty),
                mask=ok,
            )
    at = (tl.program_id(1) * LENGTH + place) * D + columns
    tl.store(partial_ptr + at, tl.sum(total, axis=0), mask=column_ok)
    if HAS_MASKS:
        tl.store(masked_partial_ptr + at, tl.sum(masked_total, axis=0), mask=column_ok)


def cut_into_patches(views: Tensor, patch_size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Patches row by row, each flattened like a convolution's weight: [R, 3, H, W] -> [R * h * w, 3 * p * p].

    Pixels beyond the last whole patch are left out. There is no gradient.
    """
    views = views.contiguous()
    num_views, _, image_height, image_width = views.shape
    height, width = image_height // patch_size[0], image_width // patch_size[1]
    out = torch.empty(num_views * height * width, 3 * patch_size[0] * patch_size[1], dtype=dtype, device=views.device)
    _patches_kernel[(num_views * height, 3)](
        views, out, height, width, image_height, image_width, PATCH_H=patch_size[0], PATCH_W=patch_size[1],
        BLOCK_H=triton.next_power_of_2(patch_size[0]), BLOCK_W=64, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def pack_tokens(
    patches: Sequence[Tensor],
    tables: Sequence[Tensor],
    num_prefix: int,
    dtype: torch.dtype,
    *,
    masks: Tensor | None = None,
    stand_in: Tensor | None = None,
) -> Tensor:  # each [R_i * n_i, D], [num_prefix + n_i, D]; [R_0, n_0] bool, [D] float32 -> [T, D]
    """Concatenate all sequences; row l of a sequence is table[l], plus patch l - num_prefix after the prefix.

    A table holds what sequences of one size share: class and register tokens, position embeddings, the bias of the
    patch embedding. Where `masks` is true, a patch of the first group is replaced by `stand_in`.
    """
    assert (masks is None) == (stand_in is None)
    assert masks is None or masks.numel() == len(patches[0])
    masks_as_bytes = None if masks is None else masks.contiguous().view(torch.uint8)
    tokens: Tensor = _PackTokens.apply(num_prefix, dtype, masks_as_bytes, stand_in, *patches, *tables)
    return tokens


class _PackTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        num_prefix: int,
        dtype: torch.dtype,
        masks: Tensor | None,
        stand_in: Tensor | None,
        *patches_and_tables: Tensor,
    ) -> Tensor:
        num_groups = len(patches_and_tables) // 2
        groups = list(zip(patches_and_tables[:num_groups], patches_and_tables[num_groups:], strict=True))
        lengths = [len(table) for _, table in groups]
        counts = [len(patches) // (len(table) - num_prefix) for patches, table in groups]
        dim = groups[0][0].shape[1]
        num_tokens = sum(count * length for count, length in zip(counts, lengths, strict=True))
        out = torch.empty(num_tokens, dim, dtype=dtype, device=groups[0][0].device)
        first_token = 0
        for number, ((patches, table), count, length) in enumerate(zip(groups, counts, lengths, strict=True)):
            has_masks = number == 0 and masks is not None
            _tokens_kernel[(triton.cdiv(count * length, 4),)](
                patches, table, masks if has_masks else None, stand_in if has_masks else None, out, first_token,
                count * length, LENGTH=length, PREFIX=num_prefix, D=dim, BLOCK_D=triton.next_power_of_2(dim), ROWS=4,
                HAS_MASKS=has_masks, num_warps=4, enable_fp_fusion=True,
            )  # fmt: skip
            first_token += count * length
        ctx.save_for_backward(masks)
        ctx.num_prefix, ctx.counts, ctx.lengths, ctx.patch_dtype = num_prefix, counts, lengths, groups[0][0].dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (masks,) = ctx.saved_tensors
        dim, first_token = grad.shape[1], 0
        grad_patches, grad_tables, grad_stand_in = [], [], None
        for number, (count, length) in enumerate(zip(ctx.counts, ctx.lengths, strict=True)):
            has_masks = number == 0 and masks is not None
            num_patches = count * (length - ctx.num_prefix)
            grad_of_patches = torch.empty(num_patches, dim, dtype=ctx.patch_dtype, device=grad.device)
            num_chunks = triton.cdiv(count, _SEQUENCES_PER_PROGRAM)
            partial = torch.empty(num_chunks, length, dim, device=grad.device)
            masked_partial = torch.empty_like(partial) if has_masks else None
            _tokens_backward_kernel[(length, num_chunks)](
                grad, masks if has_masks else None, grad_of_patches, partial, masked_partial, first_token, count,
                LENGTH=length, PREFIX=ctx.num_prefix, D=dim, BLOCK_D=triton.next_power_of_2(dim),
                SEQUENCES=_SEQUENCES_PER_PROGRAM, HAS_MASKS=has_masks, num_warps=2, enable_fp_fusion=True,
            )  # fmt: skip
            grad_patches.append(grad_of_patches)
            grad_tables.append(sum_over_rows(partial.flatten(1)).view(length, dim))
            if masked_partial is not None:
                grad_stand_in = sum_over_rows(masked_partial.flatten(0, 1))
            first_token += count * length
        return None, None, None, grad_stand_in, *grad_patches, *grad_tables
