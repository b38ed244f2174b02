"""Evaluations that share one cache of features, of which one is killed while it fills the cache."""

import signal
from pathlib import Path

from massl.evaluations.results import read_rows
from tests.faults.disk_full import disk_world
from tests.reliability.frame import Case, Crash, Wrong, fault_class
from tests.reliability.processes import Answer, server

_MOMENTS = [
    (target, moment)
    for target in (
        "massl.weights.tensor_files:seal_safetensors_file",  # half of the file is written
        "os:fsync",
        "massl.evaluations.features:write_rows",
        "massl.files:_flush_folder",
    )
    for moment in ("before", "after")
]


@fault_class("kills of an evaluation that fills a shared cache", kind="processes")
def killed_while_filling(case: Case) -> None:
    target, moment = case.pick(_MOMENTS)
    cache, nth = case.folder / "cache", int(case.random.integers(1, 3))
    killed = server().start(*_command(case, "killed", cache), kill_at_call=[target, nth, moment])
    others = [server().start(*_command(case, "beside", cache))] if case.random.random() < 0.5 else []
    answers = [process.wait() for process in (killed, *others)]
    if answers[0].status not in (0, -signal.SIGKILL):  # 0: others had filled the cache before the moment came
        raise Crash(f"status {answers[0].status}: {answers[0].text[-500:]}")
    for answer in answers[1:]:
        _check(answer, case.folder / "beside")
    with case.recovery():
        _check(server().run(*_command(case, "after", cache)), case.folder / "after")


def _command(case: Case, name: str, cache: Path) -> list[str | Path]:
    world = disk_world()
    images = ["--train", world / "images.npz", "--test", world / "images.npz"]
    output = ["--output", case.folder / name, "--cache", cache]
    return ["evaluate", world / "before" / "run", "--protocol", "knn", *images, *output]


def _check(answer: Answer, output: Path) -> None:
    if answer.status != 0:
        raise Crash(f"status {answer.status}: {answer.text[-500:]}")
    found, expected = (
        {(row.metric, str(row.setting)): row.value for row in read_rows(folder / "results.jsonl", warn=_no_warning)}
        for folder in (output, disk_world() / "after" / "evaluate" / "results")
    )
    if found != expected:
        raise Wrong(f"{found} instead of {expected}")
    if "damaged" in answer.text:
        raise Wrong(f"a file of the cache was damaged by a kill: {answer.text[-500:]}")


def _no_warning(message: str) -> None:
    raise Wrong(message)
