import pytest
import torch
from torch import nn

from massl.config import RecipeError
from massl.nn.backbone import BackboneSettings, build_backbone
from massl.nn.timm_models import create_timm_model


def test_the_small_stem_keeps_every_pixel() -> None:
    model = build_backbone(BackboneSettings(name="resnet18", stem="small", drop_path_rate=0.0), seed=0).model
    sizes = []
    for name in ("layer1", "layer4"):
        model.get_submodule(name).register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[-1]))
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 512)
    assert sizes == [32, 4]


def test_only_the_stem_differs_and_it_depends_on_the_seed() -> None:
    usual, small, again, other = (
        build_backbone(BackboneSettings(name="resnet18", stem=stem, drop_path_rate=0.0), seed=seed).model.state_dict()
        for stem, seed in (("", 0), ("small", 0), ("small", 0), ("small", 1))
    )
    assert usual.keys() == small.keys()
    assert [
        name for name in usual if usual[name].shape != small[name].shape or not torch.equal(usual[name], small[name])
    ] == ["conv1.weight"]
    assert torch.equal(small["conv1.weight"], again["conv1.weight"])
    assert not torch.equal(small["conv1.weight"], other["conv1.weight"])
    # As wide as those that timm starts: variance 2 / fan out.
    assert float(small["conv1.weight"].std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.1)


def test_a_saved_description_builds_the_same_network() -> None:
    settings = BackboneSettings(name="resnet18", stem="small", drop_path_rate=0.0)
    model = create_timm_model(settings.timm_arguments())
    assert isinstance(model.maxpool, nn.Identity)
    assert "stem" not in BackboneSettings(name="resnet18").timm_arguments()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_tiny_patch16_224", "vit_tiny_patch16_224 is not a ResNet"),
        ("resnet18d", "resnet18d has a deep stem"),
    ],
)
def test_other_networks_have_no_small_stem(name: str, message: str) -> None:
    with pytest.raises(RecipeError, match=f"backbone.stem small .*{message}"):
        build_backbone(BackboneSettings(name=name, stem="small"), seed=0)
