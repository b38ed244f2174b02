"""A run that is stopped and started again ends bit for bit as if it had never been stopped.

Kills at any moment: tests/faults/kills.py.
"""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

NUM_STEPS = 12  # of the tiny recipe on 48 images; checkpoints every 2 steps, probes every 6


@pytest.fixture(scope="module")
def command(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], list[str | Path]]:
    """The command of a run on PNG files, one of them damaged: threads, decoding and a stand-in take part."""
    root = tmp_path_factory.mktemp("photos")
    generator = random.Random(0)
    for number in range(48):
        folder = root / f"class{number % 4}"
        folder.mkdir(exist_ok=True)
        Image.frombytes("RGB", (20, 24), generator.randbytes(20 * 24 * 3)).save(folder / f"{number:03d}.png")
    damaged = root / "class1" / "005.png"
    damaged.write_bytes(damaged.read_bytes()[:300])
    length = ["--trainer.epochs", "2", "--trainer.checkpoint_every_steps", "2"]
    return lambda output: ["pretrain", "--recipe", recipe, "--data.source", root, "--output", output, *length]


@pytest.fixture(scope="module")
def uninterrupted(command: Any, server: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    answer = server.run(*command(run))
    assert answer.status == 0, answer.text
    assert "ResourceWarning" not in answer.text
    return run


def _lines(run: Path) -> list[str]:
    path = run / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def test_checkpoint_damaged_on_the_disk_is_named_and_the_one_before_it_taken(
    command: Any, server: Any, runs: Any, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    killed = server.run(*command(run), kill_at_call=["massl.nn.memory:MemoryBank.enqueue", 8, "before"])
    assert killed.status == -signal.SIGKILL
    newest = run / "checkpoints" / "step_000000006.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    answer = server.run(*command(run))
    assert answer.status == 0
    assert str(newest) in answer.text
    assert f"step 4 of {NUM_STEPS}" in answer.text
    runs.assert_bitwise_equal(run, uninterrupted)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_saves_a_checkpoint_at_once_and_the_same_command_continues(
    number: signal.Signals, status: int, command: Any, server: Any, runs: Any, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    signalled = {"kill_at_call": ["massl.nn.memory:MemoryBank.enqueue", 5, "before", int(number)]}
    answer = server.run(*command(run), "--trainer.checkpoint_every_steps", "1000", **signalled)
    assert runs.state(run)["step"] == 5
    assert answer.status == status
    assert "stopping after this step" in answer.text
    assert f"step 5 of {NUM_STEPS}" in answer.text
    assert "Traceback" not in answer.text
    assert "ResourceWarning" not in answer.text
    assert len(_lines(run)) == 6
    answer = server.run(*command(run))
    assert answer.status == 0
    assert f"step 5 of {NUM_STEPS}" in answer.text
    runs.assert_bitwise_equal(run, uninterrupted)


def test_signal_between_parts_of_a_step_is_obeyed_there(command: Any, server: Any, runs: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # Four parts a step, and four of the batch before training: the 18th pass is the second part of step 3.
    signalled = {"kill_at_call": ["massl.methods.massl:MaSSL.forward", 18, "before", int(signal.SIGINT)]}
    answer = server.run(*command(run), "--trainer.accumulation_steps", "4", **signalled)
    assert answer.status == 130
    assert "stopping after this part of the step" in answer.text
    assert f"stopped at step 3 of {NUM_STEPS}" in answer.text
    assert runs.state(run)["step"] == 3


def test_signal_before_training_begins_ends_without_traceback(command: Any, server: Any, tmp_path: Path) -> None:
    process = server.start(*command(tmp_path / "run"), "--trainer.epochs", "1000")  # should the signal be late
    process.wait_until((tmp_path / "run").is_dir)
    os.kill(process.pid, signal.SIGINT)
    answer = process.wait()
    assert answer.status == 130
    assert "Traceback" not in answer.text


def test_longer_max_steps_continues_a_run(
    command: Any, server: Any, runs: Any, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    answer = server.run(*command(run), "--trainer.max_steps", "5")
    assert answer.status == 0
    assert f"5 of {NUM_STEPS} steps" in answer.text
    answer = server.run(*command(run), "--trainer.max_steps", "8")
    assert answer.status == 0
    assert "step 5 of 8" in answer.text
    assert runs.state(run)["step"] == 8
    answer = server.run(*command(run), "--trainer.max_steps", "None")
    assert answer.status == 0
    # The ends at 5 and 8 were probed, which the uninterrupted run has not done; these probes count as flat ones too.
    probe_keys = {"knn_top1", "other_view_top1", "effective_rank", "alpha_req", "best_step", "flat_probes"}
    probe_keys |= {"embedding_spread", "teacher_entropy", "memory_winner_share"}
    for row, expected in zip(runs.rows(run), runs.rows(uninterrupted), strict=True):
        extra = row.keys() - expected.keys()
        assert extra == (probe_keys if row["step"] in (5, 8) else set())
        flat = {"flat_probes": expected["flat_probes"]} if "flat_probes" in expected else {}
        assert {key: value for key, value in row.items() if key not in extra} | flat == expected
    assert runs.difference(runs.backbone(run), runs.backbone(uninterrupted)) is None


def test_finished_run_says_so_and_is_not_trained_again(command: Any, server: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert server.run(*command(run), "--trainer.max_steps", "5").status == 0
    kept = ("metrics.jsonl", "backbone.safetensors", "checkpoints/step_000000005.pt")
    before = {name: ((run / name).read_bytes(), (run / name).stat().st_mtime_ns) for name in kept}
    answer = server.run(*command(run), "--trainer.max_steps", "5")
    assert answer.status == 0
    assert f"5 of {NUM_STEPS} steps" in answer.text
    assert "step 1/" not in answer.text
    assert {name: ((run / name).read_bytes(), (run / name).stat().st_mtime_ns) for name in kept} == before


def test_run_of_another_recipe_is_refused_and_the_difference_named(command: Any, server: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert server.run(*command(run), "--trainer.max_steps", "1").status == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    answer = server.run(
        *command(run), "--trainer.max_steps", "2", "--optimizer.learning_rate", "0.5", "--method.memory.num_rows", "40"
    )
    assert answer.status == 1
    assert "method.memory.num_rows was 32, now 40" in answer.text
    assert "optimizer.learning_rate was 0.01, now 0.5" in answer.text
    assert "Traceback" not in answer.text
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("call", ["checkpoint:CheckpointStore.save", "trainer:Trainer._write_backbone"])
def test_a_kill_around_the_first_checkpoint_never_looks_like_lost_checkpoints(
    command: Any, server: Any, runs: Any, uninterrupted: Path, tmp_path: Path, call: str, moment: str
) -> None:
    run = tmp_path / "run"
    killed = server.run(*command(run), kill_at_call=[f"massl.training.{call}", 1, moment])
    assert killed.status == -signal.SIGKILL
    answer = server.run(*command(run))
    assert answer.status == 0, answer.text
    runs.assert_bitwise_equal(run, uninterrupted)
