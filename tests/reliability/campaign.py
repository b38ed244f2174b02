"""Many cases of a class on all cores: workers are forked, watched and replaced when they die."""

import contextlib
import faulthandler
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.reliability.frame import FaultClass, Verdict, memory_mib, run_case, session_folder

_fork = multiprocessing.get_context("fork")  # the parent has imported everything and computed nothing
_SET_UP_SECONDS = 300.0  # what a class makes once is not timed by the alarm, but it must end, too
_MIB_LIMIT = 6144.0  # of a worker: the machine has to live on
_SECONDS_BETWEEN_LOOKS = 0.05
# What a worker shares with its parent: numbers, which survive its death.
_CASE, _STARTED, _DONE, _SURVIVED, _RECOVERY, _PEAK = range(6)


@dataclass(frozen=True)
class FailedCase:
    number: int
    verdict: Verdict
    detail: str
    trace: str = ""


@dataclass
class Row:
    """What became of a class: one line of results.jsonl and of the table."""

    name: str
    kind: str
    cases: int = 0
    survived: int = 0
    wrong: int = 0
    lost: int = 0
    crash: int = 0
    hang: int = 0
    recovery_s: float = 0.0
    peak_mib: float = 0.0
    seconds: float = 0.0
    failed: list[FailedCase] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "failed"}


class _Worker:
    """A process that runs some of the cases, one after the other; a new one takes over after a death."""

    def __init__(self, found: FaultClass, numbers: Iterable[int], folder: Path) -> None:
        self.found, self.folder = found, folder
        self.left = list(numbers)
        self.failed_file, self.log = folder / "failed.jsonl", folder / "log.txt"
        self.shared = _fork.Array("d", 6, lock=False)
        self.deaths: list[FailedCase] = []
        folder.mkdir(parents=True)
        self._start()

    def _start(self) -> None:
        self.shared[_CASE], self.shared[_STARTED], self.shared[_DONE] = -1, time.monotonic(), 0
        self.process = _fork.Process(target=self._work)
        self.process.start()

    def _work(self) -> None:
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and ends the workers
        faulthandler.enable()
        for number in self.left:
            self.shared[_CASE], self.shared[_STARTED] = number, time.monotonic()
            outcome = run_case(self.found, number, self.folder / "case")
            self.shared[_RECOVERY] = max(self.shared[_RECOVERY], outcome.recovery_s)
            self.shared[_PEAK] = max(self.shared[_PEAK], outcome.peak_mib)
            if outcome.verdict == "survived":
                self.shared[_SURVIVED] += 1
            else:
                failed = FailedCase(number, outcome.verdict, outcome.detail, outcome.trace)
                with self.failed_file.open("a") as file:
                    file.write(json.dumps(asdict(failed)) + "\n")
            self.shared[_DONE] += 1

    def look(self) -> bool:
        """Whether there is still work; a worker that died, hangs or eats the memory is replaced."""
        if self.process.is_alive():
            late = time.monotonic() - self.shared[_STARTED] > 2 * self.found.seconds + _SET_UP_SECONDS
            used = memory_mib(self.process.pid or 0, "VmRSS")
            if late:
                self._replace("hang", f"longer than {self.found.seconds:.0f} s and deaf to the alarm")
            elif used > _MIB_LIMIT:
                self.shared[_PEAK] = max(self.shared[_PEAK], used)
                self._replace("crash", f"the process took {used:.0f} MiB")
            return bool(self.left)
        self.process.join()
        if self.process.exitcode == 0:
            return False
        self._replace("crash", f"the process died with {self.process.exitcode}")
        return bool(self.left)

    def _replace(self, verdict: Verdict, detail: str) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        number, num_done = int(self.shared[_CASE]), int(self.shared[_DONE])
        if number < 0:  # it could not even begin: nor could the next
            number, num_done = self.left[0], len(self.left) - 1
        said = self.log.read_text(errors="replace")[-2000:] if self.log.exists() else ""
        self.deaths.append(FailedCase(number, verdict, detail, said))
        self.left = self.left[num_done + 1 :]
        if self.left:
            self._start()

    def failed(self) -> list[FailedCase]:
        lines = self.failed_file.read_text().splitlines() if self.failed_file.exists() else []
        return [FailedCase(**json.loads(line)) for line in lines] + self.deaths


def run_class(
    found: FaultClass, num_cases: int, *, num_workers: int, progress: Callable[[int], None] = lambda _: None
) -> Row:
    """All cases 0 .. num_cases - 1 of a class, shared out among workers."""
    start, folder = time.monotonic(), session_folder() / "workers"
    shutil.rmtree(folder, ignore_errors=True)
    shares = [range(first, num_cases, num_workers) for first in range(min(num_workers, num_cases))]
    workers = [_Worker(found, share, folder / str(number)) for number, share in enumerate(shares)]
    try:
        while [worker for worker in workers if worker.look()]:
            progress(sum(int(worker.shared[_SURVIVED]) for worker in workers))
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    finally:
        for worker in workers:
            if worker.process.is_alive():
                worker.process.kill()
    failed = sorted((case for worker in workers for case in worker.failed()), key=lambda case: case.number)
    row = Row(found.name, found.kind, cases=num_cases, failed=failed)
    row.survived = sum(int(worker.shared[_SURVIVED]) for worker in workers)
    for case in failed:
        setattr(row, case.verdict, getattr(row, case.verdict) + 1)
    row.recovery_s = round(max(worker.shared[_RECOVERY] for worker in workers), 3)
    row.peak_mib = round(max(worker.shared[_PEAK] for worker in workers))
    row.seconds = round(time.monotonic() - start, 1)
    not_run = num_cases - row.survived - len(failed)
    if not_run:  # the worker could not even begin
        row.crash += not_run
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)
    return row


def say(line: str, *, is_last: bool = True) -> None:
    """A line on the terminal; one that is not the last is overwritten by the next."""
    if is_last or sys.stdout.isatty():
        print(f"\r\033[K{line}" if sys.stdout.isatty() else line, end="\n" if is_last else "", flush=True)
