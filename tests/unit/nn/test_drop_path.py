import timm.layers
import torch
from torch import nn

from massl.nn.drop_path import KeyedDropPath, draw_scales, keep_probabilities, replace_drop_paths


def layers(*drop_probabilities: float) -> list[KeyedDropPath]:
    return [KeyedDropPath(probability, layer=layer) for layer, probability in enumerate(drop_probabilities)]


def test_a_branch_is_dropped_as_often_as_its_probability_says_and_keeps_its_expectation() -> None:
    scales = draw_scales(keep_probabilities(layers(0.0, 0.1, 0.5)), torch.arange(20_000))
    assert scales.shape == (3, 20_000)
    assert (scales[0] == 1.0).all()
    for layer, probability in ((1, 0.1), (2, 0.5)):
        assert abs((scales[layer] == 0.0).double().mean() - probability) < 0.015
        torch.testing.assert_close(scales[layer].unique(), torch.tensor([0.0, 1.0 / (1.0 - probability)]))
        assert abs(scales[layer].double().mean() - 1.0) < 0.03


def test_layers_decide_independently() -> None:
    dropped = draw_scales(keep_probabilities(layers(0.5, 0.5)), torch.arange(10_000)) == 0.0
    assert abs((dropped[0] & dropped[1]).double().mean() - 0.25) < 0.02


def test_a_sample_meets_the_same_decisions_at_any_position_of_any_batch() -> None:
    drop_paths, keys = layers(0.3, 0.6), torch.randint(1 << 60, (50,))
    scales = draw_scales(keep_probabilities(drop_paths), keys)
    order = torch.randperm(50)
    assert torch.equal(draw_scales(keep_probabilities(drop_paths), keys[order]), scales[:, order])
    assert torch.equal(draw_scales(keep_probabilities(drop_paths), keys[7:8]), scales[:, 7:8])


def test_a_branch_is_multiplied_by_the_scale_of_its_sample() -> None:
    layer, branch = KeyedDropPath(0.5, layer=0), torch.ones(2, 3, 4, dtype=torch.bfloat16)
    layer.scales = torch.tensor([0.0, 2.0])
    assert layer(branch).dtype == torch.bfloat16
    assert layer(branch)[0].abs().max() == 0.0
    assert (layer(branch)[1] == 2.0).all()


def test_without_scales_a_branch_is_left_alone_even_in_training_mode() -> None:
    layer, branch = KeyedDropPath(0.5, layer=0).train(), torch.ones(2, 3)
    assert layer(branch) is branch


def test_every_drop_path_of_a_model_is_replaced_in_order_and_nothing_else() -> None:
    model = nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(timm.layers.DropPath(0.1), nn.Identity()), timm.layers.DropPath(0.2)
    )
    replaced = replace_drop_paths(model)
    assert sorted(layer.drop_probability for layer in replaced) == [0.1, 0.2]
    assert [layer.layer for layer in replaced] == [0, 1]
    assert not any(isinstance(module, timm.layers.DropPath) for module in model.modules())
    assert sum(isinstance(module, KeyedDropPath) for module in model.modules()) == 2
