"""Backbones as files: safetensors with plain timm keys, and all that is needed to build the model in the metadata."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import nn

from massl.config import MasslError
from massl.nn.backbone import create_timm_model

BACKBONE_FILE = "backbone.safetensors"


class WeightsError(MasslError, ValueError):
    """A weights file is missing or not what it should be; the message says what to do."""


def backbone_bytes(model: nn.Module, *, timm_arguments: Mapping[str, Any], mean: tuple[float, ...], std: tuple[float, ...]) -> bytes:
    """The file content for a timm model."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    metadata = {"format": "pt", "timm": json.dumps(dict(timm_arguments)), "mean": json.dumps(mean), "std": json.dumps(std)}
    return safetensors.torch.save(tensors, metadata)


def load_backbone(run: str | Path) -> nn.Module:
    """The pre-trained teacher backbone of a run (its folder, or the .safetensors file itself) as a plain timm model in eval mode.

    `model(images)` gives the features; `model.default_cfg` holds the mean and std its images are normalised with. Vision transformers
    accept images of any size that is a multiple of the patch.
    """
    path = Path(run).expanduser()
    if path.is_dir():
        path = path / BACKBONE_FILE
    if not path.is_file():
        raise WeightsError(f"{path} does not exist; give the folder of a massl run that has saved a checkpoint, or its {BACKBONE_FILE}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        tensors = safetensors.torch.load_file(path)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"cannot read {path}: {error}") from error
    if "timm" not in metadata:
        raise WeightsError(f"{path} was not written by massl: it does not say which timm model it belongs to")
    arguments = json.loads(metadata["timm"])
    if "pos_embed" in tensors:
        arguments["dynamic_img_size"] = True
    model = create_timm_model(arguments)
    model.load_state_dict(tensors, strict=True)
    model.default_cfg.update(mean=tuple(json.loads(metadata["mean"])), std=tuple(json.loads(metadata["std"])))  # type: ignore[operator, union-attr]
    return model.eval()
