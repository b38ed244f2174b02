import pytest
import torch

from massl.methods import METHODS, build_method
from massl.methods.base import Method, StepHyper
from massl.nn.backbone import BackboneSettings
from massl.training.layer_decay import layer_scales
from massl.training.optimizers import DecayedAdamW, OptimizerSettings, build_optimizer


def method(**backbone: object) -> Method:
    values = {"head": {"hidden_dim": 8, "out_dim": 4}, "memory": {"num_rows": 8, "block_size": 4}}
    return build_method(
        METHODS["massl"].settings.model_validate({"name": "massl", **values}),
        BackboneSettings.model_validate(backbone),
        seed=0,
    )


def small_transformer(depth: int = 3) -> Method:
    options = {"embed_dim": 8, "depth": depth, "num_heads": 2}
    return method(name="vit_tiny_patch16_224", image_size=8, patch_size=4, timm_options=options)


def test_a_layer_has_the_rate_of_the_one_above_it_times_the_decay() -> None:
    scales = layer_scales(small_transformer(), 0.5)
    of = {name.removeprefix("student.backbone.model."): scale for name, scale in scales.items() if "student" in name}
    assert of["norm.weight"] == of["blocks.2.attn.qkv.weight"] == 0.5
    assert of["blocks.1.mlp.fc1.bias"] == 0.25
    assert of["blocks.0.norm1.weight"] == 0.125
    assert of["pos_embed"] == of["cls_token"] == of["patch_embed.proj.weight"] == 0.0625
    assert not any("head" in name for name in scales)


@pytest.mark.parametrize("name", ["test_convnext", "test_resnet"])
def test_convolutional_networks_have_layers_too(name: str) -> None:
    own = method(name=name)
    scales = layer_scales(own, 0.5)
    trained = {key for key, _ in own.named_parameters() if "backbone" in key}
    assert scales.keys() == trained
    assert len(set(scales.values())) > 3


def test_deep_networks_spread_the_decay_of_twelve_blocks() -> None:
    assert min(layer_scales(small_transformer(24), 0.75).values()) == pytest.approx(0.75**12.5)
    assert min(layer_scales(small_transformer(12), 0.75).values()) == pytest.approx(0.75**13)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_scaled_parameter_moves_and_decays_by_its_own_rate(name: str, as_tensor: bool) -> None:
    """As alone in an optimizer with that rate."""
    rate = torch.tensor(0.1) if as_tensor else 0.1
    pair = torch.nn.ParameterDict({key: torch.nn.Parameter(torch.ones(2, 2)) for key in ("low", "top")})
    alone = torch.nn.ParameterDict({"low": torch.nn.Parameter(torch.ones(2, 2))})
    settings = OptimizerSettings.model_validate({"name": name})
    both, one = build_optimizer(pair, settings, rate_scales={"low": 0.25}), build_optimizer(alone, settings)
    for step in range(3):
        for parameter in (*pair.values(), *alone.values()):
            parameter.grad = torch.full((2, 2), 0.3 + step)
        for optimizer, scale in ((both, 1.0), (one, 0.25)):
            optimizer.set_hyper(StepHyper(step=step, epoch=0, learning_rate=rate * scale, weight_decay=0.4, own={}))
            optimizer.step()
    torch.testing.assert_close(pair["low"], alone["low"])
    assert (pair["top"] < pair["low"]).all()


def test_a_frozen_parameter_keeps_value_and_moments_and_begins_with_a_first_step() -> None:
    pair = torch.nn.ParameterDict({key: torch.nn.Parameter(torch.ones(2, 2)) for key in ("low", "top")})
    optimizer = build_optimizer(pair, OptimizerSettings(), rate_scales={"low": 0.5})
    assert isinstance(optimizer, DecayedAdamW)
    for step in range(3):
        pair["top"].grad = torch.ones(2, 2)
        optimizer.set_hyper(StepHyper(step=step, epoch=0, learning_rate=0.1, weight_decay=0.4, own={}))
        optimizer.step()
    assert pair["low"].equal(torch.ones(2, 2))
    assert not optimizer.state[pair["low"]]
    pair["low"].grad = torch.ones(2, 2)
    optimizer.step()
    assert int(optimizer.state[pair["low"]]["step"]) == 1
