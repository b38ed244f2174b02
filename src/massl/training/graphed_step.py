"""The training step as CUDA graphs: recorded once, then replayed with one call instead of two thousand launches.

A launch costs the host about 7 microseconds, so Python, not the GPU, limits a step of small kernels. A graph replays
the same kernels on the same addresses; values that change (views, schedules) are copied there before each replay.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from massl.config import RecipeError
from massl.data.views import ViewBatch
from massl.methods.base import StepHyper, StepOutput
from massl.training.step import TrainingStep

# Ordinary steps before recording: they choose algorithms, compile kernels and create the optimizer's state.
_NUM_ORDINARY_STEPS = 3
# torch's fused AdamW reads a float32 rate; other values are float64
_DTYPES = {"step": torch.int64, "learning_rate": torch.float32}


class HyperOnDevice:
    """The schedule values of a step as scalar tensors at fixed addresses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] = {}

    def set(self, hyper: StepHyper) -> StepHyper:
        values = {"step": hyper.step, "learning_rate": hyper.learning_rate, "weight_decay": hyper.weight_decay}
        return StepHyper(
            epoch=hyper.epoch,
            trains_backbone=hyper.trains_backbone,
            **self._written(values, self._tensors),
            own=self._written(hyper.own, self._own),
        )

    def _written(self, values: Mapping[str, float | Tensor], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, value in values.items():
            if name not in tensors:
                tensors[name] = torch.zeros((), dtype=_DTYPES.get(name, torch.float64), device=self._device)
            tensors[name].fill_(value)  # the value is a launch argument: no copy, no synchronisation
        return tensors


@dataclass(frozen=True)
class _Recording:
    """A graph and its output, which every replay overwrites."""

    graph: torch.cuda.CUDAGraph
    output: StepOutput


class GraphedStep:
    """A TrainingStep on one GPU: ordinary for the first steps, then recorded, then replayed.

    Bitwise equal to a TrainingStep whose schedule values are tensors too; plain numbers may round differently.
    """

    def __init__(self, step: TrainingStep) -> None:
        self._step = step
        self._hyper = HyperOnDevice(step.device)
        # One stream for ordinary steps and recording: gradient accumulation is tied to its stream.
        self._stream = torch.cuda.Stream(step.device)  # type: ignore[no-untyped-call]
        self._num_done = 0
        self._views: ViewBatch | None = None
        self._parts: list[_Recording] = []  # of the first part of a batch, and of later ones, which add gradients
        self._update: _Recording | None = None
        self._outputs: list[StepOutput] = []  # a copy per part for the update, if there are several parts
        self._frozen: list[int] = []  # ids of the parameters that the recording does not train

    def __call__(self, parts: Iterable[ViewBatch], hyper: StepHyper, *, num_parts: int) -> StepOutput:
        self._restart_if_frozen_change(hyper)
        on_device = self._hyper.set(hyper)
        self._num_done += 1
        if self._num_done <= _NUM_ORDINARY_STEPS:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                output = self._step((self._staged(views) for views in parts), on_device, num_parts=num_parts)
            torch.cuda.current_stream().wait_stream(self._stream)
            return output
        self._step.guard.begin()
        for part, views in enumerate(parts):
            self._stage(views)
            if len(self._parts) <= min(part, 1):
                self._record_part(on_device, num_parts)
            recording = self._parts[min(part, 1)]
            recording.graph.replay()
            if num_parts > 1:
                self._keep(part, recording.output)
        if self._update is None:
            self._record_update(self._outputs if num_parts > 1 else [self._parts[0].output], on_device)
        assert self._update is not None
        self._update.graph.replay()
        return self._update.output

    def forward(self, views: ViewBatch, hyper: StepHyper) -> StepOutput:
        return self._step.forward(views, hyper)

    def _restart_if_frozen_change(self, hyper: StepHyper) -> None:
        """Record again when other parameters are frozen: a recording always updates the same ones."""
        frozen = [id(parameter) for parameter in self._step.method.frozen(hyper)]
        if frozen != self._frozen:
            self._frozen, self._num_done = frozen, 0
            self._parts, self._update, self._outputs = [], None, []

    def _staged(self, views: ViewBatch) -> ViewBatch:
        self._stage(views)
        assert self._views is not None
        return self._views

    def _stage(self, views: ViewBatch) -> None:
        """Copy views to where the graph reads them, image indices included, because they key its random choices."""
        if self._views is None:
            empty = {field.name: _empty_on(self._step.device, getattr(views, field.name)) for field in fields(views)}
            self._views = ViewBatch(**empty)  # type: ignore[arg-type]
        for field in fields(views):
            source, target = getattr(views, field.name), getattr(self._views, field.name)
            if source is not None:
                target.copy_(source.pin_memory() if source.device.type == "cpu" else source, non_blocking=True)

    def _record_part(self, hyper: StepHyper, num_parts: int) -> None:
        assert self._views is not None
        graph = torch.cuda.CUDAGraph()
        with _explained(), self._recording(graph):
            output = self._step.forward_backward(self._views, hyper, num_parts=num_parts, is_last=True)
        # Detached: the autograd graph would keep all activations alive.
        self._parts.append(_Recording(graph, _map(output, torch.Tensor.detach)))

    def _record_update(self, outputs: Sequence[StepOutput], hyper: StepHyper) -> None:
        graph = torch.cuda.CUDAGraph()
        with _explained(), self._recording(graph):
            output = self._step.update(outputs, hyper)
        self._update = _Recording(graph, output)

    def _recording(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        pool = self._parts[0].graph.pool() if self._parts else None
        # thread_local: the default would forbid the loader's threads to allocate and copy meanwhile.
        return torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")

    def _keep(self, part: int, output: StepOutput) -> None:
        if len(self._outputs) <= part:
            self._outputs.append(_map(output, torch.clone))
        kept = self._outputs[part]
        for target, source in zip(_tensors(kept), _tensors(output), strict=True):
            target.copy_(source)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise RecipeError(
            f"this step cannot be recorded as a CUDA graph ({reason}); set trainer.cuda_graph to false"
        ) from error


def _empty_on(device: torch.device, tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.empty_like(tensor, device=device)


def _tensors(output: StepOutput) -> list[Tensor]:
    return [output.loss, *output.metrics.values(), *output.carry.values()]


def _map(output: StepOutput, operation: Callable[[Tensor], Tensor]) -> StepOutput:
    return StepOutput(
        loss=operation(output.loss),
        metrics={name: operation(value) for name, value in output.metrics.items()},
        carry={name: operation(value) for name, value in output.carry.items()},
    )
