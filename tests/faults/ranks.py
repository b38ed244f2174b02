"""Two ranks: signals to one or all of them, one of them killed, or started unlike the other."""

import re
import shutil
import signal
import time
from pathlib import Path

from tests.faults.kills import NUM_STEPS, kill_command, kill_reference
from tests.reliability.frame import Case, Crash, Hang, Lost, Wrong, fault_class, made_once
from tests.reliability.processes import Answer, start_ranks
from tests.reliability.world import RunReader, num_lines

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
# rank 1 is given these beside what both are given; {photos}: a folder with one image less or with a file renamed
_UNLIKE = (
    (("--data.source", "{fewer}"), "different images"),
    (("--trainer.seed", "7"), "trainer.seed"),
    (("--data.source", "{renamed}"), "different images"),
    (("--data.source", "{nowhere}"), "nowhere"),
    (("--optimizer.learning_rate", "0.5"), "optimizer.learning_rate"),
)
_STOP_SECONDS = 300.0


@fault_class("signals and kills of ranks", kind="processes", quick=2, more=8)
def stop_ranks(case: Case) -> None:
    reference, run = _reference(), case.folder / "run"
    command = _command(run)
    kind = ("signal to one, slow steps", "kill one", "signal to all", "signal to one")[case.number % 4]
    hooks = {"slow_steps": [float(case.random.uniform(0.5, 1.0))]} if "slow" in kind else {}
    rare = ["--trainer.log_every_steps", "1000"] if "slow" in kind else []
    processes = start_ranks(2, *command, *rare, **hooks)
    wanted = int(case.random.integers(1, 3 if "slow" in kind else NUM_STEPS))
    processes[0].wait_until(lambda: rare or num_lines(run / "metrics.jsonl") > wanted)
    if rare:  # rows come only with probes
        processes[0].wait_until(lambda: num_lines(run / "metrics.jsonl") > 0)
    time.sleep(float(case.random.uniform(0, 0.3)))
    number = signal.SIGKILL if "kill" in kind else _SIGNALS[case.number // 4 % len(_SIGNALS)]
    for process in processes if "all" in kind else processes[1:]:
        process.kill(number)
    try:
        answers = [process.wait(seconds=_STOP_SECONDS) for process in processes]
    except Hang as hang:
        raise Hang(f"{kind}: {hang}") from None
    _require_stopped(answers, number, run)
    _continue(case, command, run, reference)


@fault_class("ranks that were started unlike each other", kind="processes", quick=1, more=5)
def unlike_ranks(case: Case) -> None:
    run, photos = case.folder / "run", kill_reference().parent / "photos"
    given, expected = case.pick(_UNLIKE)
    shutil.copytree(photos, case.folder / "fewer")
    victim = case.folder / "fewer" / f"{int(case.random.integers(48)):03d}.png"
    shutil.copytree(photos, case.folder / "renamed")
    victim.unlink()
    (case.folder / "renamed" / victim.name).rename(case.folder / "renamed" / f"x{victim.name}")
    folders = {name: case.folder / name for name in ("fewer", "renamed", "nowhere")}
    answers = [
        process.wait(seconds=_STOP_SECONDS)
        for process in start_ranks(2, *_command(run), of_last=[word.format(**folders) for word in given])
    ]
    text = " ".join(answer.text for answer in answers)
    if [answer.status for answer in answers] != [1, 1] or "Traceback" in text:
        raise Crash(f"statuses {[answer.status for answer in answers]}: {text[-800:]}")
    if text.count("massl: error") != 1 or expected not in text:
        raise Wrong(f"one error that names {expected} was wanted: {text[-800:]}")
    if run.exists():
        raise Wrong("it was refused, but left a run folder")


def _require_stopped(answers: list[Answer], number: int, run: Path) -> None:
    text, statuses = " ".join(answer.text for answer in answers), [answer.status for answer in answers]
    if "Traceback" in text:
        raise Crash(f"a traceback: {text[-1500:]}")
    if statuses == [0, 0]:  # done before it came
        return
    if number == signal.SIGKILL:
        if statuses not in ([1, -9], [0, -9]):
            raise Crash(f"statuses {statuses} after a kill: {text[-800:]}")
        if statuses[0] == 1 and text.count("another process of this run has ended") != 1:
            raise Wrong(f"the rank that was left did not say why it ended: {text[-800:]}")
        return
    is_finished = (run / "checkpoints" / f"step_{NUM_STEPS:09d}.pt").exists()
    if is_finished and set(statuses) <= {0, -number, 128 + number}:  # it came while they were ending
        return
    if statuses != [128 + number] * 2:
        raise Crash(f"statuses {statuses} after {signal.Signals(number).name}: {text[-800:]}")
    stopped = re.search(r"stopped at step (\d+)", text)
    if stopped is None or (int(stopped[1]) and not (run / "checkpoints" / f"step_{int(stopped[1]):09d}.pt").exists()):
        raise Lost(f"steps were done, none saved: {text[-800:]}")


def _continue(case: Case, command: list[str | Path], run: Path, reference: Path) -> None:
    known = num_lines(run / "metrics.jsonl")
    processes = start_ranks(2, *command)
    with case.recovery():
        processes[0].wait_until(lambda: num_lines(run / "metrics.jsonl") > known)
    answers = [process.wait() for process in processes]
    if [answer.status for answer in answers] != [0, 0]:
        raise Crash(f"statuses {[answer.status for answer in answers]} on continuing: {answers[0].text[-500:]}")
    found, expected = RunReader().state(run), RunReader().state(reference)
    if where := RunReader().difference(found, expected):
        raise Wrong(f"continued otherwise than the run that was not stopped: {where}")


def _command(run: Path) -> list[str | Path]:
    return kill_command(kill_reference().parent, run, "threads")


def _reference() -> Path:
    """A run of two ranks that nothing stopped."""

    def make(folder: Path) -> None:
        answers = [process.wait() for process in start_ranks(2, *_command(folder / "run"))]
        assert [answer.status for answer in answers] == [0, 0], answers[0].text

    kill_reference()
    return made_once("ranks", make) / "run"
