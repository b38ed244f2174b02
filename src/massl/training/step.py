"""One update of a method, from views to new weights."""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from massl import distributed
from massl.data.views import ViewBatch
from massl.methods.base import Method, StepHyper, StepOutput, combine
from massl.training.optimizers import DecayedAdamW, DecayedSGD
from massl.training.step_guard import StepGuard


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    method: Method
    parallel: nn.Module  # the method, or its data-parallel wrapper
    optimizer: DecayedAdamW | DecayedSGD
    bf16: bool
    device: torch.device

    @cached_property
    def guard(self) -> StepGuard:
        return StepGuard(self.method, self.optimizer, on_device=self.device.type != "cpu")

    def __call__(self, parts: Iterable[ViewBatch], hyper: StepHyper, *, num_parts: int) -> StepOutput:
        """Forward and backward of each equal part of the batch, one optimizer step, then update teacher and memory.

        `parts` may be a generator, so that only one part's views are in memory at a time; hence `num_parts`.
        """
        self.guard.begin()
        outputs = [
            self.forward_backward(views, hyper, num_parts=num_parts, is_last=part == num_parts - 1)
            for part, views in enumerate(parts)
        ]
        return self.update(outputs, hyper)

    def forward_backward(self, views: ViewBatch, hyper: StepHyper, *, num_parts: int, is_last: bool) -> StepOutput:
        """Add the gradients of one part of the batch."""
        with contextlib.nullcontext() if is_last else distributed.without_sync(self.parallel):
            output = self.forward(views, hyper)
            (output.loss / num_parts).backward(one_if_finite(output))  # type: ignore[no-untyped-call]
        return output

    def update(self, outputs: Sequence[StepOutput], hyper: StepHyper) -> StepOutput:
        """Step the optimizer, clear the gradients, then update teacher and memory.

        Nothing is updated if a gradient is not finite; the output says so. Ranks agree: they have the same gradients.
        """
        for parameter in self.method.frozen(hyper):
            parameter.grad = None  # not zero: without a gradient AdamW skips decay and running averages too
        device_decides = self.guard.on_device
        is_finite = self.optimizer.gradients_are_finite(decide=device_decides)
        combined = replace(combine(outputs), is_finite=is_finite)
        if not device_decides and not is_finite:
            self.optimizer.zero_grad(set_to_none=True)
            self.guard.restore()
            return combined
        if device_decides:
            hyper = self.guard.protect(hyper, is_finite)
        self.optimizer.set_hyper(hyper)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.method.after_step(combined if device_decides else replace(combined, is_finite=None), hyper)
        if device_decides:
            self.guard.restore(is_finite)
        return combined

    def forward(self, views: ViewBatch, hyper: StepHyper) -> StepOutput:
        self.method.freeze_backbones(not hyper.trains_backbone)
        with self.autocast():
            output: StepOutput = self.parallel(views, hyper)
        return output

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)


@torch.no_grad()
def one_if_finite(output: StepOutput) -> Tensor:  # -> []
    """The gradient that a backward pass starts with: NaN if the loss, or what `after_step` would keep, is not finite.

    So every fault shows in the gradients, which ranks share, and no rank updates alone.
    """
    values = [output.loss.float(), *(value.float().sum() for value in output.carry.values())]
    return torch.where(torch.stack(values).isfinite().all(), 1.0, torch.nan).to(output.loss.dtype)
