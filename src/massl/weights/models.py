"""A model to evaluate, however the user names it: a run of massl, a weights file, or a timm model."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from massl.nn.backbone import Backbone


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A backbone in eval mode, and what evaluations must know about it."""

    backbone: Backbone
    name: str  # as the user named it
    origin: str  # what was loaded, in words: "teacher of runs/a", "timm weights ...", "random weights"
    fingerprint: str  # of architecture and weights: equal exactly when features are
    image_size: int  # side of the images it was made for
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def architecture(self) -> str:
        """`ViT-S/16` where the model has that shape, so that published figures can stand beside ours; else timm's name."""
        model = self.backbone.model
        if isinstance(model, VisionTransformer):
            size = {384: "S", 768: "B", 192: "Ti", 1024: "L"}.get(model.embed_dim)
            if size is not None and len(model.blocks) == (24 if size == "L" else 12):
                return f"ViT-{size}/{model.patch_embed.patch_size[0]}"
        return str(self.backbone.timm_arguments["model_name"])


def model_fingerprint(model: nn.Module, *, arguments: dict[str, object]) -> str:
    """Digest of what decides a model's output: how it is built and every number in it."""
    digest = hashlib.sha256(json.dumps(arguments, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def open_model(name: str | Path, *, num_heads: int | None = None, pretrained: bool | None = None) -> LoadedModel:
    """The model that `name` stands for."""
    raise NotImplementedError
