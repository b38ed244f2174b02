"""The kernels against a direct computation: all shapes on a GPU, one on a CPU, in Triton's interpreter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from massl.ops.kernels.memory import gather_rows_as, join_parts
from massl.ops.memory_attention import _parts_of_block

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.kernel
@pytest.mark.parametrize(("num_rows", "num_drawn", "dim"), [(40, 33, 8), (5, 16, 24), (3, 1, 1)])
def test_gathered_rows_are_the_rows_in_the_order_given(num_rows: int, num_drawn: int, dim: int) -> None:
    rows = noise(num_rows, dim, seed=0)
    order = torch.randint(num_rows, (num_drawn,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert torch.equal(gather_rows_as(rows, order, torch.float32), rows[order])
    halves = gather_rows_as(rows, order, torch.bfloat16)
    assert halves.dtype == torch.bfloat16
    torch.testing.assert_close(halves.float(), rows[order], rtol=2**-7, atol=0)
    exact = rows.bfloat16().float()
    assert torch.equal(gather_rows_as(exact, order, torch.bfloat16).float(), exact[order])


def attention(queries: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:  # [R, D], [n, D] -> [R, D], [R]
    logits = queries @ rows.T
    return logits.softmax(dim=-1) @ rows, logits.logsumexp(dim=-1)


@pytest.mark.kernel
@pytest.mark.parametrize(("num_blocks", "num_parts", "num_queries", "dim"), [(3, 2, 4, 12), (1, 4, 5, 8), (2, 1, 9, 3)])
def test_joined_parts_are_attention_over_whole_blocks_averaged_over_blocks(
    num_blocks: int, num_parts: int, num_queries: int, dim: int
) -> None:
    queries, blocks = noise(num_queries, dim, seed=0), noise(num_blocks, num_parts * 6, dim, seed=1)
    outputs, logsumexps = zip(
        *(attention(queries, part) for part in blocks.view(num_blocks * num_parts, 6, dim)), strict=True
    )
    mean, mean_lse = join_parts(torch.stack(outputs), torch.stack(logsumexps), num_blocks)
    expected, expected_lse = zip(*(attention(queries, block) for block in blocks), strict=True)
    assert mean.dtype == mean_lse.dtype == torch.float32
    torch.testing.assert_close(mean, torch.stack(expected).mean(dim=0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mean_lse, torch.stack(expected_lse).mean(dim=0), rtol=1e-5, atol=1e-6)


@pytest.mark.kernel
def test_a_single_part_of_a_single_block_is_left_as_it_is() -> None:
    part, lse = noise(1, 5, 8, seed=0), noise(1, 5, seed=1) * 100.0
    mean, mean_lse = join_parts(part, lse, 1)
    assert torch.equal(mean, part[0])
    assert torch.equal(mean_lse, lse[0])


@pytest.mark.kernel
@pytest.mark.parametrize("level", [1000.0, -1000.0, 0.0])
def test_a_part_with_a_far_higher_logsumexp_takes_all(level: float) -> None:
    """Its exponential alone would overflow, or all of them vanish."""
    parts, lse = (
        noise(3, 2, 4, seed=0),
        torch.tensor([[0.0, 300.0], [300.0, 0.0], [-300.0, -300.0]], device=DEVICE) + level,
    )
    mean, mean_lse = join_parts(parts, lse, 1)
    assert torch.equal(mean, torch.stack([parts[1, 0], parts[0, 1]]))
    assert torch.equal(mean_lse, torch.full((2,), 300.0 + level, device=DEVICE))


@pytest.mark.kernel
def test_sixteen_bit_parts_are_joined_in_float32() -> None:
    parts, lse = noise(2, 3, 4, seed=0).bfloat16(), noise(2, 3, seed=1)
    mean, _ = join_parts(parts, lse, 1)
    expected = (lse.softmax(dim=0)[:, :, None] * parts.float()).sum(dim=0)
    torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-6)


@given(num_queries=st.integers(1, 5000), num_blocks=st.integers(1, 64), block_size=st.integers(1, 70_000))
def test_a_block_is_cut_into_equal_parts_none_shorter_than_512_rows(
    num_queries: int, num_blocks: int, block_size: int
) -> None:
    num_parts = _parts_of_block(num_queries, num_blocks, block_size)
    assert num_parts >= 1
    assert block_size % num_parts == 0
    assert num_parts == 1 or block_size // num_parts >= 512


@pytest.mark.parametrize(
    ("num_queries", "num_blocks", "block_size", "num_parts"),
    [
        (896, 4, 16_384, 4),  # the recipe of ViT-S: 28 tiles of queries and blocks
        (100, 1, 65_536, 128),
        (100, 1, 4096, 8),
        (100, 1, 1536, 2),
        (100, 1, 1000, 1),
        (100, 1, 4097, 1),
        (100_000, 1, 65_536, 1),
    ],
)
def test_few_queries_cut_a_block_into_many_parts_and_many_into_one(
    num_queries: int, num_blocks: int, block_size: int, num_parts: int
) -> None:
    assert _parts_of_block(num_queries, num_blocks, block_size) == num_parts
