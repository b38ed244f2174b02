import pytest
import torch
from torch import nn

from massl.nn.heads import HeadSettings, ProjectionHead


def test_the_output_has_unit_length_in_float32_whatever_the_precision_of_the_layers() -> None:
    features = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
    head = ProjectionHead(12, HeadSettings(hidden_dim=20, out_dim=5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = head(features)
    for embeddings in (head(features), rough):
        assert (embeddings.shape, embeddings.dtype) == ((6, 5), torch.float32)
        torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(6))
    assert not torch.equal(head(features), rough)


def test_features_of_zero_do_not_become_nan() -> None:
    assert ProjectionHead(4, HeadSettings(hidden_dim=4, out_dim=4))(torch.zeros(1, 4)).isfinite().all()


@pytest.mark.parametrize(("in_dim", "millions"), [(384, 5.51), (768, 6.30)])
def test_the_default_head_has_as_many_parameters_as_the_authors(in_dim: int, millions: float) -> None:
    """As in the authors' networks, for ViT-S and ViT-B."""
    with torch.device("meta"):
        head = ProjectionHead(in_dim, HeadSettings())
    assert sum(parameter.numel() for parameter in head.parameters()) == pytest.approx(millions * 1e6, abs=5e3)


def test_the_layers_are_linear_and_gelu_in_turn_under_the_authors_keys() -> None:
    head = ProjectionHead(12, HeadSettings(hidden_dim=20, out_dim=5))
    assert [type(layer) for layer in head.mlp] == [nn.Linear, nn.GELU, nn.Linear, nn.GELU, nn.Linear]
    assert list(head.state_dict()) == [f"mlp.{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")]
    assert [tuple(layer.weight.shape) for layer in head.mlp if isinstance(layer, nn.Linear)] == [
        (20, 12),
        (20, 20),
        (5, 20),
    ]
    assert [type(layer) for layer in ProjectionHead(12, HeadSettings(num_layers=1)).mlp] == [nn.Linear]


def test_weights_start_normal_with_deviation_0_02_and_biases_at_zero() -> None:
    head = ProjectionHead(300, HeadSettings(hidden_dim=300, out_dim=300))
    for layer in (layer for layer in head.mlp if isinstance(layer, nn.Linear)):
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.03)
        assert abs(layer.weight.mean().item()) < 1e-3
        assert layer.bias.abs().max() == 0.0
