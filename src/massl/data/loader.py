"""Batches of decoded images, read ahead by threads.

Threads rather than processes: Pillow and numpy release the interpreter lock while they work, so nothing is pickled or forked. A batch is a
pure function of the step, so neither the number of workers nor a restart changes it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from massl import keyed_random
from massl.data.decode import UnreadableImage, decode
from massl.data.sources.base import DataError, ImageSource

UNLABELLED = -1
MAX_UNREADABLE_SHARE = 0.05
MIN_TRIED_TO_JUDGE = 100
MAX_TRIES = 16  # of an image and its stand-ins: with no more unreadable ones than allowed, all fail once in 10**20 times
CHUNK_SIZE = 8  # images per task of a worker: 32-px PNGs come 1.4 to 2.4 times as fast as one by one, large JPEGs alike

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ImageBatch:
    """Images of different sizes in one tensor."""

    pixels: Tensor  # [B, 3, Hmax, Wmax] uint8, each image in the top-left corner, the rest zero
    sizes: Tensor  # [B, 2] int64 height and width, on the CPU
    indices: Tensor  # [B] int64 positions in the source as the order asked for them, on the CPU
    labels: Tensor  # [B] int64, -1 where unlabelled, on the CPU

    def to(self, device: torch.device | str) -> "ImageBatch":
        """The same batch with its pixels on the device; the sizes stay here, where crop boxes are drawn."""
        return replace(self, pixels=self.pixels.to(device, non_blocking=True))

    def slice(self, start: int, stop: int) -> "ImageBatch":
        """Images start to stop, as a micro-batch."""
        part = slice(start, stop)
        return ImageBatch(pixels=self.pixels[part], sizes=self.sizes[part], indices=self.indices[part], labels=self.labels[part])


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """One image of a batch: its own pixels [3, H, W] and label, or a stand-in's."""

    pixels: Tensor
    label: int


Tried = dict[int, str | None]  # image -> why it cannot be read, or None when it was


def _read(source: ImageSource, index: int, *, max_side: int) -> _Reading:
    try:
        image = source.read(index)
    except OSError as error:  # the file has vanished, access is denied, the disk is damaged
        raise UnreadableImage(error.strerror or str(error)) from None
    return _Reading(pixels=decode(image, max_side=max_side), label=UNLABELLED if image.label is None else image.label)


def _read_or_replace(source: ImageSource, index: int, *, seed: int, max_side: int) -> tuple[_Reading | None, Tried]:
    """The image, or a stand-in drawn by the image's own key, so that every run and every worker draws the same."""
    tried: Tried = {}
    candidate = index
    for attempt in range(MAX_TRIES):
        try:
            reading = _read(source, candidate, max_side=max_side)
        except UnreadableImage as error:
            tried[candidate] = str(error)
            candidate = int(keyed_random.integers(seed, "replacement", index, attempt, upper=len(source)))
        else:
            tried[candidate] = None
            return reading, tried
    return None, tried


class _ReadabilityRecord:
    """Which images have been tried, so that each unreadable one is named once and too many of them stop the run."""

    def __init__(self, source: ImageSource, on_skip: Callable[[str], None]) -> None:
        self._source = source
        self._on_skip = on_skip
        self._tried = bytearray(len(source))
        self._unreadable = bytearray(len(source))
        self._num_tried = 0
        self._num_unreadable = 0
        self._examples: list[str] = []

    def add(self, tried: Tried) -> None:
        messages = []
        for index, reason in tried.items():
            self._num_tried += not self._tried[index]
            self._tried[index] = True
            if reason is not None and not self._unreadable[index]:
                self._unreadable[index] = True
                messages.append(f"{self._source.key_of(index)}: {reason}")
        self._num_unreadable += len(messages)
        self._examples += messages[: 3 - len(self._examples)]
        judged = self._num_tried >= min(MIN_TRIED_TO_JUDGE, len(self._source))
        if judged and self._num_unreadable > MAX_UNREADABLE_SHARE * self._num_tried:
            raise self.error()  # before naming them: there may be thousands
        for message in messages:
            self._on_skip(message)

    def error(self) -> DataError:
        return DataError(
            f"{self._num_unreadable} of {self._num_tried} images tried in {self._source.name} cannot be read, more than "
            f"{MAX_UNREADABLE_SHARE:.0%}; repair or remove them. For example {'; '.join(self._examples)}"
        )


def _padded(readings: Sequence[_Reading], indices: Tensor, *, pin: bool) -> ImageBatch:
    """Images of different sizes in one batch. Every byte is written once: zeroing all of it first would be a second pass."""
    sizes = torch.tensor([reading.pixels.shape[1:] for reading in readings])
    height, width = sizes.amax(dim=0).tolist()
    pixels = torch.empty(len(readings), 3, height, width, dtype=torch.uint8, pin_memory=pin)
    for padded, reading in zip(pixels.numpy(), readings, strict=True):  # numpy: torch would start a team of threads in each of ours
        _, image_height, image_width = reading.pixels.shape
        padded[:, :image_height, :image_width] = reading.pixels.numpy()
        padded[:, :image_height, image_width:] = 0
        padded[:, image_height:] = 0
    return ImageBatch(pixels=pixels, sizes=sizes, indices=indices, labels=torch.tensor([reading.label for reading in readings]))


def _cut_out(source: ImageSource, indices: Tensor, *, max_side: int, pin: bool) -> ImageBatch | None:
    """The fast path: a batch taken at once from a source that holds all images as one array; None where that cannot be done."""
    if source.pixels is None or max(source.pixels.shape[1:3]) > max_side:
        return None
    images = source.pixels[indices.numpy()]  # [B, H, W] or [B, H, W, 3]
    num_images, height, width = images.shape[:3]
    pixels = torch.empty(num_images, 3, height, width, dtype=torch.uint8, pin_memory=pin)
    pixels.numpy()[:] = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    found = [source.label_of(index) for index in indices.tolist()]
    labels = torch.tensor([UNLABELLED if label is None else label for label in found])
    return ImageBatch(pixels=pixels, sizes=torch.tensor([height, width]).repeat(num_images, 1), indices=indices, labels=labels)


def _in_order(read: Callable[[int], Result], indices: Tensor, pool: ThreadPoolExecutor | None) -> list[Result]:
    """read(index) for all indices, by the pool's threads or, without one, here."""

    def read_chunk(chunk: list[int]) -> list[Result]:
        return [read(index) for index in chunk]

    chunks = [indices[start : start + CHUNK_SIZE].tolist() for start in range(0, len(indices), CHUNK_SIZE)]
    results = map(read_chunk, chunks) if pool is None else pool.map(read_chunk, chunks)
    return [result for chunk_results in results for result in chunk_results]


class Loader:
    """The batch of any step; when steps are asked for in sequence, the next ones are made in the background.

    `order_at` gives the images of a step and is called from several threads. `on_skip` hears of each unreadable image, in the thread that
    calls `at`. An unreadable image is replaced by another, but `indices` keeps its number, so views of the stand-in differ from its own.
    """

    def __init__(
        self,
        source: ImageSource,
        *,
        order_at: Callable[[int], Tensor],
        seed: int,
        num_workers: int,
        max_side: int,
        prefetch_steps: int = 2,
        on_skip: Callable[[str], None],
    ) -> None:
        self._source = source
        self._order_at = order_at
        self._seed = seed
        self._max_side = max_side
        self._prefetch_steps = prefetch_steps
        self._record = _ReadabilityRecord(source, on_skip)
        self._pin = torch.cuda.is_available()
        self._pending: dict[int, Future[tuple[ImageBatch | None, Tried]]] = {}
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="massl-decode") if num_workers > 0 else None
        # Pinning from a new thread would open a context on GPU 0 in every process, so those threads take over this thread's GPU.
        take_over_gpu = partial(torch.cuda.set_device, torch.cuda.current_device()) if self._pin else None
        # Batches wait for the workers in threads of their own: waiting inside the workers' pool could fill it with waiters.
        self._assemblers = ThreadPoolExecutor(self._prefetch_steps + 1, thread_name_prefix="massl-batch", initializer=take_over_gpu)

    def at(self, step: int) -> ImageBatch:
        """The batch of a step, the same whenever and however often it is asked for."""
        batch, tried = self._make(step) if self._workers is None else self._prefetched(step)
        self._record.add(tried)
        if batch is None:
            raise self._record.error()
        return batch

    def _prefetched(self, step: int) -> tuple[ImageBatch | None, Tried]:
        wanted = range(step, step + self._prefetch_steps + 1)
        for stale in self._pending.keys() - set(wanted):
            self._pending.pop(stale).cancel()
        for wanted_step in wanted:
            if wanted_step not in self._pending:
                self._pending[wanted_step] = self._assemblers.submit(self._make, wanted_step)
        return self._pending.pop(step).result()

    def _make(self, step: int) -> tuple[ImageBatch | None, Tried]:
        """The batch, or None if an image has no stand-in; and what was tried, which `at` judges: the timing of threads plays no part."""
        indices = self._order_at(step)
        batch = _cut_out(self._source, indices, max_side=self._max_side, pin=self._pin)
        if batch is not None:
            return batch, {}
        read = partial(_read_or_replace, self._source, seed=self._seed, max_side=self._max_side)
        results = _in_order(read, indices, self._workers)
        tried = {index: reason for _, tried_for_one in results for index, reason in tried_for_one.items()}
        readings = [reading for reading, _ in results if reading is not None]
        return _padded(readings, indices, pin=self._pin) if len(readings) == len(indices) else None, tried

    def image_keys(self, indices: Tensor) -> list[str]:
        return [self._source.key_of(index) for index in indices.tolist()]

    def close(self) -> None:
        """Stop all threads; batches under way are given up."""
        self._assemblers.shutdown(wait=False, cancel_futures=True)
        if self._workers is not None:
            self._workers.shutdown(cancel_futures=True)
        self._assemblers.shutdown()


def read_images(source: ImageSource, indices: Tensor, *, num_workers: int, max_side: int) -> ImageBatch:
    """Exactly these images, for probes and evaluations: an unreadable one stops the work instead of being replaced."""
    batch = _cut_out(source, indices, max_side=max_side, pin=False)
    if batch is not None:
        return batch

    def read(index: int) -> _Reading:
        try:
            return _read(source, index, max_side=max_side)
        except UnreadableImage as error:
            raise DataError(f"{source.key_of(index)} in {source.name} cannot be read: {error}; repair or remove it") from None

    with ThreadPoolExecutor(num_workers) if num_workers > 0 else nullcontext() as pool:
        return _padded(_in_order(read, indices, pool), indices, pin=False)
