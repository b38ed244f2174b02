"""The interface of a pre-training method: a loss, a state change after each step, and a backbone to evaluate."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from massl import keyed_random
from massl.config import RecipeError, Settings
from massl.data.views import ViewBatch, ViewSettings
from massl.nn.backbone import Backbone, BackboneSettings, build_backbone
from massl.nn.encoder import Encoder
from massl.nn.freezing import freeze, keep_statistics
from massl.nn.held_temperature import HeldTemperature
from massl.nn.token_readout import problem_with_size

# The metric that a held temperature follows: the mean entropy in nats of the teacher's softmaxes over a batch.
BATCH_ENTROPY = "batch_teacher_entropy"

ModuleType = TypeVar("ModuleType", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """A value that goes from `start` to `end`: linearly over the first `epochs`, or on a cosine over the run (None)."""

    start: float
    end: float
    epochs: float | None = None


class EMASettings(Settings):
    momentum: float = Field(default=0.992, ge=0.0, le=1.0, description="EMA momentum at first; a cosine raises it to 1")

    def ramps(self) -> dict[str, Ramp]:
        return {"momentum": Ramp(start=self.momentum, end=1.0)}


class TeacherSettings(EMASettings):
    temperature_start: float = Field(default=0.04, gt=0.0, description="teacher temperature at the first step")
    temperature: float = Field(default=0.07, gt=0.0, description="teacher temperature after its warm-up")
    temperature_warmup_epochs: float = Field(default=30.0, ge=0.0, description="epochs over which it rises linearly")
    entropy: float | None = Field(
        default=None,
        gt=0.0,
        description="mean entropy in nats at which the teacher's softmax is held: its temperature starts at "
        "temperature_start and adapts after each step; the schedule of temperatures is then not used",
    )

    def ramps(self) -> dict[str, Ramp]:
        if self.entropy is not None:
            return super().ramps()
        warm_up = Ramp(start=self.temperature_start, end=self.temperature, epochs=self.temperature_warmup_epochs)
        return super().ramps() | {"teacher_temperature": warm_up}

    def held_temperature(self, num_choices: int) -> HeldTemperature | None:  # num_choices: entries of the softmax
        """The temperature that holds the entropy; None if a schedule sets it."""
        if self.entropy is None:
            return None
        if self.entropy >= (most := math.log(num_choices)):
            raise RecipeError(
                f"method.teacher.entropy = {self.entropy} cannot be reached: a softmax over {num_choices:,} entries "
                f"has at most {most:.2f} nats; about a quarter of that is usual"
            )
        return HeldTemperature(start=self.temperature_start, entropy=self.entropy)


class MethodSettings(Settings):
    """Base of every method's settings; `name` is a Literal in each subclass and selects the method in a recipe."""

    name: str

    def ramps(self) -> dict[str, Ramp]:
        """The method's scheduled values, by their names in `StepHyper.own`."""
        return {}


@dataclass(frozen=True, kw_only=True)
class StepHyper:
    """All scheduled values of one step.

    Numbers, or scalar tensors on the device, which a CUDA graph reads at each replay. `epoch` and `trains_backbone` are
    never tensors, so `forward` and `after_step` must not depend on them; `Method.frozen` may.
    """

    step: int | Tensor
    epoch: int
    learning_rate: float | Tensor
    weight_decay: float | Tensor
    own: Mapping[str, float | Tensor]  # the method's own, named in the `ramps` of its settings
    trains_backbone: bool = True  # False: only the rest is trained

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
    is_finite: Tensor | None = None  # [] bool: whether all gradients are; set by the update, which they decide


def combine(outputs: Sequence[StepOutput]) -> StepOutput:
    """The output of a batch from the outputs of its equal parts, in order."""
    if len(outputs) == 1:
        return outputs[0]
    return StepOutput(
        loss=torch.stack([output.loss.detach() for output in outputs]).mean(),
        metrics={name: torch.stack([output.metrics[name] for output in outputs]).mean() for name in outputs[0].metrics},
        carry={name: torch.cat([output.carry[name] for output in outputs]) for name in outputs[0].carry},
    )


class Method(nn.Module, ABC):
    """One training method, built by `methods.build_method`.

    `forward` changes no state; teacher and memory change only in `after_step`.
    """

    min_global_views: int = 2

    seed: int
    has_drop_path: bool
    _has_frozen_backbones: bool = False

    @abstractmethod
    def forward(self, views: ViewBatch, hyper: StepHyper) -> StepOutput: ...

    @abstractmethod
    def after_step(self, output: StepOutput, hyper: StepHyper) -> None: ...

    @abstractmethod
    def backbone_to_evaluate(self) -> Backbone: ...

    def frozen(self, hyper: StepHyper) -> Sequence[nn.Parameter]:
        """Parameters that are not trained in this step, though in others."""
        if hyper.trains_backbone:
            return []
        return [parameter for backbone in self.backbones() for parameter in backbone.parameters()]

    def freeze_backbones(self, frozen: bool) -> None:
        """While frozen, backbones keep their weights and running averages, the teacher's too."""
        if frozen != self._has_frozen_backbones:
            self._has_frozen_backbones = frozen
            for backbone in self.backbones():
                freeze(backbone, frozen)

    def keep_statistics(self) -> None:
        """Batch norms of all backbones use and keep the running averages they have; those of heads learn theirs."""
        for backbone in self.backbones():
            keep_statistics(backbone)

    def memory_rows(self, views: ViewBatch) -> Tensor | None:  # -> [B, D]
        """What a batch adds to the memory; None for methods without one."""
        return None

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """Trade time for memory in every trained backbone."""
        for backbone in self.backbones():
            if any(parameter.requires_grad for parameter in backbone.parameters()):
                backbone.set_activation_checkpointing(enabled)

    def backbones(self) -> list[Backbone]:
        """Every backbone, trained or not."""
        return [module for module in self.modules() if isinstance(module, Backbone)]

    def check_views(self, views: ViewSettings, *, name: str) -> None:
        """Refuse views that the method or its network cannot take."""
        if views.num_global < self.min_global_views:
            least = self.min_global_views
            raise RecipeError(f"{name} compares views of an image: set views.num_global to {least} or more")
        backbone = self.backbone_to_evaluate()
        for key in ("global_size", "local_size") if views.num_local else ("global_size",):
            size = getattr(views, key)
            if reason := problem_with_size(backbone, size):
                raise RecipeError(f"{backbone.model_name} cannot take views.{key} {size}: {reason}")

    def drop_path_keys(self, views: ViewBatch, hyper: StepHyper, *, num_views: int) -> Tensor | None:
        """Keys [num_views, B] of stochastic depth for the first views of every image; None without stochastic depth."""
        if not (self.has_drop_path and self.training):
            return None
        view_numbers = torch.arange(num_views, device=views.image_indices.device)[:, None]
        keys = keyed_random.bits(self.seed, "drop path", hyper.step, views.image_indices[None, :], view_numbers)
        return keys.to(views.global_views.device, non_blocking=True)

    def health(self, features: Tensor, hyper: StepHyper) -> dict[str, float]:
        """Method-specific health metrics, from features [N, D] of `backbone_to_evaluate`."""
        return {}

    def collapse_signs(self, metrics: Mapping[str, float]) -> list[str]:
        """Signs of collapse in a probe's metrics, as sentences for the user; empty if healthy."""
        return []

    def slow_signs(self, metrics: Mapping[str, float]) -> list[str]:
        """Signs in a probe's metrics that training works but progresses slowly, as sentences for the user."""
        return []

    def cautions(self, plan: "TrainingPlan") -> list[str]:
        """Warnings about this recipe on this data set, shown once before training."""
        return []


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The facts about a run that `Method.cautions` reads."""

    num_images: int
    batch_size: int  # over all processes
    num_parts: int  # of each batch (accumulation)
    views: ViewSettings
    labels: Callable[[], Tensor] | None = None  # of all images, -1: unlabelled; called only by supervised methods


def caution_on_unused_views(plan: TrainingPlan, name: str, *, num_global: int | None = None) -> list[str]:
    """For methods that use only global views, or only some of them."""
    found = []
    if plan.views.num_local:
        found.append(
            f"{name} does not use the {plan.views.num_local} local views: set views.num_local to 0 to save time"
        )
    if num_global is not None and plan.views.num_global > num_global:
        found.append(f"{name} uses {num_global} global views, not {plan.views.num_global}: lower views.num_global")
    return found


def caution_on_parts(plan: TrainingPlan, name: str, what: str) -> list[str]:
    """For methods whose loss combines the images of a batch."""
    if plan.num_parts == 1:
        return []
    parts = f"each of the {plan.num_parts} parts of a batch"
    return [f"{name} takes {what} from {parts} separately: trainer.accumulation_steps changes the result"]


def caution_on_memory(plan: TrainingPlan, num_rows: int) -> list[str]:
    """For methods with a memory of past embeddings, to which each step adds its batch."""
    if plan.batch_size <= num_rows:
        return []
    return [
        f"a batch ({plan.batch_size:,} images) is larger than the memory (method.memory.num_rows = {num_rows:,}): each "
        "step replaces all of it and drops the rest. Raise method.memory.num_rows above trainer.batch_size."
    ]


def student_and_teacher(
    backbone: BackboneSettings, build_head: Callable[[int], nn.Module], *, seed: int
) -> tuple[Encoder, Encoder]:  # build_head: dimension of the features -> head
    """A trained encoder, and one with the same initial weights but no gradients and no stochastic depth."""

    def encoder(drop_path_rate: float) -> Encoder:
        network = build_backbone(backbone, seed=seed, drop_path_rate=drop_path_rate)
        return Encoder(network, seeded(seed, "head", lambda: build_head(network.dim)))

    return encoder(backbone.drop_path_rate), encoder(0.0).requires_grad_(False)


def autocast_dtype(device_type: str, otherwise: torch.dtype = torch.float32) -> torch.dtype:
    """The type of matrix products: autocast's if it is on."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else otherwise


def teacher_temperature(held: HeldTemperature | None, hyper: StepHyper) -> float | Tensor:
    """The held temperature, if there is one, else that of the schedule."""
    return hyper.teacher_temperature if held is None else held()


def seeded(seed: int, purpose: str, build: Callable[[], ModuleType]) -> ModuleType:
    """Build a module whose initial weights depend only on seed and purpose, not on earlier random draws."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed_random.seed_from(seed, purpose))
        return build()
