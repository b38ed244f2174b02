"""Batches of decoded images, read ahead by threads or processes and delivered on the device.

Threads are the default: decoders and numpy release the interpreter lock, and nothing has to be started or copied. The
lock limits them to about 8 busy cores; with more cores, processes decode photographs faster. A batch is a function of
the step alone: the kind and number of workers, the cache and a restart do not change it.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from massl.data.loading.cache import ImageCache
from massl.data.loading.gpu_decode import JpegDecoder
from massl.data.loading.image_reader import ImageReader, ReadabilityRecord, ReadResult, Tried, label_number
from massl.data.loading.packing import pack, pack_equal, side_stream
from massl.data.loading.threads import DaemonThreads
from massl.data.loading.workers import WorkerProcesses
from massl.data.sources.base import ImageSource
from massl.ops.image_ops import RaggedImages

_CHUNK_SIZE = 8  # images per task: 32-px PNGs load 1.4 to 2.4 times as fast as one by one, large JPEGs equally fast


@dataclass(frozen=True, kw_only=True)
class ImageBatch:
    """Images of different sizes with their indices and labels."""

    images: RaggedImages
    indices: Tensor  # [B] int64 requested indices, on the CPU
    labels: Tensor  # [B] int64, -1 where unlabelled, on the CPU

    def to(self, device: torch.device | str) -> "ImageBatch":
        """The batch with its pixels on the device; the sizes stay on the CPU, where crop boxes are drawn."""
        moved = replace(self, images=self.images.to(device))
        moved.record_stream()
        return moved

    def slice(self, start: int, stop: int) -> "ImageBatch":
        return ImageBatch(
            images=self.images.slice(start, stop), indices=self.indices[start:stop], labels=self.labels[start:stop]
        )

    def record_stream(self) -> None:
        """Tell the GPU allocator that the current stream uses the pixels, which were made on another stream.

        Otherwise that stream could overwrite them once they are freed here, before the kernels that read them run.
        """
        if self.images.pixels.is_cuda:
            self.images.pixels.record_stream(torch.cuda.current_stream(self.images.pixels.device))


class Loader:
    """The batch of any step; if steps are requested in sequence, the next ones are loaded in the background.

    `order_at` gives the image indices of a step and is called from several threads. `on_skip` receives a message for
    each unreadable image, `on_note` one about a full or useless cache, in the thread that calls `at`. An unreadable
    image is replaced by another, but keeps its entry in `indices`, so it gets other views than its replacement.

    With a GPU as `device`, batches arrive there complete: transfers and the `batch_decoder` run on their own streams,
    and the training stream never waits for them. Without `device`, batches stay on the CPU.
    """

    def __init__(
        self,
        source: ImageSource,
        *,
        order_at: Callable[[int], Tensor],
        seed: int,
        num_workers: int,
        worker_kind: Literal["threads", "processes"] = "threads",
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
        self._threads, self._processes = None, None
        if num_workers > 0 and worker_kind == "processes" and source.pixels is None:  # arrays need no decoding
            assert batch_decoder is None
            self._processes = WorkerProcesses(
                source,
                self._reader,
                order_at=order_at,
                num_workers=num_workers,
                prefetch_steps=prefetch_steps + 1,
                seed=seed,
                max_side=max_side,
            )
        elif num_workers > 0:
            self._threads = DaemonThreads(num_workers, thread_name_prefix="massl-decode")
        # Pinning memory from a new thread would open a context on GPU 0, so these threads select this thread's GPU.
        select_gpu = partial(torch.cuda.set_device, torch.cuda.current_device()) if self._pin else None
        # Batches wait for the workers in their own threads: inside the workers' pool they could fill it with waiters.
        num_assemblers = 1 if self._processes is not None else prefetch_steps + 1
        self._assemblers = DaemonThreads(num_assemblers, thread_name_prefix="massl-batch", initializer=select_gpu)

    def at(self, step: int) -> ImageBatch:
        """The batch of a step, always the same."""
        batch, tried = self._load(step) if self._num_workers == 0 else self._prefetched(step)
        self._record.add(tried)
        if batch is None:
            raise self._record.error()
        self._note_cache()
        batch.record_stream()
        return batch

    def _note_cache(self) -> None:
        """Report once that the cache is full or useless."""
        if self._cache is None or self._on_note is None:
            return
        if self._source.pixels is not None:
            self._on_note(f"data.cache_gib has no use: {self._source.name} holds all its images in memory")
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
                self._pending[wanted_step] = self._assemblers.submit(self._load, wanted_step)
        return self._pending.pop(step).result()

    def _load(self, step: int) -> tuple[ImageBatch | None, Tried]:
        """The batch, or None if an image has no replacement; and what was tried, which `at` judges in step order."""
        indices = self._order_at(step)
        batch = None
        with side_stream(self._device):
            array = self._source.pixels
            if array is not None and max(array.shape[1:3]) <= self._max_side:
                images = pack_equal(array[indices.numpy()], device=self._device, pin=self._pin)
                labels = [label_number(self._source.label_of(index)) for index in indices.tolist()]
                return ImageBatch(images=images, indices=indices, labels=torch.tensor(labels)), {}
            results = self._read(step, indices.tolist())
            loaded = [image for image, _ in results if image is not None]
            if len(loaded) == len(indices):
                pixels = [image.pixels for image in loaded if isinstance(image.pixels, Tensor)]
                images = pack(pixels, device=self._device, pin=self._pin)
                labels = [image.label for image in loaded]
                batch = ImageBatch(images=images, indices=indices, labels=torch.tensor(labels))
        return batch, {index: reason for _, tried in results for index, reason in tried.items()}

    def _read(self, step: int, indices: list[int]) -> list[ReadResult]:
        if self._processes is not None:
            return self._processes.read(step, indices)

        def read_chunk(chunk: list[int]) -> list[ReadResult]:
            return [self._reader.read_or_replace(index) for index in chunk]

        chunks = [indices[start : start + _CHUNK_SIZE] for start in range(0, len(indices), _CHUNK_SIZE)]
        done = map(read_chunk, chunks) if self._threads is None else self._threads.map(read_chunk, chunks)
        results = [result for chunk_results in done for result in chunk_results]
        return results if self._batch_decoder is None else self._reader.decode_files(indices, results)

    @property
    def unreadable(self) -> Mapping[int, str]:
        """Index -> reason, of the images found unreadable in the batches so far."""
        return self._record.unreadable

    def image_keys(self, indices: Tensor) -> list[str]:
        return [self._source.key_of(index) for index in indices.tolist()]

    def close(self) -> None:
        """Stop all threads and processes; batches in progress are dropped. A read that hangs delays it by seconds."""
        self._assemblers.shutdown(wait=False, cancel_futures=True)
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self._assemblers.shutdown()
        if self._processes is not None:
            self._processes.close()
        self._pending.clear()  # batches, and errors whose tracebacks hold images in shared memory
