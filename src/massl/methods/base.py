"""What a pre-training method is to the trainer: a loss, a change of state after each step, and a backbone to evaluate."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from massl import keyed_random
from massl.config import Settings
from massl.data.views import ViewBatch, ViewSettings
from massl.nn.backbone import Backbone, BackboneSettings, build_backbone
from massl.nn.encoder import Encoder

ModuleType = TypeVar("ModuleType", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """A value that changes from `start` to `end`: linearly over the first `epochs`, or along a cosine over the whole
    run (None).
    """

    start: float
    end: float
    epochs: float | None = None


class EMASettings(Settings):
    momentum: float = Field(
        default=0.992, ge=0.0, le=1.0, description="EMA momentum at the first step; rises to 1 along a cosine"
    )

    def ramps(self) -> dict[str, Ramp]:
        return {"momentum": Ramp(start=self.momentum, end=1.0)}


class TeacherSettings(EMASettings):
    temperature_start: float = Field(default=0.04, gt=0.0, description="teacher temperature at the first step")
    temperature: float = Field(default=0.07, gt=0.0, description="teacher temperature after its warm-up")
    temperature_warmup_epochs: float = Field(
        default=30.0, ge=0.0, description="epochs over which it rises linearly, per step"
    )

    def ramps(self) -> dict[str, Ramp]:
        warm_up = Ramp(start=self.temperature_start, end=self.temperature, epochs=self.temperature_warmup_epochs)
        return super().ramps() | {"teacher_temperature": warm_up}


class MethodSettings(Settings):
    """Base of every method's settings; `name` is a Literal in each, by which a recipe chooses."""

    name: str

    def ramps(self) -> dict[str, Ramp]:
        """The method's own values that change over training, by the names under which StepHyper gives them back."""
        return {}


@dataclass(frozen=True, kw_only=True)
class StepHyper:
    """Everything that changes from step to step by schedule.

    Numbers, or scalar tensors on the device: a step that is recorded as a CUDA graph reads them anew each time it is
    replayed. `epoch` is always a number, so `forward` and `after_step` must not depend on it; `Method.frozen` may.
    """

    step: int | Tensor
    epoch: int
    learning_rate: float | Tensor
    weight_decay: float | Tensor
    own: Mapping[str, float | Tensor]  # what the method's settings name in `ramps`

    @property
    def momentum(self) -> float | Tensor:
        return self.own["momentum"]

    @property
    def teacher_temperature(self) -> float | Tensor:
        return self.own["teacher_temperature"]


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
    """One self-supervised method. `forward` changes nothing; `after_step` is the only place where teacher and memory
    change.

    It is built from its settings, those of the backbone and a seed: `METHODS[name](settings, backbone_settings,
    seed=seed)`.
    """

    min_global_views: int = 2

    seed: int
    has_drop_path: bool

    @abstractmethod
    def forward(self, views: ViewBatch, hyper: StepHyper) -> StepOutput: ...

    @abstractmethod
    def after_step(self, output: StepOutput, hyper: StepHyper) -> None: ...

    @abstractmethod
    def backbone_to_evaluate(self) -> Backbone: ...

    def frozen(self, epoch: int) -> Sequence[nn.Parameter]:
        """Parameters that stand still in this epoch although they are trained later, or were before."""
        return []

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """Trade time for memory in every backbone that is trained."""
        for backbone in self.backbones():
            if any(parameter.requires_grad for parameter in backbone.parameters()):
                backbone.set_activation_checkpointing(enabled)

    def backbones(self) -> list[Backbone]:
        """Every backbone, trained or not."""
        return [module for module in self.modules() if isinstance(module, Backbone)]

    # -> [num_views, B]
    def drop_path_keys(self, views: ViewBatch, hyper: StepHyper, *, num_views: int) -> Tensor | None:
        """Keys of stochastic depth for the first views of every image; None where the method has none."""
        if not (self.has_drop_path and self.training):
            return None
        view_numbers = torch.arange(num_views, device=views.image_indices.device)[:, None]
        keys = keyed_random.bits(self.seed, "drop path", hyper.step, views.image_indices[None, :], view_numbers)
        return keys.to(views.global_views.device, non_blocking=True)

    # [N, D] features of `backbone_to_evaluate`
    def health(self, features: Tensor, hyper: StepHyper) -> dict[str, float]:
        """Method-specific numbers that show whether training is alive."""
        return {}

    def collapse_signs(self, metrics: Mapping[str, float]) -> list[str]:
        """In plain words, what in a probe's metrics says that training has collapsed; empty when it looks healthy."""
        return []

    def slow_signs(self, metrics: Mapping[str, float]) -> list[str]:
        """In plain words, what in a probe's metrics says that training is alive but will not get far; empty when it
        looks healthy.
        """
        return []

    def cautions(self, plan: "TrainingPlan") -> list[str]:
        """In plain words, what does not fit together in this recipe and this data set; said once, before training."""
        return []


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What a method may want to know of the run it is used in, for its cautions."""

    num_images: int
    batch_size: int  # over all processes
    num_parts: int  # each batch is cut into so many, one after the other
    views: ViewSettings
    # of all images, -1 where there is none; asked for by those who learn from them
    labels: Callable[[], Tensor] | None = None


def caution_on_unused_views(plan: TrainingPlan, name: str, *, num_global: int | None = None) -> list[str]:
    """For methods that look at global views alone, or at some of them."""
    found = []
    if plan.views.num_local:
        found.append(
            f"{name} looks at global views only: set views.num_local to 0, and the {plan.views.num_local} local ones cost nothing"
        )
    if num_global is not None and plan.views.num_global > num_global:
        found.append(
            f"{name} looks at {num_global} global views only, not {plan.views.num_global}: lower views.num_global"
        )
    return found


def caution_on_parts(plan: TrainingPlan, name: str, what: str) -> list[str]:
    """For methods in whose loss the images of a batch meet."""
    if plan.num_parts == 1:
        return []
    parts = f"each of the {plan.num_parts} parts of a batch"
    return [
        f"{name} takes {what} from {parts} on its own: with trainer.accumulation_steps 1 the result would be another"
    ]


def student_and_teacher(
    backbone: BackboneSettings, build_head: Callable[[int], nn.Module], *, seed: int
) -> tuple[Encoder, Encoder]:  # build_head: dimension of the features -> head
    """An encoder that is trained, and one of the same initial weights that follows it, without gradients and stochastic
    depth.
    """

    def encoder(drop_path_rate: float) -> Encoder:
        network = build_backbone(backbone, seed=seed, drop_path_rate=drop_path_rate)
        return Encoder(network, seeded(seed, "head", lambda: build_head(network.dim)))

    return encoder(backbone.drop_path_rate), encoder(0.0).requires_grad_(False)


def autocast_dtype(device_type: str, otherwise: torch.dtype = torch.float32) -> torch.dtype:
    """That of matrix products: the one of autocast where it is on."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else otherwise


def seeded(seed: int, purpose: str, build: Callable[[], ModuleType]) -> ModuleType:
    """A module whose initial weights depend on seed and purpose alone, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed_random.seed_from(seed, purpose))
        return build()
