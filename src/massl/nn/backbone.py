"""Any timm model as a backbone: images in, one feature vector per image (and patch tokens, for transformers) out."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import timm
import torch
from pydantic import Field
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from massl import keyed_random
from massl.config import RecipeError, Settings, closest
from massl.nn.drop_path import KeyedDropPath, draw_scales, replace_drop_paths
from massl.nn.positions import resample_positions


class BackboneSettings(Settings):
    name: str = Field(default="vit_small_patch16_224", description="a timm model name, e.g. vit_small_patch16_224 or resnet50")
    image_size: int | None = Field(default=None, gt=0, description="side of the position grid in pixels (ViTs); default: the model's own")
    patch_size: int | None = Field(default=None, gt=0, description="patch side in pixels (ViTs); default: the model's own")
    drop_path_rate: float = Field(default=0.1, ge=0.0, lt=1.0, description="stochastic depth of the student, rising linearly over depth")
    timm_options: dict[str, int | float | bool | str] = Field(
        default_factory=dict, description="further timm.create_model arguments in a YAML recipe, e.g. {depth: 6, embed_dim: 192}"
    )

    def timm_arguments(self) -> dict[str, Any]:
        """What timm.create_model needs to build this backbone, without weights or classifier."""
        sizes = {"img_size": self.image_size, "patch_size": self.patch_size}
        given = {key: value for key, value in sizes.items() if value is not None}
        return {"model_name": self.name, "num_classes": 0, **given, **self.timm_options}


@dataclass(frozen=True, kw_only=True)
class Tokens:
    pooled: Tensor  # [B, D]: the CLS token after the final norm, or a network's pooled features
    patches: Tensor | None  # [B, N, D] after the final norm; None where there are no patch tokens


class Backbone(nn.Module):
    """Wraps a timm model without changing it: `backbone.model` is the plain timm module, state dict and all.

    Vision transformers take images of any size: position embeddings are resampled as DINO does, and pixels beyond the last whole
    patch are left out. Other networks give their pooled features.
    """

    def __init__(self, model: nn.Module, *, timm_arguments: Mapping[str, Any]) -> None:
        super().__init__()
        _refuse_unknown_transformer(model)
        self.model = model
        self.timm_arguments = dict(timm_arguments)  # what builds an empty copy of the model
        self.dim = int(model.head_hidden_size)  # type: ignore[arg-type]  # of features before a classifier; num_features may be another
        self.activation_checkpointing = False
        self._drop_paths = replace_drop_paths(model)

    def forward(self, images: Tensor, sample_keys: Tensor | None = None) -> Tokens:  # [B, 3, H, W], [B] int64
        """Features of the images. `sample_keys` switches stochastic depth on and decides its coin flips."""
        scales = None if sample_keys is None or not self._drop_paths else draw_scales(self._drop_paths, sample_keys)
        if isinstance(self.model, VisionTransformer):
            return self._transformer_tokens(self.model, images, scales)
        self._set_scales(self.model, scales)
        return Tokens(pooled=self.model(images), patches=None)

    def _transformer_tokens(self, model: VisionTransformer, images: Tensor, scales: Tensor | None) -> Tokens:
        tokens = model.norm_pre(_embed_patches(model, images))
        for block in model.blocks:
            if self.activation_checkpointing and torch.is_grad_enabled():
                tokens = checkpoint(self._run_block, block, tokens, scales, use_reentrant=False)
            else:
                tokens = self._run_block(block, tokens, scales)
        tokens = model.norm(tokens)
        num_prefix = model.num_prefix_tokens
        pooled = tokens[:, 0] if model.cls_token is not None else tokens[:, num_prefix:].mean(dim=1)
        return Tokens(pooled=model.fc_norm(pooled), patches=tokens[:, num_prefix:])

    def _run_block(self, block: nn.Module, tokens: Tensor, scales: Tensor | None) -> Tensor:
        # Inside the checkpointed function, so that the recomputation in the backward pass sees the same coin flips.
        self._set_scales(block, scales)
        return block(tokens)  # type: ignore[no-any-return]

    def _set_scales(self, part: nn.Module, scales: Tensor | None) -> None:
        for module in part.modules():
            if isinstance(module, KeyedDropPath):
                module.scales = None if scales is None else scales[module.layer]

    def compile_blocks(self) -> None:
        """Compile each transformer block in place (other networks as a whole); state dict and results stay the same."""
        for block in self.model.blocks if isinstance(self.model, VisionTransformer) else [self.model]:
            block.compile(dynamic=False)

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """Recompute each transformer block in the backward pass instead of keeping its activations."""
        if enabled and not isinstance(self.model, VisionTransformer):
            raise RecipeError(
                "activation checkpointing is available for vision transformers; set trainer.activation_checkpointing to false"
            )
        self.activation_checkpointing = enabled


def _refuse_unknown_transformer(model: nn.Module) -> None:
    """Transformers whose features would differ between this wrapper and the plain timm model that users receive."""
    if not isinstance(model, VisionTransformer):
        return
    if model.attn_pool is not None or (model.cls_token is not None and model.global_pool != "token"):
        raise RecipeError(
            "this vision transformer pools its patch tokens; massl trains the class token. Choose one with global_pool 'token', "
            "e.g. vit_small_patch16_224, or set it in backbone.timm_options"
        )
    if isinstance(model, VisionTransformerDistilled):
        raise RecipeError("distilled transformers carry a second class token, which massl does not train; choose the plain model")


def _embed_patches(model: VisionTransformer, images: Tensor) -> Tensor:  # [B, 3, H, W] -> [B, prefix + patches, D]
    grid = model.patch_embed.proj(images)
    height, width = grid.shape[-2:]
    patches = model.patch_embed.norm(grid.flatten(2).transpose(1, 2))
    prefix = [token.expand(images.shape[0], -1, -1) for token in (model.cls_token, model.reg_token) if token is not None]
    if model.pos_embed is None:
        return torch.cat([*prefix, patches], dim=1)
    num_prefix_positions = 0 if model.no_embed_class else model.num_prefix_tokens
    positions = resample_positions(model.pos_embed[:, num_prefix_positions:], height, width)
    positions = torch.cat([model.pos_embed[:, :num_prefix_positions], positions], dim=1)
    if model.no_embed_class:
        return torch.cat([*prefix, patches + positions], dim=1)
    return torch.cat([*prefix, patches], dim=1) + positions


def build_backbone(settings: BackboneSettings, *, seed: int, drop_path_rate: float = 0.0) -> Backbone:
    """A freshly initialised backbone: the same weights for the same seed, whatever was drawn before."""
    model = create_timm_model(settings.timm_arguments(), drop_path_rate=drop_path_rate, seed=seed)
    if isinstance(model, VisionTransformer) and model.cls_token is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(keyed_random.seed_from(seed, "cls token"))
            nn.init.trunc_normal_(model.cls_token, std=0.02)  # timm starts it at 1e-6
    return Backbone(model, timm_arguments=settings.timm_arguments())


def create_timm_model(arguments: Mapping[str, Any], *, drop_path_rate: float = 0.0, seed: int = 0) -> nn.Module:
    """timm.create_model with errors that say what to type instead."""
    options = {key: value for key, value in arguments.items() if key != "model_name"}
    if drop_path_rate > 0.0:
        options["drop_path_rate"] = drop_path_rate
    name = arguments["model_name"]
    if not timm.is_model(name):
        raise RecipeError(f"timm has no model {name!r}.{closest(name, timm.list_models())} `timm.list_models()` lists them all.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed_random.seed_from(seed, "backbone"))
        try:
            return timm.create_model(name, **options)
        except (TypeError, AssertionError) as error:
            raise RecipeError(f"timm cannot build {name} with {json.dumps(options)}: {error}") from error
