"""What a worker process runs: it reads and decodes chunks of images until its connection closes. `worker_processes`
starts it.

A script rather than a module: importing it as `massl.data.loading.worker_main` would first import all of massl, and
with it timm and the compilers of PyTorch, for which each worker would need five seconds instead of two.
"""

import mmap
import os
import pickle
import signal
import sys
import traceback
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from massl.data.loading.image_reader import ImageReader, Tried

# Image that was read, label, height, width; what was tried. None: neither the image nor a stand-in can be read.
Entry = tuple[tuple[int, int, int, int] | None, "Tried"]
Task = tuple[int, list[int], list[int]]  # number, images, blocks that may be used again
# task (None: at the start), where its pixels lie, entries, what went wrong
Answer = tuple[int | None, int, list[Entry], Exception | None]

_SMALLEST_BLOCK = 2**16  # bytes
# A job scheduler sends these to every process of a job. What they mean is for the training process to decide, which may
# want more batches before it leaves; this one leaves when its connection closes.
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Arena:
    """Shared memory that grows as needed. Blocks are powers of two and are used again once given back: only their first
    use pays for fresh pages, which cost more than the copy.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._free: dict[int, list[int]] = defaultdict(list)  # size -> where
        self._sizes: dict[int, int] = {}  # where -> size
        self._end = 0
        self._capacity = 0
        self.memory: Any = None  # the mapped file, for numpy

    def take(self, num_bytes: int) -> int:
        """Where there is room for so many bytes."""
        size = max(_SMALLEST_BLOCK, 1 << (num_bytes - 1).bit_length())
        if self._free[size]:
            return self._free[size].pop()
        start = self._end
        self._end += size
        self._sizes[start] = size
        if self._end > self._capacity:
            self._capacity = 2 * self._end  # pages that nothing has been written to take no memory
            os.ftruncate(self._file, self._capacity)
            self.memory = mmap.mmap(self._file, self._capacity)
        return start

    def give_back(self, start: int) -> None:
        self._free[self._sizes[start]].append(start)


def main(connection: Connection, arena_file: int, setup_file: int) -> None:
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        try:
            reader = _open_reader(setup_file)
        except Exception as error:
            connection.send((None, 0, [], _sendable(error)))
            return
        connection.send((None, 0, [], None))
        arena = Arena(arena_file)
        while True:
            connection.send(_answer(connection.recv(), reader, arena))
    except (EOFError, OSError):  # the training process has closed the connection, or is gone
        return


def _open_reader(setup_file: int) -> "ImageReader":
    package = ModuleType("massl")  # in place of the real one, whose __init__ imports all there is
    package.__path__ = [str(Path(__file__).parents[2])]
    sys.modules["massl"] = package
    with mmap.mmap(setup_file, 0, access=mmap.ACCESS_READ) as setup:
        sys.path[:] = pickle.load(setup)
        import torch

        from massl.data.loading.image_reader import ImageReader

        torch.set_num_threads(1)  # there is one process per core
        source, seed, max_side = pickle.load(setup)
    os.close(setup_file)
    return ImageReader(source, seed=seed, max_side=max_side)


def _answer(task: Task, reader: "ImageReader", arena: Arena) -> Answer:
    number, images, given_back = task
    for start in given_back:
        arena.give_back(start)
    try:
        return (number, *_read(images, reader, arena), None)
    except Exception as error:
        return number, 0, [], _sendable(error)


def _read(images: list[int], reader: "ImageReader", arena: Arena) -> tuple[int, list[Entry]]:
    """Where the pixels of all images lie, one after another and each as [3, H, W], and what they are."""
    import torch

    entries: list[Entry] = []
    pixels = []
    for reading, tried in map(reader.read_or_replace, images):
        if reading is None:
            entries.append((None, tried))
            continue
        assert isinstance(reading.pixels, torch.Tensor)
        pixels.append(reading.pixels)
        height, width = reading.pixels.shape[1:]
        entries.append(((reading.index, reading.label, height, width), tried))
    block = stop = arena.take(max(1, sum(image.numel() for image in pixels)))
    for image in pixels:
        start, stop = stop, stop + image.numel()
        torch.frombuffer(arena.memory, dtype=torch.uint8, count=image.numel(), offset=start).view(image.shape).copy_(
            image
        )
    return block, entries


def _sendable(error: Exception) -> Exception:
    """The error with its traceback as a note; a plain one in its place if it does not survive the transfer."""
    error.add_note(f"In a worker process:\n{traceback.format_exc()}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"in a worker process:\n{traceback.format_exc()}")
    return error


if __name__ == "__main__":
    connection_file, arena, setup = map(int, sys.argv[1:])
    main(Connection(connection_file), arena, setup)
    os._exit(0)  # at once: taking PyTorch down takes longer than most tasks
