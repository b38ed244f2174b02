"""Supervised steps against DeiT's `train_one_epoch` (make_supervised.py says how the values were made)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from timm.optim import param_groups_weight_decay

from massl.data.views import ViewBatch
from massl.methods import supervised
from massl.methods.base import StepHyper
from massl.methods.supervised import Supervised, SupervisedSettings
from massl.nn.backbone import BackboneSettings
from massl.ops.mixup import Mixture, mix_rows, mixture_of, smoothed_targets
from massl.training.optimizers import OptimizerSettings, build_optimizer

FOLDER = Path(__file__).parent
GOLDEN = load_file(FOLDER / "supervised.safetensors")
RECORD: dict[str, Any] = json.loads((FOLDER / "supervised.json").read_text())
MODEL, CASES = RECORD["model"], RECORD["cases"]
HYPER = StepHyper(step=1, epoch=0, learning_rate=0.0, weight_decay=0.0, own={})


def ours_of(name: str) -> str:
    return name.replace("head.", "encoder.head.", 1) if name.startswith("head.") else f"encoder.backbone.model.{name}"


def recorded_method(*, mixes: bool) -> Supervised:
    backbone = BackboneSettings(
        name="vit_tiny_patch16_224",
        image_size=MODEL["img_size"],
        patch_size=MODEL["patch_size"],
        drop_path_rate=0.0,
        timm_options={key: MODEL[key] for key in ("embed_dim", "depth", "num_heads")},
    )
    alphas = {} if mixes else {"mixup_alpha": 0.0, "cutmix_alpha": 0.0}
    settings = SupervisedSettings(
        num_classes=MODEL["num_classes"], label_smoothing=RECORD["smoothing"], erasing_probability=0.0, **alphas
    )
    method = Supervised(settings, backbone, seed=0)
    method.load_state_dict(
        {ours_of(key.removeprefix("weights/")): value for key, value in GOLDEN.items() if key.startswith("weights/")}
    )
    return method


def recorded_mixture(case: dict[str, Any]) -> Mixture:
    row, column = case["centre"]
    centre = (torch.tensor(row), torch.tensor(column))
    return mixture_of(
        torch.tensor(case["share"]), cuts=torch.tensor(case["cuts"]), centre=centre, size=(MODEL["img_size"],) * 2
    )


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["cuts"] is not None])
def test_targets_of_mixed_images_are_those_of_timm(name: str) -> None:
    plain = smoothed_targets(GOLDEN["labels"], num_classes=MODEL["num_classes"], smoothing=RECORD["smoothing"])
    targets = mix_rows(plain, recorded_mixture(CASES[name]).share)
    torch.testing.assert_close(targets, GOLDEN[f"{name}/targets"], atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", list(CASES))
def test_loss_and_gradients_of_a_step_are_those_of_deit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixes = CASES[name]["cuts"] is not None
    if mixes:
        monkeypatch.setattr(supervised, "draw_mixture", lambda *key, **settings: recorded_mixture(CASES[name]))
    method, images, labels = recorded_method(mixes=mixes), GOLDEN["images"], GOLDEN["labels"]
    views = ViewBatch(
        global_views=images[None], local_views=None, image_indices=torch.arange(len(images)), labels=labels
    )
    loss = method(views, HYPER).loss
    torch.testing.assert_close(loss, GOLDEN[f"{name}/loss"], atol=0, rtol=2e-6)
    loss.backward()
    gradients = dict(method.named_parameters())
    expected = {key.split("/")[2]: value for key, value in GOLDEN.items() if key.startswith(f"{name}/gradient/")}
    assert len(expected) == (len(gradients) if name == "mixup" else 3)
    for key, gradient in expected.items():
        torch.testing.assert_close(gradients[ours_of(key)].grad, gradient, atol=1e-5, rtol=1e-4)


def test_what_decays_is_what_decays_in_deit() -> None:
    """DeiT hands timm its model, which spares biases, norms and what the model itself names."""
    method = recorded_method(mixes=True)
    model = method.encoder.backbone.model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    spared, decayed = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    assert (spared["weight_decay"], decayed["weight_decay"]) == (0.0, 0.05)
    ours, _ = build_optimizer(method, OptimizerSettings(decayed="layers")).param_groups
    assert {names[id(p)] for p in decayed["params"]} == {
        names[id(p)] for p in ours["params"] if p is not method.encoder.head.weight
    }
