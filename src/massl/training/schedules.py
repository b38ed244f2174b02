"""Learning rate, weight decay, momentum and temperature of every step, each a pure function of the step.

Cosines approach their end value and do not reach it; a linear warm-up includes both its ends (the authors' convention).
"""

import math
from dataclasses import dataclass

from massl.methods.base import StepHyper, TeacherSettings
from massl.training.optimizer import OptimizerSettings


def cosine(step: int, *, start: float, end: float, num_steps: int) -> float:
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * step / num_steps))


def warm_up(step: int, *, start: float, end: float, num_steps: int) -> float:
    """Linear from `start` at step 0 to `end` at step num_steps - 1."""
    return start + (end - start) * step / max(1, num_steps - 1)


@dataclass(frozen=True, kw_only=True)
class Schedules:
    optimizer: OptimizerSettings
    teacher: TeacherSettings
    batch_size: int
    epochs: int
    steps_per_epoch: int

    @property
    def num_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def at(self, step: int) -> StepHyper:
        optimizer, teacher = self.optimizer, self.teacher
        return StepHyper(
            step=step,
            epoch=step // self.steps_per_epoch,
            learning_rate=self._learning_rate(step),
            weight_decay=cosine(step, start=optimizer.weight_decay, end=optimizer.weight_decay_end, num_steps=self.num_steps),
            momentum=cosine(step, start=teacher.momentum, end=1.0, num_steps=self.num_steps),
            teacher_temperature=self._teacher_temperature(step),
        )

    def _learning_rate(self, step: int) -> float:
        peak = self.optimizer.peak_learning_rate(self.batch_size)
        num_warmup = round(self.optimizer.warmup_epochs * self.steps_per_epoch)
        if step < num_warmup:
            return warm_up(step, start=0.0, end=peak, num_steps=num_warmup)
        return cosine(step - num_warmup, start=peak, end=self.optimizer.min_learning_rate, num_steps=self.num_steps - num_warmup)

    def _teacher_temperature(self, step: int) -> float:
        teacher = self.teacher
        num_warmup = round(teacher.temperature_warmup_epochs * self.steps_per_epoch)
        if step < num_warmup:
            return warm_up(step, start=teacher.temperature_start, end=teacher.temperature, num_steps=num_warmup)
        return teacher.temperature
