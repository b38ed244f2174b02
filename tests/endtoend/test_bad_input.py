"""Whatever is wrong: a message that says what to do, an exit status other than 0 and no traceback."""

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from massl.methods.base import StepHyper, StepOutput
from massl.methods.massl import MaSSL
from massl.training.checkpoint import load_checkpoint
from massl.training.metrics_log import MetricsLog, read_metrics
from massl.training.run_folder import RunFolder


def _assert_refused(answer: Any, *expected: str, status: int = 1) -> None:
    assert "Traceback" not in answer.text
    assert answer.status == status, answer.text
    for text in expected:
        assert text in answer.text


@pytest.fixture
def pretrain(massl_here: Any, recipe: Path, archive: Path, tmp_path: Path) -> Callable[..., Any]:
    """pretrain("--some.option", "value", source=...): two steps of the tiny recipe into tmp_path/run."""

    def run(*options: str | Path, source: Path | str = archive, max_steps: int = 2) -> Any:
        given = [
            "--recipe",
            recipe,
            "--data.source",
            source,
            "--output",
            tmp_path / "run",
            "--trainer.max_steps",
            str(max_steps),
        ]
        return massl_here("pretrain", *given, "--probes.every_epochs", "0", *options)

    return run


# Images


def test_missing_folder_is_named(pretrain: Any, tmp_path: Path) -> None:
    _assert_refused(pretrain(source=tmp_path / "nowhere"), f"{tmp_path}/nowhere")


def test_empty_folder_is_named_with_what_was_expected(pretrain: Any, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "notes.txt").write_text("no image")
    _assert_refused(pretrain(source=tmp_path / "photos"), f"{tmp_path}/photos", ".jpg .jpeg .png")


def test_unknown_scheme_and_missing_archive_are_named(pretrain: Any, tmp_path: Path) -> None:
    _assert_refused(pretrain(source="dmo:train"), "'dmo'", "Did you mean 'demo'?")
    _assert_refused(pretrain("--output", tmp_path / "other", source=tmp_path / "nothing.npz"), "nothing.npz")


def test_fewer_images_than_one_batch_are_refused(pretrain: Any, make_folder: Any) -> None:
    _assert_refused(pretrain(source=make_folder("photos", 5)), "5 images", "--trainer.batch_size")


def test_mistake_corrected_in_a_second_try_goes_on_in_the_same_output(pretrain: Any, tmp_path: Path) -> None:
    assert pretrain(source=tmp_path / "nowhere").status == 1
    answer = pretrain()
    assert answer.status == 0, answer.text


def test_unreadable_images_are_skipped_and_each_is_named_once(pretrain: Any, make_folder: Any) -> None:
    photos = make_folder("photos", 48)
    (photos / "007.png").write_bytes(b"not an image")
    whole = (photos / "031.png").read_bytes()
    (photos / "031.png").write_bytes(whole[: len(whole) // 2])
    # two epochs and three probes meet each of them
    answer = pretrain("--probes.every_epochs", "1", source=photos, max_steps=12)
    assert answer.status == 0, answer.text
    assert answer.error.count("skipped an unreadable image: ") == 2
    assert answer.error.count("skipped 2 unreadable images in all") == 1
    assert answer.text.count("007.png") == 1
    assert answer.text.count("031.png: OSError: image file is truncated") == 1  # Pillow's own words


def test_many_unreadable_images_stop_the_run(pretrain: Any, make_folder: Any) -> None:
    photos = make_folder("photos", 48)
    for number in range(0, 48, 8):
        (photos / f"{number:03d}.png").write_bytes(b"")
    answer = pretrain(source=photos, max_steps=12)
    _assert_refused(answer, "more than 5%", ".png")


# Recipe


def test_memory_must_hold_a_block(pretrain: Any) -> None:
    _assert_refused(
        pretrain("--method.memory.block_size", "128"),
        "block_size",
        "num_rows",
        status=2,
    )


def test_unknown_backbone_gets_a_suggestion(pretrain: Any) -> None:
    _assert_refused(pretrain("--backbone.name", "resnet_18"), "'resnet_18'", "Did you mean 'resnet18'?")


def test_option_that_timm_does_not_know_is_refused(
    massl_here: Any, recipe: Path, archive: Path, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(recipe.read_text().replace("embed_dim:", "embed_dims:"))
    answer = massl_here("pretrain", "--recipe", wrong, "--data.source", archive, "--output", tmp_path / "run")
    _assert_refused(answer, "embed_dims", "Did you mean")


def test_unknown_recipe_suggests_the_nearest_and_says_where_all_are_listed(massl_here: Any, tmp_path: Path) -> None:
    answer = massl_here("pretrain", "--recipe", "massl-vits-16", "--output", tmp_path / "run")
    _assert_refused(
        answer,
        "'massl-vits-16'",
        "massl recipes",
        "Did you mean 'massl-vits16'?",
    )


def test_recipe_file_with_unknown_key_or_wrong_value_is_refused(massl_here: Any, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("trainer: {batchsize: 4}")
    _assert_refused(
        massl_here("pretrain", "--recipe", wrong, "--output", tmp_path / "run"),
        "trainer.batchsize",
        "Did you mean 'batch_size'?",
    )
    wrong.write_text("trainer: {batch_size: many}")
    _assert_refused(
        massl_here("pretrain", "--recipe", wrong, "--output", tmp_path / "run"), "trainer.batch_size", "many"
    )
    wrong.write_text("trainer: [")
    _assert_refused(massl_here("pretrain", "--recipe", wrong, "--output", tmp_path / "run"), str(wrong), "YAML")


def test_no_images_and_no_run_are_answered_with_the_command_to_give(massl_here: Any, tmp_path: Path) -> None:
    answer = massl_here("pretrain", "--output", tmp_path / "run")
    _assert_refused(answer, "massl pretrain photos/", "massl recipes")


def test_unknown_option_gets_a_suggestion(pretrain: Any, tmp_path: Path) -> None:
    _assert_refused(
        pretrain("--trainer.batchsize", "4"),
        "--trainer.batchsize",
        "--trainer.batch_size",
        status=2,
    )
    assert not (tmp_path / "run").exists()


def test_a_recipe_without_images_is_answered_with_the_command_to_give(massl_here: Any, recipe: Path) -> None:
    _assert_refused(massl_here("pretrain", "--recipe", recipe), "massl pretrain photos/")


def test_no_images_named_is_answered_with_the_option(massl_here: Any, recipe: Path, tmp_path: Path) -> None:
    answer = massl_here("pretrain", "--recipe", recipe, "--output", tmp_path / "run")
    _assert_refused(answer, "--data")
    assert not (tmp_path / "run").exists()


def test_value_out_of_range_is_refused_with_its_key(pretrain: Any) -> None:
    answer = pretrain("--trainer.batch_size", "0")
    _assert_refused(answer, "batch_size", "greater than 0", status=2)


def test_batch_must_divide_into_its_parts(pretrain: Any) -> None:
    answer = pretrain("--trainer.accumulation_steps", "3")
    _assert_refused(answer, "trainer.batch_size 8", "multiple of 3")


def test_view_smaller_than_a_patch_is_refused(pretrain: Any) -> None:
    _assert_refused(pretrain("--views.local_size", "3"), "views.local_size 3")


def test_memory_larger_than_the_data_set_is_warned_of(pretrain: Any) -> None:
    answer = pretrain("--method.memory.num_rows", "100")
    assert answer.status == 0
    warnings = [line for line in answer.error.splitlines() if line.startswith("warning: ")]
    assert any("num_rows" in line and "48 images" in line for line in warnings)
    assert any("block_size" in line and "4 random rows" in line for line in warnings)


def test_probe_without_labels_is_refused_where_it_was_asked_for(pretrain: Any, make_folder: Any) -> None:
    queries = make_folder("queries", 4)
    answer = pretrain("--probes.every_epochs", "1", "--probes.queries", str(queries))
    _assert_refused(answer, f"{queries} has no labels")


# Output folder


def test_folder_with_other_things_is_not_touched(pretrain: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    _assert_refused(pretrain(), "--output")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_file_as_output_is_refused(pretrain: Any, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("precious")
    _assert_refused(pretrain(), f"{tmp_path}/run", "--output")
    assert (tmp_path / "run").read_text() == "precious"


def test_output_that_cannot_be_made_is_refused(pretrain: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _assert_refused(pretrain("--output", tmp_path / "file" / "run"), f"{tmp_path}/file/run")


def test_folder_in_use_by_another_process_is_refused_and_not_touched(
    pretrain: Any, server: Any, recipe: Path, archive: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = [
        "--recipe",
        recipe,
        "--data.source",
        archive,
        "--output",
        run,
        "--probes.every_epochs",
        "0",
        "--trainer.epochs",
        "4000",
    ]
    other = server.start("pretrain", *options, "--trainer.max_steps", "20000")
    try:
        other.wait_until(lambda: (run / "metrics.jsonl").exists())
        assert other.poll() is None, other.log.read_text()
        before = (run / "recipe.yaml").read_text()
        answer = pretrain("--trainer.epochs", "4000", max_steps=1)
        _assert_refused(answer, "another process", str(run), "--output")
        assert (run / "recipe.yaml").read_text() == before
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()


# Loss


@pytest.fixture
def broken_from_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    original = MaSSL.forward

    def break_from(first_step: int) -> None:
        def forward(method: MaSSL, views: Any, hyper: StepHyper) -> StepOutput:
            output = original(method, views, hyper)
            loss = output.loss * torch.nan if hyper.step >= first_step else output.loss
            return StepOutput(loss=loss, metrics=output.metrics, carry=output.carry)

        monkeypatch.setattr(MaSSL, "forward", forward)

    return break_from


def test_loss_that_is_no_number_stops_and_leaves_the_last_checkpoint(
    pretrain: Any, broken_from_step: Any, runs: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert pretrain(max_steps=5).status == 0
    checkpoint = run / "checkpoints" / "step_000000005.pt"
    before, rows_before = checkpoint.read_bytes(), runs.rows(run)
    broken_from_step(6)
    answer = pretrain(max_steps=12)
    _assert_refused(answer, "step 6 is nan", "step 5")
    assert checkpoint.read_bytes() == before
    assert load_checkpoint(checkpoint)["step"] == 5
    named = json.loads((run / "nonfinite_step_6_rank_0.json").read_text())
    assert named["step"] == 6
    assert len(named["images"]) == 8
    assert all(key.startswith("images/") for key in named["images"])
    assert str(run / "nonfinite_step_6_rank_0.json") in answer.text
    assert runs.rows(run)[: len(rows_before)] == rows_before


def test_loss_that_is_no_number_from_the_start_stops(pretrain: Any, broken_from_step: Any, tmp_path: Path) -> None:
    broken_from_step(0)
    _assert_refused(pretrain(), "step 0 is nan")
    assert len(json.loads((tmp_path / "run" / "nonfinite_step_0_rank_0.json").read_text())["images"]) == 8


@pytest.mark.parametrize("probe_every_epochs", ["0", "0.17"])  # 0.17: after each step
@pytest.mark.parametrize("learning_rate", ["1e38", "1e15"])  # weights, or what is computed from them, become infinite
def test_absurd_learning_rate_never_reaches_a_checkpoint(
    learning_rate: str, probe_every_epochs: str, pretrain: Any, tmp_path: Path
) -> None:
    options = [
        "--optimizer.learning_rate",
        learning_rate,
        "--probes.every_epochs",
        probe_every_epochs,
        "--trainer.checkpoint_every_steps",
        "1",
    ]
    answer = pretrain(*options, max_steps=8)
    _assert_refused(answer, "optimizer.learning_rate")
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("*.pt"):
        assert all(bool(value.isfinite().all()) for value in load_checkpoint(checkpoint)["method"].values())


# Disk (a full one within every file and command: tests/faults/disk_full.py)


@pytest.mark.parametrize(
    "method", [(MetricsLog, "write"), (RunFolder, "write_bytes"), (RunFolder, "write_json")], ids=lambda pair: pair[1]
)
def test_disk_full_in_any_other_file_is_said_without_traceback(
    method: tuple[type, str], pretrain: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "run"))

    with monkeypatch.context() as patch:
        patch.setattr(*method, no_space)
        _assert_refused(pretrain(), "No space left on device")
    assert pretrain().status == 0
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]
