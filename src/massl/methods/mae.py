"""MAE: Masked Autoencoders Are Scalable Vision Learners (He, Chen, Xie, Li, Dollár and Girshick, CVPR 2022).

Each step, for every global view:
    kept        = a quarter of the patches, at random                  # new for each step, image and view
    tokens      = backbone(patches in kept, class token)               # hidden patches cost nothing here
    predictions = decoder(tokens at their places, mask tokens at all others)
    targets     = pixels of each patch, less their mean and over their standard deviation
    loss        = mean squared error over the hidden patches
There is one network, no teacher and no comparison of images, so nothing can collapse; a crop and a flip are enough.

The class token has no loss of its own; its feature is the one that is evaluated. Positions are fixed sines and cosines
in backbone and decoder, and weights are initialised as the authors do. With trainer.precision bf16, views are rounded
before they become targets, by at most 0.45 of an 8-bit level (the levels lie 0.017 apart).
"""

import functools
from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import normalize

from massl.config import RecipeError
from massl.data.views import ViewBatch
from massl.methods.base import (
    Method,
    MethodSettings,
    ModuleType,
    StepHyper,
    StepOutput,
    TrainingPlan,
    caution_on_unused_views,
    seeded,
)
from massl.nn.backbone import Backbone, BackboneSettings, build_backbone
from massl.nn.decoder import DecoderSettings, PatchDecoder
from massl.ops.block_masks import random_kept
from massl.ops.pixel_targets import cut_patches, hidden_patch_error, normalised_patches
from massl.ops.scoring.feature_health import embedding_spread

_NUM_COLOURS = 3


class MAESettings(MethodSettings):
    name: Literal["mae"] = "mae"
    hidden_share: float = Field(default=0.75, gt=0.0, lt=1.0, description="share of patches hidden from the backbone")
    normalise_targets: bool = Field(
        default=True, description="normalise the pixels of each patch before predicting them"
    )
    decoder: DecoderSettings = DecoderSettings()


class MAE(Method):
    min_global_views: int = 1

    def __init__(self, settings: MAESettings, backbone: BackboneSettings, *, seed: int) -> None:
        super().__init__()
        self.settings = settings
        self.seed = seed
        self.has_drop_path = backbone.drop_path_rate > 0.0
        self.backbone = build_backbone(backbone, seed=seed, drop_path_rate=backbone.drop_path_rate)
        if not isinstance(self.backbone.model, VisionTransformer):
            raise RecipeError(
                f"mae needs a vision transformer with position embeddings, which {backbone.name} is not; choose one "
                "(--backbone.name vit_small_patch16_224, or --init with weights of one) or another method"
            )
        self.backbone.fix_positions(first_axis="columns")
        seeded(seed, "mae backbone", functools.partial(_initialised, self.backbone.model))
        self.decoder = seeded(seed, "mae decoder", lambda: _initialised(self._decoder()))

    def _decoder(self) -> PatchDecoder:
        patch_embed = self.backbone.model.patch_embed
        return PatchDecoder(
            self.settings.decoder,
            in_dim=self.backbone.dim,
            out_dim=self.backbone.patch_size**2 * _NUM_COLOURS,
            grid=patch_embed.grid_size,  # type: ignore[union-attr, arg-type]
        )

    def forward(self, views: ViewBatch, hyper: StepHyper) -> StepOutput:
        num_views = len(views.global_views)
        images = views.global_views.flatten(0, 1)
        keys = self.drop_path_keys(views, hyper, num_views=num_views)
        kept = self.kept_patches(views, hyper).flatten(0, 1)
        tokens = self.backbone.visible(images, kept, None if keys is None else keys.flatten())
        fused, float32_stream = self.backbone.fused_kernels, self.backbone.float32_stream
        predictions = self.decoder(tokens, kept, self._grid(views), fused_kernels=fused, float32_stream=float32_stream)
        patches = cut_patches(images, self.backbone.patch_size)
        targets = normalised_patches(patches) if self.settings.normalise_targets else patches.float()
        return StepOutput(loss=hidden_patch_error(predictions, targets, kept), metrics={}, carry={})

    def kept_patches(self, views: ViewBatch, hyper: StepHyper) -> Tensor:  # -> [G, B, n] int64
        """Indices of the patches that the backbone sees, keyed by step, image and view."""
        height, width = self._grid(views)
        num_kept = int(height * width * (1.0 - self.settings.hidden_share))
        if num_kept == 0:
            raise RecipeError(
                f"method.hidden_share {self.settings.hidden_share} leaves none of {height} x {width} patches visible; "
                "lower it, raise views.global_size or lower backbone.patch_size"
            )
        return random_kept(
            (self.seed, "mae patches", hyper.step),
            views.image_indices,
            num_views=len(views.global_views),
            num_patches=height * width,
            num_kept=num_kept,
            device=views.global_views.device,
        )

    def _grid(self, views: ViewBatch) -> tuple[int, int]:
        return self.backbone.grid(views.global_views.shape[-1])

    def after_step(self, output: StepOutput, hyper: StepHyper) -> None:
        """There is no state besides the trained weights."""

    def backbone_to_evaluate(self) -> Backbone:
        return self.backbone

    def set_activation_checkpointing(self, enabled: bool) -> None:
        super().set_activation_checkpointing(enabled)
        self.decoder.activation_checkpointing = enabled  # it has four times the backbone's tokens

    def health(self, features: Tensor, hyper: StepHyper) -> dict[str, float]:
        return {"feature_spread": embedding_spread(normalize(features, dim=-1))}

    def collapse_signs(self, metrics: Mapping[str, float]) -> list[str]:
        signs = []
        if self.settings.normalise_targets and metrics["loss"] > 0.99:
            signs.append(
                f"the decoder predicts no more than the mean colour of each patch (loss {metrics['loss']:.3f} of 1)"
            )
        if metrics["feature_spread"] < 0.02:
            signs.append(f"all class tokens are nearly the same vector (spread {metrics['feature_spread']:.4f} of 1)")
        return signs

    def cautions(self, plan: TrainingPlan) -> list[str]:
        return caution_on_unused_views(plan, "mae")


@torch.no_grad()
def _initialised(module: ModuleType) -> ModuleType:
    """The authors' initial weights: Xavier-uniform, zero biases, tokens normal with 0.02.

    The patch embedding counts as a linear layer, but keeps PyTorch's bias of a convolution.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Conv2d):
            nn.init.xavier_uniform_(part.weight.view(len(part.weight), -1))
    for name, parameter in module.named_parameters():
        if name in ("cls_token", "reg_token", "mask_token"):
            nn.init.normal_(parameter, std=0.02)
    return module
