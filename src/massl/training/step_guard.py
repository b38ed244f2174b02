"""Leaves out the update of a step whose gradients are not finite: weights, teacher and memory stay as they are.

On a CPU the host looks at the gradients and does not update. On a GPU the host must not wait, so the device decides:
the AdamW kernel changes nothing, the teacher moves with momentum 1, and what other code changes is copied before and
put back after, by a kernel that does nothing after a good step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from massl.methods.base import Method, StepHyper
from massl.nn.memory import MemoryBank
from massl.ops.kernel_fit import fits_update_kernels
from massl.training.optimizers import DecayedAdamW, DecayedSGD


class StepGuard:
    """Call `begin` before the forward pass, `protect` before the update and `restore` after it."""

    def __init__(self, method: Method, optimizer: DecayedAdamW | DecayedSGD, *, on_device: bool) -> None:
        self._method, self._optimizer, self._parameters = method, optimizer, list(method.parameters())
        self.on_device = on_device  # whether the device decides; otherwise the host
        self._buffers: _Copies | None = None
        self._rest: _Copies | None = None

    def begin(self) -> None:
        """Copy the buffers: a forward pass changes the running averages of batch norm, `after_step` the others."""
        if self._buffers is None:
            self._buffers = _Copies(_buffers_to_copy(self._method))
        self._buffers.take()

    def protect(self, hyper: StepHyper, is_finite: Tensor) -> StepHyper:
        """The schedule values for the update, which have no effect on the teacher if gradients are not finite."""
        trained = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        states = [self._optimizer.state_of(parameter) for parameter in trained]
        parameters = self._parameters
        if isinstance(self._optimizer, DecayedAdamW) and fits_update_kernels(
            [*parameters, *(parameter.grad for parameter in trained)]
        ):
            self._rest = None
            return replace(hyper, own=_with_momentum_one_unless(is_finite, hyper.own))
        changed = [*parameters, *(value for state in states for value in state.values())]
        if self._rest is None or not self._rest.are_of(changed):
            self._rest = _Copies(changed)
        self._rest.take()
        return hyper

    def restore(self, is_finite: Tensor | None = None) -> None:
        """Put the copies back unless `is_finite`, or always; only `protect` has copied more than buffers."""
        for copies in (self._buffers, self._rest if is_finite is not None else None):
            if copies is not None:
                copies.put_back(unless=is_finite)


class _Copies:
    """Tensors and a copy of each."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._copies = [torch.empty_like(tensor) for tensor in tensors]
        pairs = list(zip(self._tensors, self._copies, strict=True))
        # One launch for each type: for a list of several types torch copies one by one.
        self._by_type = [
            list(zip(*(pair for pair in pairs if pair[0].dtype == dtype), strict=True))
            for dtype in sorted({tensor.dtype for tensor in tensors}, key=str)
        ]
        self._in_words = [pair for pair in pairs if _is_in_words(*pair)]
        self._others = [pair for pair in pairs if not _is_in_words(*pair)]

    def are_of(self, tensors: Sequence[Tensor]) -> bool:
        return [id(tensor) for tensor in tensors] == [id(tensor) for tensor in self._tensors]

    @torch.no_grad()
    def take(self) -> None:
        for tensors, copies in self._by_type:
            torch._foreach_copy_(list(copies), list(tensors))

    @torch.no_grad()
    def put_back(self, *, unless: Tensor | None) -> None:
        if unless is None:
            for tensors, copies in self._by_type:
                torch._foreach_copy_(list(tensors), list(copies))
            return
        if self._in_words:
            from massl.ops.kernels.update import restore_unless_  # needs Triton, which only GPU builds have

            restore_unless_(unless, *zip(*self._in_words, strict=True))
        for tensor, copy in self._others:
            tensor.copy_(torch.where(unless, tensor, copy))


def _buffers_to_copy(method: Method) -> list[Tensor]:
    """All but the memory's: it may hold gigabytes, and `enqueue` itself leaves out a bad batch."""
    modules = (module for module in method.modules() if not isinstance(module, MemoryBank))
    return [buffer for module in modules for buffer in module.buffers(recurse=False)]


def _with_momentum_one_unless(is_finite: Tensor, own: Mapping[str, float | Tensor]) -> Mapping[str, float | Tensor]:
    """A teacher that moves with momentum 1 stands still. float64, as the kernel takes it."""
    if "momentum" not in own:
        return own
    momentum = own["momentum"]
    if not isinstance(momentum, Tensor):
        momentum = torch.full((), momentum, dtype=torch.float64, device=is_finite.device)
    # ones_like, not 1.0: torch copies a number from the host, which a recorded CUDA graph must not
    return {**own, "momentum": torch.where(is_finite, momentum, torch.ones_like(momentum))}


def _is_in_words(tensor: Tensor, copy: Tensor) -> bool:
    """Whether the memory of both can be copied in words of four bytes."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    is_dense = tensor.numel() == 0 or span == tensor.numel()
    return is_dense and tensor.stride() == copy.stride() and tensor.numel() * tensor.element_size() % 4 == 0
