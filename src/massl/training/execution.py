"""What computes the steps of a run, as far as its device and its networks allow."""

import os
import shutil
from dataclasses import dataclass
from typing import Literal

import torch
from timm.models.vision_transformer import VisionTransformer

from massl import distributed
from massl.config import RecipeError
from massl.methods.base import Method

# What torch.compile calls: Triton a C compiler for the GPU, Inductor a C++ compiler for the CPU; the variable names
# another one.
_COMPILERS = {"cuda": ("CC", "C", ("gcc", "clang", "cc")), "cpu": ("CXX", "C++", ("g++", "clang++"))}


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What computes the steps of a run."""

    networks: str  # in words, with the reason where it is not what was asked for
    cuda_graph: bool


def choose_kernels(
    method: Method,
    *,
    wanted: Literal["fused", "compiled", "plain"],
    bf16: bool,
    float32_stream: bool,
    cuda_graph: bool,
    device: torch.device,
) -> Kernels:
    """Prepare the backbones for the kernels that are wanted."""
    networks: str = wanted
    backbones = method.backbones()
    if wanted == "compiled":
        _require_compiler(device)
        for backbone in backbones:
            backbone.compile_blocks()
    elif wanted == "fused":
        reasons = {backbone.use_fused_kernels(float32_stream=float32_stream) for backbone in backbones}
        if device.type != "cuda" or not bf16:
            reasons = {"they need a GPU and bf16"}
        stream = "fp32" if float32_stream else "bf16"
        because = "; ".join(sorted(reason for reason in reasons if reason))
        networks = f"plain ({because})" if because else f"fused, {stream} residual stream"
    if device.type == "cuda":
        for backbone in backbones:
            if not isinstance(backbone.model, VisionTransformer):
                backbone.use_channels_last()
    return Kernels(networks=networks, cuda_graph=cuda_graph and device.type == "cuda" and distributed.world_size() == 1)


def _require_compiler(device: torch.device) -> None:
    """Say it before the first step, where torch.compile would fail with a page of its own calls."""
    variable, language, names = _COMPILERS[device.type]
    named = os.environ.get(variable)
    if not any(shutil.which(name) for name in ([named] if named else names)):
        looked_for = f"{named} of {variable}" if named else ", ".join(names)
        raise RecipeError(
            f"trainer.kernels compiled needs a {language} compiler, and none was found ({looked_for}); install one, or set "
            "trainer.kernels to plain or fused"
        )
