"""NaN and infinity at a random place of a step, and training past steps that are not finite."""

import functools
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from massl.methods.base import StepOutput
from massl.training.bad_steps import TrainingStopped, origin_in
from massl.training.checkpoint import CheckpointStore, load_checkpoint
from massl.training.loss_watch import LossWatch, NonFiniteLoss, not_finite
from massl.training.optimizers import OptimizerSettings, build_optimizer
from massl.training.step import TrainingStep
from tests.reliability.frame import Case, Lost, Wrong, fault_class
from tests.reliability.world import difference
from tests.unit.training.test_bad_steps import broken
from tests.unit.training.test_step_guard import METHODS, hyper_at, training_step, views_of
from tests.unit.training.test_trainer import fit, rows_without_timing

VALUES = (math.nan, math.inf, -math.inf)
PLACES = ("output", "gradient", "parameter", "views", "buffer")


class Tiny:
    """A tiny network, its state at the start, and the layers that a step calls."""

    def __init__(self, name: str) -> None:
        self.step = training_step(name, on_device=False, optimizer="adamw")
        self.state = _state(self.step.method)
        called: dict[str, nn.Module] = {}
        handles = [
            module.register_forward_hook(functools.partial(self._note, called, name))
            for name, module in self.step.method.named_modules()
            if name
        ]
        self.step.method(views_of(0), hyper_at(0))
        for handle in handles:
            handle.remove()
        self.called = sorted(called)
        self.trained = sorted(name for name in called if called[name] is not None)

    @staticmethod
    def _note(called: dict[str, Any], name: str, module: nn.Module, given: object, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
            called[name] = module if output.requires_grad else None

    def fresh(self) -> TrainingStep:
        with torch.no_grad():
            for name, tensor in _tensors(self.step.method).items():
                tensor.copy_(self.state[name])
        optimizer = build_optimizer(self.step.method, OptimizerSettings())
        return TrainingStep(
            method=self.step.method, parallel=self.step.method, optimizer=optimizer, bf16=False, device=self.step.device
        )


def _tensors(method: nn.Module) -> dict[str, Tensor]:
    """Also buffers that checkpoints leave out."""
    return dict(method.named_parameters()) | dict(method.named_buffers())


def _state(method: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in _tensors(method).items()}


@functools.cache
def tiny(name: str) -> Tiny:
    return Tiny(name)


class Spoiled:
    """Puts one number that is not finite into the output of a layer, or into its gradient."""

    def __init__(self, layer: str, method: nn.Module, *, place: str, value: float, random: np.random.Generator) -> None:
        self._place, self._value, self._share = place, value, float(random.random())
        self.happened = False
        self.handle = method.get_submodule(layer).register_forward_hook(self._after, prepend=True)

    def _after(self, module: nn.Module, given: object, output: Tensor) -> Tensor:
        if self._place == "gradient":
            if output.requires_grad:
                output.register_hook(self._spoil)
            return output
        return self._spoil(output)

    def _spoil(self, tensor: Tensor) -> Tensor:
        self.happened = True
        flat = tensor.flatten()
        mask = torch.zeros_like(flat, dtype=torch.bool)
        mask[int(self._share * len(flat))] = True
        return torch.where(mask, self._value, flat).reshape(tensor.shape)


@fault_class("numbers that are not finite, at a random place of a step", quick=40, more=300)
def not_finite_step(case: Case) -> None:
    name = case.pick(list(METHODS))
    place = PLACES[case.number // len(METHODS) % len(PLACES)]
    value = VALUES[int(case.random.integers(0, len(VALUES)))]
    known = tiny(name)
    step, views, hyper = known.fresh(), views_of(1), hyper_at(1)
    spoiled, layer = None, ""
    if place in ("output", "gradient"):
        layers = known.called if place == "output" else known.trained
        layer = layers[int(case.random.integers(0, len(layers)))]
        spoiled = Spoiled(layer, step.method, place=place, value=value, random=case.random)
    else:
        _spoil_tensor(step, views.global_views, place, value, case.random)
    before = _state(step.method)
    try:
        output = step([views], hyper, num_parts=1)
        if output.is_finite:  # it never reached the loss: a masked score, a layer whose output is not used
            _require_noticed_later(step.method, before, output)
            return
        if _differs(step.method, before):
            raise Lost(f"{place} {layer}: the step changed the weights or buffers")
        with case.recovery():
            origin = origin_in(step, lambda: [views], hyper, num_parts=1)
        if _differs(step.method, before):
            raise Lost("naming the layer changed the weights or buffers")
        _check_origin(origin, place, layer, step.method)
    finally:
        if spoiled is not None:
            spoiled.handle.remove()


def _spoil_tensor(step: TrainingStep, views: Tensor, place: str, value: float, random: np.random.Generator) -> None:
    if place == "views":
        tensors = [views]
    elif place == "parameter":
        tensors = [parameter for parameter in step.method.parameters() if parameter.numel()]
    else:
        tensors = [buffer for buffer in step.method.buffers() if buffer.is_floating_point() and buffer.numel()]
    if not tensors:
        tensors = [views]
    chosen = tensors[int(random.integers(0, len(tensors)))]
    with torch.no_grad():
        chosen.view(-1)[int(random.integers(0, chosen.numel()))] = value


def _require_noticed_later(method: nn.Module, before: dict[str, Tensor], output: StepOutput) -> None:
    """What `after_step` spoils after a finite loss is found before it is saved, and by the next step."""
    new = [name for name in not_finite(method) if name not in _bad_names(before)]
    if not bool(output.loss.isfinite()):
        raise Wrong("a step that is not finite was taken for a good one")
    if new:
        try:
            LossWatch(torch.device("cpu")).check_weights(method, done=1)
        except NonFiniteLoss:
            return
        raise Wrong(f"{new} would be saved")


def _bad_names(state: dict[str, Tensor]) -> list[str]:
    return [name for name, value in state.items() if value.is_floating_point() and not bool(value.isfinite().all())]


def _differs(method: nn.Module, before: dict[str, Tensor]) -> bool:
    """Bit for bit; NaN equals itself."""
    return any(_bytes(value) != _bytes(before[name]) for name, value in _tensors(method).items())


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


def _check_origin(origin: str, place: str, layer: str, method: nn.Module) -> None:
    wanted = {
        "output": f"the output of {layer} (",
        "gradient": f"that of the output of {layer} (",
        "views": "the views",
    }.get(place, "")
    bad = list(not_finite(method))
    if place in ("parameter", "buffer") and bad:
        wanted = bad[0]
    if wanted not in origin:
        raise Wrong(f"{place} {layer}: {origin}")


# ---- whole runs ------------------------------------------------------------------------------------------------------


@fault_class("training past steps that are not finite", kind="processes", quick=2, more=5)
def past_bad_steps(case: Case) -> None:
    """The run stops at the first that is not allowed and names it; with more allowed it ends, stopped or not."""
    random = case.random
    steps = tuple(sorted(random.choice(6, size=int(random.integers(1, 4)), replace=False).tolist()))
    place = case.pick(["output", "gradient", "loss", "teacher"])
    method_type, allowed = broken(place, *steps, value=VALUES[int(random.integers(0, 3))]), len(steps)
    parts = {"trainer__accumulation_steps": int(random.integers(1, 3)), "trainer__checkpoint_every_steps": 1}
    straight, stopped = case.folder / "straight", case.folder / "stopped"
    fit(straight, method_type=method_type, trainer__skip_bad_steps=allowed, **parts)
    try:
        fit(stopped, method_type=method_type, trainer__skip_bad_steps=allowed - 1, **parts)
    except TrainingStopped as error:
        if f"step {steps[-1]}" not in str(error):
            raise Wrong(str(error)) from error
    else:
        raise Wrong("one bad step more than allowed was not noticed")
    saved = CheckpointStore(stopped / "checkpoints", keep_last=1).steps()
    if (saved[-1] if saved else 0) != steps[-1]:
        raise Lost(f"the last checkpoint is {saved}, the bad step {steps[-1]}")
    with case.recovery():
        fit(stopped, method_type=method_type, trainer__skip_bad_steps=allowed, **parts)
    found = difference(_last(straight), _last(stopped), "checkpoint")
    if found:
        raise Wrong(f"continued after a bad step, the run differs: {found}")
    if rows_without_timing(straight) != rows_without_timing(stopped):
        raise Wrong("continued after a bad step, the metrics differ")
    shutil.rmtree(straight)


def _last(run: Path) -> dict[str, Any]:
    state = load_checkpoint(CheckpointStore(run / "checkpoints", keep_last=1).path(6))
    return {key: value for key, value in state.items() if key != "recipe"}
