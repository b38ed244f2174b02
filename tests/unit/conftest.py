from collections.abc import Callable
from typing import Any

import pytest
import torch


class _WithRows:
    """A kernel launched with another `ROWS` than its caller passes."""

    def __init__(self, kernel: Any, num_rows: int) -> None:
        self._kernel, self._num_rows = kernel, num_rows

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        kernel, num_rows = self._kernel, self._num_rows
        return lambda *operands, **sizes: kernel[grid](*operands, **{**sizes, "ROWS": num_rows})


@pytest.fixture
def norm_gradients_in_large_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the backward norm kernel takes 64 rows at once, not one: 30 times faster in the interpreter."""
    if not torch.cuda.is_available():
        from massl.ops.kernels import norm as norm_kernels

        monkeypatch.setattr(
            norm_kernels, "_add_norm_backward_kernel", _WithRows(norm_kernels._add_norm_backward_kernel, 64)
        )
