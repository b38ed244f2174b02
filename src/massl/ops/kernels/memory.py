"""Triton kernels around memory attention: gather random blocks, join attention over the parts of a block."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gather_kernel(rows_ptr, order_ptr, out_ptr, num_rows, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    ok = places < num_rows
    mask = ok[:, None] & (columns < D)[None, :]
    sources = tl.load(order_ptr + places, mask=ok, other=0)
    values = tl.load(rows_ptr + sources[:, None] * D + columns[None, :], mask=mask, other=0.0)
    tl.store(
        out_ptr + places.to(tl.int64)[:, None] * D + columns[None, :], values.to(out_ptr.dtype.element_ty), mask=mask
    )


@triton.jit
def _join_kernel(
    parts_ptr, lse_ptr, mean_ptr, mean_lse_ptr, num_queries,
    NUM_BLOCKS: tl.constexpr, NUM_PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    queries = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    ok = queries < num_queries
    mask = ok[:, None] & (columns < D)[None, :]
    mean = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    mean_lse = tl.zeros([ROWS], dtype=tl.float32)
    for block in range(NUM_BLOCKS):
        highest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        for part in range(NUM_PARTS):
            highest = tl.maximum(
                highest, tl.load(lse_ptr + (block * NUM_PARTS + part) * num_queries + queries, mask=ok, other=0.0)
            )
        total = tl.zeros([ROWS], dtype=tl.float32)
        joined = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
        for part in range(NUM_PARTS):
            number = block * NUM_PARTS + part
            weight = tl.exp(tl.load(lse_ptr + number * num_queries + queries, mask=ok, other=0.0) - highest)
            at = (number * num_queries + queries).to(tl.int64)[:, None] * D + columns[None, :]
            joined += weight[:, None] * tl.load(parts_ptr + at, mask=mask, other=0.0).to(tl.float32)
            total += weight
        mean += joined / total[:, None]
        mean_lse += highest + tl.log(total)
    at = queries.to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(mean_ptr + at, mean / NUM_BLOCKS, mask=mask)
    tl.store(mean_lse_ptr + queries, mean_lse / NUM_BLOCKS, mask=ok)


def gather_rows_as(rows: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:  # [K, D], [n] -> [n, D]
    """rows[order] in another precision, without an intermediate copy (64 MiB at K = 65,536)."""
    num_rows, dim = len(order), rows.shape[1]
    out = torch.empty(num_rows, dim, dtype=dtype, device=rows.device)
    _gather_kernel[(triton.cdiv(num_rows, 16),)](
        rows, order, out, num_rows, D=dim, BLOCK_D=triton.next_power_of_2(dim), ROWS=16, enable_fp_fusion=True
    )
    return out


def join_parts(
    parts: Tensor, lse: Tensor, num_blocks: int
) -> tuple[Tensor, Tensor]:  # [B * P, R, D], [B * P, R] -> [R, D], [R] float32
    """Attention over blocks, and its logsumexp, from those over the P parts of each block; averaged over blocks."""
    num_parts, num_queries, dim = parts.shape[0] // num_blocks, parts.shape[1], parts.shape[2]
    mean, mean_lse = torch.empty(num_queries, dim, device=parts.device), torch.empty(num_queries, device=parts.device)
    _join_kernel[(triton.cdiv(num_queries, 4),)](
        parts, lse, mean, mean_lse, num_queries,
        NUM_BLOCKS=num_blocks, NUM_PARTS=num_parts, D=dim, BLOCK_D=triton.next_power_of_2(dim), ROWS=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return mean, mean_lse
