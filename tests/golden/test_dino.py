"""DINO's head, loss, centre and whole training steps against the official code (make_dino.py says how the values were
made).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from massl.data.views import ViewBatch
from massl.methods.base import StepHyper
from massl.methods.dino import DINO, DINOSettings
from massl.nn.backbone import BackboneSettings
from massl.nn.heads import HeadSettings, ProjectionHead
from massl.nn.prototypes import Centre, Prototypes, PrototypeSettings
from massl.ops.prototype_attention import cross_view_weights, prototype_loss, reference_prototype_loss
from massl.training.optimizers import OptimizerSettings, build_optimizer
from massl.training.step import TrainingStep
from tests.golden.comparison import assert_same

FOLDER = Path(__file__).parent
GOLDEN = load_file(FOLDER / "dino.safetensors")
RECORD: dict[str, Any] = json.loads((FOLDER / "dino.json").read_text())
SETTINGS: dict[str, Any] = RECORD["settings"]
STEPS: list[dict[str, Any]] = RECORD["steps"]
LAYER_NAMES = {"directions": "weight_v", "lengths": "weight_g"}


def recorded(prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{prefix}/"): value for key, value in GOLDEN.items() if key.startswith(f"{prefix}/")}


def recorded_prototypes(who: str) -> Prototypes:
    count, dim = GOLDEN[f"loss/{who}_weight_v"].shape
    prototypes = Prototypes(dim, PrototypeSettings(num_prototypes=count, unit_length=False))
    prototypes.load_state_dict({ours: GOLDEN[f"loss/{who}_{theirs}"] for ours, theirs in LAYER_NAMES.items()})
    return prototypes


def test_the_head_gives_the_outputs_of_theirs() -> None:
    sizes, weights = RECORD["head"], recorded("head")
    projection = ProjectionHead(
        sizes["in_dim"], HeadSettings(hidden_dim=sizes["hidden_dim"], out_dim=sizes["bottleneck_dim"])
    )
    projection.load_state_dict({key: value for key, value in weights.items() if key.startswith("mlp.")})
    prototypes = Prototypes(sizes["bottleneck_dim"], PrototypeSettings(num_prototypes=sizes["out_dim"]))
    prototypes.load_state_dict({ours: weights[f"last_layer.{theirs}"] for ours, theirs in LAYER_NAMES.items()})
    with torch.no_grad():
        outputs = projection(weights["features"]) @ prototypes().T
    torch.testing.assert_close(outputs, weights["outputs"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss_of", [prototype_loss, reference_prototype_loss], ids=["fast", "reference"])
def test_loss_gradients_and_centre_of_several_steps_are_those_of_their_loss(loss_of: Any) -> None:
    student_prototypes, teacher_prototypes = (
        recorded_prototypes("student"),
        recorded_prototypes("teacher").requires_grad_(False),
    )
    centre = Centre(PrototypeSettings(num_prototypes=RECORD["loss"]["prototypes"]))
    for step in range(RECORD["loss"]["steps"]):
        values = recorded(f"loss/step{step}")
        student = values["student"].clone().requires_grad_()
        loss = loss_of(
            student,
            values["teacher"],
            student_prototypes(),
            teacher_prototypes(),
            centre.value,
            student_temperature=0.1,
            teacher_temperature=float(values["teacher_temperature"]),
            pair_weights=cross_view_weights(len(student), 2, device="cpu"),
        )
        trained = (student, student_prototypes.directions, student_prototypes.lengths)
        gradients = torch.autograd.grad(loss, trained)
        torch.testing.assert_close(loss, values["loss"], rtol=1e-5, atol=0)
        for name, gradient in zip(("student", "weight_v", "weight_g"), gradients, strict=True):
            torch.testing.assert_close(gradient, values[f"gradient_{name}"], rtol=1e-4, atol=1e-6)
        centre.follow(values["teacher"].mean(dim=0), teacher_prototypes())
        torch.testing.assert_close(centre.value, values["centre_after"], rtol=1e-5, atol=1e-7)


def official_weights(method: DINO, who: str) -> dict[str, Tensor]:
    """The parameters of student or teacher under the official keys."""
    encoder, prototypes = getattr(method, who), getattr(method, f"{who}_prototypes")
    weights = {
        key.replace("backbone.model.", "backbone."): value for key, value in encoder.state_dict(keep_vars=True).items()
    }
    return weights | {f"head.last_layer.{theirs}": getattr(prototypes, ours) for ours, theirs in LAYER_NAMES.items()}


def recorded_method() -> DINO:
    head = SETTINGS["head"]
    settings = DINOSettings(
        head=HeadSettings(hidden_dim=head["hidden_dim"], out_dim=head["bottleneck_dim"]),
        prototypes=PrototypeSettings(
            num_prototypes=head["out_dim"], unit_length=False, frozen_epochs=SETTINGS["frozen_epochs"]
        ),
    )
    backbone = BackboneSettings(
        name="vit_tiny_patch16_224",
        image_size=SETTINGS["backbone"]["img_size"][0],
        patch_size=SETTINGS["backbone"]["patch_size"],
        drop_path_rate=0.0,
        timm_options={key: SETTINGS["backbone"][key] for key in ("embed_dim", "depth", "num_heads")},
    )
    method = DINO(settings, backbone, seed=0)
    start = recorded("steps/initial")
    for who in ("student", "teacher"):
        weights = official_weights(method, who)
        assert weights.keys() == start.keys()
        for key, value in weights.items():
            value.data.copy_(start[key])
    return method.train()


def recorded_views(step: int, images: slice) -> ViewBatch:
    values = recorded(f"steps/step{step}")
    return ViewBatch(
        global_views=values["global"][:, images],
        local_views=values["local"][:, images],
        image_indices=torch.arange(SETTINGS["batch_size"])[images],
    )


def recorded_hyper(step: dict[str, Any]) -> StepHyper:
    own = {name: step[name] for name in ("momentum", "teacher_temperature")}
    return StepHyper(
        step=step["step"],
        epoch=step["epoch"],
        learning_rate=step["learning_rate"],
        weight_decay=step["weight_decay"],
        own=own,
    )


@pytest.mark.parametrize("num_parts", [1, 2], ids=["whole batches", "batches in two parts"])
def test_losses_weights_and_centre_after_whole_training_steps_are_theirs(num_parts: int) -> None:
    method = recorded_method()
    optimizer = build_optimizer(method, OptimizerSettings(clip_norm=SETTINGS["clip"]))
    training_step = TrainingStep(
        method=method, parallel=method, optimizer=optimizer, bf16=False, device=torch.device("cpu")
    )
    part_size = SETTINGS["batch_size"] // num_parts
    losses = []
    for step in STEPS:
        parts = (
            recorded_views(step["step"], slice(part * part_size, (part + 1) * part_size)) for part in range(num_parts)
        )
        losses.append(training_step(parts, recorded_hyper(step), num_parts=num_parts).loss.item())
    assert losses == pytest.approx([step["loss"] for step in STEPS], rel=1e-5)
    assert_same(official_weights(method, "student"), recorded("steps/student"), within=1e-5)
    assert_same(official_weights(method, "teacher"), recorded("steps/teacher"), within=1e-5)
    torch.testing.assert_close(method.centre.value, GOLDEN["steps/centre"], rtol=0, atol=1e-5)


def test_the_parameters_with_a_gradient_at_each_step_are_theirs_so_that_the_prototypes_stand_still_as_long() -> None:
    method = recorded_method()
    for step in STEPS:
        frozen: list[nn.Parameter] = list(method.frozen(recorded_hyper(step)))
        moving = {
            key
            for key, value in official_weights(method, "student").items()
            if all(value is not other for other in frozen)
        }
        assert moving == step["clipped_gradient_norms"].keys()
    assert [len(step["clipped_gradient_norms"]) for step in STEPS] == [36, 36, 38, 38, 38, 38]


def test_the_record_is_one_in_which_mistakes_would_show() -> None:
    """Parameters move, lengths and centre too, and some gradients are clipped while others are not."""
    start, end = recorded("steps/initial"), recorded("steps/student")
    assert min((end[key] - start[key]).abs().max().item() for key in start) > 1e-3
    assert GOLDEN["steps/centre"].abs().max() > 0.01
    for step in STEPS:
        is_clipped = [norm > 0.999 * SETTINGS["clip"] for norm in step["clipped_gradient_norms"].values()]
        assert any(is_clipped)
        assert not all(is_clipped)
