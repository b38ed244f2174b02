import pytest
import torch
from torch import Tensor, nn

from massl.config import RecipeError
from massl.nn.heads import BatchNorm


def rows(*shape: int) -> Tensor:
    return 3.0 + 2.0 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def torchs(norm: BatchNorm, dim: int) -> nn.BatchNorm1d:
    """torch's own, with the same weights."""
    other = nn.BatchNorm1d(dim, affine=norm.weight is not None)
    with torch.no_grad():
        if norm.weight is not None and norm.bias is not None:
            norm.weight.copy_(torch.linspace(0.5, 2.0, dim))
            norm.bias.copy_(torch.linspace(-1.0, 1.0, dim))
            other.load_state_dict(norm.state_dict(), strict=False)
    return other


@pytest.mark.parametrize("affine", [True, False])
def test_values_and_gradients_are_those_of_torch_in_training(affine: bool) -> None:
    norm = BatchNorm(6, scale=affine, shift=affine)
    other = torchs(norm, 6)
    ours, theirs = rows(8, 6).requires_grad_(), rows(8, 6).requires_grad_()
    weights = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    (norm(ours) * weights).sum().backward()
    (other(theirs) * weights).sum().backward()
    torch.testing.assert_close(norm(ours), other(theirs), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    assert len(list(norm.parameters())) == len(list(other.parameters()))
    for parameter, expected in zip(norm.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-5)


def test_each_view_is_normalised_by_its_own_statistics() -> None:
    norm, views = BatchNorm(6), rows(2, 8, 6) * torch.tensor([1.0, 5.0])[:, None, None]
    torch.testing.assert_close(norm(views), torch.stack([norm(view) for view in views]))
    assert not torch.allclose(norm(views), norm(views.flatten(0, 1)).reshape(2, 8, 6), atol=0.1)


def test_weight_and_bias_can_be_left_out_one_by_one() -> None:
    assert {name for name, _ in BatchNorm(4).named_parameters()} == {"weight", "bias"}
    assert {name for name, _ in BatchNorm(4, shift=False).named_parameters()} == {"weight"}
    assert not list(BatchNorm(4, scale=False, shift=False).parameters())
    scaled = BatchNorm(4, shift=False)
    nn.init.constant_(scaled.weight, 3.0)  # type: ignore[arg-type]
    torch.testing.assert_close(scaled(rows(8, 4)), 3.0 * BatchNorm(4)(rows(8, 4)))


def test_a_forward_pass_leaves_no_trace_and_training_mode_makes_no_difference() -> None:
    norm = BatchNorm(6)
    first = norm(rows(8, 6))
    assert not list(norm.buffers())
    assert torch.equal(norm.eval()(rows(8, 6)), first)


def test_under_bf16_autocast_statistics_are_float32() -> None:
    wide = 100.0 + torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        normed = BatchNorm(4)(wide.bfloat16())
    assert normed.dtype == torch.float32
    torch.testing.assert_close(normed, BatchNorm(4)(wide.bfloat16().float()))
    assert normed.mean(dim=0).abs().max() < 1e-4


def test_a_large_mean_costs_no_digits() -> None:
    shifted = rows(64, 4) + 3000.0
    exact = BatchNorm(4)(shifted.double().sub(3000.0).float())
    torch.testing.assert_close(BatchNorm(4)(shifted), exact, rtol=0, atol=1e-3)


def test_a_single_image_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"trainer\.batch_size"):
        BatchNorm(4)(rows(2, 1, 4))
