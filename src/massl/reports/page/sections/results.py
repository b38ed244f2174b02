"""What evaluations measured, the paper's figures beside ours, and the tables of others that a run belongs in."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from massl.evaluations.results import ResultRow
from massl.reports.comparison.tables import paper_time_table
from massl.reports.page.tables import PageTable, page_table, table_markup
from massl.reports.page.templates import Section, rendered
from massl.reports.tables import results_table

_COMPARED = ("MaSSL", "iBOT", "DINO")  # whose figures of the paper stand beside ours


def results_section(
    rows: Sequence[ResultRow], *, remarks: Sequence[str] = (), public: Sequence[PageTable] = ()
) -> Section:
    """One table a protocol, then `public` tables of others with our runs in them, then what the paper says of time and
    memory.
    """
    values: dict[str, Any] = {
        "remarks": remarks,
        "protocols": [(name, table_markup(table)) for name, table in tables_by_protocol(rows).items()],
        "public": [table_markup(table) for table in public],
        "paper_time": table_markup(page_table(paper_time_table())),
    }
    return Section(id="results", title="Results", html=rendered("results.html.j2", values))


def tables_by_protocol(rows: Sequence[ResultRow]) -> Mapping[str, PageTable]:
    """Protocol -> its rows with the paper's figures; columns that are empty there are left out."""
    if not rows:
        return {}
    whole = results_table(rows, methods=_COMPARED)
    place = whole.columns.index("protocol")
    tables = {}
    for protocol in dict.fromkeys(line[place] for line in whole.lines):
        lines = tuple(line for line in whole.lines if line[place] == protocol)
        part = replace(whole, lines=lines, footnotes=_notes_of(lines, whole.footnotes))
        tables[protocol] = replace(page_table(part, without=("protocol",)), caption=whole.title)
    return tables


def _notes_of(lines: Sequence[tuple[str, ...]], footnotes: Sequence[str]) -> tuple[str, ...]:
    """Those whose mark stands at a figure of these lines."""
    marks = {mark for line in lines for cell in line for mark in _marks(cell)}
    return tuple(note for note in footnotes if note.partition(" ")[0] in marks)


def _marks(cell: str) -> list[str]:
    """The raised numbers that a figure ends with: "72.70¹,²" has two."""
    raised = "".join(sign if sign in "⁰¹²³⁴⁵⁶⁷⁸⁹" else " " for sign in cell)
    return raised.split()
