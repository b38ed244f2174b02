"""Feature extraction with a cache. The cache key covers weights, data, view, feature and precision.

The cache is never stale: all that decides a feature is part of its key, down to the modification time of each image
file. Long extractions are stored in parts, so that a stopped one continues.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from massl import distributed
from massl.config import MasslError, Settings, closest
from massl.data.evaluation.views import MAX_SIDE, PUBLISHED_CROP_RATIO, CentreView, EvaluationView, view_key
from massl.data.loading.gpu_decode import jpeg_decoder
from massl.data.loading.loader import ImageBatch, Loader
from massl.data.sources.base import ImageSource
from massl.data.sources.subset import UnreadableImages
from massl.evaluations.base import LabelledFeatures, labels_of_images, require_finite
from massl.evaluations.feature_cache import (
    DamagedCache,
    read_rows,
    read_unreadable,
    write_rows,
    write_unreadable,
)
from massl.evaluations.measurement import EvaluationError
from massl.evaluations.named_features import FEATURES, PATCHES, read_feature
from massl.ops.image_ops import Filter, normalise
from massl.weights.models import LoadedModel

_FORMAT = 1  # raise when the same key would give other features
_PART_SIZE = 65_536  # images stored together, and lost if an extraction is stopped
_UNREADABLE_FILE = "unreadable.json"  # index -> reason, beside the features of a source
_MESSAGE_BYTES = 1024  # of an error that is sent to all processes


class ExtractionSettings(Settings):
    """How images go through the backbone."""

    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="fp32: as published; bf16: several times as fast on a GPU, cosine > 0.999"
    )
    batch_size: int = Field(256, gt=0, description="images taken through the backbone at once")
    num_workers: int = Field(4, ge=0, description="threads or processes that read and decode images")
    worker_kind: Literal["threads", "processes"] = Field(
        "threads", description="what the workers are; processes: photographs on many cores"
    )
    decoder: Literal["cpu", "gpu"] = Field(
        "cpu", description="what decodes plain JPEGs; gpu: nvJPEG, whose pixels differ by about a grey level"
    )

    @model_validator(mode="after")
    def _gpu_decoder_needs_threads(self) -> "ExtractionSettings":
        if self.worker_kind == "processes" and self.decoder == "gpu":
            raise ValueError("worker_kind processes and decoder gpu do not go together; choose one of them")
        return self


class ViewedBatch(NamedTuple):
    """Images as the network sees them."""

    groups: list[Tensor]  # of [b, 3, H, W], normalised, on the device; one group if all have one size
    indices: Tensor  # [B] in the source


Progress = Callable[[str, int, int], None]  # (what, done, total)
Read = TypeVar("Read")


@dataclass(frozen=True, kw_only=True)
class Extractor:
    """A model on its device, and the cache of its features. Processes share the images; each gets all features."""

    model: LoadedModel
    settings: ExtractionSettings
    device: torch.device
    cache: Path | None  # folder; None: no cache
    feature: str | None = None  # instead of the protocol's
    crop_ratio: float = PUBLISHED_CROP_RATIO  # centre crop / shorter side of the evaluation view
    # read images again that the cache calls unreadable: the disk may have failed only for a moment
    tries_unreadable: bool = False
    progress: Progress = lambda what, done, total: None
    say: Callable[[str], None] = lambda message: None
    # without a cache folder: features of the readable images, until they are asked for
    _set_aside: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _tried: set[str] = field(default_factory=set, repr=False)  # keys of `tries_unreadable`

    def features(self, source: ImageSource, *, view: EvaluationView, feature: str) -> LabelledFeatures:
        """Features of all images of a source, in its order.

        Raises UnreadableImages with all images that cannot be read; the features of the others are kept, so a call
        with `error.without(source)` returns at once.
        """
        wanted = self.chosen_feature(feature)
        key = self.cache_key(source, view, wanted)
        self._raise_if_known(key, source)
        all_rows = torch.empty(0, 0)
        unreadable: dict[int, str] = {}
        for begin in range(0, len(source), _PART_SIZE):
            indices = torch.arange(begin, min(begin + _PART_SIZE, len(source)))
            rows = self._kept(key, begin, num_rows=len(indices))
            if rows is None:
                rows, reasons = self._extract(source, indices, view, wanted)
                require_finite(rows, name=source.name)
                unreadable |= reasons
                if not reasons:
                    self._keep(key, begin, rows)
            if begin == 0:
                # allocated once: concatenating parts would need twice the memory
                all_rows = torch.empty(len(source), rows.shape[1])
            all_rows[begin : begin + len(rows)] = rows
        if unreadable:
            readable = torch.tensor([index not in unreadable for index in range(len(source))])
            error = UnreadableImages(source, unreadable)
            self._keep_readable(self.cache_key(error.without(source), view, wanted), all_rows[readable])
            self._remember(key, unreadable)
            raise error
        return LabelledFeatures(rows=all_rows, labels=labels_of_images(source), name=source.name)

    def centre_view(self, *, filter: Filter = "bicubic") -> CentreView:
        """The evaluation view at the model's image size."""
        return CentreView(size=self.model.image_size, crop_ratio=self.crop_ratio, filter=filter)

    def chosen_feature(self, feature: str) -> str:
        """The feature chosen by the user, or else the protocol's."""
        chosen = self.feature or feature
        if chosen == PATCHES:
            raise EvaluationError(f"{PATCHES} are many vectors per image, for massl embed; name one that is one vector")
        if chosen not in FEATURES:
            known = f"Known: {', '.join(FEATURES)}"
            raise EvaluationError(f"there is no feature {chosen!r}.{closest(chosen, FEATURES)} {known}")
        return chosen

    @contextmanager
    def inference(self) -> Iterator[None]:
        """No gradients, in the precision of the settings."""
        is_bf16 = self.settings.precision == "bf16"
        with torch.inference_mode(), torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=is_bf16):
            yield

    @torch.inference_mode()
    def read(self, groups: list[Tensor], feature: str) -> Tensor:  # groups of normalised [b, 3, H, W] -> [B, D] float32
        """Features of views on the device."""
        backbone, precision = self.model.backbone, self.settings.precision
        return torch.cat([read_feature(backbone, group, feature, precision=precision) for group in groups])

    def views(self, source: ImageSource, chunks: list[Tensor], *, view: EvaluationView) -> Iterator[ViewedBatch]:
        """Batches of images in the order of `chunks`, as the network sees them."""
        for batch in self.images(source, chunks):
            yield ViewedBatch(self.seen(batch, view), batch.indices)

    def seen(self, batch: ImageBatch, view: EvaluationView) -> list[Tensor]:
        """Groups of [b, 3, H, W] as the network sees them."""
        groups = view.apply(batch.images, batch.indices)
        return [normalise(group, self.model.mean, self.model.std) for group in groups]

    def images(self, source: ImageSource, chunks: list[Tensor]) -> Iterator[ImageBatch]:
        """Batches of images as stored, on the device, read ahead; unreadable images raise UnreadableImages."""
        unreadable: dict[int, str] = {}
        for batch in self.images_or_others(source, chunks, unreadable):
            if unreadable:
                raise UnreadableImages(source, unreadable)
            yield batch

    def images_or_others(
        self, source: ImageSource, chunks: list[Tensor], unreadable: dict[int, str]
    ) -> Iterator[ImageBatch]:
        """The same, with another image in the place of an unreadable one, whose index and reason go to `unreadable`."""
        loader = Loader(
            source,
            # reading ahead asks beyond the last chunk
            order_at=lambda number: chunks[number] if number < len(chunks) else chunks[0][:1],
            seed=0,
            num_workers=self.settings.num_workers,
            worker_kind=self.settings.worker_kind,
            max_side=MAX_SIDE,
            device=self.device,
            batch_decoder=jpeg_decoder(self.settings.decoder, self.device),
            on_skip=lambda message: None,
        )
        try:
            for number in range(len(chunks)):
                batch = loader.at(number).to(self.device)
                unreadable |= loader.unreadable
                yield batch
        finally:
            loader.close()

    # -> [len(indices), D], {index of an unreadable image, whose row is to be dropped: reason}
    def _extract(
        self, source: ImageSource, indices: Tensor, view: EvaluationView, feature: str
    ) -> tuple[Tensor, dict[int, str]]:
        share = -(-len(indices) // distributed.world_size())
        # equal shares: the last ranks may repeat the first images
        positions = (distributed.rank() * share + torch.arange(share)) % len(indices)
        chunks = list(torch.split(indices[positions], self.settings.batch_size))
        rows, num_done = [], 0
        unreadable: dict[int, str] = {}
        with self.failing_together():
            for batch in self.images_or_others(source, chunks, unreadable):
                rows.append(self.read(self.seen(batch, view), feature))
                num_done += len(batch.indices)
                num_done_by_all = min(num_done * distributed.world_size(), len(indices))
                self.progress(f"features of {source.name}", int(indices[0]) + num_done_by_all, len(source))
        is_unreadable = torch.tensor([[index in unreadable] for index in indices[positions].tolist()])
        of_all = distributed.gather_rows(is_unreadable.to(self.device, torch.uint8))[: len(indices), 0].bool().cpu()
        found = {index: unreadable.get(index, "unreadable") for index in indices[of_all].tolist()}
        return distributed.gather_rows(torch.cat(rows))[: len(indices)].cpu(), found

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """An error in one process stops all; the others would wait for its share, or take its next message for that."""
        if distributed.world_size() == 1:
            yield
            return
        failure = None
        try:
            yield
        except MasslError as error:
            failure = error
        text = str(failure or "").encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
        lines = distributed.gather_rows(torch.tensor([list(text)], dtype=torch.uint8, device=self.device)).tolist()
        messages = [bytes(line).rstrip(b"\0").decode(errors="replace") for line in lines]
        if any(messages):
            if failure is None or isinstance(failure, UnreadableImages):  # which this process alone would leave out
                raise EvaluationError(next(filter(None, messages)))
            raise failure

    # ---- cache -------------------------------------------------------------------------------------------------------

    def cache_key(self, source: ImageSource, view: EvaluationView, feature: str) -> str:
        """Digest of all that decides the features."""
        parts = {
            "format": _FORMAT,
            "weights": self.model.fingerprint,
            "normalisation": [self.model.mean, self.model.std],
            "data": source.fingerprint(),
            "view": view_key(view),
            "feature": feature,
            "precision": self.settings.precision,
            "decoder": self.settings.decoder,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def _file(self, key: str, begin: int) -> Path:
        assert self.cache is not None
        return self.cache / key / f"{begin:09d}.safetensors"

    def _kept(self, key: str, begin: int, *, num_rows: int) -> Tensor | None:
        if self.cache is None:
            return self._set_aside.pop(f"{key} {begin}", None)
        rows = self._read(self._file(key, begin), lambda path: read_rows(path, num_rows=num_rows))
        # missing or damaged for one process: all compute it
        return None if distributed.largest_over_ranks(int(rows is None), self.device) else rows

    def _read(self, path: Path, read: Callable[[Path], Read]) -> Read | None:
        """What a file of the cache holds; None if it does not exist, or is damaged, which is said."""
        if not path.is_file():
            return None
        try:
            return read(path)
        except DamagedCache as error:
            self.say(f"{path} is damaged ({error}); it is computed again")
            return None

    def _keep(self, key: str, begin: int, rows: Tensor) -> None:
        if self.cache is None:
            return
        with self.failing_together():  # which also waits: no process looks for the file before it exists
            if distributed.is_main():
                write_rows(self._file(key, begin), rows)

    def _keep_readable(self, key: str, rows: Tensor) -> None:
        """Keep the features of a source's readable images, in memory if there is no cache."""
        for begin in range(0, len(rows), _PART_SIZE):
            part = rows[begin : begin + _PART_SIZE]
            if self.cache is None:
                self._set_aside[f"{key} {begin}"] = part
            else:
                self._keep(key, begin, part)

    def _remember(self, key: str, unreadable: dict[int, str]) -> None:
        """Keep which images cannot be read, so that they are not tried again."""
        if self.cache is not None:
            with self.failing_together():
                if distributed.is_main():
                    write_unreadable(self.cache / key / _UNREADABLE_FILE, unreadable)

    def _raise_if_known(self, key: str, source: ImageSource) -> None:
        if self.cache is None or (self.tries_unreadable and key not in self._tried):
            self._tried.add(key)
            return
        reasons = self._read(self.cache / key / _UNREADABLE_FILE, read_unreadable)
        # missing or damaged for one process: all try again
        if not distributed.largest_over_ranks(int(reasons is None), self.device) and reasons is not None:
            raise UnreadableImages(source, reasons)
