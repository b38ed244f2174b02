from typing import Literal

import pytest
import torch
from torch import nn

from massl.methods.base import StepHyper
from massl.nn.backbone import BackboneSettings, build_backbone
from massl.training.optimizers import OptimizerSettings, build_optimizer, clip_each_gradient

HYPER = StepHyper(
    step=0, epoch=0, learning_rate=0.5, weight_decay=0.1, own={"momentum": 0.9, "teacher_temperature": 0.07}
)


def parameter_with_gradient(*gradient: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(gradient)))
    parameter.grad = torch.tensor(gradient)
    return parameter


def test_class_token_and_positions_are_decayed_and_biases_and_norms_are_not() -> None:
    """As in the authors' code."""
    settings = BackboneSettings(
        name="vit_tiny_patch16_224",
        image_size=16,
        patch_size=8,
        timm_options={"embed_dim": 12, "depth": 1, "num_heads": 2},
    )
    backbone = build_backbone(settings, seed=0)
    decayed, not_decayed = build_optimizer(backbone, OptimizerSettings()).param_groups
    names = {parameter: name.removeprefix("model.") for name, parameter in backbone.named_parameters()}
    kernels = {"patch_embed.proj", "blocks.0.attn.qkv", "blocks.0.attn.proj", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"}
    norms = {"blocks.0.norm1", "blocks.0.norm2", "norm"}
    assert {names[parameter] for parameter in decayed["params"]} == {
        "cls_token",
        "pos_embed",
        *(f"{kernel}.weight" for kernel in kernels),
    }
    assert {names[parameter] for parameter in not_decayed["params"]} == {
        *(f"{layer}.bias" for layer in kernels | norms),
        *(f"{norm}.weight" for norm in norms),
    }


def test_frozen_parameters_are_left_out() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    groups = build_optimizer(module, OptimizerSettings()).param_groups
    assert [len(group["params"]) for group in groups] == [1, 1]


def test_the_optimizer_is_adamw_with_the_settings_given() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), OptimizerSettings(betas=(0.8, 0.95)))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert all((group["betas"], group["eps"]) == ((0.8, 0.95), 1e-8) for group in optimizer.param_groups)


def test_the_learning_rate_of_a_step_reaches_both_groups() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), OptimizerSettings())
    optimizer.set_hyper(HYPER)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_a_step_is_that_of_torchs_own_decoupled_weight_decay() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    optimizer = build_optimizer(ours, OptimizerSettings(clip_norm=0.0))
    truth = torch.optim.AdamW(
        [{"params": [theirs.weight], "weight_decay": 0.1}, {"params": [theirs.bias], "weight_decay": 0.0}], lr=0.5
    )
    for _ in range(3):
        images = torch.randn(4, 3)
        for module in (ours, theirs):
            module.zero_grad()
            module(images).square().sum().backward()
        optimizer.set_hyper(HYPER)
        optimizer.step()
        truth.step()
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)


def test_a_step_clips_each_gradient_before_it_is_averaged() -> None:
    layer = nn.Linear(2, 1)
    optimizer = build_optimizer(layer, OptimizerSettings(clip_norm=3.0, betas=(0.5, 0.5)))
    layer.weight.grad, layer.bias.grad = torch.tensor([[30.0, 40.0]]), torch.tensor([0.5])
    optimizer.set_hyper(HYPER)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[layer.weight]["exp_avg"], 0.5 * torch.tensor([[1.8, 2.4]]))
    assert optimizer.state[layer.bias]["exp_avg"].item() == 0.25


def test_a_loaded_state_is_not_changed_by_the_steps_that_follow() -> None:
    layer = nn.Linear(2, 1)
    optimizer = build_optimizer(layer, OptimizerSettings())
    for _ in range(2):
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.set_hyper(HYPER)
        optimizer.step()
        stored = optimizer.portable_state()
        optimizer.load_portable_state(stored)
    assert [int(state["step"]) for state in stored["state"].values()] == [2, 2]
    optimizer.step()
    assert [int(state["step"]) for state in stored["state"].values()] == [2, 2]


def test_the_stored_state_is_free_of_learning_rate_and_device_and_continues_the_same() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    optimizer = build_optimizer(layer, OptimizerSettings())
    layer(torch.randn(4, 3)).sum().backward()
    optimizer.set_hyper(HYPER)
    optimizer.step()
    stored = optimizer.portable_state()
    assert all("lr" not in group and "capturable" not in group for group in stored["param_groups"])
    other = nn.Linear(3, 2)
    other.load_state_dict(layer.state_dict())
    continued = build_optimizer(other, OptimizerSettings())
    continued.load_portable_state(stored)
    for module, its_optimizer in ((layer, optimizer), (other, continued)):
        module.zero_grad()
        module(torch.ones(1, 3)).sum().backward()
        its_optimizer.set_hyper(HYPER)
        its_optimizer.step()
    assert torch.equal(layer.weight, other.weight)


def test_with_a_gradient_of_zero_only_decayed_parameters_shrink() -> None:
    layer = nn.Linear(2, 2)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    optimizer = build_optimizer(layer, OptimizerSettings())
    optimizer.set_hyper(HYPER)
    (0.0 * layer(torch.ones(1, 2)).sum()).backward()
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), (1 - 0.5 * 0.1) * weight)
    assert torch.equal(layer.bias.detach(), bias)


def test_each_gradient_is_clipped_by_its_own_norm() -> None:
    large, small = parameter_with_gradient(30.0, 40.0), parameter_with_gradient(0.3, 0.4)
    without = nn.Parameter(torch.zeros(2))
    clip_each_gradient([large, small, without], 3.0)
    assert large.grad is not None
    torch.testing.assert_close(large.grad, torch.tensor([1.8, 2.4]))
    assert small.grad is not None
    # not scaled by the large one's norm, and to the last bit
    assert small.grad.tolist() == torch.tensor([0.3, 0.4]).tolist()
    assert without.grad is None


@pytest.mark.parametrize("max_norm", [0.0, 100.0])
def test_zero_switches_clipping_off_and_a_large_bound_changes_nothing(max_norm: float) -> None:
    parameter = parameter_with_gradient(30.0, 40.0)
    clip_each_gradient([parameter], max_norm)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [30.0, 40.0]


def test_clipping_nothing_is_no_error() -> None:
    clip_each_gradient([nn.Parameter(torch.zeros(2))], 3.0)


def test_the_peak_learning_rate_is_linear_in_the_batch() -> None:
    settings = OptimizerSettings(learning_rate=5e-4)
    assert settings.peak_learning_rate(256) == pytest.approx(5e-4)
    assert settings.peak_learning_rate(1024) == pytest.approx(2e-3)


@pytest.mark.parametrize(
    ("decayed", "names"),
    [
        ("matrices", {"cls_token", "pos_embed", "layer.weight"}),
        ("layers", {"layer.weight"}),
        ("all", {"cls_token", "pos_embed", "layer.weight", "layer.bias"}),
    ],
)
def test_what_decays_is_the_recipes_choice(decayed: Literal["matrices", "layers", "all"], names: set[str]) -> None:
    module = nn.Module()
    module.layer = nn.Linear(2, 2)
    module.cls_token, module.pos_embed = nn.Parameter(torch.zeros(1, 1, 2)), nn.Parameter(torch.zeros(1, 3, 2))
    optimizer = build_optimizer(module, OptimizerSettings(decayed=decayed))
    shrinking = {id(parameter) for group in optimizer.param_groups if group["decays"] for parameter in group["params"]}
    assert {name for name, parameter in module.named_parameters() if id(parameter) in shrinking} == names
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4
