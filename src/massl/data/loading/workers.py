"""Worker processes that read and decode images, by torch.utils.data.DataLoader.

The workers come from a fork server: a fresh interpreter without threads and without a GPU context, which imports
PyTorch once. Forking the training process itself would copy its locks in whatever state its threads hold them.
"""

import os
import pickle
import signal
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.util import get_temp_dir
from threading import Thread
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from massl.data.loading.image_reader import ImageReader, LoadedImage, ReadResult, Tried
from massl.data.sources.base import DataError, ImageSource

# (index of the image that was read, label, height, width), what was tried. None: no image and no replacement.
Entry = tuple[tuple[int, int, int, int] | None, Tried]
Chunk = tuple[list[int], Tensor, list[Entry]]  # requested indices, their pixels one after another (uint8), entries

_CHUNK_SIZE = 32  # images per task; whole batches would need 8 times the shared memory and are no faster
# A job scheduler sends these to every process of a job; the training process decides what they mean.
_SCHEDULER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_INSTEAD = "choose data.worker_kind threads"


class _Chunks(Dataset[Chunk]):
    """Lives in the workers: reads a chunk of images into one piece of shared memory."""

    def __init__(self, source: ImageSource, *, seed: int, max_side: int) -> None:
        self._reader = ImageReader(source, seed=seed, max_side=max_side)

    def __getitems__(self, indices: list[int]) -> Chunk:
        results = [self._reader.read_or_replace(index) for index in indices]
        images = [image.pixels for image, _ in results if image is not None and isinstance(image.pixels, Tensor)]
        # Allocated as shared memory, so that sending it copies nothing, as in torch's default_collate.
        num_bytes = max(1, sum(image.numel() for image in images))
        storage = torch.UntypedStorage._new_shared(num_bytes)  # type: ignore[no-untyped-call]
        pixels = torch.empty(0, dtype=torch.uint8).set_(storage)
        start = 0
        for image in images:
            pixels[start : start + image.numel()].view(image.shape).copy_(image)
            start += image.numel()
        return indices, pixels, [_entry(result) for result in results]


class _ChunksFrom(Sampler[list[int]]):
    """Chunks of the steps `start`, `start + 1`, ... without cached images. Runs in the training process."""

    def __init__(self, order_at: Callable[[int], Tensor], reader: ImageReader) -> None:
        self._order_at = order_at
        self._reader = reader
        self.start = 0
        self.num_chunks: deque[int] = deque()  # of each step that was not taken yet

    def __iter__(self) -> Iterator[list[int]]:
        for step in count(self.start):
            try:
                indices = self._order_at(step).tolist()
            except IndexError:  # the order ends here; the loader raises if this step is really requested
                return
            missing = [index for index in indices if self._reader.cached(index) is None]
            chunks = [missing[first : first + _CHUNK_SIZE] for first in range(0, len(missing), _CHUNK_SIZE)]
            chunks = chunks or [[]]  # at least one: with all images cached, read-ahead would never end
            self.num_chunks.append(len(chunks))
            yield from chunks


class WorkerProcesses:
    """Reads the images of steps in sequence, for one thread; a step out of sequence starts a new sequence.

    The cache of `reader` stays in this process: workers only read images that it does not hold.
    """

    def __init__(
        self,
        source: ImageSource,
        reader: ImageReader,
        *,
        order_at: Callable[[int], Tensor],
        num_workers: int,
        prefetch_steps: int,
        seed: int,
        max_side: int,
    ) -> None:
        self._source = source
        self._reader = reader
        self._sampler = _ChunksFrom(order_at, reader)
        chunks_ahead = prefetch_steps * -(-len(order_at(0)) // _CHUNK_SIZE)
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])
        # workers exit when its writing end closes, however this process ends
        self._lifeline = context.Pipe(duplex=False)
        with _more_workers_than_cores():
            self._loader: DataLoader[Chunk] = DataLoader(
                _Chunks(source, seed=seed, max_side=max_side),
                batch_sampler=self._sampler,
                num_workers=num_workers,
                prefetch_factor=max(2, -(-chunks_ahead // num_workers)),
                collate_fn=_unchanged,
                worker_init_fn=partial(_prepare_worker, self._lifeline[0]),
                persistent_workers=True,
                multiprocessing_context=context,
                generator=torch.Generator(),  # its own, so that the global generator is not used
            )
        self._chunks: Iterator[Chunk] | None = None
        self._next_step: int | None = None
        self._death: DataError | None = None

    def read(self, step: int, indices: list[int]) -> list[ReadResult]:
        """The images of a step, in the order of `indices`."""
        if self._death is not None:
            raise self._death  # steps that were requested ahead would each wait 5 s for the dead worker
        try:
            if step != self._next_step:
                self._restart(step)
            assert self._chunks is not None
            self._next_step = None  # stays so if an error is raised
            found: dict[int, ReadResult] = {}
            for _ in range(self._sampler.num_chunks.popleft() if self._sampler.num_chunks else 0):
                found.update(_results(next(self._chunks)))
        except (RuntimeError, ConnectionError, EOFError) as error:
            if "shared memory" in str(error):  # containers often have only 64 MB
                advice = f"enlarge it (docker run --shm-size), lower data.num_workers, or {_INSTEAD}"
                raise DataError(f"/dev/shm is too small for the images of worker processes; {advice}") from None
            if isinstance(error, RuntimeError) and "exited unexpectedly" not in str(error):
                raise  # an error inside a worker, which lives on
            self._death = DataError(f"a worker process died ({error}); lower data.num_workers, or {_INSTEAD}")
            raise self._death from None
        for image, _ in found.values():
            if image is not None and isinstance(image.pixels, Tensor):
                self._reader.keep(image.index, image.pixels)
        self._next_step = step + 1
        # the others were cached when the chunks were made, and nothing leaves the cache
        return [found.get(index) or ReadResult(self._reader.cached(index), {index: None}) for index in indices]

    def _restart(self, step: int) -> None:
        self._sampler.start = step
        self._sampler.num_chunks.clear()
        if self._chunks is None:
            try:
                pickle.dumps(self._source)
            except Exception as error:
                problem = f"{self._source.name} cannot be sent to worker processes ({error})"
                raise DataError(f"{problem}; {_INSTEAD}") from None
        with _isolated_start(), _more_workers_than_cores():
            self._chunks = iter(self._loader)

    def close(self) -> None:
        """Stop the workers. The lifeline goes first: DataLoader alone would wait 5 s for each worker that is stuck."""
        for end in self._lifeline:
            end.close()
        if self._chunks is not None:
            self._chunks._shutdown_workers()  # type: ignore[attr-defined]
            self._chunks = self._loader._iterator = None


@contextmanager
def _more_workers_than_cores() -> Iterator[None]:
    """Without torch's warning that there are: workers also wait for disks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        yield


@contextmanager
def _isolated_start() -> Iterator[None]:
    """Start processes that neither import the user's script nor die of signals sent to the whole job."""
    resource_tracker.ensure_running()  # now: when it starts, it unblocks signals in this thread
    get_temp_dir()  # now: workers then put their sockets into this folder, which this process removes when it ends
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # else the script is imported, which may have no `if __name__`
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SCHEDULER_SIGNALS)  # the fork server inherits this
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        sys.modules["__main__"] = main


def _prepare_worker(lifeline: Connection, _: int) -> None:
    for number in _SCHEDULER_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    Thread(target=_exit_at_end_of, args=(lifeline,), daemon=True).start()


def _exit_at_end_of(lifeline: Connection) -> None:
    """torch watches only the parent, which is the fork server: it lives as long as its workers."""
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)


def _entry(result: ReadResult) -> Entry:
    image, tried = result
    if image is None:
        return None, tried
    assert isinstance(image.pixels, Tensor)
    height, width = image.pixels.shape[1:]
    return (image.index, image.label, height, width), tried


def _results(chunk: Chunk) -> Iterator[tuple[int, ReadResult]]:
    indices, pixels, entries = chunk
    start = 0
    for requested, (image, tried) in zip(indices, entries, strict=True):
        if image is None:
            yield requested, ReadResult(None, tried)
            continue
        index, label, height, width = image
        end = start + 3 * height * width
        view = pixels[start:end].view(3, height, width)
        yield requested, ReadResult(LoadedImage(pixels=view, label=label, index=index), tried)
        start = end


def _unchanged(chunk: Any) -> Any:
    return chunk
