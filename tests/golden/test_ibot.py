"""iBOT's losses, centres and whole training steps against the official code (recorded by make_ibot.py)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from massl.data.views import ViewBatch
from massl.methods import ibot
from massl.methods.base import StepHyper
from massl.methods.ibot import IBOT, IBOTSettings, MaskSettings, SharedPrototypeSettings
from massl.nn.backbone import BackboneSettings
from massl.nn.heads import HeadSettings
from massl.nn.prototypes import Centre, Prototypes, PrototypeSettings
from massl.ops.masked_rows import masked_rows
from massl.ops.prototype_attention import cross_view_weights, prototype_loss
from massl.training.optimizers import OptimizerSettings, build_optimizer
from massl.training.step import TrainingStep
from tests.golden.comparison import assert_same

FOLDER = Path(__file__).parent
GOLDEN = load_file(FOLDER / "ibot.safetensors")
RECORD: dict[str, Any] = json.loads((FOLDER / "ibot.json").read_text())
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


@pytest.mark.parametrize("spare_slots", [0, 5])
def test_both_losses_their_gradients_and_centres_over_several_steps_are_those_of_their_loss(spare_slots: int) -> None:
    student_prototypes, teacher_prototypes = (
        recorded_prototypes("student"),
        recorded_prototypes("teacher").requires_grad_(False),
    )
    settings = PrototypeSettings(num_prototypes=RECORD["loss"]["prototypes"])
    centre, patch_centre = Centre(settings), Centre(settings)
    for step in range(RECORD["loss"]["steps"]):
        values = recorded(f"loss/step{step}")
        student, student_patches = (values[name].clone().requires_grad_() for name in ("student", "student_patches"))
        masks = values["masks"].flatten(0, 1)
        rows, row_weights = masked_rows(masks, int(masks.sum()) + spare_slots)
        temperatures = {"student_temperature": 0.1, "teacher_temperature": float(values["teacher_temperature"])}
        both = (student_prototypes(), teacher_prototypes())
        pairs = cross_view_weights(len(student), 2, device="cpu")
        class_loss = prototype_loss(student, values["teacher"], *both, centre.value, pair_weights=pairs, **temperatures)
        hidden, targets = (tokens.flatten(0, 2)[rows][None] for tokens in (student_patches, values["teacher_patches"]))
        patch_loss = prototype_loss(
            hidden,
            targets,
            *both,
            patch_centre.value,
            pair_weights=torch.ones(1, 1),
            row_weights=row_weights,
            **temperatures,
        )
        torch.testing.assert_close(class_loss, values["class_loss"], rtol=1e-5, atol=0)
        torch.testing.assert_close(patch_loss, values["patch_loss"], rtol=1e-5, atol=0)
        trained = (student, student_patches, student_prototypes.directions, student_prototypes.lengths)
        gradients = torch.autograd.grad(class_loss + patch_loss, trained)
        for name, gradient in zip(("student", "student_patches", "weight_v", "weight_g"), gradients, strict=True):
            torch.testing.assert_close(gradient, values[f"gradient_{name}"], rtol=1e-4, atol=1e-6)
        centre.follow(values["teacher"].mean(dim=0), teacher_prototypes())
        patch_centre.follow(values["teacher_patches"].mean(dim=(0, 2)), teacher_prototypes())
        torch.testing.assert_close(centre.value, values["centre_after"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(patch_centre.value, values["patch_centre_after"], rtol=1e-5, atol=1e-7)


def official_weights(method: IBOT, who: str) -> dict[str, Tensor]:
    """The parameters of student or teacher under the official keys."""
    encoder, prototypes = getattr(method, who), getattr(method, f"{who}_prototypes")
    weights = {
        key.replace("backbone.model.", "backbone."): value for key, value in encoder.state_dict(keep_vars=True).items()
    }
    weights |= {f"head.last_layer.{theirs}": getattr(prototypes, ours) for ours, theirs in LAYER_NAMES.items()}
    return weights | ({"backbone.masked_embed": method.mask_token} if who == "student" else {})


def recorded_method() -> IBOT:
    head = SETTINGS["head"]
    settings = IBOTSettings(
        head=HeadSettings(hidden_dim=head["hidden_dim"], out_dim=head["bottleneck_dim"]),
        prototypes=SharedPrototypeSettings(
            num_prototypes=head["out_dim"], unit_length=False, frozen_epochs=SETTINGS["frozen_epochs"]
        ),
        masks=MaskSettings(ratios=(0.5,), ratio_variances=(0.5,)),  # room for any number of hidden patches
    )
    backbone = BackboneSettings(
        name="vit_tiny_patch16_224",
        image_size=SETTINGS["backbone"]["img_size"][0],
        patch_size=SETTINGS["backbone"]["patch_size"],
        drop_path_rate=0.0,
        timm_options={key: SETTINGS["backbone"][key] for key in ("embed_dim", "depth", "num_heads")},
    )
    method = IBOT(settings, backbone, seed=0)
    start = recorded("steps/initial")
    assert official_weights(method, "student").keys() == start.keys()
    for who in ("student", "teacher"):
        for key, value in official_weights(method, who).items():
            value.data.copy_(start[key])
    return method.train()


def recorded_views(step: int, images: slice) -> ViewBatch:
    values = recorded(f"steps/step{step}")
    return ViewBatch(
        global_views=values["global"][:, images],
        local_views=values["local"][:, images],
        image_indices=torch.arange(SETTINGS["batch_size"])[images],
    )


def recorded_masks(key: tuple[int, str, int], image_indices: Tensor, **others: Any) -> Tensor:
    assert (others["num_views"], others["grid"]) == (2, (4, 4))
    return GOLDEN[f"steps/step{key[2]}/masks"][:, image_indices]


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
def test_losses_weights_and_centres_after_whole_training_steps_are_theirs(
    num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ibot, "block_masks", recorded_masks)
    method = recorded_method()
    optimizer = build_optimizer(method, OptimizerSettings(clip_norm=SETTINGS["clip"]))
    training_step = TrainingStep(
        method=method, parallel=method, optimizer=optimizer, bf16=False, device=torch.device("cpu")
    )
    part_size = SETTINGS["batch_size"] // num_parts
    for step in STEPS:
        parts = (
            recorded_views(step["step"], slice(part * part_size, (part + 1) * part_size)) for part in range(num_parts)
        )
        output = training_step(parts, recorded_hyper(step), num_parts=num_parts)
        found = {
            "loss": output.loss.item(),
            "cls": output.metrics["class_loss"].item(),
            "patch": output.metrics["patch_loss"].item(),
        }
        assert found == pytest.approx(step["losses"], rel=1e-5)
    for network in ("student", "teacher"):
        weights, expected = official_weights(method, network), recorded(f"steps/{network}")
        assert weights.keys() == expected.keys()
        assert_same(weights, expected, within=1e-5)
    torch.testing.assert_close(method.centre.value, GOLDEN["steps/centre"], rtol=0, atol=1e-5)
    torch.testing.assert_close(method.patch_centre.value, GOLDEN["steps/patch_centre"], rtol=0, atol=1e-5)


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
    assert [len(step["clipped_gradient_norms"]) for step in STEPS] == [37, 37, 39, 39]


def test_the_record_is_one_in_which_mistakes_would_show() -> None:
    """Parameters move, the mask token and both centres too, and views hide different numbers of patches, some none."""
    start, end = recorded("steps/initial"), recorded("steps/student")
    assert min((end[key] - start[key]).abs().max().item() for key in start) > 1e-3
    centre, patch_centre = GOLDEN["steps/centre"], GOLDEN["steps/patch_centre"]
    assert min(centre.abs().max(), patch_centre.abs().max(), (centre - patch_centre).abs().max()) > 0.01
    for step in range(len(STEPS)):
        assert len(set(GOLDEN[f"steps/step{step}/masks"].sum(dim=-1).flatten().tolist()) - {0}) > 1
        assert 0 in GOLDEN[f"steps/step{step}/masks"].sum(dim=-1)
