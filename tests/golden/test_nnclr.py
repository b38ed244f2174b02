"""Four whole training steps of NNCLR against two re-implementations (make_nnclr.py says which, and how the values were
made).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import normalize

from massl.data.views import ViewBatch
from massl.methods.base import StepHyper
from massl.methods.nnclr import NNCLR, NNCLRProjectorSettings, NNCLRSettings, SupportSetSettings
from massl.nn.backbone import BackboneSettings
from massl.nn.heads import PredictorSettings
from tests.golden.comparison import assert_same

FOLDER = Path(__file__).parent
GOLDEN = load_file(FOLDER / "nnclr.safetensors")
RECORD: dict[str, Any] = json.loads((FOLDER / "nnclr.json").read_text())
SETTINGS: dict[str, Any] = RECORD["settings"]
# Our modules and theirs.
PARTS = {"student.backbone.model.": "backbone.", "student.head.": "projector.", "predictor.": "predictor."}
HYPER = StepHyper(step=0, epoch=0, learning_rate=SETTINGS["learning_rate"], weight_decay=0.0, own={})


def their_key(ours: str) -> str:
    (part,) = [part for part in PARTS if ours.startswith(part)]
    return PARTS[part] + ours.removeprefix(part)


def initial_method() -> NNCLR:
    settings = NNCLRSettings(
        temperature=SETTINGS["temperature"],
        projector=NNCLRProjectorSettings(hidden_dim=SETTINGS["projector_dim"], out_dim=SETTINGS["dim"]),
        predictor=PredictorSettings(hidden_dim=SETTINGS["predictor_dim"]),
        memory=SupportSetSettings(num_rows=SETTINGS["memory_rows"]),
    )
    options = {key: SETTINGS["backbone"][key] for key in ("embed_dim", "depth", "num_heads")}
    backbone = BackboneSettings(
        name="vit_tiny_patch16_224", image_size=8, patch_size=4, drop_path_rate=0.0, timm_options=options
    )
    method = NNCLR(settings, backbone, seed=0).train()
    with torch.no_grad():
        for name, parameter in method.named_parameters():
            parameter.copy_(GOLDEN[f"initial/{their_key(name)}"])
    method.memory.rows.copy_(GOLDEN["memory/initial"])
    return method


@dataclass(frozen=True, kw_only=True)
class Replay:
    method: NNCLR
    losses: list[float]
    gradients: dict[str, Tensor]  # of the first step


@pytest.fixture(scope="module")
def replayed() -> Replay:
    method = initial_method()
    losses, gradients = [], dict[str, Tensor]()
    for views in GOLDEN["views"]:
        output = method(
            ViewBatch(global_views=views, local_views=None, image_indices=torch.arange(SETTINGS["batch_size"])), HYPER
        )
        method.zero_grad()
        output.loss.backward()
        losses.append(output.loss.item())
        gradients = gradients or {
            name: value.grad.clone() for name, value in method.named_parameters() if value.grad is not None
        }
        with torch.no_grad():
            for parameter in method.parameters():
                assert parameter.grad is not None
                parameter.sub_(SETTINGS["learning_rate"] * parameter.grad)
        method.after_step(output, HYPER)
    return Replay(method=method, losses=losses, gradients=gradients)


def assert_as_recorded(found: dict[str, Tensor], kind: str, *, within: float) -> None:
    theirs = {their_key(name): value for name, value in found.items()}
    assert_same(theirs, {name: GOLDEN[f"{kind}/{name}"] for name in theirs}, within=within)


def test_the_loss_of_every_step_is_theirs(replayed: Replay) -> None:
    assert replayed.losses == pytest.approx(RECORD["losses"], rel=2e-5)


def test_the_gradients_of_the_first_step_are_theirs(replayed: Replay) -> None:
    assert len(replayed.gradients) == sum(name.startswith("gradient/") for name in GOLDEN)
    assert_as_recorded(replayed.gradients, "gradient", within=1e-5)


def test_the_weights_after_the_last_step_are_theirs(replayed: Replay) -> None:
    weights = {name: value.detach() for name, value in replayed.method.named_parameters()}
    assert len(weights) == sum(name.startswith("final/") for name in GOLDEN)
    assert_as_recorded(weights, "final", within=2e-6)


def test_the_memory_after_the_last_step_is_theirs(replayed: Replay) -> None:
    assert RECORD["final_pointer"] == int(replayed.method.memory.cursor) == 8  # once round and on
    # Theirs holds embeddings of any length and normalises them when it looks. 1e-4: over 8 images some channel hardly
    # varies.
    torch.testing.assert_close(
        replayed.method.memory.rows, normalize(GOLDEN["memory/final"], dim=-1), rtol=0, atol=1e-4
    )


def test_in_the_record_weights_and_memory_change_so_that_a_mistake_would_show() -> None:
    for name in ("projector.layers.0.weight", "predictor.layers.3.weight", "backbone.blocks.0.attn.qkv.weight"):
        assert (GOLDEN[f"final/{name}"] - GOLDEN[f"initial/{name}"]).abs().max() > 2e-3
    assert (
        not torch.isclose(normalize(GOLDEN["memory/final"], dim=-1), GOLDEN["memory/initial"], atol=1e-3)
        .all(dim=1)
        .any()
    )
