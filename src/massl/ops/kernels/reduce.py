"""Sum over rows: other kernels write one row of partial sums per program, and this adds them deterministically."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sum_kernel(rows_ptr, out_ptr, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column_ok = columns < num_columns
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & column_ok[None, :]
        total += tl.load(rows_ptr + row.to(tl.int64)[:, None] * num_columns + columns[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + columns, tl.sum(total, axis=0), mask=column_ok)


def sum_over_rows(rows: Tensor) -> Tensor:  # [P, C] float32 -> [C]
    num_rows, num_columns = rows.shape
    out = torch.empty(num_columns, device=rows.device)
    # Few columns and many rows per program, so that a thousand columns occupy many multiprocessors.
    _sum_kernel[(triton.cdiv(num_columns, 16),)](
        rows, out, num_rows, num_columns, ROWS=256, COLUMNS=16, num_warps=8, enable_fp_fusion=True
    )
    return out
