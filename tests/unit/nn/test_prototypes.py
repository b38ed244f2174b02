import pytest
import torch
from torch.nn.functional import normalize

from massl.nn.prototypes import Centre, Prototypes, PrototypeSettings


def test_prototypes_point_along_their_directions_with_their_lengths() -> None:
    prototypes = Prototypes(5, PrototypeSettings(num_prototypes=7, unit_length=False))
    with torch.no_grad():
        prototypes.lengths.copy_(torch.rand(7, 1) + 0.5)
    expected = prototypes.lengths * prototypes.directions / prototypes.directions.norm(dim=1, keepdim=True)
    torch.testing.assert_close(prototypes(), expected)


def test_prototypes_start_with_length_1_and_directions_like_the_weights_of_a_linear_layer() -> None:
    torch.manual_seed(0)
    prototypes = Prototypes(64, PrototypeSettings(num_prototypes=500))
    torch.testing.assert_close(prototypes().norm(dim=1), torch.ones(500))
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 500, bias=False)
    torch.testing.assert_close(prototypes.directions.abs().max(), linear.weight.abs().max(), rtol=0.01, atol=0)
    torch.testing.assert_close(prototypes.directions.std(), linear.weight.std(), rtol=0.01, atol=0)


@pytest.mark.parametrize("unit_length", [True, False])
def test_lengths_learn_only_where_asked_for(unit_length: bool) -> None:
    prototypes = Prototypes(5, PrototypeSettings(num_prototypes=7, unit_length=unit_length))
    (prototypes() * torch.randn(7, 5)).sum().backward()
    assert prototypes.directions.grad is not None
    assert (prototypes.lengths.grad is None) == unit_length


def test_lengths_form_a_column_so_that_they_decay_with_the_matrices_as_in_the_authors_code() -> None:
    assert Prototypes(5, PrototypeSettings(num_prototypes=7)).lengths.shape == (7, 1)


def test_the_centre_is_the_running_mean_of_all_similarities() -> None:
    embeddings, prototypes = normalize(torch.randn(3, 6, 5), dim=-1), torch.randn(7, 5)
    centre = Centre(PrototypeSettings(num_prototypes=7, centre_momentum=0.8))
    expected = torch.zeros(7)
    for batch in embeddings:
        centre.follow(batch, prototypes)
        expected = 0.8 * expected + 0.2 * (batch @ prototypes.T).mean(dim=0)
    torch.testing.assert_close(centre.value, expected)


def test_the_centre_is_saved_and_joins_no_graph() -> None:
    centre = Centre(PrototypeSettings(num_prototypes=7))
    centre.follow(torch.randn(2, 5, requires_grad=True), torch.randn(7, 5, requires_grad=True))
    assert not centre.value.requires_grad
    assert list(centre.state_dict()) == ["value"]
