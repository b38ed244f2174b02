import torch
from torch import nn
from torch.nn.functional import batch_norm, gelu

from massl.nn.heads import BatchNormHead, HeadSettings


def test_layers_are_followed_by_batch_norm_and_gelu_but_not_the_last() -> None:
    torch.manual_seed(0)
    head, features = BatchNormHead(6, HeadSettings(hidden_dim=10, out_dim=4), unit_length=False), torch.randn(9, 6)
    first, second, last = (layer for layer in head.mlp if isinstance(layer, nn.Linear))
    with torch.no_grad():
        last.bias.fill_(0.5)
        rows = features
        for layer in (first, second):
            rows = gelu(batch_norm(rows @ layer.weight.T, None, None, training=True))
        torch.testing.assert_close(head(features), rows @ last.weight.T + 0.5)


def test_embeddings_are_not_brought_to_unit_length() -> None:
    torch.manual_seed(0)
    head = BatchNormHead(6, HeadSettings(hidden_dim=10, out_dim=4), unit_length=False)
    lengths = head(torch.randn(9, 6)).norm(dim=-1)
    assert lengths.max() > 1.2 * lengths.min()


def test_every_parameter_is_needed() -> None:
    torch.manual_seed(0)
    head = BatchNormHead(6, HeadSettings(hidden_dim=10, out_dim=4), unit_length=False)
    (head(torch.randn(9, 6)) * torch.randn(9, 4)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 1e-6 for parameter in head.parameters())


def test_one_layer_is_a_linear_map_and_weights_start_small() -> None:
    torch.manual_seed(0)
    head = BatchNormHead(60, HeadSettings(num_layers=1, out_dim=40), unit_length=False)
    (layer,) = head.mlp
    assert isinstance(layer, nn.Linear)
    assert 0.018 < layer.weight.std() < 0.022
    assert torch.equal(layer.bias, torch.zeros(40))


def test_the_result_is_float32_under_autocast_too() -> None:
    torch.manual_seed(0)
    head, features = BatchNormHead(6, HeadSettings(hidden_dim=10, out_dim=4), unit_length=False), torch.randn(9, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = head(features)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, head(features), rtol=0.05, atol=0.01)


def test_embeddings_have_unit_length_where_that_is_asked_for() -> None:
    plain, unit = (
        BatchNormHead(6, HeadSettings(hidden_dim=10, out_dim=4), unit_length=unit_length)
        for unit_length in (False, True)
    )
    unit.load_state_dict(plain.state_dict())
    features = torch.randn(9, 6)
    torch.testing.assert_close(unit(features), torch.nn.functional.normalize(plain(features), dim=-1))
    assert (plain(features).norm(dim=-1) - 1).abs().min() > 1e-3
