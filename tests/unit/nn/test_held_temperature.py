import math

import pytest
import torch
from torch.nn.functional import normalize

from massl.nn.held_temperature import HeldTemperature
from massl.ops.memory_attention import block_entropy


def test_it_finds_the_temperature_at_which_the_softmax_has_the_wanted_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    queries = normalize(torch.randn(20, 32, generator=generator), dim=-1)
    blocks = normalize(torch.randn(2, 64, 32, generator=generator), dim=-1)
    for start in (0.01, 0.3):
        held = HeldTemperature(start=start, entropy=1.5)
        for _ in range(200):
            held.follow(block_entropy(queries, blocks, float(held())))
        assert block_entropy(queries, blocks, float(held())).item() == pytest.approx(1.5, abs=0.01)


@pytest.mark.parametrize(("entropy", "end"), [(100.0, 0.003), (-100.0, 0.5)])
def test_it_stays_between_its_bounds(entropy: float, end: float) -> None:
    held = HeldTemperature(start=0.04, entropy=1.5)
    for _ in range(3):
        held.follow(torch.tensor(entropy))
    assert held().item() == pytest.approx(end)


def test_a_checkpoint_holds_it_bit_for_bit() -> None:
    held, other = HeldTemperature(start=0.04, entropy=1.5), HeldTemperature(start=0.1, entropy=1.5)
    assert held().item() == pytest.approx(0.04)
    held.follow(torch.tensor(2.5))
    assert held().item() == pytest.approx(0.04 * math.exp(-0.05))
    other.load_state_dict(held.state_dict())
    assert torch.equal(other(), held())
