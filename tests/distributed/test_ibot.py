"""iBOT on two processes: both centres are of the whole batch, and masks do not depend on which process trains."""

from pathlib import Path
from typing import Any

import pytest
import torch

NUM_STEPS = 8
SIZES = {
    "head.hidden_dim": "32",
    "head.out_dim": "16",
    "prototypes.num_prototypes": "24",
    "prototypes.unit_length": "False",
    "prototypes.frozen_epochs": "0",
    "teacher.momentum": "0.8",
}


def options(recipe: Path, output: Path, *more: str) -> list[str | Path]:
    sizes = [text for key, value in SIZES.items() for text in (f"--method.{key}", value)]
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
    return ["pretrain", *given, "--method.name", "ibot", *sizes, "--probes.every_epochs", "0", *more]


def test_two_ranks_train_as_one_process(
    recipe: Path, start_ranks: Any, massl_here: Any, runs: Any, tmp_path: Path
) -> None:
    processes = start_ranks(2, *options(recipe, tmp_path / "two", "--trainer.accumulation_steps", "2"))
    answer = massl_here(*options(recipe, tmp_path / "one"))
    assert answer.status == 0, answer.text
    for process in processes:
        finished = process.wait()
        assert finished.status == 0, finished.text
    rows, expected = runs.rows(tmp_path / "two"), runs.rows(tmp_path / "one")
    assert len(rows) == len(expected) == NUM_STEPS + 1
    for key in ("loss", "class_loss", "patch_loss"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], abs=1e-5)
    assert abs(rows[-1]["loss"] - rows[0]["loss"]) > 1e-3  # it has moved, so gradients were compared too
    state, expected_state = (runs.state(tmp_path / name)["method"] for name in ("two", "one"))
    assert min(state[key].abs().max() for key in ("centre.value", "patch_centre.value")) > 0.01
    assert state["mask_token"].abs().max() > 1e-3
    for key in (
        "centre.value",
        "patch_centre.value",
        "mask_token",
        "student_prototypes.lengths",
        "teacher_prototypes.directions",
    ):
        torch.testing.assert_close(
            state[key], expected_state[key], atol=1e-4, rtol=0, msg=lambda text, key=key: f"{key}: {text}"
        )
