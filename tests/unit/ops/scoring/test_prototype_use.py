import math

import pytest
import torch
from torch.nn.functional import normalize

from massl.ops.scoring import feature_health as module
from massl.ops.scoring.feature_health import prototype_use


@pytest.mark.parametrize("max_logits", [1 << 26, 20])
def test_entropies_and_winners_are_those_of_the_softmaxes_however_they_are_cut(
    max_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_LOGITS", max_logits)
    generator = torch.Generator().manual_seed(0)
    embeddings, prototypes = (normalize(torch.randn(count, 5, generator=generator), dim=-1) for count in (12, 9))
    centre = 0.1 * torch.randn(9, generator=generator)
    use = prototype_use(embeddings, prototypes, centre, temperature=0.07)
    shares = ((embeddings @ prototypes.T - centre) / 0.07).softmax(dim=-1).double()
    mean = shares.mean(dim=0)
    assert use.entropy == pytest.approx(-(shares * shares.log()).sum(dim=-1).mean().item(), rel=1e-5)
    assert use.entropy_of_mean == pytest.approx(-(mean * mean.log()).sum().item(), rel=1e-5)
    assert use.winner_share == pytest.approx(len(set(shares.argmax(dim=-1).tolist())) / 9)


def test_equal_embeddings_are_told_from_undecided_ones() -> None:
    prototypes = torch.eye(8)
    same = prototype_use(prototypes[:1].repeat(20, 1), prototypes, torch.zeros(8), temperature=0.01)
    assert (same.entropy, same.entropy_of_mean) == pytest.approx((0.0, 0.0), abs=1e-6)
    assert same.winner_share == 1 / 8
    undecided = prototype_use(torch.ones(20, 8) / math.sqrt(8), prototypes, torch.zeros(8), temperature=0.04)
    assert (undecided.entropy, undecided.entropy_of_mean) == pytest.approx((math.log(8), math.log(8)))


def test_each_embedding_with_a_prototype_of_its_own_uses_all() -> None:
    prototypes = torch.eye(8)
    use = prototype_use(prototypes[:3], prototypes, torch.zeros(8), temperature=0.01)
    assert use.winner_share == 1.0  # three embeddings cannot have more than three nearest prototypes
    assert use.entropy_of_mean == pytest.approx(math.log(3), rel=1e-5)


def test_shares_that_vanish_leave_the_entropy_a_number() -> None:
    use = prototype_use(torch.eye(2), torch.eye(2), torch.tensor([0.0, 1000.0]), temperature=0.01)
    assert use.entropy_of_mean == 0.0
