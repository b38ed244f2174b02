"""The memory of MaSSL: a ring of past teacher embeddings, cut into random blocks each step."""

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import normalize

from massl import keyed_random
from massl.config import Settings


class MemorySettings(Settings):
    num_rows: int = Field(default=65_536, gt=0, description="K: how many past teacher embeddings the memory holds")
    block_size: int = Field(16_384, gt=0, description="N_b: rows per block; K // N_b blocks are drawn each step")
    random_blocks: bool = Field(
        True, description="permute the memory each step; False: blocks in storage order (collapses in the paper)"
    )

    @model_validator(mode="after")
    def _blocks_fit(self) -> "MemorySettings":
        if self.block_size > self.num_rows:
            raise ValueError(
                f"block_size {self.block_size} exceeds num_rows {self.num_rows}: lower it, or raise num_rows"
            )
        return self


class MemoryBank(nn.Module):
    """First in, first out: `enqueue` overwrites the oldest rows. Rows start as random unit vectors without gradients.

    Example:
        memory = MemoryBank(65_536, 256)
        blocks = memory.random_blocks(16_384, key=step)    # [4, 16384, 256]
        loss = memory_loss(student, teacher, blocks, student_temperature=0.1, teacher_temperature=0.04)
        memory.enqueue(teacher[1])                          # after the loss: a batch is never compared with itself
    """

    rows: Tensor  # [num_rows, dim] float32, L2-normalised
    cursor: Tensor  # [] int64, the oldest row, which is overwritten next

    def __init__(self, num_rows: int, dim: int, *, seed: int = 0) -> None:
        super().__init__()
        if num_rows < 1 or dim < 1:
            raise ValueError(f"a memory needs at least one row and one dimension; got {num_rows} x {dim}")
        # in chunks that fit the processor's cache: a million rows at once would need 10 GB temporarily
        rows = torch.empty(num_rows, dim)
        for start in range(0, num_rows, 1024):
            chunk = rows[start : start + 1024]
            entries = torch.arange(start * dim, start * dim + chunk.numel()).view_as(chunk)
            chunk.copy_(normalize(keyed_random.normal(seed, "memory rows", entries), dim=-1))
        self.register_buffer("rows", rows)
        self.register_buffer("cursor", torch.zeros((), dtype=torch.int64))

    @property
    def num_rows(self) -> int:
        return self.rows.shape[0]

    @torch.no_grad()
    def enqueue(self, rows: Tensor, *, applies: Tensor | None = None) -> None:  # [n, dim], any n; [] bool
        """Overwrite the oldest rows, wrapping around. Of more rows than the memory holds, the last ones are kept.

        `applies` is read on the device: if it is False, nothing changes.
        """
        if rows.dim() != 2 or rows.shape[1] != self.rows.shape[1]:
            raise ValueError(f"this memory takes rows [n, {self.rows.shape[1]}]; got {list(rows.shape)}")
        num_new = rows.shape[0]
        kept = rows[-self.num_rows :].to(self.rows.dtype)
        # on the device, without reading the cursor back to the host
        offsets = torch.arange(kept.shape[0], device=self.rows.device)
        places = (self.cursor + (num_new - kept.shape[0]) + offsets) % self.num_rows
        cursor = (self.cursor + num_new) % self.num_rows
        if applies is not None:
            kept, cursor = torch.where(applies, kept, self.rows[places]), torch.where(applies, cursor, self.cursor)
        self.rows.index_copy_(0, places, kept)
        self.cursor.copy_(cursor)

    def random_blocks(
        self, block_size: int, key: keyed_random.Key, dtype: torch.dtype = torch.float32
    ) -> Tensor:  # -> [num_rows // block_size, block_size, dim]
        """Disjoint blocks of a permutation of the rows, a function of the key; an incomplete last block is dropped."""
        num_blocks = self._num_blocks(block_size)
        permutation = keyed_random.permutation(self.num_rows, key, "memory blocks", device=self.rows.device)
        order = permutation[: num_blocks * block_size]
        if self.rows.is_cuda and dtype != self.rows.dtype:
            from massl.ops.kernels.memory import gather_rows_as  # needs Triton, which requires CUDA

            rows = gather_rows_as(self.rows, order, dtype)
        else:
            rows = self.rows[order].to(dtype)
        return rows.reshape(num_blocks, block_size, -1)

    # -> [num_rows // block_size, block_size, dim]
    def storage_blocks(self, block_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Contiguous slices, which keep the rows of a batch together ("blockwise", which collapsed in the paper)."""
        num_blocks = self._num_blocks(block_size)
        return self.rows[: num_blocks * block_size].to(dtype, copy=True).reshape(num_blocks, block_size, -1)

    def _num_blocks(self, block_size: int) -> int:
        if not 0 < block_size <= self.num_rows:
            raise ValueError(f"blocks of {block_size} rows do not fit a memory of {self.num_rows}")
        return self.num_rows // block_size
