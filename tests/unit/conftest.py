import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
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
def make_fifo() -> Iterator[Callable[[Path], Path]]:
    """make_fifo(path): a FIFO. Who opens it and waits gets no bytes, so that a test of it fails and does not hang."""
    writers: list[tuple[Path, threading.Thread]] = []

    def make(path: Path) -> Path:
        os.mkfifo(path)
        writer = threading.Thread(target=lambda: path.open("wb").close(), daemon=True)
        writer.start()
        writers.append((path, writer))
        return path

    yield make
    for path, writer in writers:
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        writer.join(timeout=10)
        os.close(reader)


@pytest.fixture
def norm_gradients_in_large_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the backward norm kernel takes 64 rows at once, not one: 30 times faster in the interpreter."""
    if not torch.cuda.is_available():
        from massl.ops.kernels import norm as norm_kernels

        monkeypatch.setattr(
            norm_kernels, "_add_norm_backward_kernel", _WithRows(norm_kernels._add_norm_backward_kernel, 64)
        )
