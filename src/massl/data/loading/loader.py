"""Batches of decoded images, read ahead by threads or processes and delivered where they are used.

Threads come first: decoders and numpy release the interpreter lock while they work, and nothing has to be started or
copied. What is left of the lock binds them at some 8 busy cores; beyond that processes decode photographs faster. A
batch is a pure function of the step, so neither the kind and number of workers, the cache nor a restart changes it.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor

from massl.data.loading.cache import ImageCache
from massl.data.loading.dataloader_workers import DataLoaderWorkers
from massl.data.loading.gpu_decode import JpegDecoder
from massl.data.loading.image_reader import ImageReader, ReadabilityRecord, Reading, ReadResult, Tried, label_number
from massl.data.loading.packing import pack, pack_equal, side_stream
from massl.data.loading.workers import WorkerProcesses
from massl.data.sources.base import ImageSource
from massl.ops.image_ops import RaggedImages

CHUNK_SIZE = 8  # images per task of a worker: 32-px PNGs come 1.4 to 2.4 times as fast as one by one, large JPEGs alike

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ImageBatch:
    """Images of different sizes with their numbers and labels."""

    images: RaggedImages
    indices: Tensor  # [B] int64 positions in the source as the order asked for them, on the CPU
    labels: Tensor  # [B] int64, -1 where unlabelled, on the CPU

    def to(self, device: torch.device | str) -> "ImageBatch":
        """The same batch with its pixels on the device; the sizes stay here, where crop boxes are drawn."""
        moved = replace(self, images=self.images.to(device))
        moved.belongs_to_current_stream()
        return moved

    def slice(self, start: int, stop: int) -> "ImageBatch":
        """Images start to stop, as a micro-batch."""
        return ImageBatch(
            images=self.images.slice(start, stop), indices=self.indices[start:stop], labels=self.labels[start:stop]
        )

    def belongs_to_current_stream(self) -> None:
        """Tell the GPU's allocator who uses the pixels: they were made on another stream, which could otherwise
        overwrite them as soon as they are freed here, while kernels that read them are still waiting to run.
        """
        if self.images.pixels.is_cuda:
            self.images.pixels.record_stream(torch.cuda.current_stream(self.images.pixels.device))


def _cut_out(
    source: ImageSource, indices: Tensor, *, max_side: int, device: torch.device | None, pin: bool
) -> ImageBatch | None:
    """The fast path: a batch taken at once from a source that holds all images as one array; None where that cannot be
    done.
    """
    if source.pixels is None or max(source.pixels.shape[1:3]) > max_side:
        return None
    images = pack_equal(source.pixels[indices.numpy()], device=device, pin=pin)
    labels = torch.tensor([label_number(source.label_of(index)) for index in indices.tolist()])
    return ImageBatch(images=images, indices=indices, labels=labels)


def _batch_of(readings: list[Reading], indices: Tensor, *, device: torch.device | None, pin: bool) -> ImageBatch:
    pixels = [reading.pixels for reading in readings if isinstance(reading.pixels, Tensor)]
    assert len(pixels) == len(indices)
    return ImageBatch(
        images=pack(pixels, device=device, pin=pin),
        indices=indices,
        labels=torch.tensor([reading.label for reading in readings]),
    )


def _in_order(read: Callable[[int], Result], indices: list[int], pool: ThreadPoolExecutor | None) -> list[Result]:
    """read(index) for all indices, by the pool's threads or, without one, here."""

    def read_chunk(chunk: list[int]) -> list[Result]:
        return [read(index) for index in chunk]

    chunks = [indices[start : start + CHUNK_SIZE] for start in range(0, len(indices), CHUNK_SIZE)]
    results = map(read_chunk, chunks) if pool is None else pool.map(read_chunk, chunks)
    return [result for chunk_results in results for result in chunk_results]


class Loader:
    """The batch of any step; when steps are asked for in sequence, the next ones are made in the background.

    `order_at` gives the images of a step and is called from several threads. `on_skip` hears of each unreadable image
    and `on_note` of a full or useless cache, in the thread that calls `at`. An unreadable image is replaced by another,
    but `indices` keeps its number, so views of the stand-in differ from its own.

    With a GPU as `device` batches arrive there complete: transfers, and decoding where there is a `batch_decoder`, run
    on streams of their own, and the training stream never waits for them. Without `device` batches stay on the CPU.
    """

    def __init__(
        self,
        source: ImageSource,
        *,
        order_at: Callable[[int], Tensor],
        seed: int,
        num_workers: int,
        worker_kind: Literal["threads", "processes", "dataloader", "dataloader-batches"] = "threads",
        max_side: int,
        prefetch_steps: int = 3,
        device: torch.device | None = None,
        batch_decoder: JpegDecoder | None = None,
        cache: ImageCache | None = None,
        on_skip: Callable[[str], None],
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        self._source = source
        self._order_at = order_at
        self._max_side = max_side
        self._prefetch_steps = prefetch_steps
        self._device = device
        self._batch_decoder = batch_decoder
        self._cache = cache
        self._on_note = on_note
        self._reader = ImageReader(source, seed=seed, max_side=max_side, cache=cache, batch_decoder=batch_decoder)
        self._record = ReadabilityRecord(source, on_skip)
        self._pin = torch.cuda.is_available() and (device is None or device.type == "cuda")
        self._pending: dict[int, Future[tuple[ImageBatch | None, Tried]]] = {}
        self._num_workers = num_workers
        self._threads, self._processes, self._dataloader = None, None, None
        # arrays are here: there is nothing to decode
        if num_workers > 0 and worker_kind == "processes" and source.pixels is None:
            assert batch_decoder is None
            self._processes = WorkerProcesses(
                source, num_workers=num_workers, chunk_size=CHUNK_SIZE, seed=seed, max_side=max_side, cache=cache
            )
        elif num_workers > 0 and worker_kind.startswith("dataloader") and source.pixels is None:
            self._dataloader = DataLoaderWorkers(
                source,
                order_at=order_at,
                num_workers=num_workers,
                chunk_size=32 if worker_kind == "dataloader" else None,
                prefetch_steps=prefetch_steps + 1,
                seed=seed,
                max_side=max_side,
                cache=cache,
            )
        elif num_workers > 0:
            self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="massl-decode")
        # Pinning from a new thread would open a context on GPU 0 in every process, so those threads take over this
        # thread's GPU.
        take_over_gpu = partial(torch.cuda.set_device, torch.cuda.current_device()) if self._pin else None
        # Batches wait for the workers in threads of their own: waiting inside the workers' pool could fill it with
        # waiters.
        self._assemblers = ThreadPoolExecutor(
            1 if self._dataloader is not None else self._prefetch_steps + 1,
            thread_name_prefix="massl-batch",
            initializer=take_over_gpu,
        )

    def at(self, step: int) -> ImageBatch:
        """The batch of a step, the same whenever and however often it is asked for."""
        batch, tried = self._make(step) if self._num_workers == 0 else self._prefetched(step)
        self._record.add(tried)
        if batch is None:
            raise self._record.error()
        self._note_cache()
        batch.belongs_to_current_stream()
        return batch

    def _note_cache(self) -> None:
        """What there is to say about the cache, once."""
        if self._cache is None or self._on_note is None:
            return
        if self._source.pixels is not None:
            self._on_note(
                f"data.cache_gib has no use here: {self._source.name} holds all its images in memory as they are"
            )
        elif self._cache.is_full:
            self._on_note(self._cache.describe(len(self._source)))
        else:
            return
        self._on_note = None

    def _prefetched(self, step: int) -> tuple[ImageBatch | None, Tried]:
        wanted = range(step, step + self._prefetch_steps + 1)
        for stale in self._pending.keys() - set(wanted):
            self._pending.pop(stale).cancel()
        for wanted_step in wanted:
            if wanted_step not in self._pending:
                self._pending[wanted_step] = self._assemblers.submit(self._make, wanted_step)
        return self._pending.pop(step).result()

    def _make(self, step: int) -> tuple[ImageBatch | None, Tried]:
        """The batch, or None if an image has no stand-in; and what was tried, which `at` judges: the timing of threads
        plays no part.
        """
        indices = self._order_at(step)
        numbers = indices.tolist()
        with side_stream(self._device):
            batch = _cut_out(self._source, indices, max_side=self._max_side, device=self._device, pin=self._pin)
            if batch is not None:
                return batch, {}
            with self._reading(step, numbers) as results:
                readings = [reading for reading, _ in results if reading is not None]
                if len(readings) == len(numbers):
                    batch = _batch_of(readings, indices, device=self._device, pin=self._pin)
        return batch, {index: reason for _, tried in results for index, reason in tried.items()}

    @contextmanager
    def _reading(self, step: int, numbers: list[int]) -> Iterator[list[ReadResult]]:
        """The images, whoever reads them; to be copied inside the `with`."""
        if self._processes is not None:
            with self._processes.reading(numbers) as results:
                yield results
            return
        if self._dataloader is not None:
            yield self._dataloader.read(step, numbers)
            return
        results = _in_order(self._reader.read_or_replace, numbers, self._threads)
        yield results if self._batch_decoder is None else self._reader.decode_files(numbers, results)

    def image_keys(self, indices: Tensor) -> list[str]:
        return [self._source.key_of(index) for index in indices.tolist()]

    def close(self) -> None:
        """Stop all threads and processes; batches under way are given up."""
        self._assemblers.shutdown(wait=False, cancel_futures=True)
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        if self._processes is not None:
            self._processes.close()
        self._assemblers.shutdown()
        if self._dataloader is not None:
            self._dataloader.close()
        self._pending.clear()  # batches, and errors whose tracebacks hold images in shared memory
