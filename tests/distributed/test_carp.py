"""CARP on two processes: batch norm and the mean use of prototypes are those of the whole batch."""

from pathlib import Path
from typing import Any

import pytest
import torch

NUM_STEPS = 8
SIZES = {
    "head.hidden_dim": 32,
    "head.out_dim": 16,
    "prototypes.num_prototypes": 34,
    "prototypes.block_size": 8,
    "teacher.momentum": 0.9,
}


def options(recipe: Path, output: Path) -> list[str | Path]:
    sizes = [text for key, value in SIZES.items() for text in (f"--method.{key}", str(value))]
    given = [
        "--recipe",
        recipe,
        "--data.source",
        "demo:test",
        "--output",
        output,
        "--trainer.max_steps",
        str(NUM_STEPS),
    ]
    return ["pretrain", *given, "--method.name", "carp", *sizes, "--probes.every_epochs", "0"]


def test_two_ranks_train_as_one_process(
    recipe: Path, start_ranks: Any, massl_here: Any, runs: Any, tmp_path: Path
) -> None:
    processes = start_ranks(2, *options(recipe, tmp_path / "two"))
    answer = massl_here(*options(recipe, tmp_path / "one"))
    assert answer.status == 0, answer.text
    for process in processes:
        finished = process.wait()
        assert finished.status == 0, finished.text
    rows, expected = runs.rows(tmp_path / "two"), runs.rows(tmp_path / "one")
    assert len(rows) == len(expected) == NUM_STEPS + 1
    for key in ("loss", "disagreement", "imbalance"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], abs=5e-6)
    assert abs(rows[-1]["loss"] - rows[0]["loss"]) > 1e-3  # it has moved, so gradients were compared too
    state, expected_state = (runs.state(tmp_path / name)["method"] for name in ("two", "one"))
    for key, value in expected_state.items():
        # batch norm takes it away: its gradient is rounding, which AdamW enlarges
        if not key.endswith("backbone.model.norm.bias"):
            torch.testing.assert_close(state[key], value, atol=5e-6, rtol=0, msg=lambda text, key=key: f"{key}: {text}")
