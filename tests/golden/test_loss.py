"""The memory loss and the memory against the authors' code (README.md says how the values were made)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from massl.nn.memory import MemoryBank
from massl.ops import memory_attention
from massl.ops.memory_attention import memory_loss, memory_loss_reference

GOLDEN = load_file(Path(__file__).parent / "loss.safetensors")
CASES = ["small", "remainder", "multicrop"]


def recorded_blocks(case: str) -> Tensor:
    block_size = int(GOLDEN[f"{case}/block_size"])
    return GOLDEN[f"{case}/memory"][GOLDEN[f"{case}/permutation"]].reshape(
        -1, block_size, GOLDEN[f"{case}/memory"].shape[1]
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["fused", "plain", "reference"])
def test_loss_and_gradient_are_those_of_the_authors_code(case: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "plain":
        monkeypatch.setattr(memory_attention, "_can_fuse", lambda queries: False)
        monkeypatch.setattr(memory_attention, "_MAX_LOGITS", 50)
    student = GOLDEN[f"{case}/student"].clone().requires_grad_()
    loss = (memory_loss_reference if kind == "reference" else memory_loss)(
        student,
        GOLDEN[f"{case}/teacher"],
        recorded_blocks(case),
        student_temperature=float(GOLDEN[f"{case}/student_temperature"]),
        teacher_temperature=float(GOLDEN[f"{case}/teacher_temperature"]),
    )
    loss.backward()
    torch.testing.assert_close(loss.detach(), GOLDEN[f"{case}/loss"], rtol=1e-5, atol=0)
    assert student.grad is not None
    torch.testing.assert_close(student.grad, GOLDEN[f"{case}/gradient"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_the_memory_after_the_step_is_that_of_the_authors_code(case: str) -> None:
    memory = MemoryBank(*GOLDEN[f"{case}/memory"].shape)
    memory.rows.copy_(GOLDEN[f"{case}/memory"])
    memory.enqueue(GOLDEN[f"{case}/teacher"][1])
    assert torch.equal(memory.rows, GOLDEN[f"{case}/memory_after"])
    assert memory.cursor == GOLDEN[f"{case}/pointer_after"]


def test_a_remainder_of_the_memory_is_left_out_as_the_authors_code_does() -> None:
    memory = MemoryBank(*GOLDEN["remainder/memory"].shape)
    assert (
        memory.random_blocks(int(GOLDEN["remainder/block_size"]), key=0).shape
        == recorded_blocks("remainder").shape
        == (3, 16, 8)
    )
