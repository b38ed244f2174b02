"""A recorded and replayed step equals the same step run operation by operation, bit for bit."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from massl.data.views import ViewBatch
from massl.methods.base import StepHyper
from massl.methods.massl import MaSSL, MaSSLHeadSettings, MaSSLSettings
from massl.nn.backbone import BackboneSettings
from massl.nn.memory import MemorySettings
from massl.training.graphed_step import GraphedStep, HyperOnDevice
from massl.training.loss_watch import LossWatch
from massl.training.optimizers import OptimizerSettings, build_optimizer
from massl.training.step import TrainingStep

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
NUM_STEPS = 8  # three ordinary ones, one that is recorded, four replays
PART_SIZE = 8


def training_step(*, fused: bool = True, bf16: bool = True, drop_path_rate: float = 0.3) -> TrainingStep:
    settings = MaSSLSettings(
        head=MaSSLHeadSettings(hidden_dim=64, out_dim=64), memory=MemorySettings(num_rows=256, block_size=128)
    )
    backbone = BackboneSettings(
        name="vit_tiny_patch16_224",
        image_size=32,
        patch_size=4,
        drop_path_rate=drop_path_rate,
        timm_options={"embed_dim": 64, "depth": 3, "num_heads": 2},
    )
    method = MaSSL(settings, backbone, seed=0)
    with torch.no_grad():  # as after some training: embeddings of different images differ
        for seed, (student, teacher) in enumerate(
            zip(method.student.parameters(), method.teacher.parameters(), strict=True)
        ):
            change = 0.1 * torch.randn(student.shape, generator=torch.Generator().manual_seed(seed))
            student.add_(change)
            teacher.add_(change)
    method.to(DEVICE).train()
    if fused:
        assert [network.use_fused_kernels() for network in method.backbones()] == [None, None]
    optimizer = build_optimizer(method, OptimizerSettings())
    return TrainingStep(method=method, parallel=method, optimizer=optimizer, bf16=bf16, device=DEVICE)


def views_of(number: int, *, indices_on: torch.device) -> ViewBatch:
    """One part of a batch; the numbers of its images lie on the CPU in training, and on the device for a step that has
    no graph.
    """
    generator = torch.Generator().manual_seed(number)
    return ViewBatch(
        global_views=torch.randn(2, PART_SIZE, 3, 32, 32, generator=generator).to(DEVICE, torch.bfloat16),
        local_views=torch.randn(3, PART_SIZE, 3, 16, 16, generator=generator).to(DEVICE, torch.bfloat16),
        image_indices=(number * PART_SIZE + torch.arange(PART_SIZE)).to(indices_on),
    )


def hyper_at(step: int) -> StepHyper:
    """Every value changes at every step, so that one which the graph had kept would show."""
    return StepHyper(
        step=step,
        epoch=step // 4,
        learning_rate=1e-3 * (1 + step),
        weight_decay=0.04 + 0.05 * step,
        own={"momentum": 0.99 + 0.001 * step, "teacher_temperature": 0.04 + 0.003 * step},
    )


def run_graphed(step: TrainingStep, steps: range, num_parts: int) -> list[float]:
    graphed, cpu = GraphedStep(step), torch.device("cpu")
    losses = []
    for number in steps:
        parts = (views_of(number * num_parts + part, indices_on=cpu) for part in range(num_parts))
        # read at once: the next replay overwrites it
        losses.append(graphed(parts, hyper_at(number), num_parts=num_parts).loss.item())
    return losses


def run_plain(step: TrainingStep, steps: range, num_parts: int) -> list[float]:
    """The same without a graph, on schedule values that are tensors too."""
    on_device = HyperOnDevice(DEVICE)
    losses = []
    for number in steps:
        parts = [views_of(number * num_parts + part, indices_on=DEVICE) for part in range(num_parts)]
        losses.append(step(parts, on_device.set(hyper_at(number)), num_parts=num_parts).loss.item())
    return losses


def state_of(step: TrainingStep) -> dict[str, Any]:
    return copy.deepcopy({"method": step.method.state_dict(), "optimizer": step.optimizer.portable_state()})


def assert_same_state(ours: TrainingStep, truth: TrainingStep) -> None:
    """Weights of student and teacher, memory and its cursor, averages of the optimiser."""
    expected = truth.method.state_dict()
    assert {"memory.rows", "memory.cursor"} <= expected.keys()
    for name, value in ours.method.state_dict().items():
        assert torch.equal(value, expected[name]), name
    moments = truth.optimizer.portable_state()["state"]
    for number, state in ours.optimizer.portable_state()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, moments[number][name]), (number, name)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_replayed_steps_are_the_ordinary_ones_bit_for_bit(num_parts: int) -> None:
    graphed, plain = training_step(), training_step()
    start = state_of(graphed)["method"]
    losses = run_graphed(graphed, range(NUM_STEPS), num_parts)
    assert losses == run_plain(plain, range(NUM_STEPS), num_parts)
    assert len(set(losses)) == NUM_STEPS
    assert_same_state(graphed, plain)
    for name, value in graphed.method.state_dict().items():
        assert value.isfinite().all(), name
        assert name == "memory.cursor" or not torch.equal(value, start[name]), name  # each tensor has learnt
    assert int(graphed.method.memory.cursor) == NUM_STEPS * num_parts * PART_SIZE % 256


def test_what_changes_from_step_to_step_is_read_anew_by_each_replay() -> None:
    """A run whose last replay has another value of one schedule, or other images, ends elsewhere."""

    def last_step_with(**changes: Any) -> tuple[float, Tensor, Tensor]:
        step = training_step()
        graphed, cpu = GraphedStep(step), torch.device("cpu")
        images = changes.pop("images", None)
        for number in range(5):
            views, hyper = views_of(number, indices_on=cpu), hyper_at(number)
            if number == 4:
                own = {name: changes.pop(name) for name in hyper.own if name in changes}
                hyper = dataclasses.replace(hyper, **changes, own={**hyper.own, **own})
                views = views if images is None else dataclasses.replace(views, image_indices=images)
            loss = graphed([views], hyper, num_parts=1).loss.item()
        weight = step.method.student.backbone.model.blocks[1].attn.qkv.weight.detach()
        return loss, weight, step.method.teacher.backbone.model.blocks[1].attn.qkv.weight

    loss, student, teacher = last_step_with()
    for changes in ({"step": 99}, {"teacher_temperature": 0.2}, {"images": torch.arange(PART_SIZE) + 5000}):
        assert last_step_with(**changes)[0] != loss, changes
    for changes in ({"learning_rate": 0.1}, {"weight_decay": 0.9}):
        other_loss, other_student, _ = last_step_with(**changes)
        assert other_loss == loss
        assert not torch.equal(other_student, student), changes
    _, same_student, other_teacher = last_step_with(momentum=0.5)
    assert torch.equal(same_student, student)
    assert not torch.equal(other_teacher, teacher)


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("at_step", [0, 2, 3, 4, 6])  # ordinary, recorded, replayed
def test_a_step_that_is_not_finite_is_left_out_by_the_device(at_step: int, num_parts: int) -> None:
    """The state is that of a run in which this step never was, and no later step is touched."""
    step, without = training_step(), training_step()
    graphed, ordinary = GraphedStep(step), HyperOnDevice(DEVICE)
    before: dict[str, Any] = {}
    for number in range(NUM_STEPS):
        numbers = range(number * num_parts, (number + 1) * num_parts)
        if number == at_step:
            before = state_of(step)
        parts = [views_of(one, indices_on=torch.device("cpu")) for one in numbers]
        if number == at_step:
            parts[-1].global_views[0, 1, 2, 3, 4] = torch.nan
        output = graphed(parts, hyper_at(number), num_parts=num_parts)
        assert bool(output.is_finite) == (number != at_step)
        if number == at_step:
            for name, value in step.method.state_dict().items():
                assert torch.equal(value, before["method"][name]), name
        else:
            on_device = [views_of(one, indices_on=DEVICE) for one in numbers]
            without(on_device, ordinary.set(hyper_at(number)), num_parts=num_parts)
    assert_same_state(step, without)


def test_no_step_waits_for_the_device() -> None:
    """Also a step that is not finite: the host reads the flag one step later."""
    step = training_step()
    graphed, cpu = GraphedStep(step), torch.device("cpu")
    watch = LossWatch(DEVICE, on_bad=lambda error: found.append(error.step))
    found: list[int] = []
    for number in range(NUM_STEPS):
        views = views_of(number, indices_on=cpu)
        if number == 5:
            views.global_views[0, 0] = torch.inf
        if number >= 4:
            torch.cuda.set_sync_debug_mode("error")
        try:
            output = graphed([views], hyper_at(number), num_parts=1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        watch.push(number, output.loss, views.image_indices, is_finite=output.is_finite)
        assert found == ([5] if number >= 6 else [])


@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_restarted_run_continues_bit_for_bit(num_parts: int) -> None:
    """Stopped among replays; the new process records its own graphs, after ordinary steps of its own."""
    whole = training_step()
    losses = run_graphed(whole, range(10), num_parts)
    first = training_step()
    assert run_graphed(first, range(5), num_parts) == losses[:5]
    saved = state_of(first)
    second = training_step()
    second.method.load_state_dict(saved["method"])
    second.optimizer.load_portable_state(saved["optimizer"])
    assert run_graphed(second, range(5, 10), num_parts) == losses[5:]
    assert_same_state(second, whole)


@pytest.mark.parametrize("drop_path_rate", [0.0, 0.3])
@pytest.mark.parametrize("memory_lean", [False, True])
def test_gradients_of_the_fused_step_in_bfloat16_are_near_those_in_float32(
    memory_lean: bool, drop_path_rate: float
) -> None:
    fused = training_step(drop_path_rate=drop_path_rate)
    fused.method.set_activation_checkpointing(memory_lean)
    exact = training_step(fused=False, bf16=False, drop_path_rate=drop_path_rate)
    views = views_of(0, indices_on=DEVICE)
    assert views.local_views is not None
    in_float32 = dataclasses.replace(
        views, global_views=views.global_views.float(), local_views=views.local_views.float()
    )
    hyper = HyperOnDevice(DEVICE).set(hyper_at(3))
    loss = fused.forward_backward(views, hyper, num_parts=1, is_last=True).loss.item()
    true_loss = exact.forward_backward(in_float32, hyper, num_parts=1, is_last=True).loss.item()
    assert loss == pytest.approx(true_loss, rel=5e-3)
    gradients, truth = (
        torch.cat(
            [parameter.grad.flatten() for parameter in step.method.student.parameters() if parameter.grad is not None]
        )
        for step in (fused, exact)
    )
    assert len(gradients) == len(truth) == sum(parameter.numel() for parameter in exact.method.student.parameters())
    assert (gradients - truth).norm() < 0.03 * truth.norm()


class FrozenAtFirst(MaSSL):
    def frozen(self, hyper: StepHyper) -> list[torch.nn.Parameter]:
        return [self.student.head.mlp[-1].weight] if hyper.epoch < 1 else []


def test_a_recording_ends_where_other_parameters_are_frozen() -> None:
    """The graph of the first epoch leaves a layer out; the second epoch's must not, and its AdamW starts afresh."""
    ours, truth = training_step(), training_step()
    for step in (ours, truth):
        step.method.__class__ = FrozenAtFirst
    start = ours.method.student.head.mlp[-1].weight.detach().clone()
    graphed, plain, cpu = GraphedStep(ours), HyperOnDevice(DEVICE), torch.device("cpu")
    for number in range(12):
        hyper = dataclasses.replace(hyper_at(number), epoch=number // 5)
        graphed([views_of(number, indices_on=cpu)], hyper, num_parts=1)
        truth([views_of(number, indices_on=DEVICE)], plain.set(hyper), num_parts=1)
        assert torch.equal(ours.method.student.head.mlp[-1].weight, start) == (number < 5)
    assert_same_state(ours, truth)
    assert int(ours.optimizer.state[ours.method.student.head.mlp[-1].weight]["step"]) == 7
