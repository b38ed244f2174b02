"""NNCLR: With a Little Help from My Friends (Dwibedi, Aytar, Tompson, Sermanet and Zisserman, ICCV 2021).

Each step:
    z         = projector(backbone(both global views))                  # embeddings
    p         = predictor(z)
    friends   = the row of the memory nearest to each z, no gradient    # past embeddings of other images
    loss      = 1/2 InfoNCE(friends of view 1, p of view 2) + 1/2 InfoNCE(friends of view 2, p of view 1)
                each friend against the predictions of the whole batch, of all ranks; its own image's is the positive
    after the optimizer step: memory <- embeddings of the first view
The positive is thus another, similar image, which no augmentation could make. There is no teacher: the trained backbone
is evaluated.

The authors published no code; this follows the paper's algorithm. The memory starts as random unit vectors and is used
from the first step, as in the re-implementations of lightly and solo-learn.
"""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from massl import distributed
from massl.config import Settings
from massl.data.views import ViewBatch
from massl.methods.base import (
    Method,
    MethodSettings,
    StepHyper,
    StepOutput,
    TrainingPlan,
    caution_on_memory,
    caution_on_parts,
    caution_on_unused_views,
    seeded,
)
from massl.methods.contrastive import contrastive_collapse_signs, contrastive_health
from massl.nn.backbone import Backbone, BackboneSettings, build_backbone
from massl.nn.encoder import ViewwiseEncoder
from massl.nn.heads import PredictorSettings, ProjectorSettings, build_predictor, build_projector
from massl.nn.memory import MemoryBank
from massl.ops.contrastive import info_nce, most_similar_rows

_NUM_VIEWS = 2
_ENQUEUED_VIEW = 0  # the first, as in the paper's algorithm and in solo-learn; lightly takes the second


class NNCLRProjectorSettings(ProjectorSettings):
    hidden_dim: int = Field(default=2048, gt=0, description="width of its hidden layers")


class SupportSetSettings(Settings):
    num_rows: int = Field(default=98_304, gt=0, description="number of past embeddings in the memory")


class NNCLRSettings(MethodSettings):
    name: Literal["nnclr"] = "nnclr"
    temperature: float = Field(default=0.1, gt=0.0, description="tau of the softmax over predictions")
    projector: NNCLRProjectorSettings = NNCLRProjectorSettings()
    predictor: PredictorSettings = PredictorSettings()
    memory: SupportSetSettings = SupportSetSettings()


class NNCLR(Method):
    def __init__(self, settings: NNCLRSettings, backbone: BackboneSettings, *, seed: int) -> None:
        super().__init__()
        self.settings = settings
        self.seed = seed
        self.has_drop_path = backbone.drop_path_rate > 0.0
        network = build_backbone(backbone, seed=seed, drop_path_rate=backbone.drop_path_rate)
        projector = seeded(seed, "head", lambda: build_projector(network.dim, settings.projector, last_norm="scaled"))
        self.student = ViewwiseEncoder(network, projector)
        self.predictor = seeded(
            seed, "predictor", lambda: build_predictor(settings.projector.out_dim, settings.predictor, last_norm="none")
        )
        self.memory = MemoryBank(settings.memory.num_rows, settings.projector.out_dim, seed=seed)

    def forward(self, views: ViewBatch, hyper: StepHyper) -> StepOutput:
        both = views.global_views[:_NUM_VIEWS]
        embeddings = self.student(both, self.drop_path_keys(views, hyper, num_views=_NUM_VIEWS))  # [2, B, D]
        predictions = normalize(self.predictor(embeddings), dim=-1)
        gathered = distributed.gather_rows_with_gradient(predictions.transpose(0, 1))
        all_predictions = gathered.transpose(0, 1)  # [2, B * ranks, D]
        unit = normalize(embeddings.detach(), dim=-1)
        nearest, similarity = most_similar_rows(unit.flatten(0, 1), self.memory.rows)
        friends = self.memory.rows[nearest].reshape(unit.shape)
        num_images, num_predictions = both.shape[1], all_predictions.shape[1]
        loss, top1 = info_nce(
            friends,
            all_predictions.flip(0),
            temperature=self.settings.temperature,
            first_positive=distributed.rank() * num_images,
        )
        metrics = {
            "contrastive_top1": top1,
            "loss_over_guessing": loss.detach() / math.log(num_predictions),
            "neighbour_similarity": similarity.mean(),
        }
        return StepOutput(loss=loss, metrics=metrics, carry={"memory_rows": unit[_ENQUEUED_VIEW]})

    def after_step(self, output: StepOutput, hyper: StepHyper) -> None:
        rows = distributed.gather_rows(output.carry["memory_rows"])
        self.memory.enqueue(rows, applies=output.is_finite)

    def memory_rows(self, views: ViewBatch) -> Tensor:  # -> [B, D]
        return normalize(self.student(views.global_views[_ENQUEUED_VIEW : _ENQUEUED_VIEW + 1])[0], dim=-1)

    def backbone_to_evaluate(self) -> Backbone:
        return self.student.backbone

    @torch.no_grad()
    def health(self, features: Tensor, hyper: StepHyper) -> dict[str, float]:
        return contrastive_health(features, self.student.head)

    def collapse_signs(self, metrics: Mapping[str, float]) -> list[str]:
        return contrastive_collapse_signs(metrics)

    def cautions(self, plan: TrainingPlan) -> list[str]:
        found = caution_on_unused_views(plan, "NNCLR", num_global=_NUM_VIEWS)
        found += caution_on_parts(plan, "NNCLR", "predictions and batch statistics")
        num_rows = self.settings.memory.num_rows
        found += caution_on_memory(plan, num_rows)
        if num_rows > plan.num_images:
            found.append(
                f"the memory (method.memory.num_rows = {num_rows:,}) is larger than the data set ({plan.num_images:,} "
                "images): the nearest neighbour of an image is often its own past. Lower it below the number of images."
            )
        return found
