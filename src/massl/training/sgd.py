"""SGD with momentum, for convolutional networks, on the same terms as AdamW."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from massl.methods.base import StepHyper
from massl.training.gradient_clip import clip_each_gradient
from massl.training.portable_state import PortableState


class DecayedSGD(PortableState, SGD):
    """SGD with momentum (torch's: the decay joins the gradient before the running sum) on gradients clipped tensor by tensor.

    Learning rate and decay may be tensors, so that a CUDA graph reads them anew at each step. `set_hyper` must be called before each step.
    """

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float, clip_norm: float) -> None:
        super().__init__(groups, lr=0.0, momentum=momentum)
        self._clip_norm = clip_norm

    def set_hyper(self, hyper: StepHyper) -> None:
        self._hyper = hyper

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters: list[Tensor] = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            clip_each_gradient(group["params"], self._clip_norm)
            gradients: list[Tensor] = [parameter.grad for parameter in parameters if parameter.grad is not None]
            device = parameters[0].device
            if group["decays"]:
                torch._foreach_add_(gradients, list(torch._foreach_mul(parameters, _scalar(self._hyper.weight_decay, device))))
            sums = [self._running_sum(parameter) for parameter in parameters]
            torch._foreach_mul_(sums, group["momentum"])
            torch._foreach_add_(sums, gradients)
            torch._foreach_sub_(parameters, list(torch._foreach_mul(sums, _scalar(self._hyper.learning_rate, device))))

    def _running_sum(self, parameter: Tensor) -> Tensor:
        state: dict[str, Tensor] = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)  # torch's first sum, the gradient itself, comes out of it too
        return state["momentum_buffer"]


def _scalar(value: float | Tensor, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32, device=device)
