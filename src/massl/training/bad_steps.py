"""Steps that are not finite: repeated once to name the first layer that is not, then left out or the end of the run."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from massl import distributed
from massl.config import MasslError
from massl.data.loading.loader import Loader
from massl.data.views import ViewBatch
from massl.methods.base import StepHyper, StepOutput
from massl.training.loss_watch import NonFiniteLoss, in_short, not_finite
from massl.training.ranks import stop_together
from massl.training.run_folder import RunFolder
from massl.training.step import TrainingStep


class TrainingStopped(MasslError, RuntimeError):
    """Training cannot continue; the message says what was saved and what to try."""


class BadSteps:
    """Decides about steps that are not finite: `allowed` of them are left out, one more ends the run."""

    def __init__(
        self,
        folder: RunFolder,
        loader: Loader,
        *,
        allowed: int,  # trainer.skip_bad_steps
        origin_of: Callable[[int], str],  # repeats a step
    ) -> None:
        self._folder, self._loader, self._allowed, self._origin_of = folder, loader, allowed, origin_of
        self.skipped: list[int] = []  # the steps left out so far; checkpoints keep them

    def add(self, error: NonFiniteLoss, *, warn: Callable[[int, str], None]) -> None:
        """Count the step, or raise if as many as allowed were left out before; its update is left out in any case.

        `warn` takes the number of steps done and a sentence.
        """
        error.origin = self._origin_of(error.step)
        if len(self.skipped) >= self._allowed:
            raise error
        self.skipped.append(error.step)
        path = self._list_images(error)
        of_most = f"{len(self.skipped)} of at most {self._allowed} (trainer.skip_bad_steps)"
        warn(error.step + 1, f"{error}: {error.origin}. The step is left out, {of_most}; its images: {path}")

    def end(self, error: NonFiniteLoss, *, steps_saved: Sequence[int]) -> NoReturn:
        """End the run, in words. Of several processes that end at the same step one tells it."""
        stopped = self._explained(error, steps_saved)
        if error.origin:  # all processes left the step out; weights may be damaged in one of them alone
            with stop_together():
                raise stopped from error
        raise stopped from error

    def _explained(self, error: NonFiniteLoss, steps_saved: Sequence[int]) -> TrainingStopped:
        saved = f"The last good checkpoint, step {steps_saved[-1]}, is untouched" if steps_saved else "Nothing is saved"
        rare = ""
        if error.origin:
            saved = f"{error.origin[0].upper()}{error.origin[1:]}. {saved}"
            more = len(self.skipped) + 1
            rare = f"If it is rare, the same command with --trainer.skip_bad_steps {more} leaves such a step out. "
        return TrainingStopped(
            f"{error}: training stopped. {saved}; the images of that step are listed in {self._list_images(error)}. "
            f"{rare}Otherwise try a lower optimizer.learning_rate, a warm-up (optimizer.warmup_epochs) or "
            "trainer.precision fp32, in a new --output."
        )

    def _list_images(self, error: NonFiniteLoss) -> Path:
        name = f"nonfinite_step_{error.step}_rank_{distributed.rank()}.json"
        images = self._loader.image_keys(error.indices)
        path = self._folder.write_json(name, {"step": error.step, "origin": error.origin, "images": images})
        return path if distributed.world_size() == 1 else path.with_name(f"nonfinite_step_{error.step}_rank_*.json")


def origin_in(step: TrainingStep, parts: Callable[[], Iterable[ViewBatch]], hyper: StepHyper, *, num_parts: int) -> str:
    """Where numbers that are not finite first appear when the step is repeated with the weights of now.

    All ranks must call it: methods exchange rows in their forward passes.
    """
    tracer = _Tracer()
    step.guard.begin()
    try:
        with _plain_networks(step), tracer.watching(step.method):
            for views in parts():
                tracer.look("the views", views)
                with step.autocast():
                    output: StepOutput = step.method(views, hyper)
                tracer.look("the loss", output.loss)
                tracer.look("what the method keeps", output.carry)
                (output.loss / num_parts).backward()  # type: ignore[no-untyped-call]
        found = _words(step.method, tracer)
    except torch.OutOfMemoryError:
        found = "the step could not be repeated to name the layer: the GPU has too little memory"
    finally:
        step.optimizer.zero_grad(set_to_none=True)
        step.guard.restore()
    of_ranks = distributed.gather_objects(found)
    rank = next((rank for rank, words in enumerate(of_ranks) if words), 0)
    where = f" (on rank {rank})" if len(of_ranks) > 1 else ""
    nothing = "when the step was repeated everything was finite, so a single layer cannot be named"
    return f"{of_ranks[rank]}{where}" if of_ranks[rank] else nothing


def _words(method: nn.Module, tracer: "_Tracer") -> str:
    weights = list(not_finite(method))
    gradients = [
        name
        for name, parameter in method.named_parameters()
        if parameter.grad is not None and not bool(parameter.grad.norm().isfinite())
    ]
    if weights:
        return f"the weights {in_short(weights)} are not finite"
    if tracer.forward:
        return f"the first that is not finite is {tracer.forward}"
    if tracer.backward:
        return f"all of the forward pass is finite; the first gradient that is not is {tracer.backward}"
    return f"the gradients of the weights {in_short(gradients)} are not finite" if gradients else ""


class _Tracer:
    """Remembers the first output and the first gradient that are not finite, in the order they are computed."""

    def __init__(self) -> None:
        self.forward = self.backward = ""

    def look(self, what: str, values: object) -> None:
        if not self.forward and not all(bool(tensor.isfinite().all()) for tensor in _tensors(values)):
            self.forward = what

    @contextlib.contextmanager
    def watching(self, method: nn.Module) -> Iterator[None]:
        named = [(name, module) for name, module in method.named_modules() if name]
        handles = [module.register_forward_hook(functools.partial(self._after, name)) for name, module in named]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _after(self, name: str, module: nn.Module, given: object, output: object) -> None:
        what = f"the output of {name} ({type(module).__name__})"
        self.look(what, output)
        for tensor in _tensors(output):
            if tensor.requires_grad:
                hook = functools.partial(self._gradient, f"that of {what}")
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _gradient(self, what: str, gradient: Tensor) -> None:
        if not self.backward and not bool(gradient.isfinite().all()):
            self.backward = what


@contextlib.contextmanager
def _plain_networks(step: TrainingStep) -> Iterator[None]:
    """Layer by layer: fused and compiled networks do not call their layers."""
    backbones = step.method.backbones()
    fused = [backbone.fused_kernels for backbone in backbones]
    try:
        for backbone in backbones:
            backbone.fused_kernels = False
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for backbone, was_fused in zip(backbones, fused, strict=True):
            backbone.fused_kernels = was_fused


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors of numbers in nested lists, mappings and dataclasses."""
    if isinstance(values, Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, Mapping):
        yield from (tensor for value in values.values() for tensor in _tensors(value))
    elif isinstance(values, list | tuple):
        yield from (tensor for value in values for tensor in _tensors(value))
    elif is_dataclass(values):
        yield from (tensor for field in fields(values) for tensor in _tensors(getattr(values, field.name)))
