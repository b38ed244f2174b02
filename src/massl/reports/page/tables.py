"""Tables of the page: a cell has a text and, in columns of numbers, the number it is sorted by."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from massl.reports.page.templates import rendered
from massl.reports.tables import ResultsTable

_NUMBER = re.compile(r"[-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
_MISSING = frozenset({"", "–", "--", "-"})
MISSING = "–"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One field of a table."""

    text: str
    number: float | None = None  # what it is sorted by in a column of numbers; None: missing
    run: int | None = None  # the run whose colour is shown beside it


@dataclass(frozen=True, kw_only=True)
class Line:
    cells: tuple[Cell, ...]
    is_ours: bool = False  # marked among the numbers of others


@dataclass(frozen=True, kw_only=True)
class PageTable:
    """A table that can be sorted by each of its columns."""

    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    caption: str = ""
    footnotes: tuple[str, ...] = ()

    @property
    def has_numbers(self) -> tuple[bool, ...]:
        """Per column: whether it holds numbers only."""
        columns = zip(*(line.cells for line in self.lines), strict=True)
        return tuple(
            any(cell.number is not None for cell in cells)
            and all(cell.number is not None or cell.text in _MISSING for cell in cells)
            for cells in columns
        )


def number_in(text: str) -> float | None:
    """The number a text begins with, to sort "44.80 ± 0.40", "1,024 (k=20)" and "1/8" by it; None for words."""
    ratio = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if ratio is not None:
        return int(ratio.group(1)) / int(ratio.group(2))
    found = _NUMBER.match(text.strip())
    return None if found is None else float(found.group().replace(",", "").replace("−", "-"))


def page_table(table: ResultsTable, *, without: Sequence[str] = ()) -> PageTable:
    """A table of texts as one of the page, without empty columns and those in `without`."""
    kept = [
        place
        for place, column in enumerate(table.columns)
        if column not in without and any(line[place] not in _MISSING for line in table.lines)
    ]
    return PageTable(
        columns=tuple(table.columns[place] for place in kept),
        lines=tuple(
            Line(cells=tuple(_cell(line[place], is_word=table.columns[place] in table.text_columns) for place in kept))
            for line in table.lines
        ),
        caption=table.title,
        footnotes=table.footnotes,
    )


def _cell(text: str, *, is_word: bool) -> Cell:
    return Cell(text=MISSING if text in _MISSING else text, number=None if is_word else number_in(text))


def table_markup(table: PageTable) -> Markup:
    """The table in a box, in which it scrolls where it is wider than the page."""
    return rendered("table.html.j2", {"table": table})
