"""Triton kernels for the residual sum and the LayerNorm after it, forward and backward.

Each reads its operands once, computes in float32 and writes once; sums over rows (gradients of biases and norm weights)
are taken in the same pass, as one partial sum per program, so they are deterministic. Tensors are contiguous [T, C].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from massl.ops.kernels.reduce import sum_over_rows

_ROWS_PER_PROGRAM = 64  # tokens per partial sum of the backward kernel


@triton.jit
def _add_norm_forward_kernel(
    x_ptr, branch_ptr, bias_ptr, scale_ptr, weight_ptr, shift_ptr, sum_ptr, normed_ptr, mean_ptr, rstd_ptr,
    num_rows, epsilon,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, HAS_BRANCH: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_C)
    row_ok, column_ok = rows < num_rows, columns < C
    mask = row_ok[:, None] & column_ok[None, :]
    at = rows.to(tl.int64)[:, None] * C + columns[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        branch = tl.load(branch_ptr + at, mask=mask, other=0.0).to(tl.float32)
        branch += tl.load(bias_ptr + columns, mask=column_ok, other=0.0).to(tl.float32)[None, :]
        if HAS_SCALE:
            branch *= tl.load(scale_ptr + rows, mask=row_ok, other=0.0)[:, None]
        # Rounded to the type of the stream before the norm, so that the backward pass sees the same numbers.
        rounded = (x + branch).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, rounded, mask=mask)
        x = tl.where(mask, rounded.to(tl.float32), 0.0)
    mean = tl.sum(x, axis=1) / C
    centred = tl.where(mask, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / C + epsilon)
    weight = tl.load(weight_ptr + columns, mask=column_ok, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + columns, mask=column_ok, other=0.0).to(tl.float32)
    normed = centred * rstd[:, None] * weight[None, :] + shift[None, :]
    tl.store(normed_ptr + at, normed.to(normed_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + rows, mean, mask=row_ok)
    tl.store(rstd_ptr + rows, rstd, mask=row_ok)


@triton.jit
def _add_norm_backward_kernel(
    grad_normed_ptr, grad_sum_ptr, sum_ptr, mean_ptr, rstd_ptr, scale_ptr, weight_ptr, shift_ptr,
    grad_x_ptr, grad_branch_ptr, normed_ptr, partial_ptr,
    num_rows,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, ROWS_PER_PROGRAM: tl.constexpr, STAGES: tl.constexpr,
    HAS_GRAD_SUM: tl.constexpr, HAS_SCALE: tl.constexpr, WRITE_BRANCH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK_C)
    column_ok = columns < C
    weight = tl.load(weight_ptr + columns, mask=column_ok, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + columns, mask=column_ok, other=0.0).to(tl.float32)
    # Summed over rows only at the end: a sum over rows in every round would cost more than all the rest.
    weight_sum = tl.zeros([ROWS, BLOCK_C], dtype=tl.float32)
    shift_sum = tl.zeros([ROWS, BLOCK_C], dtype=tl.float32)
    bias_sum = tl.zeros([ROWS, BLOCK_C], dtype=tl.float32)
    # num_stages fetches rows ahead, which saves a fifth of the time
    for first in tl.range(0, ROWS_PER_PROGRAM, ROWS, num_stages=STAGES):
        rows = program * ROWS_PER_PROGRAM + first + tl.arange(0, ROWS)
        row_ok = rows < num_rows
        mask = row_ok[:, None] & column_ok[None, :]
        at = rows.to(tl.int64)[:, None] * C + columns[None, :]
        grad = tl.load(grad_normed_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(sum_ptr + at, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=row_ok, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=row_ok, other=0.0)
        unit = tl.where(mask, (x - mean[:, None]) * rstd[:, None], 0.0)
        normed = unit * weight[None, :] + shift[None, :]
        tl.store(normed_ptr + at, normed.to(normed_ptr.dtype.element_ty), mask=mask)
        weight_sum += grad * unit
        shift_sum += grad
        scaled = grad * weight[None, :]
        along = tl.sum(scaled * unit, axis=1) / C
        level = tl.sum(scaled, axis=1) / C
        grad_x = (scaled - level[:, None] - unit * along[:, None]) * rstd[:, None]
        if HAS_GRAD_SUM:
            grad_x += tl.load(grad_sum_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        if HAS_SCALE:
            grad_x *= tl.load(scale_ptr + rows, mask=row_ok, other=0.0)[:, None]
        if WRITE_BRANCH:
            tl.store(grad_branch_ptr + at, grad_x.to(grad_branch_ptr.dtype.element_ty), mask=mask)
        bias_sum += tl.where(mask, grad_x, 0.0)
    partial = partial_ptr + program * 3 * C + columns
    tl.store(partial, tl.sum(weight_sum, axis=0), mask=column_ok)
    tl.store(partial + C, tl.sum(shift_sum, axis=0), mask=column_ok)
    tl.store(partial + 2 * C, tl.sum(bias_sum, axis=0), mask=column_ok)


def add_norm(
    x: Tensor,
    branch: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    weight: Tensor,
    shift: Tensor,
    *,
    epsilon: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # [T, C], [T, C], [C], [T], [C], [C] -> [T, C], [T, C], [T], [T]
    """sum = x + scale * (branch + bias), its LayerNorm as `dtype`, and the norm's mean and 1 / deviation."""
    num_rows, num_columns = x.shape
    total = x if branch is None else torch.empty_like(x)
    normed = torch.empty_like(x, dtype=dtype)
    mean, rstd = torch.empty(2, num_rows, device=x.device).unbind()
    block = triton.next_power_of_2(num_columns)
    rows = max(1, 2048 // block)
    _add_norm_forward_kernel[(triton.cdiv(num_rows, rows),)](
        x, branch, bias, scale, weight, shift, total, normed, mean, rstd, num_rows, epsilon,
        C=num_columns, BLOCK_C=block, ROWS=rows, HAS_BRANCH=branch is not None, HAS_SCALE=scale is not None,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return total, normed, mean, rstd


def add_norm_backward(
    grad_normed: Tensor,
    grad_sum: Tensor | None,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    shift: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, branch, norm weight, norm shift, branch bias; and the norm's output, cheaper than keeping it."""
    num_rows, num_columns = total.shape
    grad_x, normed = torch.empty_like(total), torch.empty_like(grad_normed)
    separate = scale is not None or total.dtype != grad_normed.dtype
    grad_branch = torch.empty_like(grad_normed) if separate else grad_x
    num_programs = triton.cdiv(num_rows, _ROWS_PER_PROGRAM)
    partial = torch.empty(num_programs, 3, num_columns, device=total.device)
    block = triton.next_power_of_2(num_columns)
    _add_norm_backward_kernel[(num_programs,)](
        grad_normed, grad_sum, total, mean, rstd, scale, weight, shift, grad_x, grad_branch, normed, partial, num_rows,
        C=num_columns, BLOCK_C=block, ROWS=1, ROWS_PER_PROGRAM=_ROWS_PER_PROGRAM, STAGES=3,
        HAS_GRAD_SUM=grad_sum is not None, HAS_SCALE=scale is not None, WRITE_BRANCH=separate,
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    grad_weight, grad_shift, grad_bias = sum_over_rows(partial.flatten(1)).view(3, num_columns).unbind()
    return grad_x, grad_branch, grad_weight, grad_shift, grad_bias, normed
