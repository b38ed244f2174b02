from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from massl.nn.memory import MemoryBank, MemorySettings


def numbered_rows(start: int, stop: int) -> Tensor:
    """Rows that name themselves."""
    return torch.arange(float(start), float(stop))[:, None].repeat(1, 2)


def numbers(rows: Tensor) -> list[int]:
    return [int(row[0]) for row in rows]


def test_memory_starts_as_unit_vectors_that_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    memory = MemoryBank(500, 8, seed=3)
    torch.manual_seed(2)
    torch.testing.assert_close(memory.rows.norm(dim=1), torch.ones(500))
    assert torch.equal(MemoryBank(500, 8, seed=3).rows, memory.rows)
    assert not torch.equal(MemoryBank(500, 8, seed=4).rows, memory.rows)
    assert memory.rows.mean(dim=0).norm() < 0.15  # in all directions
    assert (memory.rows.dtype, int(memory.cursor), memory.num_rows) == (torch.float32, 0, 500)
    assert not list(memory.parameters())


def test_memory_forgets_the_oldest_rows_first() -> None:
    memory = MemoryBank(5, 2)
    memory.enqueue(numbered_rows(0, 5))
    memory.enqueue(numbered_rows(5, 7))
    assert numbers(memory.rows) == [5, 6, 2, 3, 4]
    assert int(memory.cursor) == 2  # row 2 is now the oldest


def test_memory_goes_round_at_its_end() -> None:
    memory = MemoryBank(5, 2)
    for start in (0, 3, 6):
        memory.enqueue(numbered_rows(start, start + 3))
    assert numbers(memory.rows) == [5, 6, 7, 8, 4]
    assert int(memory.cursor) == 4


def test_of_more_rows_than_fit_the_last_ones_stay() -> None:
    memory = MemoryBank(3, 2)
    memory.enqueue(numbered_rows(0, 1))
    memory.enqueue(numbered_rows(1, 9))
    assert sorted(numbers(memory.rows)) == [6, 7, 8]
    assert int(memory.cursor) == 0  # nine rows written
    assert numbers(memory.rows) == [6, 7, 8]


@given(st.integers(1, 7), st.lists(st.integers(0, 16), max_size=6))
def test_memory_behaves_as_a_list_written_round_and_round(num_rows: int, batch_sizes: list[int]) -> None:
    memory = MemoryBank(num_rows, 2)
    memory.enqueue(numbered_rows(-num_rows, 0))
    expected, cursor, next_number = list(range(-num_rows, 0)), 0, 0
    for batch_size in batch_sizes:
        memory.enqueue(numbered_rows(next_number, next_number + batch_size))
        for number in range(next_number, next_number + batch_size):
            expected[cursor] = number
            cursor = (cursor + 1) % num_rows
        next_number += batch_size
        assert numbers(memory.rows) == expected
        assert int(memory.cursor) == cursor


def test_rows_of_another_type_are_stored_as_float32_and_without_a_gradient() -> None:
    memory = MemoryBank(4, 2)
    memory.enqueue(numbered_rows(0, 2).bfloat16().requires_grad_())
    assert memory.rows.dtype == torch.float32
    assert not memory.rows.requires_grad
    assert numbers(memory.rows[:2]) == [0, 1]


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 2, 2)])
def test_rows_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"takes rows \[n, 2\]; got \["):
        MemoryBank(4, 2).enqueue(torch.zeros(shape))


def test_a_memory_that_was_saved_and_loaded_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    memory, restored = MemoryBank(5, 2, seed=0), MemoryBank(5, 2, seed=1)
    memory.enqueue(numbered_rows(0, 3))
    assert memory.state_dict().keys() == {"rows", "cursor"}
    torch.save(memory.state_dict(), tmp_path / "memory.pt")
    restored.load_state_dict(torch.load(tmp_path / "memory.pt", weights_only=True))
    for either in (memory, restored):
        either.enqueue(numbered_rows(3, 7))
    assert torch.equal(restored.rows, memory.rows)
    assert int(restored.cursor) == int(memory.cursor) == 2


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 100))
def test_random_blocks_are_disjoint_and_hold_all_rows_but_a_remainder(num_rows: int, block_size: int, key: int) -> None:
    num_rows = max(num_rows, block_size)
    memory = MemoryBank(num_rows, 2)
    memory.enqueue(numbered_rows(0, num_rows))
    blocks = memory.random_blocks(block_size, key)
    assert blocks.shape == (num_rows // block_size, block_size, 2)
    drawn = numbers(blocks.flatten(0, 1))
    assert len(set(drawn)) == len(drawn) == num_rows - num_rows % block_size
    assert set(drawn) <= set(range(num_rows))


def test_random_blocks_depend_on_the_key_alone() -> None:
    memory = MemoryBank(64, 2)
    memory.enqueue(numbered_rows(0, 64))
    first = memory.random_blocks(16, (7, 0))
    torch.rand(1)
    assert torch.equal(memory.random_blocks(16, (7, 0)), first)
    others = [memory.random_blocks(16, key) for key in [(7, 1), (8, 0), (0, 7)]]
    assert all(not torch.equal(other, first) for other in others)


def test_over_many_keys_each_row_is_left_out_equally_often() -> None:
    memory = MemoryBank(10, 2)
    memory.enqueue(numbered_rows(0, 10))
    num_drawn = torch.zeros(10)
    for key in range(500):
        num_drawn[numbers(memory.random_blocks(7, key).flatten(0, 1))] += 1
    assert (num_drawn - 350).abs().max() < 45  # standard deviation 10.2


def test_storage_blocks_are_slices_of_the_ring_in_order() -> None:
    memory = MemoryBank(7, 2)
    memory.enqueue(numbered_rows(0, 7))
    blocks = memory.storage_blocks(3)
    assert [numbers(block) for block in blocks] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("kind", ["random", "storage"])
def test_blocks_are_copies_that_a_later_enqueue_does_not_change(kind: str) -> None:
    memory = MemoryBank(6, 2)
    blocks = memory.random_blocks(3, 0) if kind == "random" else memory.storage_blocks(3)
    before = blocks.clone()
    memory.enqueue(numbered_rows(0, 6))
    assert torch.equal(blocks, before)


@pytest.mark.parametrize("block_size", [0, 7, -1])
def test_blocks_that_do_not_fit_are_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"blocks of {block_size} rows"):
        MemoryBank(6, 2).random_blocks(block_size, 0)


def test_a_memory_without_rows_is_refused_and_so_are_settings_with_a_block_larger_than_the_memory() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        MemoryBank(0, 4)
    with pytest.raises(ValueError, match="block_size 32"):
        MemorySettings(num_rows=16, block_size=32)
