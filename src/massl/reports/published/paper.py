"""The numbers of "Learning from Memory" (MaSSL, ICML 2024), looked up by the names that our own results have."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from pydantic import model_validator

from massl.reports.published.document import Note, Number, Published, read_document

# The eight sets of the k-NN transfer table (CARP's protocol), and the name of their unweighted mean.
TRANSFER_DATA = ("Pets", "Flowers", "Aircraft", "Cars", "Country211", "Food101", "STL-10", "GTSRB")
TRANSFER_AVERAGE = "average of 8"

_K_NOT_STATED = "the paper does not say for which k"
_BEST = "best over rates and epochs (as published)"


class Correspondence(NamedTuple):
    """A setting of ours, and its name in the paper's tables."""

    protocol: str
    ours: str
    paper: str
    note: str | None = None


# Only settings with another name in the paper; "k=10", "medium", "only_fg" and others are the same there.
SETTINGS = (
    Correspondence("knn", "k=20", "k not stated", _K_NOT_STATED),
    Correspondence("linear", _BEST, "best over rates"),
    Correspondence("long-tail", _BEST, "best over rates"),
    Correspondence("low-shot", "1% knn k=20", "1% k-NN", _K_NOT_STATED),
    Correspondence("low-shot", "10% knn k=20", "10% k-NN", _K_NOT_STATED),
    Correspondence("low-shot", "1% logreg lambda=2e-06", "1% LogReg"),
    Correspondence("low-shot", "10% logreg lambda=2e-06", "10% LogReg"),
    Correspondence("low-shot", f"1% linear {_BEST}", "1% Linear"),
    Correspondence("low-shot", f"10% linear {_BEST}", "10% Linear"),
    Correspondence("low-shot", "1 per class linear mean", "1 per class"),
    Correspondence("low-shot", "2 per class linear mean", "2 per class"),
    Correspondence("low-shot", "4 per class linear mean", "4 per class"),
)


class PaperColumn(Published):
    """What the figures of one column measure."""

    protocol: str
    data: str
    setting: str
    metric: str


class PaperFigure(Published):
    """One number of the paper."""

    value: Number  # accuracies and scores in percent
    deviation: Number | None = None  # over draws, where the paper gives one
    notes: tuple[Note, ...]  # cautions for comparing with it
    epochs: int | None  # of pre-training, where the paper says


class PaperRow(Published):
    """One model in one table."""

    method: str
    architecture: str
    epochs: int | None = None
    figures: tuple[PaperFigure | None, ...]  # one per column; None where the paper prints a dash


class PaperTable(Published):
    """One table of the paper."""

    id: str
    label: str  # of the paper's LaTeX source
    caption: str
    remarks: tuple[Note, ...] = ()  # where the paper's text contradicts the table
    columns: tuple[PaperColumn, ...]
    rows: tuple[PaperRow, ...]

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, plain: dict[str, Any]) -> dict[str, Any]:
        """Give each column what the table says for all, and each figure the notes of its table, column and row."""
        table = dict(plain)
        shared = {key: table.pop(key) for key in PaperColumn.model_fields if key in table}
        table_note = table.pop("note", None)
        columns = [{**shared, **column} for column in table["columns"]]
        notes = [(table_note, column.pop("note", None)) for column in columns]
        return {**table, "columns": columns, "rows": [_expanded_row(row, notes) for row in table["rows"]]}


def _expanded_row(plain: dict[str, Any], column_notes: Sequence[tuple[str | None, ...]]) -> dict[str, Any]:
    row = dict(plain)
    values, row_note = row.pop("values"), row.pop("note", None)
    figures: list[dict[str, Any] | None] = []
    for value, notes in zip(values, column_notes, strict=True):
        cell = dict(value) if isinstance(value, dict) else {"value": value}
        named = [name for name in (*notes, row_note, cell.pop("note", None)) if name is not None]
        figures.append(None if value == "--" else {**cell, "notes": named, "epochs": row.get("epochs")})
    return {**row, "figures": figures}


class PaperTables(Published):
    """The whole document."""

    notes: dict[str, str]
    tables: tuple[PaperTable, ...]


def paper_figures(*, protocol: str, data: str, setting: str, metric: str, architecture: str) -> dict[str, PaperFigure]:
    """Method -> the paper's figure for the same measurement, named as in our results.

    Where the paper has several lengths of pre-training, the longest counts, and a note says so.
    """
    found: dict[str, list[PaperFigure]] = {}
    for published_setting, notes in _published_settings(protocol, setting):
        column = PaperColumn(protocol=protocol, data=data, setting=published_setting, metric=metric)
        for method, figure in _figures_of(column, architecture):
            found.setdefault(method, []).append(_with_notes(figure, *notes))
    return {method: _longest_trained(figures) for method, figures in found.items()}


@cache
def paper_tables() -> tuple[PaperTable, ...]:
    """All tables, in the paper's order."""
    return read_document(PaperTables, "paper_tables.toml").tables


def _published_settings(protocol: str, setting: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The setting under our name and under the paper's, each with the notes on taking one for the other."""
    yield setting, ()
    for entry in SETTINGS:
        if (entry.protocol, entry.ours) == (protocol, setting):
            yield entry.paper, () if entry.note is None else (entry.note,)


def _figures_of(column: PaperColumn, architecture: str) -> Iterator[tuple[str, PaperFigure]]:
    for table in paper_tables():
        for row in table.rows:
            for own_column, figure in zip(table.columns, row.figures, strict=True):
                if own_column == column and figure is not None and row.architecture == architecture:
                    yield row.method, figure


def _longest_trained(figures: list[PaperFigure]) -> PaperFigure:
    longest = max(
        figures, key=lambda figure: figure.epochs or 0
    )  # the first of equals: main tables before the appendix
    *others, last = sorted({figure.epochs or 0 for figure in figures})
    shorter = " and ".join(str(epochs) for epochs in others if epochs)
    if not shorter:
        return longest
    note = f"after {last} epochs, the longest pre-training the paper has figures for (others: {shorter})"
    return _with_notes(longest, note)


def _with_notes(figure: PaperFigure, *notes: str) -> PaperFigure:
    return figure.model_copy(update={"notes": (*figure.notes, *notes)})
