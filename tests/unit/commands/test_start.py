from pathlib import Path

import pytest
import torch

from massl.commands.console import message_console
from massl.commands.recipe import load_recipe
from massl.commands.start import backbone_settings, decide_start, network_of
from massl.config import RecipeError, to_yaml
from massl.nn.backbone import build_backbone
from massl.weights.models import open_model


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "vit_small_patch16_224.dino",
        "vit_small_patch14_reg4_dinov2.lvd142m",
        "vit_small_patch16_dinov3.lvd1689m",
        "resnet50.a1_in1k",
    ],
)
def test_the_settings_of_a_published_model_build_the_same_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a download: timm's random weights stand for the published ones."""
    monkeypatch.setattr("massl.weights.models._load_published", lambda backbone: None)
    model = open_model(name)
    settings = backbone_settings(model, drop_path_rate=0.1)
    assert "." not in settings.name
    own = build_backbone(settings, seed=1, drop_path_rate=0.1).eval()
    own.model.load_state_dict(model.backbone.model.state_dict())
    image = torch.linspace(-1.0, 1.0, 3 * 56 * 56).reshape(1, 3, 56, 56)
    with torch.no_grad():
        torch.testing.assert_close(own(image).pooled, model.backbone(image).pooled)


@pytest.mark.parametrize(("name", "patch"), [("test_vit.r160_in1k", 16), ("test_convnext.r160_in1k", None)])
def test_the_patch_of_a_timm_name_is_known_where_views_are_chosen(
    name: str, patch: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("massl.weights.models._load_published", lambda backbone: None)
    assert network_of(name).patch_size == patch


def test_settings_of_weights_need_weights_but_old_runs_that_have_none_go_on(tmp_path: Path) -> None:
    recipe = load_recipe("massl-tiny", {"data.source": "photos/", "init.head_epochs": 2.0})
    with pytest.raises(RecipeError, match=r"--init\.head_epochs needs weights to start from"):
        decide_start(recipe, None, path=tmp_path, given=(), console=message_console())
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe))
    assert decide_start(recipe, None, path=tmp_path, given=(), console=message_console()).recipe == recipe
