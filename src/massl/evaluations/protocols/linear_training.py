"""Training a sweep of linear heads, one per learning rate, and resuming a stopped sweep."""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch
from pydantic import Field, field_validator
from safetensors import SafetensorError
from torch import Tensor

from massl import distributed, keyed_random
from massl.config import Settings
from massl.data.evaluation.views import RandomCropView
from massl.data.sources.base import ImageSource
from massl.evaluations.base import LabelledFeatures
from massl.evaluations.features import Extractor
from massl.evaluations.measurement import EvaluationError
from massl.ops.scoring.linear_heads import LinearHeads, count_correct, matrix_products, new_heads, sgd_step_
from massl.weights.tensor_files import read_tensors, write_tensors

PUBLISHED = "best over rates and epochs (as published)"
HONEST = "rate chosen on held-out images"
_LAST_EPOCH = "last epoch, best over rates"
_HONEST_LAST_EPOCH = "last epoch, rate chosen on held-out images"

_RATE_UNIT = 256  # batch size of the base rates
_INITIAL_DEVIATION = 0.01
_SECONDS_BETWEEN_SAVES = 60.0
_MAX_DEVICE_BYTES = 4 << 30  # more features than this stay in main memory and go to the device in batches


class SweepSettings(Settings):
    """How the heads are trained."""

    epochs: int = Field(100, gt=0, description="passes over the training images")
    batch_size: int = Field(1024, gt=0, description="images per step, over all processes")
    base_rates: tuple[float, ...] = Field(
        tuple(float(f"{digit}e{exponent}") for exponent in (-4, -3, -2, -1, 0) for digit in range(1, 10)),
        min_length=1,
        description="learning rates for batches of 256, one head for each; they grow in proportion to the batch",
    )
    seed: int = Field(0, ge=0, le=keyed_random.MAX_SEED, description="of first heads, order, crops, held-out images")

    @field_validator("base_rates")
    @classmethod
    def _are_positive(cls, base_rates: tuple[float, ...]) -> tuple[float, ...]:
        if min(base_rates) <= 0:
            raise ValueError("learning rates must be positive")
        return base_rates


class TrainingRows(Protocol):
    """Features of the training images, possibly of other crops in each epoch."""

    @property
    def name(self) -> str: ...

    @property
    def labels(self) -> Tensor: ...  # [N] on the CPU

    def batches(self, epoch: int, batches: list[Tensor]) -> Iterator[Tensor]:
        """Features [B, D] on the device, for each batch of image indices."""
        ...


@dataclass(frozen=True, kw_only=True)
class FreshCrops:
    """A new random crop of every image in every epoch. Processes share each batch, and each receives all features."""

    extractor: Extractor
    source: ImageSource
    labels: Tensor  # [N]
    feature: str
    seed: int

    @property
    def name(self) -> str:
        return self.source.name

    def batches(self, epoch: int, batches: list[Tensor]) -> Iterator[Tensor]:
        view = RandomCropView(size=self.extractor.model.image_size, seed=self.seed, epoch=epoch)
        shares = [torch.split(self._share(batch), self.extractor.settings.batch_size) for batch in batches]
        stream = self.extractor.views(self.source, [part for share in shares for part in share], view=view)
        for batch, share in zip(batches, shares, strict=True):
            with self.extractor.failing_together():
                parts = [self.extractor.read(part.groups, self.feature) for part in islice(stream, len(share))]
                rows = torch.cat(parts)
            yield distributed.gather_rows(rows)[: len(batch)]
        assert next(stream, None) is None  # asking beyond the last batch also stops the workers

    @staticmethod
    def _share(batch: Tensor) -> Tensor:
        size = -(-len(batch) // distributed.world_size())
        # equal shares: the last may repeat images
        return batch[(distributed.rank() * size + torch.arange(size)) % len(batch)]


@dataclass(frozen=True, kw_only=True)
class KeptCrops:
    """Features of one or several crops of every image, extracted once; epochs take them in turn."""

    crops: list[Tensor]  # each [N, D]
    labels: Tensor  # [N]
    name: str
    device: torch.device

    def batches(self, epoch: int, batches: list[Tensor]) -> Iterator[Tensor]:
        rows = self.crops[epoch % len(self.crops)]
        for batch in batches:
            yield rows[batch.to(rows.device)].to(self.device)


def kept_crops(crops: list[LabelledFeatures], *, device: torch.device) -> KeptCrops:
    """The crops, on the device if small enough."""
    num_bytes = sum(crop.rows.nbytes for crop in crops)
    rows = [crop.rows.to(device) if num_bytes <= _MAX_DEVICE_BYTES else crop.rows for crop in crops]
    return KeptCrops(crops=rows, labels=crops[0].labels, name=crops[0].name, device=device)


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Images for choosing rate and epoch, in the evaluation view.

    If they are training images, each rate gets a second head, which learns without them: the rate and the epoch at
    which it is best on the held-out images choose the first head that is reported.
    """

    features: LabelledFeatures
    excluded: Tensor | None  # [N] bool: training images that are held out; None: none
    key: str  # digest of all that decides the features


@dataclass(frozen=True, kw_only=True)
class ChosenHead:
    rate_index: int
    epoch: int  # from 0
    weights: Tensor  # [C, D] on the CPU
    bias: Tensor  # [C]


@dataclass(frozen=True, kw_only=True)
class TrainedHeads:
    """Accuracy curves of a sweep, and its chosen heads."""

    base_rates: tuple[float, ...]
    test_top1: Tensor  # [epochs, rates] float64, percent
    held_out_top1: Tensor | None  # [epochs, rates]
    chosen: dict[str, ChosenHead]  # by PUBLISHED and, if images were held out, HONEST
    file: Path  # where it stays until its protocol is done

    def top1(self) -> dict[str, float]:
        """Test accuracy by each way of choosing a head; the first two choose on the test images."""
        values = {PUBLISHED: float(self.test_top1.max()), _LAST_EPOCH: float(self.test_top1[-1].max())}
        if self.held_out_top1 is not None:
            honest = self.chosen[HONEST]
            values[HONEST] = float(self.test_top1[honest.epoch, honest.rate_index])
            values[_HONEST_LAST_EPOCH] = float(self.test_top1[-1, int(self.held_out_top1[-1].argmax())])
        return values


Progress = Callable[[int, int], None]  # (images done, images in all epochs)


class Sweep:
    """A sweep in progress. `run` trains it and saves it to a file, from which it continues with identical results."""

    def __init__(
        self,
        training: TrainingRows,
        *,
        test: LabelledFeatures,
        held_out: HeldOut | None,
        num_classes: int,
        settings: SweepSettings,
        device: torch.device,
        allow_tf32: bool,
        file: Path,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._training, self._settings, self._file, self._say = training, settings, file, say
        self._device, self._allow_tf32 = device, allow_tf32
        self._test = (test.rows.to(device), test.labels.to(device))
        self._held_out, self._kept = None, None
        if held_out is not None:
            self._held_out = (held_out.features.rows.to(device), held_out.features.labels.to(device))
            self._kept = None if held_out.excluded is None else ~held_out.excluded.to(device)  # [N]
        self._labels = training.labels.to(device)
        self._shape = (num_classes, test.rows.shape[1])
        # correctly classified images, [epochs so far, rates] on the CPU
        self._test_correct = torch.zeros(0, len(settings.base_rates), dtype=torch.int64)
        self._held_out_correct = torch.zeros_like(self._test_correct)
        self._chosen: dict[str, ChosenHead] = {}
        self._heads: LinearHeads | None = None  # none in a finished sweep

    def run(self, progress: Progress) -> TrainedHeads:
        """Train from the state of the file, or from the beginning."""
        self._restore()
        distributed.barrier()  # no process writes the file before all have read it
        saved_at = time.monotonic()
        for epoch in range(len(self._test_correct), self._settings.epochs):
            heads = self._heads = self._heads or self._initial_heads()
            self._train_epoch(heads, epoch, progress)
            with matrix_products(allow_tf32=self._allow_tf32):
                self._measure(heads, epoch)
            if epoch + 1 == self._settings.epochs:
                self._heads = None
                self._save()
            elif time.monotonic() - saved_at >= _SECONDS_BETWEEN_SAVES:
                self._save()
                saved_at = time.monotonic()
        held_out_top1 = None
        if self._held_out is not None:
            held_out_top1 = 100.0 * self._held_out_correct.double() / len(self._held_out[1])
        return TrainedHeads(
            base_rates=self._settings.base_rates,
            test_top1=100.0 * self._test_correct.double() / len(self._test[1]),
            held_out_top1=held_out_top1,
            chosen=self._chosen,
            file=self._file,
        )

    def _initial_heads(self) -> LinearHeads:
        """Normal weights with deviation 0.01; the second head of a rate starts as the first."""
        classes, columns = (torch.arange(size, device=self._device) for size in self._shape)
        drawn = [
            keyed_random.normal(self._settings.seed, "linear head", number, classes[:, None], columns)
            for number in range(len(self._settings.base_rates))
        ]
        weights = torch.stack(drawn * (1 if self._kept is None else 2))
        return new_heads(weights.mul_(_INITIAL_DEVIATION))

    def _train_epoch(self, heads: LinearHeads, epoch: int, progress: Progress) -> None:
        settings, num_images = self._settings, len(self._labels)
        cosine = (1 + math.cos(math.pi * epoch / settings.epochs)) / 2
        num_copies = len(heads.weights) // len(settings.base_rates)
        rates = torch.tensor(settings.base_rates * num_copies, device=self._device) * (
            cosine * settings.batch_size / _RATE_UNIT
        )
        order = keyed_random.permutation(num_images, settings.seed, "linear order", epoch)
        here = order.to(self._device)
        labels = torch.split(self._labels[here], settings.batch_size)
        kept = None if self._kept is None else torch.split(self._kept[here], settings.batch_size)
        rows = self._training.batches(epoch, list(torch.split(order, settings.batch_size)))
        num_done = epoch * num_images
        for number, (batch_rows, batch_labels) in enumerate(zip(rows, labels, strict=True)):
            kept_by_heads = None if kept is None else self._kept_by_heads(kept[number])
            with matrix_products(allow_tf32=self._allow_tf32):
                sgd_step_(heads, batch_rows, batch_labels, rates=rates, kept=kept_by_heads)
            num_done += len(batch_labels)
            progress(num_done, settings.epochs * num_images)

    def _kept_by_heads(self, kept: Tensor) -> Tensor:  # [B] -> [B, 2 * rates]
        """The first head of each rate learns from all images, the second from those not held out."""
        per_rate = kept[:, None].expand(-1, len(self._settings.base_rates))
        return torch.cat([torch.ones_like(per_rate), per_rate], dim=1)

    def _measure(self, heads: LinearHeads, epoch: int) -> None:
        """Add the epoch to the curves and copy new best heads; ties keep the earliest epoch, then the lowest rate."""
        if not bool(heads.biases.isfinite().all(dim=1).any()):
            raise EvaluationError(
                f"all linear heads on {self._training.name} have overflowed in epoch {epoch + 1}: the features are not "
                "finite, or all base_rates are too large"
            )
        num_rates = len(self._settings.base_rates)
        correct = count_correct(heads.weights[:num_rates], heads.biases[:num_rates], *self._test).cpu()
        self._choose(PUBLISHED, heads, correct, self._test_correct)
        self._test_correct = torch.cat([self._test_correct, correct[None]])
        if self._held_out is not None:
            correct = count_correct(heads.weights[-num_rates:], heads.biases[-num_rates:], *self._held_out).cpu()
            self._choose(HONEST, heads, correct, self._held_out_correct)
            self._held_out_correct = torch.cat([self._held_out_correct, correct[None]])

    # [rates], [epochs, rates]
    def _choose(self, selection: str, heads: LinearHeads, correct: Tensor, before: Tensor) -> None:
        best = int(correct.argmax())
        if len(before) == 0 or int(correct[best]) > int(before.max()):
            weights, bias = heads.weights[best].cpu().clone(), heads.biases[best].cpu().clone()
            self._chosen[selection] = ChosenHead(rate_index=best, epoch=len(before), weights=weights, bias=bias)

    # ---- file --------------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        if not distributed.is_main():
            return
        tensors = {"test_correct": self._test_correct, "held_out_correct": self._held_out_correct}
        for selection, head in self._chosen.items():
            tensors |= {f"{selection}.weights": head.weights, f"{selection}.bias": head.bias}
        tensors |= {} if self._heads is None else vars(self._heads)
        chosen = {selection: [head.rate_index, head.epoch] for selection, head in self._chosen.items()}
        write_tensors(self._file, tensors, {"chosen": json.dumps(chosen)})

    def _restore(self) -> None:
        state = self._read() if self._file.is_file() else None
        # missing or damaged for one process: all start from the beginning
        if distributed.largest_over_ranks(int(state is None), self._device) or state is None:
            return
        tensors, chosen = state
        self._test_correct, self._held_out_correct = tensors.pop("test_correct"), tensors.pop("held_out_correct")
        for selection, (rate_index, epoch) in chosen.items():
            weights, bias = tensors.pop(f"{selection}.weights"), tensors.pop(f"{selection}.bias")
            self._chosen[selection] = ChosenHead(rate_index=rate_index, epoch=epoch, weights=weights, bias=bias)
        if tensors:
            self._heads = LinearHeads(**{name: tensor.to(self._device) for name, tensor in tensors.items()})

    def _read(self) -> tuple[dict[str, Tensor], dict[str, tuple[int, int]]] | None:
        try:
            tensors, metadata = read_tensors(self._file)
            chosen = json.loads(metadata["chosen"])
            heads = [f"{selection}.{part}" for selection in chosen for part in ("weights", "bias")]
            _ = [tensors[name] for name in ("test_correct", "held_out_correct", *heads)]  # all are there
            return tensors, chosen
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            self._say(f"{self._file} is damaged ({error}); its heads are trained again")
            return None
