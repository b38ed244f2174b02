"""The device memory of a training step, by count; `trial.py` measures it where there is a GPU."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from massl.config import RecipeError
from massl.nn.backbone import Backbone
from massl.nn.timm_models import create_timm_model

# Bytes kept for the backward pass, for each token, channel and block. Fused: the H200's 9.8, 10.8 and 10.6 GiB
# (docs/performance.md, docs/results/imagenette.md) give 20 to 23. The official code under autocast has 23.3 GiB where
# fused kernels have 9.8. Plain float32: counted in timm's blocks.
_BYTES: Final = {("fused", "bf16"): 21.0, ("plain", "bf16"): 52.0, ("plain", "fp32"): 84.0}
_BYTES_PER_WEIGHT: Final = 20  # student: weight, gradient, two averages of AdamW; the teacher
# Other networks, times what autograd keeps in float32. Measured: a ResNet-10 on a CPU, 1.2, 1.9 and 2.9 GiB at batch
# 128, 512 and 1,024, and a ResNet-18 on an H200, 3.2 GiB (docs/results/lightly-cifar10.md).
_OTHER_SHARE: Final = {"fp32": 1.35, "bf16": 0.6}
_FIXED_GIB: Final = {"cuda": 0.2, "cpu": 1.0}  # the libraries' own
_DIMENSIONS: Final = {"tiny": 192, "small": 384, "base": 768, "large": 1024}
_DEPTH: Final = {"large": 24}
_NAME: Final = re.compile(r"vit_(tiny|small|base|large)_patch(\d+)_\d+")


def num_weights(values: Mapping[str, Any]) -> int | None:
    """Weights of the student, by the dotted values of a recipe; None for networks that cannot be counted."""
    hidden, out = int(values.get("method.head.hidden_dim", 2048)), int(values.get("method.head.out_dim", 256))
    if shape := _shape(values):
        dim, depth, patch = shape
        weights = 12 * depth * dim**2 + dim * (3 * patch**2 + _tokens(int(values["views.global_size"]), patch))
    elif network := _network(values, int(values["views.global_size"])):
        dim, weights = network.dim, network.num_weights
    else:
        return None
    return weights + dim * hidden + hidden**2 + hidden * out


def computed_gib(values: Mapping[str, Any], *, device_kind: str, num_processes: int = 1) -> float | None:
    """GiB of one process, by the dotted values of a recipe; None for networks that cannot be counted."""
    weights = num_weights(values)
    sizes = [int(values["views.global_size"])] * int(values["views.num_global"])
    sizes += [int(values["views.local_size"])] * int(values["views.num_local"])
    kept = _kept_bytes(values, sizes, device_kind)
    if kept is None or weights is None:
        return None
    images = int(values["trainer.batch_size"]) / int(values.get("trainer.accumulation_steps", 1)) / num_processes
    pixels = sum(3 * size**2 for size in sizes) * 2 * 2
    rows = int(values.get("method.memory.num_rows", 0)) * int(values.get("method.head.out_dim", 256)) * 4 * 2
    total = images * (kept + pixels) + rows + weights * _BYTES_PER_WEIGHT
    return total / 2**30 + _FIXED_GIB[device_kind]


def _kept_bytes(values: Mapping[str, Any], sizes: list[int], device_kind: str) -> float | None:
    """Kept for the backward pass, for the views of one image."""
    precision, shape = str(values["trainer.precision"]), _shape(values)
    if shape is None:
        networks = [_network(values, size) for size in sizes]
        return (
            None
            if None in networks
            else _OTHER_SHARE[precision] * sum(network.kept_bytes for network in networks if network)
        )
    dim, depth, patch = shape
    is_fused = device_kind == "cuda" and precision == "bf16" and values.get("trainer.kernels", "fused") == "fused"
    kept = _BYTES["fused" if is_fused else "plain", precision] * depth
    if values.get("trainer.activation_checkpointing"):
        kept = _BYTES["fused" if is_fused else "plain", precision] * 2 + 4 * depth
    return kept * dim * sum(_tokens(size, patch) for size in sizes)


def checkpoint_gib(values: Mapping[str, Any]) -> float | None:
    """One checkpoint: student, teacher and AdamW's two averages in float32, and the memory."""
    weights = num_weights(values)
    if weights is None:
        return None
    rows = int(values.get("method.memory.num_rows", 0)) * int(values.get("method.head.out_dim", 256))
    return (16 * weights + 4 * rows) / 2**30


def _shape(values: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Dimension, depth and patch of a plain ViT."""
    name = _NAME.match(str(values["backbone.name"]))
    if name is None:
        return None
    options = values.get("backbone.timm_options") or {}
    dim = int(options.get("embed_dim", _DIMENSIONS[name[1]]))
    depth = int(options.get("depth", _DEPTH.get(name[1], 12)))
    return dim, depth, int(values.get("backbone.patch_size") or name[2])


def _tokens(size: int, patch: int) -> int:
    return (size // patch) ** 2 + 1


@dataclass(frozen=True, kw_only=True)
class _Network:
    """What one image costs in a network, in float32."""

    dim: int
    num_weights: int
    kept_bytes: int


def _network(values: Mapping[str, Any], size: int) -> _Network | None:
    given = {"img_size": values.get("backbone.image_size"), "patch_size": values.get("backbone.patch_size")}
    given |= {"model_name": values["backbone.name"], "stem": values.get("backbone.stem") or None, "num_classes": 0}
    given |= values.get("backbone.timm_options") or {}
    return _counted(json.dumps({key: value for key, value in given.items() if value is not None}), size)


@cache
def _counted(arguments: str, size: int) -> _Network | None:
    """Pass an image without memory through the network; what autograd keeps is counted once, and no weights."""
    try:
        with torch.device("meta"):
            model = create_timm_model(json.loads(arguments)).train()
            backbone = Backbone(model, timm_arguments={})
    except RecipeError:
        return None  # training explains it
    kept: dict[int, Tensor] = {}
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            features = backbone.pooled([torch.empty(2, 3, size, size, device="meta")])
    except (RuntimeError, AssertionError, NotImplementedError):  # without memory, or at this size, it cannot run
        return None
    return _Network(
        dim=features.shape[1],
        num_weights=sum(weight.numel() for weight in model.parameters()),
        kept_bytes=sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in own) // 2,
    )
