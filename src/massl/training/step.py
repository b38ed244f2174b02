"""One update of a method, from views to new weights."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import AdamW

from massl import distributed
from massl.data.views import ViewBatch
from massl.methods.base import Method, StepHyper, StepOutput, combine
from massl.training.optimizer import clip_each_gradient, set_hyper


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    method: Method
    parallel: nn.Module  # the method, or its data-parallel wrapper
    optimizer: AdamW
    clip_norm: float
    bf16: bool
    device: torch.device

    def __call__(self, parts: Iterable[ViewBatch], hyper: StepHyper, *, num_parts: int) -> StepOutput:
        """Forward and backward of each equal part of the batch, one optimiser step, then teacher and memory."""
        set_hyper(self.optimizer, hyper)
        outputs = []
        for part, views in enumerate(parts):
            is_last = part == num_parts - 1
            with contextlib.nullcontext() if is_last else distributed.without_sync(self.parallel):
                output = self.forward(views, hyper)
                (output.loss / num_parts).backward()  # type: ignore[no-untyped-call]
            outputs.append(output)
        clip_each_gradient(self.method.parameters(), self.clip_norm)
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
