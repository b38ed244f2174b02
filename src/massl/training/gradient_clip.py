"""The gradient clip of DINO, iBOT and MaSSL."""

from collections.abc import Iterable

import torch
from torch import nn


@torch.no_grad()
def clip_each_gradient(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Scale each gradient tensor to at most `max_norm` by its own L2 norm, as the authors' code does; no host synchronisation."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients or max_norm == 0.0:
        return
    norms = torch.stack(torch._foreach_norm(gradients))
    factors = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, list(factors.unbind()))
