"""Optimizers: settings, AdamW and SGD, both with gradients clipped tensor by tensor and a state any device can load."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from massl.config import Settings
from massl.methods.base import StepHyper
from massl.ops.kernel_fit import fits_update_kernels

_TOKENS = ("cls_token", "pos_embed", "reg_token", "mask_token")


class OptimizerSettings(Settings):
    name: Literal["adamw", "sgd"] = Field(default="adamw", description="adamw, or sgd with momentum, usual for ResNets")
    learning_rate: float = Field(
        default=5e-4,
        gt=0.0,
        description="peak learning rate for a batch of 256; scaled linearly with trainer.batch_size",
    )
    min_learning_rate: float = Field(default=1e-6, ge=0.0, description="where the cosine ends; not scaled")
    warmup_epochs: float = Field(default=0.0, ge=0.0, description="epochs of linear warm-up from 0")
    weight_decay: float = Field(default=0.04, ge=0.0, description="at the first step; a cosine to weight_decay_end")
    weight_decay_end: float = Field(default=0.4, ge=0.0, description="weight decay at the last step")
    decayed: Literal["matrices", "layers", "all"] = Field(
        default="matrices",
        description="what decays. matrices: all but biases and norms; layers: of those, not the tokens and position "
        "embeddings; all: everything",
    )
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = Field(
        default=(0.9, 0.999), description="AdamW's running-average coefficients"
    )
    momentum: float = Field(default=0.9, ge=0.0, lt=1.0, description="SGD's momentum")
    clip_norm: float = Field(default=3.0, ge=0.0, description="largest gradient norm of each tensor; 0: no clipping")

    @model_validator(mode="after")
    def _settings_of_one_optimiser(self) -> Self:
        foreign = "momentum" if self.name == "adamw" else "betas"
        if getattr(self, foreign) != type(self).model_fields[foreign].default:
            raise ValueError(f"{foreign} has no meaning for {self.name}; leave it out")
        return self

    def peak_learning_rate(self, batch_size: int) -> float:
        return self.learning_rate * batch_size / 256.0


def build_optimizer(
    module: nn.Module, settings: OptimizerSettings, *, rate_scales: Mapping[str, float] | None = None
) -> "DecayedAdamW | DecayedSGD":
    """An optimizer over the trained parameters, in two groups: with weight decay and without.

    `rate_scales`, by parameter name, are factors on the learning rate; there are then two groups for each factor.
    """
    groups = [group for scale in sorted({1.0, *(rate_scales or {}).values()}) for group in _two_groups(scale)]
    if not rate_scales:
        groups = [{key: value for key, value in group.items() if key != "rate_scale"} for group in groups]
    by_kind = {(group["decays"], group.get("rate_scale", 1.0)): group for group in groups}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            kind = (_decays(name, parameter, settings.decayed), (rate_scales or {}).get(name, 1.0))
            by_kind[kind]["params"].append(parameter)
    if settings.name == "sgd":
        return DecayedSGD(groups, momentum=settings.momentum, clip_norm=settings.clip_norm)
    on_gpu = any(parameter.is_cuda for parameter in module.parameters())
    return DecayedAdamW(groups, betas=settings.betas, clip_norm=settings.clip_norm, capturable=on_gpu)


def _two_groups(rate_scale: float) -> list[dict[str, Any]]:
    return [{"params": [], "decays": decays, "rate_scale": rate_scale} for decays in (True, False)]


def _decays(name: str, parameter: nn.Parameter, decayed: str) -> bool:
    if decayed == "all":
        return True
    is_matrix = parameter.dim() > 1 and not name.endswith(".bias")
    return is_matrix and not (decayed == "layers" and name.rpartition(".")[2] in _TOKENS)


class PortableState(Optimizer):
    """An optimizer whose saved state leaves out the values of this device and step: learning rate, `capturable`."""

    _norms: Tensor | None = None  # of this step's gradients
    _is_finite: Tensor | None = None

    def gradients_are_finite(self, *, decide: bool = True) -> Tensor:  # -> [] bool, on the device: no wait
        """Whether all gradients are finite. `step` uses the norms; if they `decide`, it does nothing unless finite."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not gradients:
            return torch.ones((), dtype=torch.bool)
        self._norms = torch.stack(torch._foreach_norm(gradients))
        is_finite = self._norms.isfinite().all()
        self._is_finite = is_finite if decide else None
        return is_finite

    def _take_norms(self, gradients: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Norms [N] of all gradients, and whether they are finite where `gradients_are_finite` was asked."""
        norms, is_finite = self._norms, self._is_finite
        self._norms = self._is_finite = None
        return (torch.stack(torch._foreach_norm(gradients)) if norms is None else norms), is_finite

    def portable_state(self) -> dict[str, Any]:
        state = self.state_dict()
        own = ("lr", "capturable")
        groups = [{key: value for key, value in group.items() if key not in own} for group in state["param_groups"]]
        return {"state": state["state"], "param_groups": groups}

    def load_portable_state(self, state: dict[str, Any]) -> None:
        present = self.state_dict()["param_groups"]
        groups = [{**now, **saved} for now, saved in zip(present, state["param_groups"], strict=True)]
        # A copy: torch keeps the given tensors themselves, and later steps would change them for the caller too.
        self.load_state_dict({"state": deepcopy(state["state"]), "param_groups": groups})


class DecayedAdamW(PortableState, AdamW):
    """AdamW (Loshchilov and Hutter, 2019) on gradients clipped tensor by tensor, with weight decay as a separate step.

    torch's fused step takes the decay as a plain number, which a CUDA graph would never update; as a factor on the
    weights it may be a tensor. On a GPU, clipping, decay and update are one kernel, and the gradients are not changed.
    The state is torch's in both cases, so a checkpoint moves between them. Call `set_hyper` before each step.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, betas: tuple[float, float], clip_norm: float, capturable: bool
    ) -> None:
        super().__init__(groups, lr=0.0, betas=betas, eps=1e-8, weight_decay=0.0, fused=True, capturable=capturable)
        self._clip_norm = clip_norm

    def set_hyper(self, hyper: StepHyper) -> None:
        self._hyper = hyper
        for group in self.param_groups:
            group["lr"] = hyper.learning_rate * group["rate_scale"] if "rate_scale" in group else hyper.learning_rate

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        pairs = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        parameters = [parameter for parameter, _ in pairs]
        gradients = [parameter.grad for parameter in parameters]
        states = [self.state[parameter] for parameter in parameters if self.state[parameter]]
        averages = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
        if not gradients:
            return
        norms, is_finite = self._take_norms(gradients)
        if fits_update_kernels([*parameters, *gradients, *averages]):
            self._step_by_kernel(parameters, gradients, [group for _, group in pairs], norms, is_finite)
            return
        clip_each_gradient(parameters, self._clip_norm, norms)
        for group in self.param_groups:
            decayed = [parameter for parameter in group["params"] if parameter.grad is not None and group["decays"]]
            shrink = 1.0 - group["lr"] * self._hyper.weight_decay
            if decayed:
                torch._foreach_mul_(decayed, shrink.float() if isinstance(shrink, Tensor) else shrink)
        super().step(closure)

    def _step_by_kernel(
        self,
        parameters: list[nn.Parameter],
        gradients: list[Tensor],
        groups: list[dict[str, Any]],  # of each parameter
        norms: Tensor,
        is_finite: Tensor | None,
    ) -> None:
        """If gradients are not finite, the kernel changes nothing."""
        from massl.ops.kernels.update import clipped_adamw_  # imported here: needs Triton, which only GPU builds have

        states = [self.state_of(parameter) for parameter in parameters]
        steps = [state["step"] for state in states]
        if is_finite is None:
            torch._foreach_add_(steps, 1.0)
        else:
            # a list: a single tensor may be read by the host, which a recorded CUDA graph must not
            torch._foreach_add_(steps, [is_finite.float()] * len(steps))
        group = groups[0]  # betas and epsilon are the same in all groups
        clipped_adamw_(
            parameters,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            steps,
            norms if self._clip_norm > 0.0 else None,
            [own["decays"] for own in groups],
            rate_scales=[own["rate_scale"] for own in groups] if "rate_scale" in group else None,
            learning_rate=self._hyper.learning_rate,
            weight_decay=self._hyper.weight_decay,
            betas=group["betas"],
            epsilon=group["eps"],
            max_norm=self._clip_norm,
            applies=is_finite,
        )

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state of a parameter; before its first step it is created as torch would."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state


class DecayedSGD(PortableState, SGD):
    """torch's SGD with momentum (the decay is added to the gradient) on gradients clipped tensor by tensor.

    Learning rate and decay may be tensors, so that a CUDA graph reads new values at each step. Call `set_hyper` before
    each step.
    """

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float, clip_norm: float) -> None:
        super().__init__(groups, lr=0.0, momentum=momentum)
        self._clip_norm = clip_norm

    def set_hyper(self, hyper: StepHyper) -> None:
        self._hyper = hyper

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        of_groups = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        if not any(of_groups):
            return
        norms, _ = self._take_norms([parameter.grad for parameters in of_groups for parameter in parameters])
        for group, parameters, own in zip(
            self.param_groups, of_groups, torch.split(norms, [len(some) for some in of_groups]), strict=True
        ):
            if not parameters:
                continue
            clip_each_gradient(parameters, self._clip_norm, own)
            gradients: list[Tensor] = [parameter.grad for parameter in parameters if parameter.grad is not None]
            rate, decay = (
                torch.as_tensor(value, dtype=torch.float32, device=parameters[0].device)
                for value in (self._hyper.learning_rate, self._hyper.weight_decay)
            )
            rate = rate * group["rate_scale"] if "rate_scale" in group else rate
            if group["decays"]:
                torch._foreach_add_(gradients, list(torch._foreach_mul(parameters, decay)))
            sums = [self.state_of(parameter)["momentum_buffer"] for parameter in parameters]
            torch._foreach_mul_(sums, group["momentum"])
            torch._foreach_add_(sums, gradients)
            torch._foreach_sub_(parameters, list(torch._foreach_mul(sums, rate)))

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter; it is created before its first step."""
        state: dict[str, Tensor] = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)  # the first sum is then the gradient, as in torch
        return state


@torch.no_grad()
def clip_each_gradient(parameters: Iterable[nn.Parameter], max_norm: float, norms: Tensor | None = None) -> None:
    """Scale each gradient tensor to an L2 norm of at most `max_norm`, as the authors do; the host does not wait.

    `norms` [N] are those of the gradients, if they are known.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients or max_norm == 0.0:
        return
    if norms is None:
        norms = torch.stack(torch._foreach_norm(gradients))
    factors = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, list(factors.unbind()))
