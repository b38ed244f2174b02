"""DINO: Emerging Properties in Self-Supervised Vision Transformers (Caron et al., ICCV 2021).

Each step:
    student   = head(backbone(every view))                             # unit vectors
    teacher   = the same with EMA weights, global views only, no gradient
    p, q      = softmax(prototypes . student / tau_s), softmax((teacher's prototypes . teacher - centre) / tau_t)
    loss      = mean over pairs of different views of cross_entropy(q, p)
    after the optimizer step: centre <- running mean of the teacher's similarities;
                              teacher and its prototypes <- EMA of the student's
Two forces balance: the centre keeps one prototype from winning everywhere, the teacher's low temperature keeps its
choice from being uniform. In the first epochs the prototypes are frozen.
"""

from typing import Literal

import torch

from massl.data.views import ViewBatch
from massl.methods.base import StepHyper, StepOutput
from massl.methods.self_distillation import SelfDistillation, SelfDistillationSettings
from massl.ops.prototype_attention import cross_view_weights


class DINOSettings(SelfDistillationSettings):
    name: Literal["dino"] = "dino"


class DINO(SelfDistillation):
    def forward(self, views: ViewBatch, hyper: StepHyper) -> StepOutput:
        student = self.student(views.groups(), self.drop_path_keys(views, hyper, num_views=views.num_views))
        with torch.no_grad():
            teacher = self.teacher([views.global_views])
        pairs = cross_view_weights(len(student), len(teacher), device=student.device)
        loss, metrics = self.imitation_loss(student, teacher, self.centre, hyper, pair_weights=pairs)
        return StepOutput(loss=loss, metrics=metrics, carry={"teacher_embeddings": teacher.mean(dim=0)})

    def after_step(self, output: StepOutput, hyper: StepHyper) -> None:
        # The centre first: the embeddings it follows belong to the prototypes before the update.
        self.centre.follow(output.carry["teacher_embeddings"], self.teacher_prototypes())
        self.move_teacher(output, hyper)
