"""CARP's loss and one step of it against the authors' code (make_carp.py says how the values were made)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from massl import keyed_random
from massl.data.views import ViewBatch
from massl.methods.base import EMASettings, StepHyper
from massl.methods.carp import CARP, CARPSettings, PartitionSettings
from massl.nn.backbone import BackboneSettings
from massl.nn.heads import HeadSettings
from massl.ops import partition_loss
from massl.ops.partition_loss import imbalance, partition_terms, reference_partition_terms

FOLDER = Path(__file__).parent
GOLDEN = load_file(FOLDER / "carp.safetensors")
SETTINGS = json.loads((FOLDER / "carp.json").read_text())["step"]
# Where their layers are in our head: biases before batch norm are left out, because it takes them away.
HEAD_LAYERS = {
    "mlp.0.weight",
    "mlp.1.weight",
    "mlp.1.bias",
    "mlp.3.weight",
    "mlp.4.weight",
    "mlp.4.bias",
    "mlp.6.weight",
    "mlp.6.bias",
}
USELESS = {"mlp.0.bias", "mlp.3.bias"}


@pytest.mark.parametrize("case", ["small", "remainder", "clamped"])
@pytest.mark.parametrize("kind", ["fast", "fast, one block at a time", "reference"])
def test_loss_and_gradients_are_those_of_the_authors_code(
    case: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "fast, one block at a time":
        monkeypatch.setattr(partition_loss, "_MAX_LOGITS", 1)
    values = {key.split("/")[2]: value for key, value in GOLDEN.items() if key.startswith(f"loss/{case}/")}
    student, prototypes = (
        values["student"].clone().requires_grad_(),
        values["student_prototypes"].clone().requires_grad_(),
    )
    shape = (-1, int(values["block_size"]), student.shape[-1])
    blocks, teacher_blocks = (
        rows[values["permutation"]].reshape(shape) for rows in (prototypes, values["teacher_prototypes"])
    )
    terms = reference_partition_terms if kind == "reference" else partition_terms
    disagreement, mean_shares = terms(student, values["teacher"], blocks, teacher_blocks)
    skew = imbalance(mean_shares)
    (disagreement + skew).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(disagreement.detach(), values["consistency"], rtol=1e-5, atol=0)
    torch.testing.assert_close(skew.detach(), values["entropy"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(student.grad, values["student_gradient"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(prototypes.grad, values["prototype_gradient"], rtol=1e-4, atol=1e-5)


def recorded(prefix: str) -> dict[str, Tensor]:
    """Their tensors under the names that they have in an Encoder and in Prototypes."""
    named = {
        key.removeprefix(f"step/{prefix}/"): value for key, value in GOLDEN.items() if key.startswith(f"step/{prefix}/")
    }
    ours = {
        key.replace("backbone.", "encoder.backbone.model."): value
        for key, value in named.items()
        if key.startswith("backbone.")
    }
    ours |= {f"encoder.head.{key}": named[f"head.{key}"] for key in HEAD_LAYERS}
    ours["prototypes.directions"] = named["head.last_layer.weight_v"]
    if "head.last_layer.weight_g" in named:
        ours["prototypes.lengths"] = named["head.last_layer.weight_g"]
    return ours


def named_parts(method: CARP, who: str) -> dict[str, torch.nn.Parameter]:
    encoder, prototypes = (
        (method.student, method.student_prototypes) if who == "student" else (method.teacher, method.teacher_prototypes)
    )
    named = {f"encoder.{key}": value for key, value in encoder.named_parameters()}
    return named | {f"prototypes.{key}": value for key, value in prototypes.named_parameters()}


@pytest.fixture
def method(monkeypatch: pytest.MonkeyPatch) -> CARP:
    """Ours with the recorded weights, on whose permutation the die always falls."""
    sizes = dict(SETTINGS["backbone"])
    backbone = BackboneSettings(
        name="vit_tiny_patch16_224",
        image_size=sizes.pop("img_size"),
        patch_size=sizes.pop("patch_size"),
        drop_path_rate=0.0,
        timm_options={key: sizes[key] for key in ("embed_dim", "depth", "num_heads")},
    )
    settings = CARPSettings(
        teacher=EMASettings(momentum=SETTINGS["momentum"]),
        head=HeadSettings(hidden_dim=SETTINGS["head"]["hidden_dim"], out_dim=SETTINGS["head"]["bottleneck_dim"]),
        prototypes=PartitionSettings(num_prototypes=SETTINGS["num_prototypes"], block_size=SETTINGS["block_size"]),
    )
    method = CARP(settings, backbone, seed=0)
    with torch.no_grad():
        for who in ("student", "teacher"):
            parameters, values = named_parts(method, who), recorded(who)
            assert parameters.keys() == values.keys()
            for key, value in values.items():
                parameters[key].copy_(value)
    monkeypatch.setattr(keyed_random, "permutation", lambda num_items, *key, device: GOLDEN["step/permutation"].clone())
    return method.train()


def test_one_step_of_the_whole_method_is_that_of_the_authors_code(method: CARP) -> None:
    views = GOLDEN["step/views"]
    batch = ViewBatch(global_views=views[:2], local_views=views[2:], image_indices=torch.arange(views.shape[1]))
    hyper = StepHyper(step=0, epoch=0, learning_rate=0.1, weight_decay=0.0, own={"momentum": SETTINGS["momentum"]})
    output = method(batch, hyper)
    output.loss.backward()
    torch.testing.assert_close(output.metrics["disagreement"], GOLDEN["step/consistency"], rtol=1e-5, atol=0)
    torch.testing.assert_close(output.metrics["imbalance"], GOLDEN["step/entropy"], rtol=1e-4, atol=0)
    parameters, gradients = named_parts(method, "student"), recorded("gradient")
    assert {key for key, parameter in parameters.items() if parameter.grad is not None} == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(
            parameters[key].grad, gradient, rtol=1e-3, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )
    assert all(GOLDEN[f"step/gradient/head.{key}"].abs().max() < 1e-7 for key in USELESS)

    method.after_step(output, hyper)  # the student has not moved: so theirs too, which moves the teacher first
    for key, value in recorded("teacher_after").items():
        torch.testing.assert_close(named_parts(method, "teacher")[key].detach(), value, rtol=1e-6, atol=1e-7)
