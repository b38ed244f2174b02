"""The frame judges rightly: a class that fails must not look as if it had survived, nor stop the others."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.reliability.frame import TESTS, Case, FaultClass, Lost, Wrong, random_of, run_case
from tests.reliability.table import PAGE, read_rows, with_table

# In a process of its own, because workers are forked: torch is not imported there.
CAMPAIGN = """
import ctypes, json, os, signal, time
from tests.reliability import campaign
from tests.reliability.frame import FaultClass, Wrong

campaign._SET_UP_SECONDS, campaign._MIB_LIMIT = 0.5, 300.0

def cases(case):
    if case.number == 1: raise Wrong("wrong")
    if case.number == 2: os._exit(3)
    if case.number == 4: os.kill(os.getpid(), signal.SIGSEGV)
    if case.number == 5: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]); time.sleep(60)
    if case.number == 6: kept = b"1" * (400 << 20); time.sleep(60)
    if case.number == 8: time.sleep(60)

found = FaultClass(name="toy", run=cases, kind="cases", seconds=0.5, mib=None, quick=0, more=0)
row = campaign.run_class(found, 11, num_workers=2)
print(json.dumps([row.as_json(), [[case.number, case.verdict] for case in row.failed]]))
"""


def judged(run: object, folder: Path, **limits: float) -> tuple[str, str]:
    found = FaultClass(name="toy", run=run, kind="cases", quick=0, more=0, **{"seconds": 5.0, "mib": None} | limits)  # type: ignore[arg-type]
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
        np.ones(100 << 20, np.uint8)

    verdict, detail = judged(hungry, tmp_path, mib=50.0)
    assert verdict == "crash"
    assert "MiB" in detail
    assert judged(hungry, tmp_path, mib=200.0)[0] == "survived"


def test_random_numbers_depend_on_name_and_number_alone() -> None:
    first = random_of("a", 1).integers(1 << 60, size=4)
    assert (random_of("a", 1).integers(1 << 60, size=4) == first).all()
    assert (random_of("a", 2).integers(1 << 60, size=4) != first).all()
    assert (random_of("b", 1).integers(1 << 60, size=4) != first).all()


def test_options_are_picked_in_turn(tmp_path: Path) -> None:
    assert [Case("a", number, tmp_path).pick("xyz") for number in range(4)] == ["x", "y", "z", "x"]


def test_workers_that_die_hang_or_eat_memory_are_counted_and_replaced() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CAMPAIGN], cwd=TESTS.parent, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    row, failed = json.loads(done.stdout)
    assert failed == [[1, "wrong"], [2, "crash"], [4, "crash"], [5, "hang"], [6, "crash"], [8, "hang"]]
    counts = {key: row[key] for key in ("cases", "survived", "wrong", "lost", "crash", "hang")}
    assert counts == {"cases": 11, "survived": 5, "wrong": 1, "lost": 0, "crash": 3, "hang": 2}
    assert row["peak_mib"] > 300


def test_the_page_has_the_table_of_the_results() -> None:
    page = PAGE.read_text()
    assert with_table(page, read_rows()) == page


@pytest.mark.parametrize("row", read_rows(), ids=lambda row: row["name"])
def test_every_case_of_the_table_was_survived(row: dict[str, int]) -> None:
    assert row["survived"] == row["cases"]
