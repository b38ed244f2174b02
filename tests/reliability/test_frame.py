"""The frame judges rightly: a class that fails must not look as if it had survived, nor stop the others."""

import fcntl
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.reliability import frame
from tests.reliability.frame import TESTS, Case, FaultClass, Lost, Wrong, random_of, run_case
from tests.reliability.table import PAGE, read_rows, with_table

# In a process of its own, because workers are forked: torch is not imported there. Those that do not hang have hours.
CAMPAIGN = """
import ctypes, json, os, signal, time
from tests.reliability import campaign, processes
from tests.reliability.frame import FaultClass, Wrong

campaign._MIB_LIMIT = 300.0

def dying(case):
    if case.number == 1: raise Wrong("wrong")
    if case.number == 2: os._exit(3)
    if case.number == 4: os.kill(os.getpid(), signal.SIGSEGV)
    if case.number == 6: kept = b"1" * (400 << 20); time.sleep(10**6)

def hanging(case):
    if case.number == 1: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]); time.sleep(10**6)
    if case.number == 2: time.sleep(10**6)

def judged(run, num_cases, seconds):
    found = FaultClass(name="toy", run=run, kind="cases", seconds=seconds, mib=None, quick=0, more=0)
    row = campaign.run_class(found, num_cases, num_workers=2)
    return row.as_json(), [[case.number, case.verdict] for case in row.failed]

rows = [judged(dying, 8, 3600.0)]
campaign._SET_UP_SECONDS = 1.0
print(json.dumps([*rows, judged(hanging, 4, 1.0)]))
"""


def judged(run: object, folder: Path, **limits: float) -> tuple[str, str]:
    found = FaultClass(name="toy", run=run, kind="cases", quick=0, more=0, **{"seconds": 120.0, "mib": None} | limits)  # type: ignore[arg-type]
    outcome = run_case(found, 3, folder / "case")
    assert not (folder / "case").exists()
    return outcome.verdict, outcome.detail


def test_verdicts(tmp_path: Path) -> None:
    def raising(error: Exception) -> object:
        def run(case: Case) -> None:
            raise error

        return run

    def never_ends(case: Case) -> None:
        while True:
            try:
                np.ones(10).sum()
            except Exception:
                continue

    assert judged(lambda case: None, tmp_path) == ("survived", "")
    assert judged(raising(Wrong("accuracy 99")), tmp_path) == ("wrong", "accuracy 99")
    assert judged(raising(AssertionError("unequal")), tmp_path)[0] == "wrong"
    assert judged(raising(Lost("rows")), tmp_path) == ("lost", "rows")
    assert judged(raising(ValueError("foreign")), tmp_path) == ("crash", "ValueError: foreign")
    assert judged(never_ends, tmp_path, seconds=0.2)[0] == "hang"


def test_memory_that_was_freed_again_still_counts(tmp_path: Path) -> None:
    def hungry(case: Case) -> None:
        np.ones(400 << 20, np.uint8)

    gc.collect()  # what other tests left must not be freed in a case: it would hide what the case takes
    verdict, detail = judged(hungry, tmp_path, mib=50.0)
    assert verdict == "crash"
    assert "MiB" in detail
    assert judged(hungry, tmp_path, mib=800.0)[0] == "survived"


def test_the_folder_of_a_killed_session_is_removed_by_the_next(tmp_path: Path) -> None:
    killed, running, young = (tmp_path / f"{frame._PREFIX}{name}" / "owner.lock" for name in ("a", "b", "c"))
    for path in (killed, running, young):
        path.parent.mkdir()
        path.touch()
    for path in (killed, running):
        os.utime(path, (0, 0))
    with running.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        frame._remove_abandoned(tmp_path)
    assert sorted(tmp_path.iterdir()) == [running.parent, young.parent]


def test_random_numbers_depend_on_name_and_number_alone() -> None:
    first = random_of("a", 1).integers(1 << 60, size=4)
    assert (random_of("a", 1).integers(1 << 60, size=4) == first).all()
    assert (random_of("a", 2).integers(1 << 60, size=4) != first).all()
    assert (random_of("b", 1).integers(1 << 60, size=4) != first).all()


def test_options_are_picked_in_turn(tmp_path: Path) -> None:
    assert [Case("a", number, tmp_path).pick("xyz") for number in range(4)] == ["x", "y", "z", "x"]


def test_workers_that_die_hang_or_eat_memory_are_counted_and_replaced() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CAMPAIGN], cwd=TESTS.parent, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    (dying, died), (hanging, hung) = json.loads(done.stdout)
    assert died == [[1, "wrong"], [2, "crash"], [4, "crash"], [6, "crash"]]
    assert hung == [[1, "hang"], [2, "hang"]]
    names = ("cases", "survived", "wrong", "lost", "crash", "hang")
    assert [dying[name] for name in names] == [8, 4, 1, 0, 3, 0]
    assert [hanging[name] for name in names] == [4, 2, 0, 0, 0, 2]
    assert dying["peak_mib"] >= 300  # stopped on the way to 400, and rounded


def test_the_page_has_the_table_of_the_results() -> None:
    page = PAGE.read_text()
    assert with_table(page, read_rows()) == page


@pytest.mark.parametrize("row", read_rows(), ids=lambda row: row["name"])
def test_every_case_of_the_table_was_survived(row: dict[str, int]) -> None:
    assert row["survived"] == row["cases"]
