"""AdamW with the method's parameter groups, and the gradient clip that goes with it."""

from collections.abc import Iterable
from typing import Annotated

import torch
from pydantic import Field
from torch import nn
from torch.optim import AdamW

from massl.config import Settings
from massl.methods.base import StepHyper


class OptimizerSettings(Settings):
    learning_rate: float = Field(
        default=5e-4, gt=0.0, description="peak learning rate for a batch of 256; scaled linearly with trainer.batch_size"
    )
    min_learning_rate: float = Field(default=1e-6, ge=0.0, description="where the cosine ends; not scaled")
    warmup_epochs: float = Field(default=0.0, ge=0.0, description="epochs of linear warm-up from 0")
    weight_decay: float = Field(default=0.04, ge=0.0, description="at the first step; follows a cosine to weight_decay_end")
    weight_decay_end: float = Field(default=0.4, ge=0.0, description="weight decay at the last step")
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = Field(
        default=(0.9, 0.999), description="AdamW's running-average coefficients"
    )
    clip_norm: float = Field(default=3.0, ge=0.0, description="largest gradient norm of each tensor on its own; 0 switches clipping off")

    def peak_learning_rate(self, batch_size: int) -> float:
        return self.learning_rate * batch_size / 256.0


def build_optimizer(module: nn.Module, settings: OptimizerSettings) -> AdamW:
    """Weight decay on every tensor with two or more axes (cls_token and pos_embed too), none on biases and norms."""
    decayed: list[nn.Parameter] = []
    not_decayed: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            (not_decayed if parameter.dim() <= 1 or name.endswith(".bias") else decayed).append(parameter)
    groups = [{"params": decayed, "decays": True}, {"params": not_decayed, "weight_decay": 0.0, "decays": False}]
    return AdamW(groups, lr=0.0, betas=settings.betas, eps=1e-8, fused=True)


def set_hyper(optimizer: AdamW, hyper: StepHyper) -> None:
    for group in optimizer.param_groups:
        group["lr"] = hyper.learning_rate
        group["weight_decay"] = hyper.weight_decay if group["decays"] else 0.0


@torch.no_grad()
def clip_each_gradient(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Scale each gradient tensor to at most `max_norm` by its own L2 norm, as the authors' code does; no host synchronisation."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients or max_norm == 0.0:
        return
    norms = torch.stack(torch._foreach_norm(gradients))
    factors = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, list(factors.unbind()))
