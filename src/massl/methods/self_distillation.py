"""The base of DINO and iBOT: a student that imitates how its moving average (teacher) chooses among prototypes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from massl.methods.base import (
    BATCH_ENTROPY,
    Method,
    MethodSettings,
    Ramp,
    StepHyper,
    StepOutput,
    TeacherSettings,
    TrainingPlan,
    autocast_dtype,
    seeded,
    student_and_teacher,
    teacher_temperature,
)
from massl.nn.backbone import Backbone, BackboneSettings
from massl.nn.ema import move_towards
from massl.nn.heads import HeadSettings, ProjectionHead
from massl.nn.prototypes import Centre, Prototypes, PrototypeSettings
from massl.ops.prototype_attention import prototype_loss, prototype_loss_and_entropy
from massl.ops.scoring.feature_health import embedding_spread, prototype_use


class SlowTeacherSettings(TeacherSettings):
    momentum: float = Field(default=0.996, ge=0.0, le=1.0, description="EMA momentum at first; a cosine raises it to 1")


class SelfDistillationSettings(MethodSettings):
    student_temperature: float = Field(default=0.1, gt=0.0, description="of the student's softmax over prototypes")
    teacher: SlowTeacherSettings = SlowTeacherSettings()
    head: HeadSettings = HeadSettings()
    prototypes: PrototypeSettings = PrototypeSettings()

    def ramps(self) -> dict[str, Ramp]:
        return self.teacher.ramps()


class SelfDistillation(Method):
    """Student, teacher, the prototypes of each, and the centre of the teacher's similarities."""

    def __init__(self, settings: SelfDistillationSettings, backbone: BackboneSettings, *, seed: int) -> None:
        super().__init__()
        self.settings = settings
        self.seed = seed
        self.has_drop_path = backbone.drop_path_rate > 0.0
        self.student, self.teacher = student_and_teacher(
            backbone, lambda dim: ProjectionHead(dim, settings.head), seed=seed
        )
        self.student_prototypes = self._prototypes()
        self.teacher_prototypes = self._prototypes().requires_grad_(False)
        self.centre = Centre(settings.prototypes)
        self.held_temperature = settings.teacher.held_temperature(settings.prototypes.num_prototypes)

    def _prototypes(self) -> Prototypes:
        return seeded(self.seed, "prototypes", lambda: Prototypes(self.settings.head.out_dim, self.settings.prototypes))

    def imitation_loss(
        self,
        student: Tensor,
        teacher: Tensor,
        centre: Centre,
        hyper: StepHyper,
        *,
        pair_weights: Tensor,
        row_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:  # [V, N, D], [G, N, D], [V, G], [N] -> [], metrics
        """Weighted sum of cross-entropies between the teacher's (centred, sharpened) and the student's choices.

        With a held temperature, its metrics too.
        """
        temperature = teacher_temperature(self.held_temperature, hyper)
        tensors = (student, teacher, self.student_prototypes(), self.teacher_prototypes(), centre.value)
        options: dict[str, Any] = {"pair_weights": pair_weights, "row_weights": row_weights}
        options |= {"student_temperature": self.settings.student_temperature, "teacher_temperature": temperature}
        options |= {"operand_dtype": autocast_dtype(student.device.type)}
        if self.held_temperature is None:
            return prototype_loss(*tensors, **options), {}
        loss, entropy = prototype_loss_and_entropy(*tensors, **options)
        return loss, {"teacher_temperature": torch.as_tensor(temperature), BATCH_ENTROPY: entropy}

    def move_teacher(self, output: StepOutput, hyper: StepHyper) -> None:
        """Move the teacher and its prototypes towards the student's, and a held temperature."""
        if self.held_temperature is not None:
            self.held_temperature.follow(output.metrics[BATCH_ENTROPY])
        move_towards(self.teacher, self.student, momentum=hyper.momentum)
        move_towards(self.teacher_prototypes, self.student_prototypes, momentum=hyper.momentum)

    def frozen(self, hyper: StepHyper) -> Sequence[nn.Parameter]:
        is_early = hyper.epoch < self.settings.prototypes.frozen_epochs
        return [*super().frozen(hyper), *(self.student_prototypes.parameters() if is_early else ())]

    def backbone_to_evaluate(self) -> Backbone:
        return self.teacher.backbone

    @torch.no_grad()
    def health(self, features: Tensor, hyper: StepHyper) -> dict[str, float]:
        embeddings = self.teacher.head(features)
        temperature = float(teacher_temperature(self.held_temperature, hyper))
        use = prototype_use(embeddings, self.teacher_prototypes(), self.centre.value, temperature=temperature)
        return {
            "embedding_spread": embedding_spread(embeddings),
            "teacher_entropy": use.entropy,
            "prototype_entropy": use.entropy_of_mean,
            "prototype_winner_share": use.winner_share,
        }

    def collapse_signs(self, metrics: Mapping[str, float]) -> list[str]:
        return prototype_collapse_signs(metrics, num_prototypes=self.settings.prototypes.num_prototypes)

    def cautions(self, plan: TrainingPlan) -> list[str]:
        return caution_on_prototypes(plan, self.settings.prototypes.num_prototypes)


def prototype_collapse_signs(metrics: Mapping[str, float], *, num_prototypes: int) -> list[str]:
    """The two collapses of a teacher with prototypes (Caron et al., 2021, section 5.3), and equal embeddings."""
    signs = []
    most = math.log(num_prototypes)
    # 0.5 % below ln K; random unit vectors in 256 dimensions at a temperature of 0.04 are 11 % below.
    if (entropy := metrics["teacher_entropy"]) > 0.995 * most:
        of_most = f"{entropy:.3f} of ln {num_prototypes:,} = {most:.3f} nats"
        signs.append(f"the teacher gives all prototypes the same share (entropy {of_most})")
    if (entropy := metrics["prototype_entropy"]) < 0.05:
        mean_choice = f"entropy of its mean choice {entropy:.3f} nats"
        signs.append(f"the teacher chooses one prototype for all images ({mean_choice})")
    if metrics["embedding_spread"] < 0.02:
        signs.append(f"all embeddings are nearly the same vector (spread {metrics['embedding_spread']:.4f} of 1)")
    return signs


def caution_on_prototypes(plan: TrainingPlan, num_prototypes: int) -> list[str]:
    if num_prototypes <= plan.num_images:
        return []
    return [
        f"there are more prototypes (method.prototypes.num_prototypes = {num_prototypes:,}) than images "
        f"({plan.num_images:,}), so images need not share them. Lower it below the number of images."
    ]
