"""Signals to a run at any moment, once or twice, also while a read never returns; the same command continues it."""

import re
import signal
import time
from pathlib import Path

from tests.faults.kills import NUM_STEPS, kill_command, kill_reference
from tests.reliability.frame import Case, Crash, Lost, Wrong, fault_class
from tests.reliability.processes import Answer, Process, server
from tests.reliability.world import RunReader, num_lines

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_TWICE = 0.25  # seconds between two signals, at least; what comes sooner counts as one
_STOP_SECONDS = 300.0  # far more than a step and a checkpoint take on a busy machine


@fault_class("signals to a run", kind="processes", quick=2, more=8)
def signal_and_continue(case: Case) -> None:
    reference, run = kill_reference(), case.folder / "run"
    command = kill_command(reference.parent, run, ("threads", "threads", "processes")[case.number % 3])
    number = case.pick(_SIGNALS)
    process = server().start(*command)
    if case.random.random() < 0.4:  # while it starts
        time.sleep(float(case.random.uniform(0, 0.8)))
    else:
        wanted = int(case.random.integers(NUM_STEPS))
        process.wait_until(lambda: num_lines(run / "metrics.jsonl") > wanted)
        time.sleep(float(case.random.uniform(0, 0.1)))
    has_trained = num_lines(run / "metrics.jsonl") > 1  # the first row comes before the first step
    process.kill(number)
    is_twice = case.random.random() < 0.3
    if is_twice:
        time.sleep(_TWICE + float(case.random.uniform(0, 0.3)))
        process.kill(number)
    answer = process.wait(seconds=_STOP_SECONDS)
    _require_clean_end(answer, number)
    if has_trained and not is_twice:
        _require_checkpoint(answer, run)
    _continue(case, command, run, reference)


@fault_class("signals to a run whose read never returns", kind="processes", quick=2, more=8)
def signal_stuck_run(case: Case) -> None:
    reference, run = kill_reference(), case.folder / "run"
    command: list[str | Path] = [*kill_command(reference.parent, run, "threads")]
    num_workers, may_be_interrupted = ((0, True), (2, False), (0, False), (2, True))[case.number % 4]
    number, flag = _SIGNALS[case.number // 4 % 4], case.folder / "gone"
    hang = ["017.png", str(flag), may_be_interrupted]
    process = server().start(*command, "--data.num_workers", str(num_workers), hang_at_file=hang)
    wanted = int(case.random.integers(1, NUM_STEPS // 2))
    process.wait_until(lambda: num_lines(run / "metrics.jsonl") > wanted)
    flag.touch()
    process.wait_until(lambda: flag.with_name("gone.reached").exists())
    time.sleep(0.2)  # until the steps that were read ahead are done, or not: either is a case
    is_training = num_lines(run / "metrics.jsonl") < NUM_STEPS // 2  # later a probe may wait for the file
    process.kill(number)
    if is_training and (num_workers > 0 or may_be_interrupted):
        # one is enough, unless steps that were read ahead led to the probe before it came
        process.wait_until(lambda: num_lines(run / "metrics.jsonl") >= NUM_STEPS // 2, seconds=_STOP_SECONDS)
    one_is_enough = process.poll() is not None
    answer = _insist(process, number)
    _require_clean_end(answer, number)
    if one_is_enough:
        _require_checkpoint(answer, run)
    flag.unlink()
    _continue(case, command, run, reference)


@fault_class("Ctrl-C in other commands", kind="processes", quick=3, more=12)
def interrupt_command(case: Case) -> None:
    run, output = kill_reference(), case.folder / "output"
    photos = run.parent / "photos"
    knn: list[str | Path] = ["--protocol", "knn", "--train", "demo:train", "--test", "demo:test"]
    commands: tuple[list[str | Path], ...] = (
        ["embed", run, "--data", photos, "--output", output / "features.npz"],
        ["evaluate", run, *knn, "--output", output],
        ["report", run, "--output", output / "report.html", "--device", "cpu"],
        ["visualize", run, "attention", "--data", photos, "--output", output],
        ["compare", "--runs", run, "--output", output],
        ["ablate", "block-size", "--recipe", run.parent / "recipe.yaml", "--data", "demo:train", "--output", output],
    )
    output.mkdir()
    process = server().start(*case.pick(commands))
    time.sleep(float(case.random.uniform(0, 1.0)))
    process.kill(signal.SIGINT)
    answer = process.wait(seconds=_STOP_SECONDS)
    _require_clean_end(answer, signal.SIGINT)
    if left := [*output.rglob("*.partial")]:
        raise Wrong(f"half a file was left: {left}")


def _insist(process: Process, number: int) -> Answer:
    """Send a signal until the process ends: one that is starved may take the first two for one."""
    deadline = time.monotonic() + _STOP_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(_TWICE)
        process.kill(number)
    return process.wait(seconds=_STOP_SECONDS)


def _require_clean_end(answer: Answer, number: int) -> None:
    # 0: it was done before the signal; minus the number: nothing was trained yet, or a second signal came
    if answer.status not in (0, 128 + number, -number):
        raise Crash(f"status {answer.status} after {signal.Signals(number).name}: {answer.text[-500:]}")
    if "Traceback" in answer.text:
        raise Wrong(f"more than a line: {answer.text[-1500:]}")
    if answer.status == -signal.SIGINT:
        raise Wrong("SIGINT ended it without a word")


def _require_checkpoint(answer: Answer, run: Path) -> None:
    if answer.status == 0 or (run / "checkpoints" / f"step_{NUM_STEPS:09d}.pt").exists():  # done before the signal
        return
    stopped = re.search(r"stopped at step (\d+)", answer.text)
    if stopped is None or not (run / "checkpoints" / f"step_{int(stopped[1]):09d}.pt").exists():
        raise Lost(f"steps were done, none saved: {answer.text[-800:]}")


def _continue(case: Case, command: list[str | Path], run: Path, reference: Path) -> None:
    known = num_lines(run / "metrics.jsonl")
    process: Process = server().start(*command)
    with case.recovery():
        process.wait_until(lambda: num_lines(run / "metrics.jsonl") > known)
    answer = process.wait()
    if answer.status != 0:
        raise Crash(f"status {answer.status} on continuing: {answer.text[-500:]}")
    RunReader().assert_bitwise_equal(run, reference)
