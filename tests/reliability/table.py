"""results.jsonl, and the table of docs/reliability.md that is made from it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from massl.files import write_atomically
from tests.reliability.campaign import Row
from tests.reliability.frame import TESTS, FaultClass

RESULTS = Path(__file__).with_name("results.jsonl")
PAGE = TESTS.parent / "docs" / "reliability.md"
_BEGIN, _END = "<!-- table: make reliability -->", "<!-- end of the table -->"
_HEAD = ("class", "cases", "survived", "wrong", "lost", "crash", "hang", "longest recovery", "peak memory")


def read_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def keep_row(row: Row, classes: Sequence[FaultClass]) -> None:
    """Put the row in its place, drop those of classes that are gone, and write file and table."""
    rows = {known["name"]: known for known in read_rows()} | {row.name: row.as_json()}
    ordered = [rows[found.name] for found in classes if found.name in rows]
    write_atomically(RESULTS, "".join(json.dumps(known) + "\n" for known in ordered))
    write_atomically(PAGE, with_table(PAGE.read_text(), ordered))


def with_table(page: str, rows: Sequence[dict[str, Any]]) -> str:
    """The page with the table of these rows between its two marks."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{_table(rows)}\n{_END}{after}"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [_HEAD, ("---", *["---:"] * (len(_HEAD) - 1)), *[_cells(row) for row in rows]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    counts = [f"{row[key]:,}" for key in ("cases", "survived", "wrong", "lost", "crash", "hang")]
    seconds = row["recovery_s"]
    recovery = "-" if not seconds else f"{seconds * 1000:.0f} ms" if seconds < 0.1 else f"{seconds:.1f} s"
    return (row["name"], *counts, recovery, f"{row['peak_mib']:,.0f} MiB")
