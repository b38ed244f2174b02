"""One update of a method, from views to new weights."""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from massl import distributed
from massl.data.views import ViewBatch
from massl.methods.base import Method, StepHyper, StepOutput, combine
from massl.training.optimizers import DecayedAdamW, DecayedSGD


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    method: Method
    parallel: nn.Module  # the method, or its data-parallel wrapper
    optimizer: DecayedAdamW | DecayedSGD
    bf16: bool
    device: torch.device

    def __call__(self, parts: Iterable[ViewBatch], hyper: StepHyper, *, num_parts: int) -> StepOutput:
        """Forward and backward of each equal part of the batch, one optimizer step, then update teacher and memory.

        `parts` may be a generator, so that only one part's views are in memory at a time; hence `num_parts`.
        """
        outputs = [
            self.forward_backward(views, hyper, num_parts=num_parts, is_last=part == num_parts - 1)
            for part, views in enumerate(parts)
        ]
        return self.update(outputs, hyper)

    def forward_backward(self, views: ViewBatch, hyper: StepHyper, *, num_parts: int, is_last: bool) -> StepOutput:
        """Add the gradients of one part of the batch."""
        with contextlib.nullcontext() if is_last else distributed.without_sync(self.parallel):
            output = self.forward(views, hyper)
            (output.loss / num_parts).backward()  # type: ignore[no-untyped-call]
        return output

    def update(self, outputs: Sequence[StepOutput], hyper: StepHyper) -> StepOutput:
        """Step the optimizer, clear the gradients, then update teacher and memory."""
        for parameter in self.method.frozen(hyper.epoch):
            parameter.grad = None  # not zero: without a gradient AdamW skips decay and running averages too
        self.optimizer.set_hyper(hyper)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        combined = combine(outputs)
        self.method.after_step(combined, hyper)
        return combined

    def forward(self, views: ViewBatch, hyper: StepHyper) -> StepOutput:
        with self.autocast():
            output: StepOutput = self.parallel(views, hyper)
        return output

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)
