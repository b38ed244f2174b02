"""Images read and decoded by the worker processes of torch.utils.data.DataLoader. Provisional: measured against ours.

The workers come from a fork server: a fresh interpreter without threads and without a GPU context, which imports
PyTorch once. Forking the training process itself would copy its locks in whatever state its threads hold them.
"""

import multiprocessing
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import ModuleType

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from massl.data.loading.cache import ImageCache
from massl.data.loading.image_reader import ImageReader, LoadedImage, ReadResult, Tried, label_number
from massl.data.sources.base import DataError, ImageSource

# (index of the image that was read, label, height, width), what was tried. None: no image and no replacement.
Entry = tuple[tuple[int, int, int, int] | None, Tried]
Chunk = tuple[
    list[int], Tensor, list[Entry]
]  # indices asked for, their pixels one after another (uint8), their entries

_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_INSTEAD = "choose data.worker_kind threads"


class _ChunkDataset(Dataset[Chunk]):
    """Lives in the workers: reads a whole chunk into one piece of shared memory."""

    def __init__(self, source: ImageSource, *, seed: int, max_side: int) -> None:
        self._reader = ImageReader(source, seed=seed, max_side=max_side)

    def __getitems__(self, indices: list[int]) -> Chunk:
        results = [self._reader.read_or_replace(index) for index in indices]
        images = [image.pixels for image, _ in results if image is not None and isinstance(image.pixels, Tensor)]
        # allocated as shared memory, so that sending it copies nothing, as torch's default_collate does
        storage = torch.UntypedStorage._new_shared(max(1, sum(image.numel() for image in images)))
        pixels = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
        start = 0
        for image in images:
            pixels[start : start + image.numel()].view(image.shape).copy_(image)
            start += image.numel()
        return indices, pixels, [_entry(result) for result in results]


class _ChunksFrom(Sampler[list[int]]):
    """The chunks of `start`, `start + 1`, ... without the cached images; runs in the training process, read ahead."""

    def __init__(
        self, order_at: Callable[[int], Tensor], *, chunk_size: int | None, source_name: str, cache: ImageCache | None
    ) -> None:
        self._order_at = order_at
        self._chunk_size = chunk_size
        self._source_name = source_name
        self._cache = cache
        self.start = 0
        self.num_chunks: deque[int] = deque()  # of each step not taken yet

    def __iter__(self) -> Iterator[list[int]]:
        for step in count(self.start):
            missing = [
                index
                for index in self._order_at(step).tolist()
                if self._cache is None or self._cache.get(self._source_name, index) is None
            ]
            size = self._chunk_size or max(1, len(missing))
            chunks = [missing[first : first + size] for first in range(0, len(missing), size)] or [[]]
            self.num_chunks.append(len(chunks))
            yield from chunks


class DataLoaderWorkers:
    """Reads the steps in sequence, from one thread; a step out of sequence starts the sequence anew.

    `chunk_size` None: each worker makes a whole batch, as is usual with a DataLoader.
    """

    def __init__(
        self,
        source: ImageSource,
        *,
        order_at: Callable[[int], Tensor],
        num_workers: int,
        chunk_size: int | None,
        prefetch_steps: int,
        seed: int,
        max_side: int,
        cache: ImageCache | None = None,
    ) -> None:
        self._source = source
        self._cache = cache
        self._sampler = _ChunksFrom(order_at, chunk_size=chunk_size, source_name=source.name, cache=cache)
        chunks_ahead = prefetch_steps * -(-len(order_at(0)) // chunk_size) if chunk_size else 0
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._loader: DataLoader[Chunk] = DataLoader(
            _ChunkDataset(source, seed=seed, max_side=max_side),
            batch_sampler=self._sampler,
            num_workers=num_workers,
            prefetch_factor=max(2, -(-chunks_ahead // num_workers)),
            collate_fn=_as_it_is,
            worker_init_fn=_ignore_signals,
            persistent_workers=True,
            multiprocessing_context=context,
            generator=torch.Generator(),  # its own: the global one stays untouched
        )
        self._chunks: Iterator[Chunk] | None = None
        self._next_step: int | None = None

    def read(self, step: int, indices: list[int]) -> list[ReadResult]:
        """The images of a step, in the order of `indices`."""
        try:
            if step != self._next_step:
                self._restart(step)
            assert self._chunks is not None
            self._next_step = None  # until all is well
            found: dict[int, ReadResult] = {}
            for _ in range(self._sampler.num_chunks.popleft()):
                found.update(_results(next(self._chunks)))
        except RuntimeError as error:
            if "exited unexpectedly" not in str(error):
                raise
            raise DataError(f"a worker process died ({error}); lower data.num_workers, or {_INSTEAD}") from None
        for image, _ in found.values():
            if self._cache is not None and not self._cache.is_full and image is not None:
                assert isinstance(image.pixels, Tensor)
                self._cache.keep(self._source.name, image.index, image.pixels.clone())
        self._next_step = step + 1
        return [found[index] if index in found else self._cached(index) for index in indices]

    def _cached(self, index: int) -> ReadResult:
        assert self._cache is not None
        pixels = self._cache.get(self._source.name, index)
        assert pixels is not None  # it was there when the chunks were made, and nothing leaves the cache
        label = label_number(self._source.label_of(index))
        return ReadResult(LoadedImage(pixels=pixels, label=label, index=index), {index: None})

    def _restart(self, step: int) -> None:
        self._sampler.start = step
        self._sampler.num_chunks.clear()
        try:
            with _empty_main():
                self._chunks = iter(self._loader)
        except (AttributeError, TypeError, ImportError) as error:
            raise DataError(f"{self._source.name} cannot be sent to worker processes ({error}); {_INSTEAD}") from None

    def close(self) -> None:
        if self._chunks is not None:
            self._chunks._shutdown_workers()  # type: ignore[attr-defined]
            self._chunks = self._loader._iterator = None


@contextmanager
def _empty_main() -> Iterator[None]:
    """Lets multiprocessing start processes that do not import the user's script, which may have no `if __name__`."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


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
    for asked_for, (what, tried) in zip(indices, entries, strict=True):
        if what is None:
            yield asked_for, ReadResult(None, tried)
            continue
        index, label, height, width = what
        image = pixels[start : start + 3 * height * width].view(3, height, width)
        start += image.numel()
        yield asked_for, ReadResult(LoadedImage(pixels=image, label=label, index=index), tried)


def _as_it_is(chunk: Chunk) -> Chunk:
    return chunk


def _ignore_signals(_: int) -> None:
    """A job scheduler sends them to every process of a job; the training process decides what they mean."""
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
