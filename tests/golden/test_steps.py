"""Twelve whole training steps against the authors' `train_one_epoch` (README.md says how the values were made)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from massl.data.views import ViewBatch
from massl.methods.base import StepHyper, TeacherSettings
from massl.methods.massl import MaSSL, MaSSLHeadSettings, MaSSLSettings
from massl.nn.backbone import BackboneSettings
from massl.nn.memory import MemoryBank, MemorySettings
from massl.training import optimizers as optimizer_module
from massl.training.optimizers import OptimizerSettings, build_optimizer, clip_each_gradient
from massl.training.schedules import Schedules
from massl.training.step import TrainingStep
from tests.golden.comparison import assert_same

FOLDER = Path(__file__).parent
GOLDEN = load_file(FOLDER / "steps.safetensors")
RECORD: dict[str, Any] = json.loads((FOLDER / "steps.json").read_text())
SETTINGS: dict[str, Any] = RECORD["settings"]
STEPS: list[dict[str, Any]] = RECORD["steps"]
BACKBONE = BackboneSettings(
    name="vit_tiny_patch16_224",
    image_size=16,
    patch_size=4,
    drop_path_rate=0.0,
    timm_options={key: SETTINGS["backbone"][key] for key in ("embed_dim", "depth", "num_heads")},
)


@dataclass(frozen=True, kw_only=True)
class Replay:
    method: MaSSL
    losses: list[float]
    hypers: list[StepHyper]
    gradients: list[dict[str, Tensor]]  # before clipping, under the authors' keys
    clipped: list[list[str]]


def recorded_teacher() -> TeacherSettings:
    momentum, temperature = (SETTINGS["schedules"][key] for key in ("momentum", "teacher_temperature"))
    return TeacherSettings(
        momentum=momentum["base_value"],
        temperature_start=temperature["start_warmup_value"],
        temperature=temperature["base_value"],
        temperature_warmup_epochs=temperature["warmup_epochs"],
    )


def recorded_schedules() -> Schedules:
    rate, decay = (SETTINGS["schedules"][key] for key in ("learning_rate", "weight_decay"))
    return Schedules(
        optimizer=OptimizerSettings(
            # the record holds the peak itself, ours is for a batch of 256
            learning_rate=rate["base_value"] * 256 / SETTINGS["batch_size"],
            min_learning_rate=rate["final_value"],
            warmup_epochs=rate["warmup_epochs"],
            weight_decay=decay["base_value"],
            weight_decay_end=decay["final_value"],
            betas=tuple(SETTINGS["betas"]),
            clip_norm=SETTINGS["clip"],
        ),
        ramps=recorded_teacher().ramps(),
        batch_size=SETTINGS["batch_size"],
        epochs=SETTINGS["epochs"],
        steps_per_epoch=SETTINGS["steps_per_epoch"],
    )


def our_key(theirs: str) -> str:
    return theirs.replace("backbone.", "backbone.model.", 1) if theirs.startswith("backbone.") else theirs


def recorded_weights(who: str) -> dict[str, Tensor]:
    return {our_key(key.removeprefix(f"{who}/")): value for key, value in GOLDEN.items() if key.startswith(f"{who}/")}


def recorded_method(schedules: Schedules) -> MaSSL:
    settings = MaSSLSettings(
        student_temperature=SETTINGS["student_temperature"],
        teacher=recorded_teacher(),
        head=MaSSLHeadSettings(hidden_dim=SETTINGS["head"]["hidden_dim"], out_dim=SETTINGS["head"]["bottleneck_dim"]),
        memory=MemorySettings(num_rows=SETTINGS["memory_rows"], block_size=SETTINGS["block_size"]),
    )
    method = MaSSL(settings, BACKBONE, seed=0)
    method.student.load_state_dict(recorded_weights("initial"))
    method.teacher.load_state_dict(recorded_weights("initial"))
    method.memory.rows.copy_(GOLDEN["memory/initial_rows"])
    return method.train()


def recorded_views(step: int, images: slice) -> ViewBatch:
    return ViewBatch(
        global_views=GOLDEN[f"step{step}/global"][:, images],
        local_views=GOLDEN[f"step{step}/local"][:, images],
        image_indices=torch.arange(SETTINGS["batch_size"])[images],
    )


def replay(num_parts: int) -> Replay:
    """The recorded batches and permutations through our own training step."""
    schedules = recorded_schedules()
    method = recorded_method(schedules)
    record = Replay(method=method, losses=[], hypers=[], gradients=[], clipped=[])
    names = {
        parameter: name.replace("backbone.model.", "backbone.") for name, parameter in method.student.named_parameters()
    }

    def recorded_blocks(memory: MemoryBank, block_size: int, key: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return memory.rows[GOLDEN[f"step{key[1]}/permutation"]].reshape(-1, block_size, memory.rows.shape[1])

    def clip(parameters: Any, max_norm: float, norms: Tensor) -> None:
        before = {
            names[parameter]: parameter.grad.clone()
            for parameter in method.student.parameters()
            if parameter.grad is not None
        }
        clip_each_gradient(parameters, max_norm, norms)
        record.gradients.append(before)
        after: dict[str, nn.Parameter] = {name: parameter for parameter, name in names.items()}
        record.clipped.append([name for name in before if not torch.equal(after[name].grad, before[name])])  # type: ignore[arg-type]

    training_step = TrainingStep(
        method=method,
        parallel=method,
        optimizer=build_optimizer(method, schedules.optimizer),
        bf16=False,
        device=torch.device("cpu"),
    )
    part_size = SETTINGS["batch_size"] // num_parts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryBank, "random_blocks", recorded_blocks)
        patch.setattr(optimizer_module, "clip_each_gradient", clip)
        for step in range(len(STEPS)):
            hyper = schedules.at(step)
            parts = (recorded_views(step, slice(part * part_size, (part + 1) * part_size)) for part in range(num_parts))
            record.losses.append(training_step(parts, hyper, num_parts=num_parts).loss.item())
            record.hypers.append(hyper)
    return record


@pytest.fixture(
    scope="module", params=[1, 2, 4], ids=["whole batches", "batches in two parts", "batches in four parts"]
)
def replayed(request: pytest.FixtureRequest) -> Replay:
    return replay(request.param)


def assert_same_weights(module: nn.Module, who: str) -> None:
    expected = recorded_weights(who)
    assert module.state_dict().keys() == expected.keys()
    assert_same(module.state_dict(), expected, within=1e-6)


def test_the_schedules_give_what_the_authors_code_used() -> None:
    plan = recorded_schedules()
    for recorded in STEPS:
        hyper = plan.at(recorded["step"])
        assert hyper.epoch == recorded["epoch"]
        for name in ("learning_rate", "weight_decay", "momentum", "teacher_temperature"):
            assert getattr(hyper, name) == pytest.approx(recorded[name], rel=1e-12, abs=1e-15), name


def test_the_loss_of_every_step_is_theirs(replayed: Replay) -> None:
    assert replayed.losses == pytest.approx([recorded["loss"] for recorded in STEPS], rel=1e-5)
    assert replayed.losses == pytest.approx([float(GOLDEN[f"step{step}/loss"]) for step in range(len(STEPS))], rel=1e-5)


def test_the_gradients_and_which_of_them_are_clipped_are_theirs(replayed: Replay) -> None:
    for step, recorded in enumerate(STEPS):
        norms = {name: gradient.norm().item() for name, gradient in replayed.gradients[step].items()}
        assert norms.keys() == recorded["gradient_norms"].keys()
        for name, norm in norms.items():
            assert norm == pytest.approx(recorded["gradient_norms"][name], rel=1e-4), (step, name)
        assert sorted(replayed.clipped[step]) == sorted(recorded["clipped"])


def test_the_student_after_the_last_step_is_theirs(replayed: Replay) -> None:
    assert_same_weights(replayed.method.student, "student")


def test_the_teacher_after_the_last_step_is_theirs(replayed: Replay) -> None:
    assert_same_weights(replayed.method.teacher, "teacher")


def test_the_memory_after_the_last_step_is_theirs(replayed: Replay) -> None:
    torch.testing.assert_close(replayed.method.memory.rows, GOLDEN["memory/rows"], rtol=0, atol=1e-5)
    assert int(replayed.method.memory.cursor) == int(GOLDEN["memory/pointer"]) == RECORD["final_pointer"] == 32


def test_the_record_is_one_in_which_mistakes_would_show() -> None:
    """Parameters move, the memory wraps, some gradients are clipped and some are not."""
    start, end = recorded_weights("initial"), recorded_weights("student")
    assert max((end[key] - start[key]).abs().max().item() for key in start) > 1e-3
    assert len(STEPS) * SETTINGS["batch_size"] > SETTINGS["memory_rows"]
    assert all(0 < len(recorded["clipped"]) < len(start) for recorded in STEPS)
