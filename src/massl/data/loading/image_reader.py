"""Reading single images: out of the cache or the source, replaced where they cannot be read, and the record of those."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from massl import keyed_random
from massl.data.loading.cache import ImageCache
from massl.data.loading.decode import UnreadableImage, as_tensor, decode
from massl.data.loading.gpu_decode import JpegDecoder, decode_what_can_be, suits_gpu
from massl.data.sources.base import DataError, ImageSource

UNLABELLED = -1
MAX_UNREADABLE_SHARE = 0.05
MIN_TRIED_TO_JUDGE = 100
# of an image and its stand-ins: with no more unreadable ones than allowed, all fail once in 10**20 times
MAX_TRIES = 16

Tried = dict[int, str | None]  # image -> why it cannot be read, or None when it was


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One image of a batch: its own, or a stand-in's."""

    pixels: Tensor | bytes  # [3, H, W] uint8, or a JPEG file that the batch decoder takes
    label: int
    index: int  # of the image that was read


def label_number(label: int | None) -> int:
    """The label as it stands in a batch."""
    return UNLABELLED if label is None else label


class ReadResult(NamedTuple):
    reading: Reading | None  # None: neither the image nor a stand-in can be read
    tried: Tried


class ImageReader:
    """Reads images by number. All methods may be called from several threads at once."""

    def __init__(
        self,
        source: ImageSource,
        *,
        seed: int,
        max_side: int,
        cache: ImageCache | None = None,
        batch_decoder: JpegDecoder | None = None,
    ) -> None:
        self._source = source
        self._seed = seed
        self._max_side = max_side
        self._cache = cache
        self._batch_decoder = batch_decoder
        # images that the batch decoder has refused alone: each fails its batch once, not in every epoch
        self._refused: set[int] = set()

    def read(self, index: int) -> Reading:
        """The image, decoded unless it is left to the batch decoder; UnreadableImage says why not."""
        cached = None if self._cache is None else self._cache.get(self._source.name, index)
        if cached is not None:
            return Reading(pixels=cached, label=label_number(self._source.label_of(index)), index=index)
        try:
            image = self._source.read(index)
        except OSError as error:  # the file has vanished, access is denied, the disk is damaged
            raise UnreadableImage(error.strerror or str(error)) from None
        label, data = label_number(image.label), image.data
        may_wait = self._batch_decoder is not None and index not in self._refused
        if may_wait and isinstance(data, bytes) and suits_gpu(data, max_side=self._max_side):
            return Reading(pixels=data, label=label, index=index)
        pixels = decode(image, max_side=self._max_side)
        if self._cache is not None:
            pixels = self._cache.keep(self._source.name, index, pixels)
        return Reading(pixels=pixels, label=label, index=index)

    def read_or_replace(self, index: int) -> ReadResult:
        """The image, or a stand-in drawn by the image's own key, so that every run and every worker draws the same."""
        tried: Tried = {}
        candidate = index
        for attempt in range(MAX_TRIES):
            try:
                reading = self.read(candidate)
            except UnreadableImage as error:
                tried[candidate] = str(error)
                candidate = int(
                    keyed_random.integers(self._seed, "replacement", index, attempt, upper=len(self._source))
                )
            else:
                tried[candidate] = None
                return ReadResult(reading, tried)
        return ReadResult(None, tried)

    def decode_files(self, indices: list[int], results: list[ReadResult]) -> list[ReadResult]:
        """The results with all pixels decoded. What the batch decoder refuses goes through the CPU's, which names and
        replaces it.

        An image's pixels depend on nothing but its file: of a batch that fails, each image is tried alone by the same
        decoder.
        """
        decoded = list(results)
        while files := [
            position for position, (reading, _) in enumerate(decoded) if reading and isinstance(reading.pixels, bytes)
        ]:
            self._decode_some(files, indices, decoded)
        return decoded

    def _decode_some(self, positions: list[int], indices: list[int], results: list[ReadResult]) -> None:
        assert self._batch_decoder is not None
        readings = [reading for reading, _ in (results[position] for position in positions) if reading is not None]
        files = [as_tensor(reading.pixels) for reading in readings if isinstance(reading.pixels, bytes)]
        for position, reading, pixels in zip(
            positions, readings, decode_what_can_be(self._batch_decoder, files), strict=True
        ):
            if pixels is None:
                self._refused.add(reading.index)
                # the same way to the same stand-in, if it is one
                results[position] = self.read_or_replace(indices[position])
                continue
            if self._cache is not None and not self._cache.is_full:
                self._cache.keep(self._source.name, reading.index, pixels.cpu())
            results[position] = ReadResult(
                Reading(pixels=pixels, label=reading.label, index=reading.index), results[position].tried
            )


class ReadabilityRecord:
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
