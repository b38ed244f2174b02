"""Supervised training as in DeiT, without distillation (Touvron et al., ICML 2021): the reference for other methods.

Each step:
    images  = every global view as its own sample                      # several per image: repeated augmentation
    images  = normal noise in a rectangle of a quarter of them         # random erasing
    targets = 0.9 on the image's class, 0.1 spread over all classes    # label smoothing
    images, targets = each mixed with its partner's                    # mixup or CutMix, one mixture per batch
    loss    = cross_entropy(targets, softmax(classifier(backbone(images))))
A mixed image counts for both classes by their shares. An image without a label (-1) adds nothing to the loss.

Differences from DeiT: our views have no RandAugment but colour jitter, grey, blur and solarisation, close to DeiT III's
three-augment (Touvron et al., 2022). There is no average of weights, because DeiT's code evaluates the plain ones.
Partners are found within the images of one forward pass: processes and parts of a batch share only the mixture.
"""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from massl import keyed_random
from massl.config import RecipeError
from massl.data.views import ViewBatch
from massl.methods.base import (
    Method,
    MethodSettings,
    StepHyper,
    StepOutput,
    TrainingPlan,
    caution_on_parts,
    caution_on_unused_views,
    seeded,
)
from massl.nn.backbone import Backbone, BackboneSettings, build_backbone
from massl.nn.encoder import Encoder
from massl.ops.mixup import (
    Mixture,
    draw_mixture,
    erase_rectangles,
    mix_images,
    mix_rows,
    smoothed_targets,
    soft_cross_entropy,
)


class SupervisedSettings(MethodSettings):
    name: Literal["supervised"] = "supervised"
    num_classes: int = Field(default=1000, gt=1, description="number of classes; labels are 0 to num_classes - 1")
    label_smoothing: float = Field(default=0.1, ge=0.0, lt=1.0, description="part of a target spread over all classes")
    mixup_alpha: float = Field(default=0.8, ge=0.0, description="mixup share from Beta(alpha, alpha); 0: no mixup")
    cutmix_alpha: float = Field(default=1.0, ge=0.0, description="CutMix share from Beta(alpha, alpha); 0: no CutMix")
    cutmix_probability: float = Field(default=0.5, ge=0.0, le=1.0, description="of CutMix where mixup is on too")
    erasing_probability: float = Field(default=0.25, ge=0.0, le=1.0, description="of noise in a rectangle of a view")

    @property
    def mixes(self) -> bool:
        return self.mixup_alpha > 0.0 or self.cutmix_alpha > 0.0


class Supervised(Method):
    min_global_views: int = 1

    def __init__(self, settings: SupervisedSettings, backbone: BackboneSettings, *, seed: int) -> None:
        super().__init__()
        self.settings = settings
        self.seed = seed
        self.has_drop_path = backbone.drop_path_rate > 0.0
        trained = build_backbone(backbone, seed=seed, drop_path_rate=backbone.drop_path_rate)
        self.encoder = Encoder(
            trained, seeded(seed, "classifier", lambda: _classifier(trained.dim, settings.num_classes))
        )

    def forward(self, views: ViewBatch, hyper: StepHyper) -> StepOutput:
        labels = self._labels(views, hyper).repeat(len(views.global_views))  # [G * B], in the order of the views
        targets = smoothed_targets(
            labels, num_classes=self.settings.num_classes, smoothing=self.settings.label_smoothing
        )
        images = self._erased(views, hyper)
        share = torch.ones((), device=images.device)
        if self.settings.mixes:
            mixture = self._mixture(images, hyper)
            images, targets, share = mix_images(images, mixture), mix_rows(targets, mixture.share), mixture.share
        keys = self.drop_path_keys(views, hyper, num_views=len(views.global_views))
        logits = self.encoder([images.reshape(views.global_views.shape)], keys).flatten(0, 1)
        # A label beyond the classes would silently count as none. The device cannot raise, but a NaN stops training.
        poison = torch.where((labels >= self.settings.num_classes).any(), torch.nan, 1.0)
        loss = soft_cross_entropy(logits, targets) * poison
        return StepOutput(loss=loss, metrics=_train_metrics(logits.detach(), labels, share), carry={})

    def _labels(self, views: ViewBatch, hyper: StepHyper) -> Tensor:  # -> [B] int64 on the device of the views
        labels = views.labels
        if labels is None:
            raise RecipeError("supervised training needs labels, but the images have none")
        # On the CPU, as the loader gives them, reading labels costs nothing; for a CUDA graph they are on the device.
        if labels.device.type == "cpu":
            self._refuse_wrong_labels(labels, is_first=isinstance(hyper.step, int) and hyper.step == 0)
        return labels.to(views.global_views.device, non_blocking=True)

    def _refuse_wrong_labels(self, labels: Tensor, *, is_first: bool) -> None:
        largest, num_classes = int(labels.max()), self.settings.num_classes
        if largest >= num_classes:
            raise RecipeError(
                f"an image has the label {largest}, but method.num_classes is {num_classes}; labels count from 0, "
                f"so it must be {largest + 1} or more"
            )
        if is_first and largest < 0:
            raise RecipeError(
                f"none of {len(labels):,} images has a label; supervised training needs a labelled data.source, "
                "such as a folder with one folder of images per class"
            )

    def _erased(self, views: ViewBatch, hyper: StepHyper) -> Tensor:  # -> [G * B, 3, H, W]
        images = views.global_views.flatten(0, 1)
        if self.settings.erasing_probability == 0.0:
            return images
        view_numbers = torch.arange(len(views.global_views), device=views.image_indices.device)[:, None]
        keys = keyed_random.bits(self.seed, "erasing", hyper.step, views.image_indices[None, :], view_numbers).flatten()
        noise_key = (self.seed, "erasing noise", hyper.step)
        return erase_rectangles(
            images, keys.to(images.device, non_blocking=True), noise_key, probability=self.settings.erasing_probability
        )

    def _mixture(self, images: Tensor, hyper: StepHyper) -> Mixture:
        return draw_mixture(
            self.seed,
            "mixing",
            hyper.step,
            size=(images.shape[2], images.shape[3]),
            mixup_alpha=self.settings.mixup_alpha,
            cutmix_alpha=self.settings.cutmix_alpha,
            cutmix_probability=self.settings.cutmix_probability,
            device=images.device,
        )

    def after_step(self, output: StepOutput, hyper: StepHyper) -> None:
        """There is no state besides the trained weights."""

    def backbone_to_evaluate(self) -> Backbone:
        return self.encoder.backbone

    def collapse_signs(self, metrics: Mapping[str, float]) -> list[str]:
        if metrics["labelled_share"] == 0.0:
            return ["none of the images of this step has a label"]
        loss, guessing = metrics["loss"] / metrics["labelled_share"], math.log(self.settings.num_classes)
        if loss > 0.995 * guessing:
            return [f"the loss {loss:.3f} is that of guessing (ln {self.settings.num_classes} = {guessing:.3f})"]
        return []

    def cautions(self, plan: TrainingPlan) -> list[str]:
        found = caution_on_unused_views(plan, "supervised")
        if plan.labels is not None:
            labels = plan.labels()
            self._refuse_wrong_labels(labels, is_first=True)
            num_unlabelled = int((labels < 0).sum())
            if num_unlabelled:
                found.append(f"{num_unlabelled:,} of {len(labels):,} images have no label and are not learnt from")
        if self.settings.mixes:
            found += caution_on_parts(plan, "supervised", "the partners of mixup and CutMix")
        return found


def _classifier(in_dim: int, num_classes: int) -> nn.Linear:
    classifier = nn.Linear(in_dim, num_classes)
    nn.init.trunc_normal_(classifier.weight, std=0.02)
    nn.init.zeros_(classifier.bias)
    return classifier


@torch.no_grad()
def _train_metrics(logits: Tensor, labels: Tensor, share: Tensor) -> dict[str, Tensor]:  # [R, C], [R], []
    """Accuracy in percent on the (mixed) training images, and the share of images with a label."""
    predicted = logits.argmax(dim=1)
    hits = share * (predicted == labels) + (1.0 - share) * (predicted == labels.flip(0))
    labelled = (labels >= 0).float().mean()
    return {"train_top1": 100.0 * hits.mean() / labelled.clamp_min(1e-9), "labelled_share": labelled}
