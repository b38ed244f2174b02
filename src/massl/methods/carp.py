"""CARP: Consistent Assignment of Views over Random Partitions (Silva and Ramírez Rivera, NeurIPS 2023).

Each step:
    blocks    = random partition of the prototypes                     # learnt unit vectors, same cut for the teacher's
    student   = head(backbone(every view))                             # any length, which sets the softmax's sharpness
    teacher   = the same with EMA weights, global views only, no gradient
    p, q      = softmax(student . block), softmax(teacher . teacher's block)
    loss      = mean over blocks and over pairs of different views of -log <p, q>
                + mean over blocks of KL(mean of all p and q over the images of all processes || uniform)
    after the optimizer step: teacher and its prototypes <- EMA of the student's
The first term is least when each image picks one prototype per block; the second keeps all images from picking the same
one. The authors' code moves the teacher just before the optimizer step, so theirs is one step behind.

MaSSL continues from here: its blocks hold past teacher embeddings instead of learnt prototypes and need no second term.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import normalize

from massl import distributed, keyed_random
from massl.config import Settings
from massl.data.views import ViewBatch
from massl.methods.base import (
    EMASettings,
    Method,
    MethodSettings,
    Ramp,
    StepHyper,
    StepOutput,
    TrainingPlan,
    autocast_dtype,
    caution_on_parts,
    seeded,
    student_and_teacher,
)
from massl.methods.self_distillation import caution_on_prototypes, prototype_collapse_signs
from massl.nn.backbone import Backbone, BackboneSettings
from massl.nn.ema import move_towards
from massl.nn.heads import BatchNormHead, HeadSettings
from massl.nn.prototypes import Prototypes, PrototypeSettings
from massl.ops.partition_loss import imbalance, partition_terms
from massl.ops.scoring.feature_health import embedding_spread, prototype_use


class PartitionSettings(Settings):
    num_prototypes: int = Field(default=65_536, gt=1, description="K: number of learnt prototypes")
    block_size: int = Field(
        default=512, gt=1, description="prototypes per block; each step draws K // block_size blocks"
    )

    @model_validator(mode="after")
    def _blocks_fit(self) -> "PartitionSettings":
        if self.block_size > self.num_prototypes:
            raise ValueError(
                f"block_size {self.block_size} exceeds num_prototypes {self.num_prototypes}: "
                "lower block_size or raise num_prototypes to a multiple of it"
            )
        return self


class CARPSettings(MethodSettings):
    name: Literal["carp"] = "carp"
    teacher: EMASettings = EMASettings(momentum=0.99)
    head: HeadSettings = HeadSettings()
    prototypes: PartitionSettings = PartitionSettings()

    def ramps(self) -> dict[str, Ramp]:
        return self.teacher.ramps()


class CARP(Method):
    def __init__(self, settings: CARPSettings, backbone: BackboneSettings, *, seed: int) -> None:
        super().__init__()
        self.settings = settings
        self.seed = seed
        self.has_drop_path = backbone.drop_path_rate > 0.0
        self.student, self.teacher = student_and_teacher(
            backbone, lambda dim: BatchNormHead(dim, settings.head, unit_length=False), seed=seed
        )
        self.student_prototypes = self._prototypes()
        self.teacher_prototypes = self._prototypes().requires_grad_(False)

    def _prototypes(self) -> Prototypes:
        settings = PrototypeSettings(num_prototypes=self.settings.prototypes.num_prototypes, unit_length=True)
        return seeded(self.seed, "prototypes", lambda: Prototypes(self.settings.head.out_dim, settings))

    def forward(self, views: ViewBatch, hyper: StepHyper) -> StepOutput:
        student = self.student(views.groups(), self.drop_path_keys(views, hyper, num_views=views.num_views))
        with torch.no_grad():
            teacher = self.teacher([views.global_views])
        disagreement, mean_shares = partition_terms(
            student,
            teacher,
            self._blocks(self.student_prototypes, hyper.step),
            self._blocks(self.teacher_prototypes, hyper.step),
            operand_dtype=autocast_dtype(student.device.type),
        )
        skew = imbalance(distributed.sum_over_ranks(mean_shares) / distributed.world_size())
        metrics = {"disagreement": disagreement.detach(), "imbalance": skew.detach()}
        return StepOutput(loss=disagreement + skew, metrics=metrics, carry={})

    def after_step(self, output: StepOutput, hyper: StepHyper) -> None:
        move_towards(self.teacher, self.student, momentum=hyper.momentum)
        move_towards(self.teacher_prototypes, self.student_prototypes, momentum=hyper.momentum)

    def backbone_to_evaluate(self) -> Backbone:
        return self.teacher.backbone

    def _blocks(self, prototypes: Prototypes, step: int | Tensor) -> Tensor:  # -> [B, C, D]
        """Disjoint random blocks of prototypes, keyed by seed and step; the remainder of the division is left out."""
        settings = self.settings.prototypes
        num_blocks = settings.num_prototypes // settings.block_size
        order = keyed_random.permutation(
            settings.num_prototypes, self.seed, "partition", step, device=prototypes.directions.device
        )
        in_order: Tensor = prototypes().index_select(0, order[: num_blocks * settings.block_size])
        return in_order.reshape(num_blocks, settings.block_size, -1)

    @torch.no_grad()
    def health(self, features: Tensor, hyper: StepHyper) -> dict[str, float]:
        embeddings = self.teacher.head(features)
        blocks = self._blocks(self.teacher_prototypes, hyper.step)
        no_centre = torch.zeros(blocks.shape[1], device=blocks.device)
        uses = [prototype_use(embeddings, block, no_centre, temperature=1.0) for block in blocks]
        return {
            "embedding_spread": embedding_spread(normalize(embeddings, dim=-1)),
            "teacher_entropy": sum(use.entropy for use in uses) / len(uses),
            "prototype_entropy": sum(use.entropy_of_mean for use in uses) / len(uses),
            "prototype_winner_share": sum(use.winner_share for use in uses) / len(uses),
        }

    def collapse_signs(self, metrics: Mapping[str, float]) -> list[str]:
        return prototype_collapse_signs(metrics, num_prototypes=self.settings.prototypes.block_size)

    def cautions(self, plan: TrainingPlan) -> list[str]:
        settings = self.settings.prototypes
        found = caution_on_prototypes(plan, settings.num_prototypes)
        found += caution_on_parts(plan, "CARP", "batch norm and the mean use of prototypes")
        if left_out := settings.num_prototypes % settings.block_size:
            unused = f"{left_out:,} random prototypes stay unused each step"
            found.append(f"method.prototypes.num_prototypes is no multiple of block_size: {unused}.")
        return found
