"""The same command started several times at once, into the same folder."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from massl.evaluations.results import read_rows
from tests.faults.disk_full import disk_world
from tests.faults.kills import NUM_STEPS, kill_command, kill_reference
from tests.reliability.frame import Case, Crash, Wrong, fault_class
from tests.reliability.processes import Answer, server
from tests.reliability.world import RunReader


@fault_class("concurrent starts", kind="processes", quick=1, more=4)
def concurrent_starts(case: Case) -> None:
    """One does the work, the others are refused with a clear line or find it done; nothing is mixed up."""
    kind = case.pick([_pretrain, _pretrain_continuing, _evaluate, _embed])
    command, check = kind(case)
    processes = []
    for _ in range(int(case.random.integers(2, 4))):
        processes.append(server().start(*command))
        time.sleep(float(case.random.choice([0.0, 0.0, 0.05, 0.2])))
    answers = [process.wait() for process in processes]
    for answer in answers:
        if answer.status not in (0, 1) or "Traceback" in answer.text:
            raise Crash(f"status {answer.status}: {answer.text[-700:]}")
    check(answers)


def _require_one_success(answers: list[Answer], words: str) -> None:
    if all(answer.status != 0 for answer in answers):
        raise Wrong(f"nobody did the work: {[answer.text[-300:] for answer in answers]}")
    for answer in answers:
        if answer.status and words not in answer.text:
            raise Wrong(f"refused for another reason: {answer.text[-300:]}")


def _pretrain(case: Case) -> tuple[list[str | Path], Callable[[list[Answer]], None]]:
    reference, run = kill_reference(), case.folder / "run"

    def check(answers: list[Answer]) -> None:
        _require_one_success(answers, str(run))
        RunReader().assert_bitwise_equal(run, reference)

    return kill_command(reference.parent, run, "threads"), check


def _pretrain_continuing(case: Case) -> tuple[list[str | Path], Callable[[list[Answer]], None]]:
    """A killed run that two commands continue."""
    command, check = _pretrain(case)
    nth = int(case.random.integers(1, NUM_STEPS + 1))
    killed = server().run(*command, kill_at_call=["massl.nn.memory:MemoryBank.enqueue", nth, "before"])
    assert killed.status == -signal.SIGKILL, killed.text
    return command, check


def _evaluate(case: Case) -> tuple[list[str | Path], Callable[[list[Answer]], None]]:
    """Evaluations may share a folder: each finds its numbers in it."""
    world, output = disk_world(), case.folder / "results"
    images = world / "images.npz"
    command: list[str | Path] = ["evaluate", world / "before" / "run", "--protocol", "knn"]
    command += ["--train", images, "--test", images, "--output", output]

    def check(answers: list[Answer]) -> None:
        if any(answer.status for answer in answers):
            raise Wrong(f"an evaluation was refused: {[answer.text[-300:] for answer in answers if answer.status]}")
        found, expected = (
            {(row.metric, str(row.setting)): row.value for row in read_rows(folder / "results.jsonl", warn=_no_warning)}
            for folder in (output, world / "after" / "evaluate" / "results")
        )
        if found != expected:
            raise Wrong(f"{found} instead of {expected}")

    return command, check


def _no_warning(message: str) -> None:
    raise Wrong(message)


def _embed(case: Case) -> tuple[list[str | Path], Callable[[list[Answer]], None]]:
    world, output = disk_world(), case.folder / "features.npz"

    def check(answers: list[Answer]) -> None:
        _require_one_success(answers, str(output))
        found, expected = (np.load(path)["features"] for path in (output, world / "after" / "embed" / "features.npz"))
        if not np.array_equal(found, expected):
            raise Wrong("other features")

    return ["embed", world / "before" / "run", "--data", world / "images.npz", "--output", output], check
