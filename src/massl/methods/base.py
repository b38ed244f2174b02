"""What a pre-training method is to the trainer: a loss, a change of state after each step, and a backbone to evaluate."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor, nn

from massl.config import Settings
from massl.data.views import ViewBatch
from massl.nn.backbone import Backbone


class TeacherSettings(Settings):
    momentum: float = Field(default=0.992, ge=0.0, le=1.0, description="EMA momentum at the first step; rises to 1 along a cosine")
    temperature_start: float = Field(default=0.04, gt=0.0, description="teacher temperature at the first step")
    temperature: float = Field(default=0.07, gt=0.0, description="teacher temperature after its warm-up")
    temperature_warmup_epochs: float = Field(default=30.0, ge=0.0, description="epochs over which it rises linearly, per step")


@dataclass(frozen=True, kw_only=True)
class StepHyper:
    """Everything that changes from step to step by schedule.

    Numbers, or scalar tensors on the device: a step that is recorded as a CUDA graph reads them anew each time it is replayed.
    """

    step: int | Tensor
    epoch: int
    learning_rate: float | Tensor
    weight_decay: float | Tensor
    momentum: float | Tensor
    teacher_temperature: float | Tensor


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    loss: Tensor
    metrics: Mapping[str, Tensor]  # stay on the device until logged
    carry: Mapping[str, Tensor]  # what after_step needs, batch first, e.g. the new memory rows


def combine(outputs: Sequence[StepOutput]) -> StepOutput:
    """The output of one large batch from those of its equal parts, in order."""
    if len(outputs) == 1:
        return outputs[0]
    return StepOutput(
        loss=torch.stack([output.loss.detach() for output in outputs]).mean(),
        metrics={name: torch.stack([output.metrics[name] for output in outputs]).mean() for name in outputs[0].metrics},
        carry={name: torch.cat([output.carry[name] for output in outputs]) for name in outputs[0].carry},
    )


class Method(nn.Module, ABC):
    """One self-supervised method. `forward` changes nothing; `after_step` is the only place where teacher and memory change."""

    @abstractmethod
    def forward(self, views: ViewBatch, hyper: StepHyper) -> StepOutput: ...

    @abstractmethod
    def after_step(self, output: StepOutput, hyper: StepHyper) -> None: ...

    @abstractmethod
    def backbone_to_evaluate(self) -> Backbone: ...

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """Trade time for memory in every backbone that is trained."""
        for backbone in self.backbones():
            if any(parameter.requires_grad for parameter in backbone.parameters()):
                backbone.set_activation_checkpointing(enabled)

    def backbones(self) -> list[Backbone]:
        """Every backbone, trained or not."""
        return [module for module in self.modules() if isinstance(module, Backbone)]

    def health(self, features: Tensor, hyper: StepHyper) -> dict[str, float]:  # [N, D] features of `backbone_to_evaluate`
        """Method-specific numbers that show whether training is alive."""
        return {}

    def collapse_signs(self, metrics: Mapping[str, float]) -> list[str]:
        """In plain words, what in a probe's metrics says that training has collapsed; empty when it looks healthy."""
        return []

    def cautions(self, num_images: int, batch_size: int) -> list[str]:
        """In plain words, what does not fit together in this recipe and this data set; said once, before training."""
        return []
