"""Supervised training with mixing on two processes, and what a user is told whose labels do not fit."""

from pathlib import Path
from typing import Any

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
