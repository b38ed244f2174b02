"""The training step as CUDA graphs: recorded once, then started with one call instead of two thousand launches.

A launch costs the host about 7 microseconds, so a step of small kernels is paced by Python, not by the GPU. A graph
replays the same kernels on the same addresses; what changes from step to step (views, schedule values) is written there
first.
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

# Ordinary steps first: they choose algorithms, compile kernels and create the optimiser's state, none of which a graph
# may do.
_NUM_ORDINARY_STEPS = 3
# torch's fused AdamW reads a float32 rate; the others are exact
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
            epoch=hyper.epoch, **self._written(values, self._tensors), own=self._written(hyper.own, self._own)
        )

    def _written(self, values: Mapping[str, float | Tensor], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, value in values.items():
            if name not in tensors:
                tensors[name] = torch.zeros((), dtype=_DTYPES.get(name, torch.float64), device=self._device)
            tensors[name].fill_(value)  # it travels as an argument of the launch: nothing to copy, nothing to wait for
        return tensors


@dataclass(frozen=True)
class _Recording:
    """A graph and what it leaves behind, which every replay overwrites."""

    graph: torch.cuda.CUDAGraph
    output: StepOutput


class GraphedStep:
    """A TrainingStep on one GPU: ordinary for the first steps, recorded at the next, replayed ever after.

    The results are those of a TrainingStep whose schedule values are tensors too, bit for bit; plain numbers may round
    differently.
    """

    def __init__(self, step: TrainingStep) -> None:
        self._step = step
        self._hyper = HyperOnDevice(step.device)
        # One stream for ordinary steps and recording: gradients remember theirs.
        self._stream = torch.cuda.Stream(step.device)  # type: ignore[no-untyped-call]
        self._num_done = 0
        self._views: ViewBatch | None = None
        # of the first part of a batch, and of any further one, which adds to its gradients
        self._parts: list[_Recording] = []
        self._update: _Recording | None = None
        self._outputs: list[StepOutput] = []  # of each part, kept for the update when there are several
        self._frozen: list[int] = []  # addresses of what stands still, in the steps done and in the recording

    def __call__(self, parts: Iterable[ViewBatch], hyper: StepHyper, *, num_parts: int) -> StepOutput:
        self._start_anew_if_frozen_change(hyper.epoch)
        on_device = self._hyper.set(hyper)
        self._num_done += 1
        if self._num_done <= _NUM_ORDINARY_STEPS:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                output = self._step((self._staged(views) for views in parts), on_device, num_parts=num_parts)
            torch.cuda.current_stream().wait_stream(self._stream)
            return output
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

    def _start_anew_if_frozen_change(self, epoch: int) -> None:
        """A recording updates what it did when it was made: where other parameters are to stand still, another one is
        needed.
        """
        frozen = [id(parameter) for parameter in self._step.method.frozen(epoch)]
        if frozen != self._frozen:
            self._frozen, self._num_done = frozen, 0
            self._parts, self._update, self._outputs = [], None, []

    def _staged(self, views: ViewBatch) -> ViewBatch:
        self._stage(views)
        assert self._views is not None
        return self._views

    def _stage(self, views: ViewBatch) -> None:
        """Write views where the graph reads them; the numbers of the images too, for they key its random choices."""
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
        self._parts.append(_Recording(graph, _detached(output)))

    def _record_update(self, outputs: Sequence[StepOutput], hyper: StepHyper) -> None:
        graph = torch.cuda.CUDAGraph()
        with _explained(), self._recording(graph):
            output = self._step.update(outputs, hyper)
        self._update = _Recording(graph, output)

    def _recording(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        pool = self._parts[0].graph.pool() if self._parts else None
        # thread_local: the loader's threads go on allocating and copying, which the default forbids to every thread.
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


def _detached(output: StepOutput) -> StepOutput:
    """Without the autograd graph, which would keep all activations alive."""
    return _map(output, torch.Tensor.detach)
