"""Two processes with half of each batch do what one process does with all of it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

NUM_STEPS = 30
ACCURACIES = {"knn_top1", "other_view_top1"}
PROBE_KEYS = {*ACCURACIES, "effective_rank", "alpha_req", "embedding_spread", "teacher_entropy", "memory_winner_share"}


@pytest.fixture
def options(recipe: Path) -> Callable[..., list[str | Path]]:
    """Pre-training on 2,000 small images, 250 steps an epoch; a probe every 15 steps on odd numbers of images."""

    def make(output: Path, *more: str, max_steps: int = NUM_STEPS) -> list[str | Path]:
        probes = ["--probes.every_epochs", "0.06", "--probes.max_database", "61", "--probes.max_queries", "31"]
        given = [
            "--recipe",
            recipe,
            "--data.source",
            "demo:test",
            "--output",
            output,
            "--trainer.max_steps",
            str(max_steps),
        ]
        return ["pretrain", *given, *probes, *more]

    return make


@pytest.fixture
def one_process(massl_here: Any, options: Any, tmp_path: Path) -> Callable[..., Path]:
    def run(*more: str, max_steps: int = NUM_STEPS) -> Path:
        answer = massl_here(*options(tmp_path / "one", *more, max_steps=max_steps))
        assert answer.status == 0, answer.text
        return tmp_path / "one"

    return run


def _assert_all_finished(processes: list[Any]) -> None:
    answers = [process.wait() for process in processes]
    for answer in answers:
        assert answer.status == 0, answer.text
        assert "Warning" not in answer.text
    assert "finished" in answers[0].text
    assert not answers[1].text  # only the first process talks


def _assert_same_training(runs: Any, run: Path, reference: Path) -> None:
    rows, expected = runs.rows(run), runs.rows(reference)
    assert [row["step"] for row in rows] == [row["step"] for row in expected] == list(range(len(rows)))
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], abs=1e-5)
    for row, expected_row in zip(rows, expected, strict=True):
        assert row.keys() == expected_row.keys()
        assert (row.keys() >= PROBE_KEYS) == (row["step"] % 15 == 0)
        for key in row.keys() - {"loss", *PROBE_KEYS}:
            assert row[key] == expected_row[key]
        for key in row.keys() & PROBE_KEYS:
            assert row[key] == pytest.approx(expected_row[key], abs=1e-6 if key in ACCURACIES else 1e-4)
    method, expected_method = runs.state(run)["method"], runs.state(reference)["method"]
    assert method.keys() == expected_method.keys()
    torch.testing.assert_close(method["memory.rows"], expected_method["memory.rows"], atol=1e-5, rtol=0)
    assert method["memory.cursor"] == expected_method["memory.cursor"]


@pytest.mark.parametrize(
    ("drop_path_rate", "accumulation_steps"), [("0.0", "1"), ("0.3", "2")], ids=["plain", "drop path, two parts"]
)
def test_two_ranks_train_and_probe_as_one_process(
    drop_path_rate: str,
    accumulation_steps: str,
    start_ranks: Any,
    one_process: Any,
    options: Any,
    runs: Any,
    tmp_path: Path,
) -> None:
    drop_path = ["--backbone.drop_path_rate", drop_path_rate]
    processes = start_ranks(
        2, *options(tmp_path / "two", *drop_path, "--trainer.accumulation_steps", accumulation_steps)
    )
    reference = one_process(*drop_path)
    _assert_all_finished(processes)
    _assert_same_training(runs, tmp_path / "two", reference)
    assert not list((tmp_path / "two").glob("nonfinite*"))


@pytest.mark.slow
def test_two_ranks_end_early_together_at_the_step_of_one_process(
    start_ranks: Any, one_process: Any, options: Any, runs: Any, tmp_path: Path
) -> None:
    flat = ["--trainer.stop_when_flat", "1", "--probes.every_epochs", "0.012"]
    processes = start_ranks(2, *options(tmp_path / "two", *flat))
    reference = one_process(*flat)
    answers = [process.wait() for process in processes]
    assert [answer.status for answer in answers] == [0, 0], answers[0].text
    assert "finished early" in answers[0].text
    last, expected = runs.rows(tmp_path / "two")[-1], runs.rows(reference)[-1]
    assert last["step"] == expected["step"] < NUM_STEPS
    assert (last["best_step"], last["flat_probes"]) == (expected["best_step"], 1)
    assert (tmp_path / "two" / "best.safetensors").is_file()


def test_torchrun_starts_the_same_command(one_process: Any, options: Any, runs: Any, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--log-dir", str(tmp_path / "logs"), "-m", "massl"]  # else in the system's temporary folder
    command = [str(part) for part in (*launcher, *options(tmp_path / "two", max_steps=4))]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "2 x CPU" in finished.stderr
    assert finished.stderr.count("finished: ") == 1
    reference = one_process(max_steps=4)
    losses, expected = ([row["loss"] for row in runs.rows(run)] for run in (tmp_path / "two", reference))
    assert losses == pytest.approx(expected, abs=1e-5)


def test_run_of_one_process_continues_on_two_and_back_on_one(
    start_ranks: Any, massl_here: Any, one_process: Any, options: Any, runs: Any, tmp_path: Path
) -> None:
    run = tmp_path / "moved"
    no_probes = ["--probes.every_epochs", "0"]
    assert massl_here(*options(run, *no_probes, max_steps=6)).status == 0
    _assert_all_finished(start_ranks(2, *options(run, *no_probes, max_steps=13)))
    answer = massl_here(*options(run, *no_probes, max_steps=20))
    assert answer.status == 0
    assert "step 13 of 20" in answer.text
    reference = one_process(*no_probes, max_steps=20)
    assert [row["loss"] for row in runs.rows(run)] == pytest.approx(
        [row["loss"] for row in runs.rows(reference)], abs=1e-5
    )
    memory, expected = (runs.state(folder)["method"]["memory.rows"] for folder in (run, reference))
    torch.testing.assert_close(memory, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("signalled", [[0, 1], [1]], ids=["both", "only the second"])
def test_signal_stops_all_ranks_at_the_same_step(
    signalled: list[int], start_ranks: Any, options: Any, runs: Any, tmp_path: Path
) -> None:
    run = tmp_path / "two"
    # Both send it to themselves: sent from here, the second could come after its process has ended.
    both = {"kill_at_call": ["massl.nn.memory:MemoryBank.enqueue", 3, "before", int(signal.SIGTERM)]}
    hooks = both if signalled == [0, 1] else {}
    processes = start_ranks(2, *options(run, "--probes.every_epochs", "0", max_steps=1000), **hooks)
    if not hooks:
        processes[0].wait_until(
            lambda: (run / "metrics.jsonl").exists() and len((run / "metrics.jsonl").read_text().splitlines()) > 2
        )
        os.kill(processes[1].pid, signal.SIGTERM)
    answers = [process.wait() for process in processes]
    stopped = runs.state(run)["step"]
    assert f"step {stopped} of 1000" in answers[0].text
    assert "Traceback" not in answers[0].text + answers[1].text
    assert [answer.status for answer in answers] == [143, 143]


def test_batch_that_two_ranks_cannot_share_is_refused(start_ranks: Any, options: Any, tmp_path: Path) -> None:
    answers = [process.wait() for process in start_ranks(2, *options(tmp_path / "two", "--trainer.batch_size", "9"))]
    assert [answer.status for answer in answers] == [1, 1]
    assert "trainer.batch_size 9" in answers[0].text
    assert "Traceback" not in answers[0].text + answers[1].text
