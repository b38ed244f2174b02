"""The numbers of "Learning from Memory" (MaSSL, ICML 2024), looked up by the names that our own results have."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import model_validator

from massl.reports.published.document import Number, Published, read_document

# The eight sets of the k-NN transfer table (CARP's protocol), and the name of their unweighted mean.
TRANSFER_DATA = ("Pets", "Flowers", "Aircraft", "Cars", "Country211", "Food101", "STL-10", "GTSRB")
TRANSFER_AVERAGE = "average of 8"

_K_NOT_STATED = "the paper does not say for which k"
_BEST = "best over rates and epochs (as published)"
# (protocol, our name of a setting) -> the paper's name of it, then notes; settings of the same name are left out.
SETTINGS: dict[tuple[str, str], tuple[str, ...]] = {
    ("knn", "k=20"): ("k not stated", _K_NOT_STATED),
    ("linear", _BEST): ("best over rates",),
    ("long-tail", _BEST): ("best over rates",),
    ("low-shot", "1% knn k=20"): ("1% k-NN", _K_NOT_STATED),
    ("low-shot", "10% knn k=20"): ("10% k-NN", _K_NOT_STATED),
    ("low-shot", "1% logreg lambda=2e-06"): ("1% LogReg",),
    ("low-shot", "10% logreg lambda=2e-06"): ("10% LogReg",),
    ("low-shot", f"1% linear {_BEST}"): ("1% Linear",),
    ("low-shot", f"10% linear {_BEST}"): ("10% Linear",),
    ("low-shot", "1 per class linear mean"): ("1 per class",),
    ("low-shot", "2 per class linear mean"): ("2 per class",),
    ("low-shot", "4 per class linear mean"): ("4 per class",),
}


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
    notes: tuple[str, ...]  # cautions for comparing with it
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
    remarks: tuple[str, ...] = ()  # where the paper's text contradicts the table
    columns: tuple[PaperColumn, ...]
    rows: tuple[PaperRow, ...]


class PaperTables(Published):
    """The whole document."""

    notes: dict[str, str]
    tables: tuple[PaperTable, ...]

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, plain: dict[str, Any]) -> dict[str, Any]:
        return {**plain, "tables": [_expanded_table(table, plain["notes"]) for table in plain["tables"]]}


def _expanded_table(plain: dict[str, Any], notes: Mapping[str, str]) -> dict[str, Any]:
    """Give each column what the table says for all, and each figure the notes of its table, column and row."""
    shared = {key: value for key, value in plain.items() if key in PaperColumn.model_fields}
    table = {key: value for key, value in plain.items() if key not in {*shared, "note"}}
    columns = [{**shared, **column} for column in plain["columns"]]
    above = [(plain.get("note"), column.pop("note", None)) for column in columns]
    rows = [_expanded_row(row, above, notes) for row in plain["rows"]]
    remarks = [notes[name] for name in plain.get("remarks", ())]
    return {**table, "columns": columns, "rows": rows, "remarks": remarks}


def _expanded_row(
    plain: dict[str, Any], above: Sequence[tuple[str | None, ...]], notes: Mapping[str, str]
) -> dict[str, Any]:
    row = {key: value for key, value in plain.items() if key not in ("values", "note")}
    figures: list[dict[str, Any] | None] = []
    for value, names in zip(plain["values"], above, strict=True):
        cell = dict(value) if isinstance(value, dict) else {"value": value}
        noted = [notes[name] for name in (*names, plain.get("note"), cell.pop("note", None)) if name is not None]
        figures.append(None if value == "--" else {**cell, "notes": noted, "epochs": plain.get("epochs")})
    return {**row, "figures": figures}


@cache
def paper_tables() -> tuple[PaperTable, ...]:
    """All tables, in the paper's order."""
    return read_document(PaperTables, "paper_tables.toml").tables


def paper_figures(*, protocol: str, data: str, setting: str, metric: str, architecture: str) -> dict[str, PaperFigure]:
    """Method -> the paper's figure for the same measurement, named as in our results.

    Where the paper has several lengths of pre-training, the longest counts, and a note says so.
    """
    found: dict[str, list[PaperFigure]] = {}
    for name, *notes in filter(None, [(setting,), SETTINGS.get((protocol, setting))]):
        column = PaperColumn(protocol=protocol, data=data, setting=name, metric=metric)
        for method, figure in _figures_of(column, architecture):
            found.setdefault(method, []).append(_with_notes(figure, *notes))
    return {method: _longest_trained(figures) for method, figures in found.items()}


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
    note = f"after {last} epochs, the longest pre-training the paper has figures for (others: {shorter})"
    return _with_notes(longest, note) if shorter else longest


def _with_notes(figure: PaperFigure, *notes: str) -> PaperFigure:
    return figure.model_copy(update={"notes": (*figure.notes, *notes)})
