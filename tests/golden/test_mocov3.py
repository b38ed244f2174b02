"""Four whole training steps of MoCo-v3 against the authors' `train` (make_mocov3.py says how the values were made)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from massl.data.views import ViewBatch
from massl.methods.base import StepHyper, StepOutput
from massl.methods.mocov3 import MoCoTeacherSettings, MoCoV3, MoCoV3Settings
from massl.nn.backbone import BackboneSettings
from massl.nn.heads import PredictorSettings, ProjectorSettings
from massl.training.optimizers import OptimizerSettings, build_optimizer
from massl.training.schedules import Schedules
from massl.training.step import TrainingStep
from tests.golden.comparison import assert_same

FOLDER = Path(__file__).parent
GOLDEN = load_file(FOLDER / "mocov3.safetensors")
RECORD: dict[str, Any] = json.loads((FOLDER / "mocov3.json").read_text())
SETTINGS: dict[str, Any] = RECORD["settings"]
STEPS: list[dict[str, float]] = RECORD["steps"]
# Our modules and theirs.
PARTS = {
    "student.backbone.model.": "base_encoder.",
    "student.head.layers.": "base_encoder.head.",
    "predictor.layers.": "predictor.",
}
PARTS |= {"teacher.backbone.model.": "momentum_encoder.", "teacher.head.layers.": "momentum_encoder.head."}


def their_key(ours: str) -> str:
    (part,) = [part for part in PARTS if ours.startswith(part)]
    return PARTS[part] + ours.removeprefix(part)


def recorded_method() -> MoCoV3:
    settings = MoCoV3Settings(
        temperature=SETTINGS["temperature"],
        teacher=MoCoTeacherSettings(momentum=SETTINGS["training"]["moco_m"]),
        projector=ProjectorSettings(hidden_dim=SETTINGS["mlp_dim"], out_dim=SETTINGS["dim"]),
        predictor=PredictorSettings(hidden_dim=SETTINGS["mlp_dim"]),
    )
    options = {key: SETTINGS["backbone"][key] for key in ("embed_dim", "depth", "num_heads")}
    backbone = BackboneSettings(
        name="vit_tiny_patch16_224", image_size=8, patch_size=4, drop_path_rate=0.0, timm_options=options
    )
    return MoCoV3(settings, backbone, seed=0).train()


def initial_method() -> MoCoV3:
    method = recorded_method()
    initial = {
        name: GOLDEN["initial/" + their_key(name).replace("momentum_encoder", "base_encoder")]
        for name in method.state_dict()
    }
    method.load_state_dict(initial)
    return method


def views(step: int) -> ViewBatch:
    return ViewBatch(
        global_views=GOLDEN["views"][step], local_views=None, image_indices=torch.arange(SETTINGS["batch_size"])
    )


@dataclass(frozen=True, kw_only=True)
class Replay:
    student: dict[str, Tensor]  # student and predictor after the last step
    teacher: dict[str, Tensor]  # as the last step has used it
    losses: list[float]
    gradients: dict[str, Tensor]  # of the first step


@pytest.fixture(scope="module")
def replayed() -> Replay:
    """The recorded batches through our own training step. The teacher moves at its end, by the momentum they use in the
    next one.
    """
    method = initial_method()
    optimizer = build_optimizer(method, OptimizerSettings(decayed="all", clip_norm=0.0))
    step_of = TrainingStep(method=method, parallel=method, optimizer=optimizer, bf16=False, device=torch.device("cpu"))
    losses, gradients, teacher = [], dict[str, Tensor](), dict[str, Tensor]()
    for step, (recorded, following) in enumerate(zip(STEPS, [*STEPS[1:], {"momentum": 1.0}], strict=True)):
        teacher = {name: value.clone() for name, value in method.state_dict().items() if name.startswith("teacher")}
        hyper = StepHyper(
            step=step,
            epoch=0,
            learning_rate=recorded["learning_rate"],
            weight_decay=SETTINGS["weight_decay"],
            own={"momentum": following["momentum"]},
        )
        outputs: list[StepOutput] = [step_of.forward_backward(views(step), hyper, num_parts=1, is_last=True)]
        losses.append(outputs[0].loss.item())
        gradients = gradients or {
            name: value.grad.clone() for name, value in method.named_parameters() if value.grad is not None
        }
        step_of.update(outputs, hyper)
    student = {name: value for name, value in method.state_dict().items() if not name.startswith("teacher")}
    return Replay(student=student, teacher=teacher, losses=losses, gradients=gradients)


def assert_as_recorded(found: dict[str, Tensor], kind: str, *, within: float) -> None:
    # The batch norm of the projector's first layer takes the bias of the backbone's last norm away again: its gradient
    # is exactly zero, and AdamW blows up what rounding leaves of it.
    theirs = {their_key(name): value for name, value in found.items() if not name.endswith("backbone.model.norm.bias")}
    assert_same(theirs, {name: GOLDEN[f"{kind}/{name}"] for name in theirs}, within=within)


def test_the_loss_of_every_step_is_theirs(replayed: Replay) -> None:
    assert replayed.losses == pytest.approx([recorded["loss"] for recorded in STEPS], rel=1e-5)


def test_the_gradients_of_the_first_step_are_theirs_and_the_frozen_patch_embedding_has_none(replayed: Replay) -> None:
    assert {their_key(name) for name in replayed.gradients} == {
        name.removeprefix("gradient/") for name in GOLDEN if name.startswith("gradient/")
    }
    assert not any("patch_embed" in name or "pos_embed" in name for name in replayed.gradients)
    assert_as_recorded(replayed.gradients, "gradient", within=1e-5)


def test_student_and_predictor_after_the_last_step_are_theirs(replayed: Replay) -> None:
    assert_as_recorded(replayed.student, "final", within=1e-6)


def test_the_teacher_of_the_last_step_is_theirs(replayed: Replay) -> None:
    assert_as_recorded(replayed.teacher, "final", within=1e-6)


def test_in_the_record_student_and_teacher_move_so_that_a_mistake_would_show() -> None:
    for name in ("head.0.weight", "blocks.0.attn.qkv.weight", "cls_token"):
        start, student, teacher = (
            GOLDEN[f"{key}.{name}"] for key in ("initial/base_encoder", "final/base_encoder", "final/momentum_encoder")
        )
        assert (student - start).abs().max() > 2e-3
        assert 1e-4 < (teacher - start).abs().max() < 0.5 * (student - start).abs().max()


def test_the_fixed_positions_are_theirs() -> None:
    positions = recorded_method().student.backbone.model.pos_embed
    assert isinstance(positions, nn.Parameter)
    torch.testing.assert_close(positions.detach(), GOLDEN["initial/base_encoder.pos_embed"], rtol=0, atol=1e-6)


def test_the_schedules_are_theirs_but_for_the_step_at_which_the_warm_up_ends() -> None:
    training = SETTINGS["training"]
    batch_size, steps_per_epoch = 256, SETTINGS["steps_per_epoch"]
    optimizer = OptimizerSettings(
        learning_rate=training["lr"],
        min_learning_rate=0.0,
        warmup_epochs=training["warmup_epochs"],
        weight_decay=SETTINGS["weight_decay"],
        weight_decay_end=SETTINGS["weight_decay"],
    )
    ramps = MoCoV3Settings(teacher=MoCoTeacherSettings(momentum=training["moco_m"])).ramps()
    schedules = Schedules(
        optimizer=optimizer,
        ramps=ramps,
        batch_size=batch_size,
        epochs=training["epochs"],
        steps_per_epoch=steps_per_epoch,
    )
    for step, recorded in enumerate(STEPS):
        hyper = schedules.at(step)
        assert hyper.momentum == pytest.approx(recorded["momentum"], rel=1e-12)
        assert hyper.weight_decay == SETTINGS["weight_decay"]
        if step != 1:  # ours reaches the peak at the last step of the warm-up, theirs one later
            assert hyper.learning_rate == pytest.approx(recorded["learning_rate"], rel=1e-12)
