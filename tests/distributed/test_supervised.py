"""Supervised training on two processes, and what a user is told whose labels do not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch

NUM_STEPS = 6


def options(recipe: Path, output: Path, *more: str, num_classes: int = 10) -> list[str | Path]:
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
    method = ["--method.name", "supervised", "--method.num_classes", str(num_classes)]
    return ["pretrain", *given, *method, "--views.num_local", "0", "--probes.every_epochs", "0", *more]


def test_without_mixing_two_ranks_train_as_one_process(
    recipe: Path, start_ranks: Any, massl_here: Any, runs: Any, tmp_path: Path
) -> None:
    unmixed = ["--method.mixup_alpha", "0", "--method.cutmix_alpha", "0"]
    processes = start_ranks(2, *options(recipe, tmp_path / "two", *unmixed, "--trainer.accumulation_steps", "2"))
    answer = massl_here(*options(recipe, tmp_path / "one", *unmixed))
    assert answer.status == 0, answer.text
    for process in processes:
        finished = process.wait()
        assert finished.status == 0, finished.text
    rows, expected = runs.rows(tmp_path / "two"), runs.rows(tmp_path / "one")
    assert len(rows) == len(expected) == NUM_STEPS + 1
    for key in ("loss", "train_top1", "labelled_share"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], abs=1e-5)
    assert abs(rows[-1]["loss"] - rows[0]["loss"]) > 1e-3  # it has moved, so gradients were compared too
    state, expected_state = (runs.state(tmp_path / name)["method"] for name in ("two", "one"))
    for key in ("encoder.head.weight", "encoder.backbone.model.cls_token"):
        torch.testing.assert_close(
            state[key], expected_state[key], atol=1e-4, rtol=0, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_with_mixing_two_ranks_stay_together(recipe: Path, start_ranks: Any, runs: Any, tmp_path: Path) -> None:
    answers = [process.wait() for process in start_ranks(2, *options(recipe, tmp_path / "two"))]
    assert [answer.status for answer in answers] == [0, 0], answers[0].text
    assert len(runs.rows(tmp_path / "two")) == NUM_STEPS + 1


def test_labels_beyond_the_classes_stop_the_run_before_its_first_step(
    recipe: Path, massl_here: Any, tmp_path: Path
) -> None:
    answer = massl_here(*options(recipe, tmp_path / "bad", num_classes=3))
    assert answer.status == 1
    assert "method.num_classes is 3" in answer.text
    assert "Traceback" not in answer.text
