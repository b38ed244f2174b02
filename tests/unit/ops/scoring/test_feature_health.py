import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from massl.ops.scoring.feature_health import effective_rank, embedding_spread, spectrum_decay


@given(st.integers(1, 12))
def test_the_effective_rank_of_orthogonal_directions_is_their_number(num_directions: int) -> None:
    assert effective_rank(torch.eye(12)[:num_directions].repeat(3, 1)) == pytest.approx(num_directions)


def test_the_effective_rank_is_the_exponential_of_the_entropy_of_the_singular_values() -> None:
    features = torch.eye(2)[[0] * 9 + [1]]  # singular values 3 and 1
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert effective_rank(features) == pytest.approx(math.exp(entropy))


def test_the_length_of_the_features_does_not_matter() -> None:
    features = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    lengths = torch.linspace(0.1, 30.0, 20)[:, None]
    assert effective_rank(features * lengths) == pytest.approx(effective_rank(features))


def test_features_that_are_all_one_vector_have_rank_one() -> None:
    """Not centred: the small differences that are left do not hide the collapse."""
    features = torch.ones(50, 8) + 1e-4 * torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    assert effective_rank(features) == pytest.approx(1.0, abs=0.02)
    assert effective_rank(torch.zeros(5, 8)) == pytest.approx(1.0)


def test_the_spread_of_equal_vectors_is_zero_and_of_opposite_ones_one() -> None:
    assert embedding_spread(torch.tensor([[0.6, 0.8]]).repeat(7, 1)) == pytest.approx(0.0, abs=1e-3)
    assert embedding_spread(torch.tensor([[0.6, 0.8], [-0.6, -0.8]])) == pytest.approx(1.0)


def test_the_spread_is_the_root_of_the_summed_variance() -> None:
    embeddings = torch.nn.functional.normalize(
        torch.randn(30, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), dim=-1
    )
    variance = sum(float(((column - column.mean()) ** 2).mean()) for column in embeddings.T)
    assert embedding_spread(embeddings) == pytest.approx(math.sqrt(variance))


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_the_decay_of_a_spectrum_is_the_exponent_of_its_power_law(exponent: float) -> None:
    generator = torch.Generator().manual_seed(0)
    directions = torch.linalg.qr(torch.randn(96, 96, generator=generator)).Q
    scales = torch.arange(1, 97) ** (-exponent / 2)
    features = torch.randn(4000, 96, generator=generator) * scales @ directions
    assert spectrum_decay(features) == pytest.approx(exponent, abs=0.06)
    assert spectrum_decay(features[:60]) is not None  # fewer images than dimensions


def test_features_that_vary_in_too_few_directions_have_no_spectrum() -> None:
    assert spectrum_decay(torch.ones(9, 4)) is None
    assert spectrum_decay(torch.zeros(5, 8)) is None
    assert spectrum_decay(torch.randn(300, 2) @ torch.randn(2, 64)) is None
    assert spectrum_decay(torch.randn(1, 8)) is None
