"""MoCo-v3: An Empirical Study of Training Self-Supervised Vision Transformers (Chen, Xie and He, ICCV 2021).

Each step:
    queries   = predictor(projector(backbone(both global views)))      # student
    keys      = projector(backbone(both global views))                 # teacher: EMA weights, no gradient, no predictor
    loss      = 2 tau x [InfoNCE(queries of view 1, keys of view 2) + InfoNCE(queries of view 2, keys of view 1)]
                each query against the keys of the whole batch, of all ranks; its own image's is the positive
    after the optimizer step: teacher <- EMA of student
Batches are large, so there is no queue. A frozen random patch embedding keeps a vision transformer stable (section 4);
position embeddings are fixed sines and cosines. The paper evaluates the trained backbone, not the teacher's.

Order of updates: the authors move the teacher inside the forward pass of step i, with momentum m_i, towards the weights
that step i - 1 left. Here it moves at the end of step i - 1 towards the same weights, with m_{i-1}. On the cosine from
0.99 to 1 the two momenta differ by at most 0.01 (pi / 2) / (number of steps), 1.7e-7 for 300 epochs of 312 steps.
"""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import normalize

from massl import distributed
from massl.data.views import ViewBatch
from massl.methods.base import (
    EMASettings,
    Method,
    MethodSettings,
    Ramp,
    StepHyper,
    StepOutput,
    TrainingPlan,
    caution_on_parts,
    caution_on_unused_views,
    seeded,
)
from massl.methods.contrastive import contrastive_collapse_signs, contrastive_health
from massl.nn.backbone import Backbone, BackboneSettings, build_backbone
from massl.nn.ema import move_towards
from massl.nn.encoder import ViewwiseEncoder
from massl.nn.heads import PredictorSettings, ProjectorSettings, build_predictor, build_projector
from massl.ops.contrastive import info_nce

_NUM_VIEWS = 2


class MoCoTeacherSettings(EMASettings):
    momentum: float = Field(default=0.99, ge=0.0, le=1.0, description="EMA momentum at first; a cosine raises it to 1")


class MoCoV3Settings(MethodSettings):
    name: Literal["mocov3"] = "mocov3"
    temperature: float = Field(default=0.2, gt=0.0, description="tau of the softmax over keys")
    freeze_patch_embedding: bool = Field(default=True, description="do not train a transformer's patch embedding")
    teacher: MoCoTeacherSettings = MoCoTeacherSettings()
    projector: ProjectorSettings = ProjectorSettings()
    predictor: PredictorSettings = PredictorSettings()

    def ramps(self) -> dict[str, Ramp]:
        return self.teacher.ramps()


class MoCoV3(Method):
    def __init__(self, settings: MoCoV3Settings, backbone: BackboneSettings, *, seed: int) -> None:
        super().__init__()
        self.settings = settings
        self.seed = seed
        self.has_drop_path = backbone.drop_path_rate > 0.0
        self.student = self._encoder(backbone, drop_path_rate=backbone.drop_path_rate)
        dim = settings.projector.out_dim
        self.predictor = seeded(seed, "predictor", lambda: build_predictor(dim, settings.predictor, last_norm="plain"))
        self.teacher = self._encoder(backbone, drop_path_rate=0.0).requires_grad_(False)

    def _encoder(self, backbone_settings: BackboneSettings, *, drop_path_rate: float) -> ViewwiseEncoder:
        backbone = build_backbone(backbone_settings, seed=self.seed, drop_path_rate=drop_path_rate)
        model = backbone.model
        if isinstance(model, VisionTransformer):
            backbone.fix_positions(first_axis="rows")
            seeded(self.seed, "transformer", lambda: _draw_weights(model))
            if self.settings.freeze_patch_embedding:
                model.patch_embed.proj.requires_grad_(False)
        projector = seeded(
            self.seed, "head", lambda: build_projector(backbone.dim, self.settings.projector, last_norm="plain")
        )
        return ViewwiseEncoder(backbone, projector)

    def forward(self, views: ViewBatch, hyper: StepHyper) -> StepOutput:
        both = views.global_views[:_NUM_VIEWS]
        embeddings = self.student(both, self.drop_path_keys(views, hyper, num_views=_NUM_VIEWS))  # [2, B, D]
        queries = self.predictor(embeddings)
        with torch.no_grad():
            keys = normalize(self.teacher(both), dim=-1)
            all_keys = distributed.gather_rows(keys.transpose(0, 1)).transpose(0, 1)  # [2, B * ranks, D]
        num_images, num_keys = both.shape[1], all_keys.shape[1]
        loss, top1 = info_nce(
            normalize(queries, dim=-1),
            all_keys.flip(0),
            temperature=self.settings.temperature,
            first_positive=distributed.rank() * num_images,
        )
        metrics = {"contrastive_top1": top1, "loss_over_guessing": loss.detach() / math.log(num_keys)}
        # 2: the sum over both directions, not their mean. 2 tau: gradients then depend less on the temperature.
        return StepOutput(loss=2.0 * 2.0 * self.settings.temperature * loss, metrics=metrics, carry={})

    def after_step(self, output: StepOutput, hyper: StepHyper) -> None:
        move_towards(self.teacher, self.student, momentum=hyper.momentum)

    def backbone_to_evaluate(self) -> Backbone:
        return self.student.backbone

    @torch.no_grad()
    def health(self, features: Tensor, hyper: StepHyper) -> dict[str, float]:
        return contrastive_health(features, self.student.head)

    def collapse_signs(self, metrics: Mapping[str, float]) -> list[str]:
        return contrastive_collapse_signs(metrics)

    def cautions(self, plan: TrainingPlan) -> list[str]:
        unused = caution_on_unused_views(plan, "MoCo-v3", num_global=_NUM_VIEWS)
        return unused + caution_on_parts(plan, "MoCo-v3", "keys and batch statistics")


def _draw_weights(model: VisionTransformer) -> VisionTransformer:
    """The authors' initial weights: Xavier-uniform, with query, key and value as three matrices; zero biases.

    The patch embedding is one matrix, the class token is nearly zero, norms are not changed.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            num_outputs = module.weight.shape[0] // 3 if name.endswith("qkv") else module.weight.shape[0]
            _draw_xavier(module, num_inputs=module.weight.shape[1], num_outputs=num_outputs)
    projection = model.patch_embed.proj
    _draw_xavier(projection, num_inputs=projection.weight[0].numel(), num_outputs=projection.weight.shape[0])
    if model.cls_token is not None:
        nn.init.normal_(model.cls_token, std=1e-6)
    return model


def _draw_xavier(layer: nn.Linear | nn.Conv2d, *, num_inputs: int, num_outputs: int) -> None:
    bound = math.sqrt(6.0 / (num_inputs + num_outputs))
    nn.init.uniform_(layer.weight, -bound, bound)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
