import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from massl.ops.contrastive import info_nce, most_similar_rows


def unit(*shape: int, seed: int = 0) -> Tensor:
    return normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def plain_info_nce(queries: Tensor, keys: Tensor, temperature: float, first_positive: int) -> Tensor:
    """The formula, one query at a time."""
    losses = []
    for view_queries, view_keys in zip(queries, keys, strict=True):
        for number, query in enumerate(view_queries):
            weights = torch.stack([torch.exp(query @ key / temperature) for key in view_keys])
            losses.append(-torch.log(weights[first_positive + number] / weights.sum()))
    return torch.stack(losses).mean()


@pytest.mark.parametrize(("num_keys", "first_positive"), [(5, 0), (15, 10)], ids=["one process", "the third of three"])
def test_the_loss_and_its_gradients_are_those_of_the_formula(num_keys: int, first_positive: int) -> None:
    queries, keys = unit(2, 5, 8).double().requires_grad_(), unit(2, num_keys, 8, seed=1).double().requires_grad_()
    loss, _ = info_nce(queries, keys, temperature=0.2, first_positive=first_positive)
    expected = plain_info_nce(queries, keys, 0.2, first_positive)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    for found, wanted in zip(
        torch.autograd.grad(loss, [queries, keys]), torch.autograd.grad(expected, [queries, keys]), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_equal_embeddings_cost_what_guessing_costs() -> None:
    same = unit(1, 1, 8).expand(2, 6, 8)
    loss, _ = info_nce(same, same, temperature=0.1)
    assert loss.item() == pytest.approx(math.log(6), rel=1e-5)


def test_the_share_of_queries_that_pick_their_own_key_is_given_in_percent() -> None:
    keys = torch.eye(4).expand(2, 4, 4)
    assert info_nce(keys, keys, temperature=0.1)[1].item() == 100.0
    swapped = keys.clone()
    swapped[0, [0, 1]] = keys[0, [1, 0]]
    assert info_nce(swapped, keys, temperature=0.1)[1].item() == 75.0
    assert info_nce(keys[:, :2], keys, temperature=0.1, first_positive=2)[1].item() == 0.0
    assert not info_nce(keys.clone().requires_grad_(), keys, temperature=0.1)[1].requires_grad


def test_under_bf16_autocast_similarities_stay_float32() -> None:
    queries, keys = unit(2, 5, 64), unit(2, 5, 64, seed=1)
    exact, _ = info_nce(queries, keys, temperature=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = info_nce(queries, keys, temperature=0.05)
        numbers, similarities = most_similar_rows(queries[0], keys[0])
    assert torch.equal(loss, exact)
    torch.testing.assert_close(similarities, (queries[0] @ keys[0].T).max(dim=1).values, rtol=1e-6, atol=1e-7)
    assert torch.equal(numbers, (queries[0] @ keys[0].T).argmax(dim=1))


@pytest.mark.parametrize("max_similarities", [1, 70, 2**27])
def test_the_nearest_row_is_found_whatever_is_computed_at_a_time(max_similarities: int) -> None:
    queries, rows = unit(9, 8), unit(31, 8, seed=1)
    queries[4] = rows[30]
    numbers, similarities = most_similar_rows(queries, rows, max_similarities=max_similarities)
    for number, similarity, query in zip(numbers, similarities, queries, strict=True):
        distances = (rows - query).norm(dim=1)
        assert int(number) == int(distances.argmin())
        assert similarity.item() == pytest.approx((rows[number] @ query).item(), abs=1e-6)
    assert int(numbers[4]) == 30


def test_looking_for_neighbours_carries_no_gradient() -> None:
    _, similarities = most_similar_rows(unit(3, 8).requires_grad_(), unit(5, 8, seed=1))
    assert not similarities.requires_grad
