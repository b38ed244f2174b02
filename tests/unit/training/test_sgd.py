import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from massl.methods.base import StepHyper
from massl.training.optimizers import DecayedSGD, OptimizerSettings, build_optimizer

SETTINGS = OptimizerSettings(name="sgd", momentum=0.8, clip_norm=0.0)


def hyper(learning_rate: float | Tensor = 0.3, weight_decay: float | Tensor = 0.05) -> StepHyper:
    return StepHyper(step=0, epoch=0, learning_rate=learning_rate, weight_decay=weight_decay, own={})


def train(
    module: nn.Module, optimizer: torch.optim.Optimizer, *, num_steps: int, value: StepHyper | None = None
) -> None:
    for step in range(num_steps):
        optimizer.zero_grad()
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        module(inputs).square().sum().backward()
        if value is not None:
            assert isinstance(optimizer, DecayedSGD)
            optimizer.set_hyper(value)
        optimizer.step()


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


@pytest.mark.parametrize("as_tensors", [False, True])
def test_steps_are_those_of_torch(as_tensors: bool) -> None:
    ours, theirs = layer(), layer()
    value = hyper(torch.tensor(0.01), torch.tensor(0.05, dtype=torch.float64)) if as_tensors else hyper(0.01)
    train(ours, build_optimizer(ours, SETTINGS), num_steps=5, value=value)
    groups = [{"params": [theirs.weight], "weight_decay": 0.05}, {"params": [theirs.bias], "weight_decay": 0.0}]
    train(theirs, torch.optim.SGD(groups, lr=0.01, momentum=0.8), num_steps=5)
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)
    assert not torch.allclose(ours.weight, layer().weight, atol=1e-2)


def test_gradients_are_clipped_before_they_are_used() -> None:
    module = layer()
    before = module.bias.detach().clone()
    optimizer = build_optimizer(module, OptimizerSettings(name="sgd", clip_norm=0.5))
    module.bias.grad = torch.tensor([3.0, 4.0])
    optimizer.set_hyper(hyper(1.0))
    optimizer.step()
    torch.testing.assert_close(before - module.bias.detach(), torch.tensor([0.3, 0.4]))


def test_what_has_no_gradient_stands_still() -> None:
    module = layer()
    before = module.weight.detach().clone()
    optimizer = build_optimizer(module, SETTINGS)
    module.bias.grad = torch.ones(2)
    optimizer.set_hyper(hyper())
    optimizer.step()
    assert torch.equal(module.weight, before)


def test_a_stored_state_continues_bit_for_bit() -> None:
    whole, parts, value = layer(), layer(), hyper(0.01)
    train(whole, build_optimizer(whole, SETTINGS), num_steps=3, value=value)
    optimizer = build_optimizer(whole, SETTINGS)
    first = build_optimizer(parts, SETTINGS)
    train(parts, first, num_steps=3, value=value)
    stored = first.portable_state()
    assert all("lr" not in group for group in stored["param_groups"])
    optimizer.load_portable_state(stored)
    second = build_optimizer(parts, SETTINGS)
    second.load_portable_state(stored)
    for module, its_optimizer in ((whole, optimizer), (parts, second)):
        train(module, its_optimizer, num_steps=2, value=value)
    assert torch.equal(whole.weight, parts.weight)
    assert all(state["momentum_buffer"].abs().sum() > 0 for state in stored["state"].values())


@pytest.mark.parametrize(("name", "foreign"), [("adamw", {"momentum": 0.8}), ("sgd", {"betas": (0.8, 0.9)})])
def test_settings_of_the_other_optimiser_are_refused(name: str, foreign: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=f"{next(iter(foreign))} has no meaning for {name}"):
        OptimizerSettings.model_validate({"name": name, **foreign})
