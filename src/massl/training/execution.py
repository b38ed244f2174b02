"""Chooses how training steps are computed (fused kernels, torch.compile, plain; CUDA graph) on this device."""

import os
import shutil
from dataclasses import dataclass
from typing import Literal

import torch

from massl import distributed
from massl.config import RecipeError
from massl.methods.base import Method

# torch.compile needs a C compiler for the GPU (Triton) and a C++ compiler for the CPU (Inductor); the environment
# variable names another one.
_COMPILERS = {"cuda": ("CC", "C", ("gcc", "clang", "cc")), "cpu": ("CXX", "C++", ("g++", "clang++"))}


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the steps of a run are computed."""

    networks: str  # in words, with the reason if it is not what was requested
    cuda_graph: bool


def choose_execution(
    method: Method,
    *,
    kernels: Literal["fused", "compiled", "plain"],
    bf16: bool,
    float32_stream: bool,
    cuda_graph: bool,
    device: torch.device,
) -> Execution:
    """Prepare the backbones for the requested kernels, as far as device and networks allow."""
    networks: str = kernels
    backbones = method.backbones()
    if kernels == "compiled":
        _require_compiler(device)
        for backbone in backbones:
            backbone.compile_blocks()
    elif kernels == "fused":
        reasons = {backbone.use_fused_kernels(float32_stream=float32_stream) for backbone in backbones}
        if device.type != "cuda" or not bf16:
            reasons = {"fused ones need a GPU and bf16"}
        because = "; ".join(sorted(reason for reason in reasons if reason))
        is_slower = device.type == "cuda" and bf16 and all(backbone.is_transformer for backbone in backbones)
        plain = f"plain{', which is slower' if is_slower else ''} ({because})"
        networks = plain if because else f"fused, {'fp32' if float32_stream else 'bf16'} residual stream"
    for backbone in backbones:
        if not backbone.is_transformer:
            backbone.use_channels_last()
    can_record = device.type == "cuda" and distributed.world_size() == 1
    return Execution(networks=networks, cuda_graph=cuda_graph and can_record)


def _require_compiler(device: torch.device) -> None:
    """Fail before the first step with one sentence, where torch.compile would print a page of its own calls."""
    variable, language, names = _COMPILERS[device.type]
    named = os.environ.get(variable)
    if not any(shutil.which(name) for name in ([named] if named else names)):
        searched = f"{variable}={named}" if named else ", ".join(names)
        raise RecipeError(
            f"trainer.kernels compiled needs a {language} compiler, but none was found (searched: {searched}); "
            "install one, or set trainer.kernels to plain or fused"
        )


def peak_memory(device: torch.device) -> dict[str, float]:
    """The entry of a row of metrics: most memory of all tensors on a GPU; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    return {"peak_memory_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 3)}
