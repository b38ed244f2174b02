"""The device leaves a bad step out as the host does: all methods, both optimizers, kernels and torch's operations."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from massl.commands.recipe import PretrainRecipe
from massl.config import merge, validate
from massl.data.views import ViewBatch
from massl.methods import build_method
from massl.methods.base import StepHyper
from massl.nn import ema
from massl.training import optimizers, step_guard
from massl.training.optimizers import build_optimizer
from massl.training.step import TrainingStep

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEAD = {"method.head.hidden_dim": 12, "method.head.out_dim": 8}
PROJECTOR = {"method.projector.hidden_dim": 12, "method.projector.out_dim": 8, "method.predictor.hidden_dim": 12}
METHODS: dict[str, dict[str, Any]] = {
    "massl": {**HEAD, "method.memory.num_rows": 24, "method.memory.block_size": 8},
    "dino": {**HEAD, "method.prototypes.num_prototypes": 16, "method.prototypes.frozen_epochs": 0},
    "ibot": {**HEAD, "method.prototypes.num_prototypes": 16, "method.prototypes.frozen_epochs": 0},
    "carp": {**HEAD, "method.prototypes.num_prototypes": 16, "method.prototypes.block_size": 8},
    "mocov3": PROJECTOR,
    "nnclr": {**PROJECTOR, "method.memory.num_rows": 24},
    "mae": {"method.decoder.dim": 12, "method.decoder.depth": 1, "method.decoder.num_heads": 2},
    "supervised": {"method.num_classes": 3},
}
BASE = {
    "views": {"global_size": 8, "num_local": 0},
    "backbone": {
        "name": "vit_tiny_patch16_224",
        "image_size": 8,
        "patch_size": 4,
        "timm_options": {"embed_dim": 16, "depth": 1, "num_heads": 2},
    },
}
# RuntimeWarning: what a kernel does not store, the interpreter still divides by zero.
pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def training_step(name: str, *, on_device: bool, optimizer: str) -> TrainingStep:
    changes = {"method.name": name, **METHODS[name], "optimizer.name": optimizer}
    recipe = validate(PretrainRecipe, merge(BASE, changes, PretrainRecipe), origin="test")
    method = build_method(recipe.method, recipe.backbone, seed=0).to(DEVICE).train()
    optimizer_ = build_optimizer(method, recipe.optimizer)
    step = TrainingStep(method=method, parallel=method, optimizer=optimizer_, bf16=False, device=DEVICE)
    step.guard.on_device = on_device
    return step


def views_of(number: int, *, bad: bool = False) -> ViewBatch:
    pixels = torch.randn(2, 4, 3, 8, 8, generator=torch.Generator().manual_seed(number))
    if bad:
        pixels[0, 1, 0, 2, 3] = torch.nan
    indices = torch.arange(4) + 4 * number
    return ViewBatch(
        global_views=pixels.to(DEVICE), local_views=None, image_indices=indices, labels=torch.arange(4) % 3
    )


def hyper_at(step: int) -> StepHyper:
    own = {"momentum": 0.9 + 0.001 * step, "teacher_temperature": 0.05}
    return StepHyper(step=step, epoch=0, learning_rate=0.01, weight_decay=0.1, own=own)


def state_of(step: TrainingStep) -> dict[str, Any]:
    return copy.deepcopy({"method": step.method.state_dict(), "optimizer": step.optimizer.portable_state()["state"]})


def leaves(state: Any, where: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, dict):
        yield from (leaf for key, value in state.items() for leaf in leaves(value, f"{where}.{key}"))
    else:
        yield where, torch.as_tensor(state).cpu()


def differences(first: Any, second: Any) -> list[str]:
    return [
        where
        for (where, one), (other_where, other) in zip(leaves(first), leaves(second), strict=True)
        if where != other_where or not torch.equal(one, other)
    ]


def run(step: TrainingStep, numbers: list[int], *, bad: int | None = None) -> list[bool]:
    """Whether each step was finite."""
    outputs = [
        step([views_of(number, bad=number == bad)], hyper_at(number), num_parts=1).is_finite for number in numbers
    ]
    return [bool(is_finite) for is_finite in outputs]


def assert_left_out(name: str, optimizer: str, *, by_kernels: bool, patch: pytest.MonkeyPatch) -> None:
    for module in (ema, optimizers, step_guard):
        patch.setattr(module, "fits_update_kernels", lambda _: by_kernels)
    guarded = training_step(name, on_device=True, optimizer=optimizer)
    before = state_of(guarded)
    assert run(guarded, [0], bad=0) == [False], name
    assert differences(before["method"], state_of(guarded)["method"]) == [], name
    # The optimizer's state is created in the first step: as if that had never been.
    assert all(not bool(leaf.any()) for _, leaf in leaves(state_of(guarded)["optimizer"])), name
    assert run(guarded, [1, 2]) == [True, True], name
    before = state_of(guarded)
    assert run(guarded, [3], bad=3) == [False], name
    assert differences(before, state_of(guarded)) == [], name
    run(guarded, [4])
    without = training_step(name, on_device=True, optimizer=optimizer)
    run(without, [1, 2, 4])
    assert differences(state_of(without), state_of(guarded)) == [], name


def test_the_device_leaves_a_bad_step_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_left_out("massl", "adamw", by_kernels=True, patch=monkeypatch)


@pytest.mark.slow
def test_the_device_leaves_a_bad_step_out_of_every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """One test for all, because without a GPU only the first parameter set of a kernel test is run.

    On a CPU, Triton's interpreter is slow: kernels and SGD take part for one method that also has frozen weights.
    """
    for name in METHODS:
        for optimizer, by_kernels in (("adamw", True), ("adamw", False), ("sgd", False)):
            if DEVICE.type == "cuda" or name == "mocov3" or (optimizer == "adamw" and not by_kernels):
                with monkeypatch.context() as patch:
                    assert_left_out(name, optimizer, by_kernels=by_kernels, patch=patch)


@pytest.mark.slow
def test_a_good_step_is_the_same_whoever_decides() -> None:
    if DEVICE.type != "cpu":
        pytest.skip("on a GPU the device always decides")
    for name in METHODS:
        by_host, by_device = (
            training_step(name, on_device=on_device, optimizer="adamw") for on_device in (False, True)
        )
        for step in (by_host, by_device):
            run(step, [0, 1, 2, 3], bad=2)
        assert differences(state_of(by_host), state_of(by_device)) == [], name


@pytest.mark.parametrize("keep", [False, True])
def test_copies_of_any_type_come_back_bit_for_bit_only_after_a_bad_step(keep: bool) -> None:
    tensors = [
        torch.randn(3, 5, 2, 2, device=DEVICE).to(memory_format=torch.channels_last),
        torch.tensor(7, device=DEVICE),
        torch.tensor([True, False, True], device=DEVICE),
        torch.full((2,), torch.nan, device=DEVICE),
        torch.zeros(0, device=DEVICE),
        torch.arange(8, device=DEVICE)[::2],
    ]
    before, copies = copy.deepcopy(tensors), step_guard._Copies(tensors)
    copies.take()
    for tensor in tensors:
        tensor.zero_()
    copies.put_back(unless=torch.tensor(keep, device=DEVICE))
    for tensor, old in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, torch.zeros_like(old) if keep else old, rtol=0, atol=0, equal_nan=True)
