"""MAE as a whole against its authors' model (make_mae.py says how the values were made)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from massl.data.views import ViewBatch
from massl.methods import mae
from massl.methods.base import StepHyper
from massl.methods.mae import MAE, MAESettings
from massl.nn.backbone import BackboneSettings
from massl.nn.decoder import DecoderSettings
from massl.ops.pixel_targets import cut_patches, hidden_patch_error, hidden_patches, normalised_patches

FOLDER = Path(__file__).parent
GOLDEN = load_file(FOLDER / "mae.safetensors")
RECORD: dict[str, Any] = json.loads((FOLDER / "mae.json").read_text())
MODEL: dict[str, int] = RECORD["model"]
HYPER = StepHyper(step=0, epoch=0, learning_rate=0.0, weight_decay=0.0, own={})


def ours_of(name: str) -> str:
    """Our name of a parameter of theirs."""
    if name == "mask_token":
        return "decoder.mask_token"
    if name.startswith("decoder_"):
        return "decoder." + name.removeprefix("decoder_").replace("pred.", "predict.", 1).replace(
            "pos_embed", "positions"
        )
    return f"backbone.model.{name}"


def recorded_method(*, normalised: bool) -> MAE:
    backbone = BackboneSettings(
        name="vit_tiny_patch16_224",
        image_size=MODEL["img_size"],
        patch_size=MODEL["patch_size"],
        drop_path_rate=0.0,
        timm_options={key: MODEL[key] for key in ("embed_dim", "depth", "num_heads")},
    )
    decoder = DecoderSettings(
        dim=MODEL["decoder_embed_dim"], depth=MODEL["decoder_depth"], num_heads=MODEL["decoder_num_heads"]
    )
    settings = MAESettings(hidden_share=RECORD["mask_ratio"], normalise_targets=normalised, decoder=decoder)
    method = MAE(settings, backbone, seed=0)
    theirs = {
        ours_of(key.removeprefix("weights/")): value for key, value in GOLDEN.items() if key.startswith("weights/")
    }
    positions = {key: theirs.pop(key) for key in ("decoder.positions", "backbone.model.pos_embed")}
    # Positions are not loaded but computed, and equal theirs.
    torch.testing.assert_close(method.decoder.positions, positions["decoder.positions"][:, 1:], atol=1e-6, rtol=0)
    torch.testing.assert_close(
        method.backbone.model.pos_embed, positions["backbone.model.pos_embed"], atol=1e-6, rtol=0
    )
    method.load_state_dict(theirs | {"backbone.model.pos_embed": method.backbone.model.pos_embed})
    return method


def kept_of(noise: Tensor) -> Tensor:  # [R, N] -> [R, n]
    """What their `random_masking` keeps: the places of the smallest numbers."""
    return noise.argsort(dim=1)[:, : noise.shape[1] // 4]


@pytest.mark.parametrize("case", ["normalised", "plain"])
def test_the_loss_of_given_predictions_is_the_authors(case: str) -> None:
    kept = kept_of(GOLDEN[f"{case}/noise"])
    patches = cut_patches(GOLDEN["images"], MODEL["patch_size"])
    targets = normalised_patches(patches) if case == "normalised" else patches
    assert torch.equal(hidden_patches(kept, 16), GOLDEN[f"{case}/mask"])
    loss = hidden_patch_error(GOLDEN[f"{case}/predictions"], targets, kept)
    torch.testing.assert_close(loss, GOLDEN[f"{case}/loss"], atol=0, rtol=1e-6)


@pytest.mark.parametrize("case", ["normalised", "plain"])
def test_loss_predictions_and_gradients_of_the_whole_are_the_authors(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, kept = recorded_method(normalised=case == "normalised"), kept_of(GOLDEN[f"{case}/noise"])
    monkeypatch.setattr(mae, "random_kept", lambda *key, **sizes: kept[None])
    images = GOLDEN["images"]
    views = ViewBatch(global_views=images[None], local_views=None, image_indices=torch.arange(len(images)))
    output = method(views, HYPER)
    torch.testing.assert_close(output.loss, GOLDEN[f"{case}/loss"], atol=0, rtol=2e-6)
    predictions = method.decoder(method.backbone.visible(images, kept), kept, (4, 4))
    torch.testing.assert_close(predictions, GOLDEN[f"{case}/predictions"], atol=1e-5, rtol=1e-5)
    output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in method.named_parameters() if parameter.requires_grad}
    expected = {
        ours_of(key.split("/")[2]): value for key, value in GOLDEN.items() if key.startswith("normalised/gradient/")
    }
    assert gradients.keys() == expected.keys()
    if case == "normalised":
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                gradient, expected[name], atol=2e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )
