"""Detects steps and weights that are not finite; steps without making the GPU wait for the host."""

import collections
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from massl.config import MasslError


class NonFiniteLoss(MasslError, RuntimeError):
    """A step or the weights are not finite; holds the step, its images and where it began, if that is known."""

    def __init__(self, what: str, *, step: int, indices: Tensor, origin: str = "") -> None:
        super().__init__(what)
        self.step, self.indices, self.origin = step, indices, origin


def _raise(error: NonFiniteLoss) -> None:
    raise error


@dataclass(frozen=True)
class _Pending:
    step: int
    loss: Tensor  # on the host once `copied` is done
    is_finite: Tensor  # of the gradients; likewise
    copied: torch.cuda.Event | None
    indices: Tensor


class LossWatch:
    """Checks each step; on CUDA one step late, so that the next step is already queued when the values arrive.

    `on_bad` is told of a step that is not finite and may raise; by default the error itself is raised.
    """

    def __init__(self, device: torch.device, *, on_bad: Callable[[NonFiniteLoss], None] = _raise) -> None:
        self._lag = 1 if device.type == "cuda" else 0
        self._on_bad = on_bad
        self._pending: collections.deque[_Pending] = collections.deque()
        self.last_loss = math.nan
        self.last_indices = torch.empty(0, dtype=torch.int64)

    def push(self, step: int, loss: Tensor, indices: Tensor, *, is_finite: Tensor | None = None) -> None:
        """`is_finite`: of the gradients, equal on all ranks; by default, of the loss."""
        known = loss.detach().isfinite() if is_finite is None else is_finite
        on_host, known = (value.detach().to("cpu", non_blocking=True) for value in (loss, known))
        copied = None
        if loss.device.type == "cuda":
            # Blocking: the host sleeps until the value arrives; spinning would occupy a core that could decode images.
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()
        self._pending.append(_Pending(step, on_host, known, copied, indices))
        self._check(keep=self._lag)

    def flush(self) -> float:
        """Check everything pushed so far; returns the newest loss."""
        self._check(keep=0)
        return self.last_loss

    def check_weights(self, method: nn.Module, *, done: int) -> None:
        """No step makes weights that are not finite; a damaged file or device may. They are never saved or probed."""
        names = list(not_finite(method))
        if names:
            raise NonFiniteLoss(
                f"the weights after step {done - 1} are not finite ({in_short(names)})",
                step=done - 1,
                indices=self.last_indices,
            )

    def _check(self, *, keep: int) -> None:
        while len(self._pending) > keep:
            oldest = self._pending.popleft()
            if oldest.copied is not None:
                oldest.copied.synchronize()
            self.last_loss, self.last_indices = float(oldest.loss), oldest.indices
            if not bool(oldest.is_finite):
                what = f"the loss of step {oldest.step} is {self.last_loss}"
                if math.isfinite(self.last_loss):
                    what = f"the gradients of step {oldest.step} are not finite (its loss is {self.last_loss:.4g})"
                self._on_bad(NonFiniteLoss(what, step=oldest.step, indices=oldest.indices))


def not_finite(module: nn.Module) -> Iterator[str]:
    """Names of the parameters and buffers that are not finite; the host waits for the device once."""
    tensors = {
        name: tensor
        for named in (module.named_parameters(), module.named_buffers())
        for name, tensor in named
        if tensor.is_floating_point() and tensor.numel()
    }
    # The largest magnitude, not the norm: squares of large finite numbers overflow.
    largest = torch._foreach_norm([tensor.detach() for tensor in tensors.values()], math.inf) if tensors else []
    are_finite = torch.stack([one.float() for one in largest]).isfinite().tolist() if tensors else []
    return (name for name, is_finite in zip(tensors, are_finite, strict=True) if not is_finite)


def in_short(names: list[str], *, most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
