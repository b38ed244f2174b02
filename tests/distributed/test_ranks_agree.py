"""Two processes that were not started alike, or do not see the same images, stop before the first step."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def start(start_ranks: Any, recipe: Path, tmp_path: Path) -> Callable[..., list[Any]]:
    """start(source, of_last=[...]): the answers of two ranks after two steps into tmp_path/run."""

    def run(source: Path, *options: str | Path, of_last: Sequence[str | Path] = ()) -> list[Any]:
        given = [
            "--recipe",
            recipe,
            "--data.source",
            source,
            "--output",
            tmp_path / "run",
            "--probes.every_epochs",
            "0",
        ]
        processes = start_ranks(2, "pretrain", *given, "--trainer.max_steps", "2", *options, of_last=of_last)
        return [process.wait() for process in processes]

    return run


def assert_refused(answers: list[Any], *expected: str) -> None:
    """All processes end, one of them says why, once."""
    assert [answer.status for answer in answers] == [1, 1]
    text = " ".join(answer.text for answer in answers)
    assert "Traceback" not in text
    assert text.count("massl: error") == 1
    for words in expected:
        assert words in text


def test_ranks_that_see_different_images_stop_and_say_what_each_sees(
    start: Any, make_folder: Any, tmp_path: Path
) -> None:
    photos = make_folder("photos", 16)
    shutil.copytree(photos, tmp_path / "other")
    (tmp_path / "other" / "003.png").unlink()
    answers = start(photos, of_last=["--data.source", tmp_path / "other"])
    seen = f"rank 0 sees 16 images in {photos}", f"rank 1 sees 15 images in {tmp_path / 'other'}"
    assert_refused(answers, "different images", *seen)
    assert not (tmp_path / "run").exists()


def test_ranks_that_see_the_same_images_elsewhere_train(
    start: Any, make_folder: Any, runs: Any, tmp_path: Path
) -> None:
    photos = make_folder("photos", 16)
    shutil.copytree(photos, tmp_path / "copy", copy_function=shutil.copyfile)
    always = ["--trainer.checkpoint_every_minutes", "1e-9"]
    answers = start(photos, *always, of_last=["--data.source", tmp_path / "copy"])
    assert [answer.status for answer in answers] == [0, 0], answers[0].text
    assert runs.state(tmp_path / "run")["step"] == 2
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["step_000000001.pt", "step_000000002.pt"]  # both ranks found the minutes over


def test_ranks_of_different_recipes_stop_and_name_the_values(start: Any, make_folder: Any, tmp_path: Path) -> None:
    answers = start(make_folder("photos", 16), of_last=["--trainer.max_steps", "3"])
    assert_refused(answers, "trainer.max_steps is 2 on rank 0, 3 on rank 1")
    assert not (tmp_path / "run").exists()


def test_images_missing_on_one_rank_stop_the_other_too(start: Any, make_folder: Any, tmp_path: Path) -> None:
    answers = start(make_folder("photos", 16), of_last=["--data.source", tmp_path / "nowhere"])
    assert_refused(answers, f"{tmp_path}/nowhere")
    assert "massl: error" in answers[1].text


def test_changed_images_stop_all_ranks_of_a_continued_run(start: Any, make_folder: Any, tmp_path: Path) -> None:
    photos = make_folder("photos", 16)
    assert [answer.status for answer in start(photos)] == [0, 0]
    (photos / "003.png").unlink()
    assert_refused(start(photos), "1 removed (003.png)", "--data.accept_changes")
    answers = start(photos, "--data.accept_changes", "True", "--trainer.max_steps", "3")
    assert [answer.status for answer in answers] == [0, 0], answers[0].text


def test_two_ranks_start_from_the_weights_of_a_run(start: Any, make_folder: Any, runs: Any, tmp_path: Path) -> None:
    photos = make_folder("photos", 16)
    assert [answer.status for answer in start(photos)] == [0, 0]
    shutil.move(tmp_path / "run", tmp_path / "old")
    answers = start(photos, "--init", tmp_path / "old")
    assert [answer.status for answer in answers] == [0, 0], answers[0].text
    assert "step 2" in answers[0].text
    assert runs.state(tmp_path / "run")["step"] == 2
    assert_refused(start(tmp_path / "photos", "--init", tmp_path / "nowhere"), "started from")


def test_two_ranks_start_from_a_backbone_as_one_does(
    start: Any, server: Any, make_folder: Any, recipe: Path, runs: Any, tmp_path: Path
) -> None:
    photos = make_folder("photos", 16)
    assert [answer.status for answer in start(photos)] == [0, 0]
    shutil.move(tmp_path / "run", tmp_path / "old")
    given = ["--init", tmp_path / "old", "--init.part", "backbone", "--init.head_epochs", "1"]
    given += ["--trainer.max_steps", "5", "--probes.every_epochs", "0"]
    answers = start(photos, *given)
    assert [answer.status for answer in answers] == [0, 0], answers[0].text
    assert "filling the memory of" in answers[0].text
    one = ["pretrain", "--recipe", recipe, "--data", photos, "--output", tmp_path / "one", *given]
    assert server.run(*one).status == 0
    both, alone = (runs.state(tmp_path / name)["method"] for name in ("run", "one"))
    for key, value in both.items():
        torch.testing.assert_close(value, alone[key], rtol=1e-3, atol=1e-4)
