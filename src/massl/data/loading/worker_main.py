"""The program of a worker process: reads and decodes chunks of images until its connection closes.

`workers` starts it. PyTorch is imported inside functions: signals must be ignored before that import, which takes 2 s.
"""

import mmap
import os
import pickle
import signal
import traceback
from collections import defaultdict
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from massl.data.loading.image_reader import ImageReader, Tried

# (index of the image that was read, label, height, width), what was tried. None: no image and no replacement.
Entry = tuple[tuple[int, int, int, int] | None, "Tried"]
Task = tuple[int, list[int], list[int]]  # number, image indices, blocks that may be reused
# task number (None: the worker has started), block of its pixels, entries, error
Answer = tuple[int | None, int, list[Entry], Exception | None]

_SMALLEST_BLOCK = 2**16  # bytes
# A job scheduler sends these to every process of a job. The training process decides what they mean, and may need more
# batches before it exits; this process exits when its connection closes.
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Arena:
    """Growing shared memory, given out in blocks whose sizes are powers of two and which are reused once freed.

    Only the first use of a block pays for fresh pages, which cost more than copying the pixels.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._free: dict[int, list[int]] = defaultdict(list)  # size -> starts
        self._sizes: dict[int, int] = {}  # start -> size
        self._end = 0
        self._capacity = 0
        self.memory: Any = None  # the mapped file, for numpy

    def take(self, num_bytes: int) -> int:
        """The start of a block of at least this size."""
        size = max(_SMALLEST_BLOCK, 1 << (num_bytes - 1).bit_length())
        if self._free[size]:
            return self._free[size].pop()
        start = self._end
        self._end += size
        self._sizes[start] = size
        if self._end > self._capacity:
            self._capacity = 2 * self._end  # untouched pages take no memory
            os.ftruncate(self._file, self._capacity)
            self.memory = mmap.mmap(self._file, self._capacity)
        return start

    def free(self, start: int) -> None:
        self._free[self._sizes[start]].append(start)


def main(connection_file: int, arena_file: int, setup_file: int) -> None:
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with suppress(EOFError, OSError):  # the training process closed the connection or is gone
        _serve(Connection(connection_file), Arena(arena_file), setup_file)
    os._exit(0)  # at once: shutting PyTorch down takes longer than most tasks


def _serve(connection: Connection, arena: Arena, setup_file: int) -> None:
    try:
        reader = _open_reader(setup_file)
    except Exception as error:
        connection.send((None, 0, [], _sendable(error)))
        return
    connection.send((None, 0, [], None))
    while True:
        connection.send(_answer(connection.recv(), reader, arena))


def _open_reader(setup_file: int) -> "ImageReader":
    import torch

    from massl.data.loading.image_reader import ImageReader

    torch.set_num_threads(1)  # there is one process per core
    with mmap.mmap(setup_file, 0, access=mmap.ACCESS_READ) as setup:
        source, seed, max_side = pickle.load(setup)
    os.close(setup_file)
    return ImageReader(source, seed=seed, max_side=max_side)


def _answer(task: Task, reader: "ImageReader", arena: Arena) -> Answer:
    number, indices, freed = task
    for start in freed:
        arena.free(start)
    try:
        return (number, *_read(indices, reader, arena), None)
    except Exception as error:
        return number, 0, [], _sendable(error)


def _read(indices: list[int], reader: "ImageReader", arena: Arena) -> tuple[int, list[Entry]]:
    """The block with the pixels of all images, one after another and each as [3, H, W], and their entries."""
    import torch

    entries: list[Entry] = []
    all_pixels = []
    for image, tried in map(reader.read_or_replace, indices):
        if image is None:
            entries.append((None, tried))
            continue
        assert isinstance(image.pixels, torch.Tensor)
        all_pixels.append(image.pixels)
        height, width = image.pixels.shape[1:]
        entries.append(((image.index, image.label, height, width), tried))
    block = start = arena.take(max(1, sum(pixels.numel() for pixels in all_pixels)))
    for pixels in all_pixels:
        shared = torch.frombuffer(arena.memory, dtype=torch.uint8, count=pixels.numel(), offset=start)
        shared.view(pixels.shape).copy_(pixels)
        start += pixels.numel()
    return block, entries


def _sendable(error: Exception) -> Exception:
    """The error with its traceback as a note, or a RuntimeError if it cannot be pickled."""
    error.add_note(f"In a worker process:\n{traceback.format_exc()}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"in a worker process:\n{traceback.format_exc()}")
    return error
