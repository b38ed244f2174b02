"""Learning rate, weight decay and a method's own values at every step, each a pure function of the step.

A cosine does not reach its end value; a linear warm-up includes both ends (the authors' convention).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from massl.methods.base import Method, Ramp, StepHyper
from massl.training.init_settings import InitSettings
from massl.training.layer_decay import layer_scales
from massl.training.optimizers import OptimizerSettings

_NO_INIT = InitSettings()
_HEAD_WARM_UP = 0.1  # of the steps in which only the head is trained
_LEAST_WARM_UP = 0.05  # of the steps after them: AdamW's averages of the backbone are still empty then


def cosine(step: int, *, start: float, end: float, num_steps: int) -> float:
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * step / num_steps))


def warm_up(step: int, *, start: float, end: float, num_steps: int) -> float:
    """Linear from `start` at step 0 to `end` at step num_steps - 1."""
    return start + (end - start) * step / max(1, num_steps - 1)


@dataclass(frozen=True, kw_only=True)
class Schedules:
    optimizer: OptimizerSettings
    ramps: Mapping[str, Ramp]  # the method's own values
    batch_size: int
    epochs: int
    steps_per_epoch: int
    init: InitSettings = _NO_INIT  # resolved, where the run starts from existing weights

    @property
    def num_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def num_head_steps(self) -> int:
        """The first steps, in which the backbone is frozen."""
        head_epochs = self.init.head_epochs if self.init.weights is not None else None
        return min(round((head_epochs or 0.0) * self.steps_per_epoch), self.num_steps)

    @property
    def peak_learning_rate(self) -> float:
        """While the backbone is trained; that of a new head before is the optimizer's own."""
        factor = self.init.learning_rate_factor if self.init.weights is not None else None
        return self.optimizer.peak_learning_rate(self.batch_size) * (factor or 1.0)

    def rate_scales(self, method: Method) -> dict[str, float]:
        """Factors on the learning rate, by parameter name; none: the same rate for all."""
        decay = self.init.layer_decay if self.init.weights is not None else None
        return layer_scales(method, decay) if decay is not None and decay < 1.0 else {}

    def at(self, step: int) -> StepHyper:
        optimizer = self.optimizer
        return StepHyper(
            step=step,
            epoch=step // self.steps_per_epoch,
            learning_rate=self._learning_rate(step),
            weight_decay=cosine(
                step, start=optimizer.weight_decay, end=optimizer.weight_decay_end, num_steps=self.num_steps
            ),
            own={name: self._on_ramp(ramp, step) for name, ramp in self.ramps.items()},
            trains_backbone=step >= self.num_head_steps,
        )

    def _learning_rate(self, step: int) -> float:
        num_head_steps, num_warmup = self.num_head_steps, round(self.optimizer.warmup_epochs * self.steps_per_epoch)
        if step < num_head_steps:  # a new head on fixed features needs no caution: soon the full rate
            full, num_first = self.optimizer.peak_learning_rate(self.batch_size), round(_HEAD_WARM_UP * num_head_steps)
            return full * min(1.0, (step + 1) / (num_first + 1))
        step, num_steps, peak = step - num_head_steps, self.num_steps - num_head_steps, self.peak_learning_rate
        end = self.optimizer.min_learning_rate
        if self.init.weights is not None:
            num_warmup, end = max(num_warmup, round(_LEAST_WARM_UP * num_steps)), min(end, peak)
        if step < num_warmup:
            return warm_up(step, start=0.0, end=peak, num_steps=num_warmup)
        return cosine(step - num_warmup, start=peak, end=end, num_steps=num_steps - num_warmup)

    def _on_ramp(self, ramp: Ramp, step: int) -> float:
        if ramp.epochs is None:
            return cosine(step, start=ramp.start, end=ramp.end, num_steps=self.num_steps)
        # a head that is taken has been through its warm-up: from the start value its loss would jump
        if self.init.weights is not None and self.init.part == "all":
            return ramp.end
        num_warmup = round(ramp.epochs * self.steps_per_epoch)
        return warm_up(step, start=ramp.start, end=ramp.end, num_steps=num_warmup) if step < num_warmup else ramp.end
