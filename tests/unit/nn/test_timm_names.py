from pathlib import Path

import pytest
import torch

from massl.config import RecipeError
from massl.nn.backbone import BackboneSettings, build_backbone
from massl.nn.timm_models import checked_options
from massl.weights.io import backbone_bytes, load_backbone


@pytest.mark.parametrize(
    ("given", "suggested"),
    [
        ("vit_tinny", "vit_tiny_patch16_224"),
        ("vit_base", "vit_base_patch16_224"),
        ("resnet-50", "resnet50"),
        ("convnxt_tiny", "convnext_tiny"),
    ],
)
def test_of_the_names_like_a_mistyped_one_the_common_one_is_suggested(given: str, suggested: str) -> None:
    with pytest.raises(RecipeError, match=f"no model .*{given}.* Did you mean '{suggested}'"):
        checked_options({"model_name": given}, prefix="")


def test_a_network_may_have_stages_of_its_own(tmp_path: Path) -> None:
    options: dict[str, int | float | bool | str | list[int]] = {"layers": [1, 2, 1, 1], "channels": [8, 8, 16, 24]}
    backbone = build_backbone(BackboneSettings(name="resnet18", timm_options=options), seed=0)
    image = torch.rand(1, 3, 40, 40)
    expected = backbone.eval()(image).pooled
    assert expected.shape == (1, 24)
    kept = {"timm_arguments": backbone.timm_arguments, "mean": (0.5,) * 3, "std": (0.5,) * 3, "image_size": 40}
    (tmp_path / "backbone.safetensors").write_bytes(backbone_bytes(backbone.model, **kept))
    torch.testing.assert_close(load_backbone(tmp_path / "backbone.safetensors").model(image), expected)


@pytest.mark.parametrize("value", [[8, 8, 16], [8, 8, 16, 0], [8, 8, 16, 2**20], [8, 8, 16, 24.0], 8, "8888"])
def test_stages_are_four_whole_numbers(value: object) -> None:
    with pytest.raises(RecipeError, match=r"channels is .*give a list of 4, each a whole number"):
        checked_options({"model_name": "resnet18", "channels": value}, prefix="")
