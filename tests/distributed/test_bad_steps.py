"""NaN in the images of one process: both leave the step out, or both stop and one says why."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from massl.data.order import EpochOrder


@pytest.fixture
def train(start_ranks: Any, recipe: Path, make_folder: Any, tmp_path: Path) -> Callable[..., list[Any]]:
    """The answers of two processes; the images of step 1 that the second process trains on hold NaN."""
    photos = make_folder("photos", 16)
    bad = int(EpochOrder(num_images=16, batch_size=8, seed=0).at(1)[6])

    def run(output: str, skip_bad_steps: int) -> list[Any]:
        given = ["--recipe", recipe, "--data.source", photos, "--output", tmp_path / output, "--trainer.max_steps", "4"]
        options = ["--probes.every_epochs", "0", "--trainer.checkpoint_every_steps", "1"]
        options += ["--trainer.skip_bad_steps", str(skip_bad_steps)]
        return [process.wait() for process in start_ranks(2, "pretrain", *given, *options, spoil_image=[bad])]

    return run


def test_all_processes_stop_and_one_names_the_step_and_the_layer(train: Any, runs: Any, tmp_path: Path) -> None:
    answers = train("run", 0)
    assert [answer.status for answer in answers] == [1, 1]
    text = " ".join(answer.text for answer in answers)
    assert "Traceback" not in text
    assert text.count("massl: error") == 1
    assert "step 1" in text
    assert "the views (on rank 1)" in text
    assert "--trainer.skip_bad_steps 1" in text
    assert runs.state(tmp_path / "run")["step"] == 1


def test_all_processes_leave_the_step_out_and_end_alike_if_stopped_or_not(
    train: Any, runs: Any, tmp_path: Path
) -> None:
    assert [answer.status for answer in train("stopped", 0)] == [1, 1]
    for output in ("straight", "stopped"):
        answers = train(output, 2)
        assert [answer.status for answer in answers] == [0, 0], answers[0].text
        state = runs.state(tmp_path / output)
        assert (state["step"], state["skipped_steps"][0]) == (4, 1)
        warnings = [json.loads(line) for line in (tmp_path / output / "warnings.jsonl").read_text().splitlines()]
        assert any("step is left out, 1 of at most 2" in row["warning"] for row in warnings)
    runs.assert_bitwise_equal(tmp_path / "straight", tmp_path / "stopped")
