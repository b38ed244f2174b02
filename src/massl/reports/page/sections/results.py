"""Results of evaluations beside the paper's figures, and public tables that list our runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from massl.evaluations.results import ResultRow
from massl.reports.comparison.tables import paper_time_table
from massl.reports.page.tables import PageTable, page_table, table_markup
from massl.reports.page.templates import Section, rendered
from massl.reports.tables import results_table

_COMPARED = ("MaSSL", "iBOT", "DINO")  # whose figures in the paper are shown beside ours


def results_section(
    rows: Sequence[ResultRow], *, remarks: Sequence[str] = (), public: Sequence[PageTable] = ()
) -> Section:
    """One table per protocol, then `public` tables that list our runs, then the paper's time and memory."""
    values = {
        "remarks": remarks,
        "protocols": [(name, table_markup(table)) for name, table in tables_by_protocol(rows).items()],
        "public": [table_markup(table) for table in public],
        "paper_time": table_markup(page_table(paper_time_table())),
    }
    return Section(id="results", title="Results", html=rendered("results.html.j2", values))


def tables_by_protocol(rows: Sequence[ResultRow]) -> Mapping[str, PageTable]:
    """Protocol -> its rows with the paper's figures, without empty columns."""
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
    """Footnotes whose raised number a cell of these lines has; "72.70¹,²" has two."""
    marks = {mark for line in lines for cell in line for mark in re.findall("[⁰¹²³⁴⁵⁶⁷⁸⁹]+", cell)}
    return tuple(note for note in footnotes if note.partition(" ")[0] in marks)
