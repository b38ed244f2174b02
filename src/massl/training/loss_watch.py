"""Detects losses and weights that are not finite; losses without making the GPU wait for the host."""

import collections
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from massl.config import MasslError


class NonFiniteLoss(MasslError, RuntimeError):
    """Training cannot continue; holds the step and its images."""

    def __init__(self, what: str, *, step: int, indices: Tensor) -> None:
        super().__init__(what)
        self.step = step
        self.indices = indices


@dataclass(frozen=True)
class _Pending:
    step: int
    loss: Tensor  # on the host once `copied` is done
    copied: torch.cuda.Event | None
    indices: Tensor


class LossWatch:
    """Checks each loss; on CUDA one step late, so that the next step is already queued when the value arrives."""

    def __init__(self, device: torch.device) -> None:
        self._lag = 1 if device.type == "cuda" else 0
        self._pending: collections.deque[_Pending] = collections.deque()
        self.last_loss = math.nan
        self.last_indices = torch.empty(0, dtype=torch.int64)

    def push(self, step: int, loss: Tensor, indices: Tensor) -> None:
        on_host = loss.detach().to("cpu", non_blocking=True)
        copied = None
        if loss.device.type == "cuda":
            # Blocking: the host sleeps until the value arrives; spinning would occupy a core that could decode images.
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()
        self._pending.append(_Pending(step, on_host, copied, indices))
        self._check(keep=self._lag)

    def flush(self) -> float:
        """Check everything pushed so far; returns the newest loss."""
        self._check(keep=0)
        return self.last_loss

    def check_weights(self, method: nn.Module, *, done: int) -> None:
        """Infinite gradients under a finite loss break the weights one step before the loss shows it."""
        norms = torch._foreach_norm([parameter for parameter in method.parameters() if parameter.requires_grad])
        if not bool(torch.stack(norms).isfinite().all()):
            raise NonFiniteLoss(
                f"the weights after step {done - 1} are not finite", step=done - 1, indices=self.last_indices
            )

    def _check(self, *, keep: int) -> None:
        while len(self._pending) > keep:
            oldest = self._pending.popleft()
            if oldest.copied is not None:
                oldest.copied.synchronize()
            self.last_loss, self.last_indices = float(oldest.loss), oldest.indices
            if not math.isfinite(self.last_loss):
                raise NonFiniteLoss(
                    f"the loss of step {oldest.step} is {self.last_loss}", step=oldest.step, indices=oldest.indices
                )
