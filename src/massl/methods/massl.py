"""MaSSL: Learning from Memory (Silva, Pedrini and Ramírez Rivera, ICML 2024).

Each step:
    blocks    = random partition of the memory                         # past teacher embeddings
    student   = head(backbone(every view))                             # unit vectors
    teacher   = the same with EMA weights, global views only, no gradient
    loss      = mean over blocks and over pairs of different views of
                cross_entropy(softmax(teacher . block / tau_t), softmax(student . block / tau_s))
    after the optimizer step: teacher <- EMA of student; memory <- teacher embeddings of the second global view
Only the random blocks prevent collapse: there is no centring, no prototype and no regulariser.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from massl import distributed
from massl.config import RecipeError
from massl.data.views import ViewBatch
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
    caution_on_memory,
    caution_on_parts,
    student_and_teacher,
    teacher_temperature,
)
from massl.nn.backbone import Backbone, BackboneSettings
from massl.nn.ema import move_towards
from massl.nn.heads import BatchNormHead, HeadSettings, ProjectionHead
from massl.nn.memory import MemoryBank, MemorySettings
from massl.ops.contrastive import info_nce
from massl.ops.memory_attention import block_entropy, memory_loss, memory_loss_and_entropy
from massl.ops.scoring.feature_health import embedding_spread

# The teacher view stored in the memory: the second global one, with solarisation and little blur (figure 1 and the
# authors' code; the paper's pseudo-code says the first).
_ENQUEUED_VIEW = 1
# Metric: the part of the loss that compares with the memory, if it is not the whole loss (instance_weight).
_MEMORY_LOSS = "memory_loss"
# Share of the largest possible teacher entropy above which runs learn slowly. After a tenth of the run, no good run was
# above 0.84 (docs/results/cifar10/run1-paper-views.jsonl: 0.834); three were above 0.85 and learnt less than similar
# ones: six_temp07 and six_nobn of docs/results/lightly-cifar10/pilots.jsonl, and
# docs/results/tiny-imagenet-100/massl-20-epochs-m90-bn-jax.jsonl.
_EVEN_TEACHER = 0.85


class MaSSLHeadSettings(HeadSettings):
    batch_norm: bool = Field(default=False, description="batch norm after all layers but the last; ResNets need it")

    def build(self, in_dim: int) -> nn.Module:
        return BatchNormHead(in_dim, self, unit_length=True) if self.batch_norm else ProjectionHead(in_dim, self)


class MaSSLSettings(MethodSettings):
    name: Literal["massl"] = "massl"
    student_temperature: float = Field(default=0.1, gt=0.0, description="of the student's softmax over memory rows")
    student_views: Literal["all", "local"] = Field(
        default="all",
        description="views of the student; local: not the teacher's, so that those may be augmented less (ReSSL)",
    )
    instance_weight: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="share of the loss that tells the images of a batch apart, which the paper does not have; 0: none",
    )
    teacher: TeacherSettings = TeacherSettings()
    head: MaSSLHeadSettings = MaSSLHeadSettings()
    memory: MemorySettings = MemorySettings()

    def ramps(self) -> dict[str, Ramp]:
        return self.teacher.ramps()


class MaSSL(Method):
    def __init__(self, settings: MaSSLSettings, backbone: BackboneSettings, *, seed: int) -> None:
        super().__init__()
        self.settings = settings
        self.seed = seed
        self.has_drop_path = backbone.drop_path_rate > 0.0
        self.min_global_views = 2 if settings.student_views == "all" else 1
        self.student, self.teacher = student_and_teacher(backbone, settings.head.build, seed=seed)
        self.memory = MemoryBank(settings.memory.num_rows, settings.head.out_dim, seed=seed)
        self.held_temperature = settings.teacher.held_temperature(settings.memory.block_size)

    def forward(self, views: ViewBatch, hyper: StepHyper) -> StepOutput:
        sees_all = self.settings.student_views == "all"
        student = self._student(views, hyper) if sees_all else self._student_of_local_views(views, hyper)
        with torch.no_grad():
            teacher = self.teacher([views.global_views])
        dtype = autocast_dtype(student.device.type, otherwise=student.dtype)
        embeddings = (student, teacher, self._blocks(hyper.step, dtype))
        temperature = teacher_temperature(self.held_temperature, hyper)
        options: dict[str, Any] = {"shared_views": sees_all, "operand_dtype": dtype}
        options |= {"student_temperature": self.settings.student_temperature, "teacher_temperature": temperature}
        metrics: dict[str, Tensor] = {}
        if self.held_temperature is None:
            loss = memory_loss(*embeddings, **options)
        else:
            loss, entropy = memory_loss_and_entropy(*embeddings, **options)
            metrics = {"teacher_temperature": torch.as_tensor(temperature), BATCH_ENTROPY: entropy}
        if self.settings.instance_weight:
            instance_loss, top1 = self._instance_loss(student, teacher)
            metrics |= {"contrastive_top1": top1, _MEMORY_LOSS: loss.detach()}
            loss = torch.lerp(loss, instance_loss, self.settings.instance_weight)
        carry = {"memory_rows": teacher[min(_ENQUEUED_VIEW, len(teacher) - 1)]}
        return StepOutput(loss=loss, metrics=metrics, carry=carry)

    def after_step(self, output: StepOutput, hyper: StepHyper) -> None:
        if self.held_temperature is not None:
            self.held_temperature.follow(output.metrics[BATCH_ENTROPY])
        move_towards(self.teacher, self.student, momentum=hyper.momentum)
        rows = distributed.gather_rows(output.carry["memory_rows"])
        self.memory.enqueue(rows, applies=output.is_finite)

    def memory_rows(self, views: ViewBatch) -> Tensor:  # -> [B, D]
        enqueued = min(_ENQUEUED_VIEW, len(views.global_views) - 1)
        return self.teacher([views.global_views[enqueued : enqueued + 1]])[0]  # type: ignore[no-any-return]

    def backbone_to_evaluate(self) -> Backbone:
        return self.teacher.backbone

    def _instance_loss(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:  # [V, B, D], [T, B, D]
        """InfoNCE of each student view with each other teacher view, and its top-1 (idea: SCE, Denize et al., 2023)."""
        keys = distributed.gather_rows(teacher.transpose(0, 1)).transpose(0, 1)  # [T, B * ranks, D]
        is_shared = self.settings.student_views == "all"
        pairs = [(v, t) for v in range(len(student)) for t in range(len(keys)) if v != t or not is_shared]
        return info_nce(
            torch.stack([student[v] for v, _ in pairs]),
            torch.stack([keys[t] for _, t in pairs]),
            temperature=self.settings.student_temperature,
            first_positive=distributed.rank() * student.shape[1],
        )

    def _student(self, views: ViewBatch, hyper: StepHyper) -> Tensor:  # -> [V, B, D]
        return self.student(views.groups(), self.drop_path_keys(views, hyper, num_views=views.num_views))  # type: ignore[no-any-return]

    def _student_of_local_views(self, views: ViewBatch, hyper: StepHyper) -> Tensor:  # -> [L, B, D]
        if views.local_views is None:
            raise RecipeError("method.student_views local needs local views: raise views.num_local")
        keys = self.drop_path_keys(views, hyper, num_views=views.num_views)
        return self.student([views.local_views], None if keys is None else keys[len(views.global_views) :])  # type: ignore[no-any-return]

    def _blocks(self, step: int | Tensor, dtype: torch.dtype) -> Tensor:
        memory = self.settings.memory
        if not memory.random_blocks:
            return self.memory.storage_blocks(memory.block_size, dtype)
        return self.memory.random_blocks(memory.block_size, (self.seed, step), dtype)

    @torch.no_grad()
    def health(self, features: Tensor, hyper: StepHyper) -> dict[str, float]:
        embeddings = self.teacher.head(features)
        blocks = self._blocks(hyper.step, torch.float32)
        temperature = float(teacher_temperature(self.held_temperature, hyper))
        return {
            "embedding_spread": embedding_spread(embeddings),
            "teacher_entropy": float(block_entropy(embeddings, blocks, temperature)),
            "memory_winner_share": winner_share(embeddings, blocks),
        }

    def collapse_signs(self, metrics: Mapping[str, float]) -> list[str]:
        return memory_collapse_signs(metrics, block_size=self.settings.memory.block_size)

    def slow_signs(self, metrics: Mapping[str, float]) -> list[str]:
        most = math.log(self.settings.memory.block_size)
        if metrics["teacher_entropy"] <= _EVEN_TEACHER * most:
            return []
        option = "method.teacher." + ("temperature" if self.held_temperature is None else "entropy")
        entropy = f"entropy {metrics['teacher_entropy']:.2f} of at most {most:.2f} nats"
        return [f"the teacher hardly prefers any memory row ({entropy}); lower {option} to sharpen it"]

    def cautions(self, plan: TrainingPlan) -> list[str]:
        num_rows = self.settings.memory.num_rows
        found = caution_on_memory(plan, num_rows)
        if self.settings.memory.block_size == 1:
            found.append(
                "a block of one memory row (method.memory.block_size = 1) leaves nothing to choose from: the loss is "
                "always 0 and nothing is learnt. Raise it, to a quarter of method.memory.num_rows for example."
            )
        if num_rows > plan.num_images:
            found.append(
                f"the memory (method.memory.num_rows = {num_rows:,}) is larger than the data set ({plan.num_images:,} "
                "images), so a view may have to match its own past embeddings. Lower it below the number of images."
            )
        if left_out := num_rows % self.settings.memory.block_size:
            unused = f"{left_out:,} random rows stay unused each step"
            found.append(f"method.memory.num_rows is no multiple of block_size: {unused}.")
        if self.settings.head.batch_norm:
            found += caution_on_parts(plan, "batch norm in the head", "its statistics")
        if self.settings.instance_weight:
            found += caution_on_parts(plan, "method.instance_weight", "the images to tell apart")
        return found


def winner_share(queries: Tensor, blocks: Tensor) -> float:  # [N, D], [B, N_b, D] -> number in (0, 1]
    """Memory rows that are nearest to some query, as a share of the possible number; low: a few rows attract all."""
    num_winners = sum(int(torch.unique((queries @ block.T).argmax(dim=1)).numel()) for block in blocks)
    return num_winners / (blocks.shape[0] * min(blocks.shape[1], queries.shape[0]))


def memory_collapse_signs(metrics: Mapping[str, float], *, block_size: int) -> list[str]:
    """Signs of collapse in a probe's metrics, also for reports, which have no network."""
    signs = []
    most, loss = math.log(block_size), metrics.get(_MEMORY_LOSS, metrics["loss"])
    # A loss at or above ln(block_size) under a teacher that does prefer rows is a student that still disagrees with it.
    if abs(loss - most) < 0.005 * most and metrics["teacher_entropy"] > 0.95 * most:
        name = "memory loss" if _MEMORY_LOSS in metrics else "loss"
        guessing = f"random guessing over a block (ln {block_size} = {most:.3f})"
        signs.append(f"the {name} {loss:.3f} is that of {guessing}, and the teacher prefers no row either")
    if metrics["teacher_entropy"] < 0.05:
        entropy = f"entropy {metrics['teacher_entropy']:.3f} nats"
        signs.append(f"the teacher puts all weight on one memory row ({entropy})")
    if metrics["embedding_spread"] < 0.02:
        signs.append(f"all embeddings are nearly the same vector (spread {metrics['embedding_spread']:.4f} of 1)")
    return signs
