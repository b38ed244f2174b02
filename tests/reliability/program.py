"""The program behind `make reliability`: cases of fault classes on all cores, and the table of docs/reliability.md."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.reliability import table
from tests.reliability.campaign import Row, run_class, say
from tests.reliability.frame import FaultClass, all_classes, run_case, session_folder

_FAILURES = Path("runs") / "reliability" / "failures.jsonl"
_SHOWN = 5  # failed cases of a class on the terminal; all are in the file


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="of each class that starts no process")
    parser.add_argument("--kills", type=int, default=100, help="cases of each class that starts processes")
    parser.add_argument("--only", action="append", metavar="NAME", help="this class; may be given several times")
    parser.add_argument("--case", type=int, metavar="N", help="this case alone, with its traceback")
    parser.add_argument("--table", action="store_true", help="keep the rows and write the table of docs/reliability.md")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true", help="name the classes")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    broken: dict[str, Exception] = {}
    given, classes = parse_arguments(arguments), all_classes(broken=broken)
    for name, error in broken.items():
        print(f"{name} cannot be imported: {type(error).__name__}: {error}", file=sys.stderr)
    if unknown := set(given.only or ()) - {found.name for found in classes}:
        print(f"no class is named {', '.join(sorted(unknown))}; --list names them", file=sys.stderr)
        return 2
    chosen = [found for found in classes if not given.only or found.name in given.only]
    session_folder()  # before the workers are forked, so that they share it
    if given.list:
        print("\n".join(f"{found.name} ({found.kind}, tests/{found.room})" for found in chosen))
        return 0
    if given.case is not None:
        return max(_one_case(found, given.case) for found in chosen)
    _FAILURES.parent.mkdir(parents=True, exist_ok=True)
    _FAILURES.unlink(missing_ok=True)
    num_bad = sum(_many_cases(found, given, classes) for found in chosen)
    print(f"{num_bad} cases were not survived: {_FAILURES}" if num_bad else "all cases were survived")
    return int(bool(num_bad or broken))


def _one_case(found: FaultClass, number: int) -> int:
    outcome = run_case(found, number, session_folder() / "case")
    print(f"{found.name}, case {number}: {outcome.verdict} {outcome.detail}\n{outcome.trace}".rstrip())
    return int(outcome.verdict != "survived")


def _many_cases(found: FaultClass, given: argparse.Namespace, classes: Sequence[FaultClass]) -> int:
    """Run a class, say what became of it and keep its row; the number of cases that were not survived."""
    num_cases = given.kills if found.kind == "processes" else given.cases
    say(f"{found.name}: 0 of {num_cases:,}", is_last=False)
    row = run_class(
        found,
        num_cases,
        num_workers=given.workers,
        progress=lambda survived: say(f"{found.name}: {survived:,} of {num_cases:,}", is_last=False),
    )
    say(_summary(row))
    for failed in row.failed[:_SHOWN]:
        detail = failed.detail.splitlines()[0][:200] if failed.detail else ""
        print(f"  {failed.verdict}: {detail}\n    {found.command_of(failed.number)}", flush=True)
    with _FAILURES.open("a") as file:
        file.writelines(json.dumps({"class": found.name} | asdict(failed)) + "\n" for failed in row.failed)
    if given.table:
        table.keep_row(row, classes)
    return row.cases - row.survived


def _summary(row: Row) -> str:
    counts = ", ".join(f"{getattr(row, key):,} {key}" for key in ("survived", "wrong", "lost", "crash", "hang"))
    per_case = 1000 * row.seconds / max(row.cases, 1)
    return (
        f"{row.name}: {counts}; {row.seconds:.0f} s ({per_case:.1f} ms a case), "
        f"recovery {row.recovery_s:.2f} s, peak {row.peak_mib:.0f} MiB"
    )
