"""Reads single images from the cache or the source, replaces unreadable ones, and keeps count of those."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from massl import keyed_random
from massl.data.keys import stored_key
from massl.data.loading import read_watch
from massl.data.loading.cache import ImageCache
from massl.data.loading.decode import UnreadableImage, as_tensor, decode
from massl.data.loading.gpu_decode import JpegDecoder, decode_or_none, suits_gpu
from massl.data.sources.base import DataError, ImageSource

_UNLABELLED = -1
MAX_UNREADABLE_SHARE = 0.05
_MIN_TRIED_TO_JUDGE = 100
_MAX_TRIES = 16  # the image and its replacements: at the largest allowed share all of them fail once in 10**20 times

Tried = dict[int, str | None]  # index -> why the image cannot be read, or None if it was read


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedImage:
    """One image of a batch: the requested one or its replacement."""

    pixels: Tensor | bytes  # [3, H, W] uint8, or a JPEG file left to the batch decoder
    label: int
    index: int  # of the image that was read


class ReadResult(NamedTuple):
    image: LoadedImage | None  # None: neither the image nor a replacement can be read
    tried: Tried


def label_number(label: int | None) -> int:
    """The label as batches store it."""
    return _UNLABELLED if label is None else label


class ImageReader:
    """Reads images by index; thread-safe."""

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
        # images that the batch decoder refused: each fails its batch once, not in every epoch
        self._refused: set[int] = set()

    def cached(self, index: int) -> LoadedImage | None:
        pixels = None if self._cache is None else self._cache.get(self._source.name, index)
        if pixels is None:
            return None
        return LoadedImage(pixels=pixels, label=label_number(self._source.label_of(index)), index=index)

    def keep(self, index: int, pixels: Tensor) -> Tensor:
        """Add decoded pixels to the cache, if there is one."""
        return pixels if self._cache is None else self._cache.keep(self._source.name, index, pixels)

    def read(self, index: int) -> LoadedImage:
        """The image, decoded unless it is left to the batch decoder; raises UnreadableImage."""
        cached = self.cached(index)
        if cached is not None:
            return cached
        read_watch.begin(self._source, index)
        try:
            image = self._source.read(index)
        except OSError as error:  # the file is gone, access is denied, the disk is damaged
            raise UnreadableImage(error.strerror or str(error)) from None
        finally:
            read_watch.end()
        label, data = label_number(image.label), image.data
        may_wait = self._batch_decoder is not None and index not in self._refused
        if may_wait and isinstance(data, bytes) and suits_gpu(data, max_side=self._max_side):
            return LoadedImage(pixels=data, label=label, index=index)
        return LoadedImage(pixels=self.keep(index, decode(image, max_side=self._max_side)), label=label, index=index)

    def read_or_replace(self, index: int) -> ReadResult:
        """The image, or a replacement drawn by the image's own key: the same in every run and worker."""
        tried: Tried = {}
        candidate = index
        for attempt in range(_MAX_TRIES):
            try:
                image = self.read(candidate)
            except UnreadableImage as error:
                tried[candidate] = str(error)
                drawn = keyed_random.integers(self._seed, "replacement", index, attempt, upper=len(self._source))
                candidate = int(drawn)
            else:
                tried[candidate] = None
                return ReadResult(image, tried)
        return ReadResult(None, tried)

    def decode_files(self, indices: list[int], results: list[ReadResult]) -> list[ReadResult]:
        """Decode by the batch decoder what `read` left to it. Files it refuses go to the CPU, which may replace them.

        An image's pixels depend on its file alone: if a batch fails, each file is tried alone by the same decoder.
        """
        decoded = list(results)
        while waiting := [
            (position, image, as_tensor(image.pixels))
            for position, (image, _) in enumerate(decoded)
            if image is not None and isinstance(image.pixels, bytes)
        ]:
            assert self._batch_decoder is not None
            all_pixels = decode_or_none(self._batch_decoder, [file for _, _, file in waiting])
            for (position, image, _), pixels in zip(waiting, all_pixels, strict=True):
                if pixels is None:
                    self._refused.add(image.index)
                    # arrives at the same replacement, if this is one
                    decoded[position] = self.read_or_replace(indices[position])
                    continue
                if self._cache is not None and not self._cache.is_full:
                    self.keep(image.index, pixels.cpu())
                decoded[position] = ReadResult(replace(image, pixels=pixels), decoded[position].tried)
        return decoded


class ReadabilityRecord:
    """Remembers which images were tried: each unreadable one is reported once, too many of them stop the run."""

    def __init__(self, source: ImageSource, on_skip: Callable[[str], None]) -> None:
        self._source = source
        self._on_skip = on_skip
        self._tried = bytearray(len(source))
        self.unreadable: dict[int, str] = {}  # index -> reason
        self._num_tried = 0
        self._examples: list[str] = []

    def add(self, tried: Tried) -> None:
        messages = []
        for index, reason in tried.items():
            self._num_tried += not self._tried[index]
            self._tried[index] = True
            if reason is not None and index not in self.unreadable:
                self.unreadable[index] = reason
                messages.append(f"{stored_key(self._source.key_of(index))}: {reason}")
        self._examples += messages[: 3 - len(self._examples)]
        can_judge = self._num_tried >= min(_MIN_TRIED_TO_JUDGE, len(self._source))
        if can_judge and len(self.unreadable) > MAX_UNREADABLE_SHARE * self._num_tried:
            raise self.error()  # before reporting each: there may be thousands
        for message in messages:
            self._on_skip(message)

    def error(self) -> DataError:
        return DataError(
            f"{len(self.unreadable)} of {self._num_tried} images tried in {self._source.name} cannot be read, more "
            f"than {MAX_UNREADABLE_SHARE:.0%}; repair or remove them. For example {'; '.join(self._examples)}"
        )
