"""Learning rate, weight decay and a method's own values at every step, each a pure function of the step.

A cosine does not reach its end value; a linear warm-up includes both ends (the authors' convention).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from massl.methods.base import Ramp, StepHyper
from massl.training.optimizers import OptimizerSettings


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

    @property
    def num_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

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
        )

    def _learning_rate(self, step: int) -> float:
        peak = self.optimizer.peak_learning_rate(self.batch_size)
        num_warmup = round(self.optimizer.warmup_epochs * self.steps_per_epoch)
        if step < num_warmup:
            return warm_up(step, start=0.0, end=peak, num_steps=num_warmup)
        return cosine(
            step - num_warmup, start=peak, end=self.optimizer.min_learning_rate, num_steps=self.num_steps - num_warmup
        )

    def _on_ramp(self, ramp: Ramp, step: int) -> float:
        if ramp.epochs is None:
            return cosine(step, start=ramp.start, end=ramp.end, num_steps=self.num_steps)
        num_warmup = round(ramp.epochs * self.steps_per_epoch)
        return warm_up(step, start=ramp.start, end=ramp.end, num_steps=num_warmup) if step < num_warmup else ramp.end
