"""The device memory of a training step, by count; `trial.py` measures it where there is a GPU."""

import re
from collections.abc import Mapping
from typing import Any, Final

# Bytes kept for the backward pass, for each token, channel and block. Fused: the H200's 9.8, 10.8 and 10.6 GiB
# (docs/performance.md, docs/results/imagenette.md) give 20 to 23. The official code under autocast has 23.3 GiB where
# fused kernels have 9.8. Plain float32: counted in timm's blocks.
_BYTES: Final = {("fused", "bf16"): 21.0, ("plain", "bf16"): 52.0, ("plain", "fp32"): 84.0}
_BYTES_PER_WEIGHT: Final = 20  # student: weight, gradient, two averages of AdamW; the teacher
_FIXED_GIB: Final = {"cuda": 0.2, "cpu": 0.5}  # the libraries' own
_DIMENSIONS: Final = {"tiny": 192, "small": 384, "base": 768, "large": 1024}
_DEPTH: Final = {"large": 24}
_NAME: Final = re.compile(r"vit_(tiny|small|base|large)_patch(\d+)_\d+")


def num_weights(values: Mapping[str, Any]) -> int | None:
    """Weights of the student, by the dotted values of a recipe; None for networks other than plain ViTs."""
    shape = _shape(values)
    if shape is None:
        return None
    dim, depth, patch = shape
    tokens = _tokens(int(values["views.global_size"]), patch)
    hidden, out = int(values.get("method.head.hidden_dim", 2048)), int(values.get("method.head.out_dim", 256))
    return 12 * depth * dim**2 + dim * (3 * patch**2 + tokens) + dim * hidden + hidden**2 + hidden * out


def computed_gib(values: Mapping[str, Any], *, device_kind: str, num_processes: int = 1) -> float | None:
    """GiB of one process, by the dotted values of a recipe; None for networks other than plain ViTs."""
    shape, weights = _shape(values), num_weights(values)
    if shape is None or weights is None:
        return None
    dim, depth, patch = shape
    sizes = [int(values["views.global_size"])] * int(values["views.num_global"])
    sizes += [int(values["views.local_size"])] * int(values["views.num_local"])
    tokens = sum(_tokens(size, patch) for size in sizes)
    images = int(values["trainer.batch_size"]) / int(values.get("trainer.accumulation_steps", 1)) / num_processes
    precision = str(values["trainer.precision"])
    is_fused = device_kind == "cuda" and precision == "bf16" and values.get("trainer.kernels", "fused") == "fused"
    kept = _BYTES["fused" if is_fused else "plain", precision] * depth
    if values.get("trainer.activation_checkpointing"):
        kept = _BYTES["fused" if is_fused else "plain", precision] * 2 + 4 * depth
    pixels = sum(3 * size**2 for size in sizes) * images * 2 * 2
    rows = int(values.get("method.memory.num_rows", 0)) * int(values.get("method.head.out_dim", 256)) * 4 * 2
    total = images * tokens * dim * kept + pixels + rows + weights * _BYTES_PER_WEIGHT
    return total / 2**30 + _FIXED_GIB[device_kind]


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
