"""The figures of "Learning from Memory" (MaSSL, ICML 2024) as data, found by the names that our own results carry."""

import tomllib
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

# The eight sets of the k-NN transfer table (CARP's protocol), and what their unweighted mean is called.
TRANSFER_DATA = ("Pets", "Flowers", "Aircraft", "Cars", "Country211", "Food101", "STL-10", "GTSRB")
TRANSFER_AVERAGE = "average of 8"

_MEASURED = ("protocol", "data", "setting", "metric")  # what a column says, or its table for all columns
_K_NOT_STATED = "the paper does not say for which k"
_BEST = "best over rates and epochs (as published)"


class Correspondence(NamedTuple):
    """A setting of ours, and what the paper's tables say in its place."""

    protocol: str
    ours: str
    paper: str
    note: str | None = None


# Only what is named differently: settings such as "k=10", "medium" and "only_fg" stand in the tables under our names.
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


@dataclass(frozen=True, kw_only=True)
class PaperColumn:
    """What the figures of one column measure."""

    protocol: str
    data: str
    setting: str
    metric: str


@dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """One number of the paper."""

    value: float  # accuracies and scores in percent
    deviation: float | None  # over draws, where the paper gives one
    notes: tuple[str, ...]  # what a reader must know before comparing with it
    epochs: int | None  # of pre-training, where the paper says
    table: str  # id of the table it stands in

    @property
    def note(self) -> str | None:
        """All notes as one sentence, or None."""
        return "; ".join(self.notes) or None


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """One model in one table."""

    method: str
    architecture: str
    epochs: int | None
    figures: tuple[PaperFigure | None, ...]  # one a column; None where the paper prints a dash


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """One table of the paper."""

    id: str
    label: str  # of the paper's LaTeX source
    caption: str
    remarks: tuple[str, ...]  # where the paper's text does not fit the table
    columns: tuple[PaperColumn, ...]
    rows: tuple[PaperRow, ...]


def paper_figures(*, protocol: str, data: str, setting: str, metric: str, architecture: str) -> dict[str, PaperFigure]:
    """Method -> the paper's figure for what these names of ours measure.

    Of several lengths of pre-training the longest counts, and a note says so.
    """
    found: dict[str, list[PaperFigure]] = {}
    for published_setting, note in _published_settings(protocol, setting):
        column = PaperColumn(protocol=protocol, data=data, setting=published_setting, metric=metric)
        for method, figure in _figures_of(column, architecture):
            found.setdefault(method, []).append(_with_note(figure, note))
    return {method: _longest_trained(figures) for method, figures in found.items()}


def paper_figure(
    *, protocol: str, data: str, setting: str, metric: str, architecture: str, method: str = "MaSSL"
) -> PaperFigure | None:
    """One method's figure, or None where the paper has none."""
    return paper_figures(protocol=protocol, data=data, setting=setting, metric=metric, architecture=architecture).get(
        method
    )


@cache
def paper_tables() -> tuple[PaperTable, ...]:
    """All tables, in the paper's order."""
    document = tomllib.loads(resources.files(__package__).joinpath("paper_tables.toml").read_text(encoding="utf-8"))
    checked_keys(document, "paper_tables.toml", needed={"notes", "tables"})
    return tuple(_table(plain, document["notes"]) for plain in document["tables"])


def checked_keys(plain: dict[str, Any], where: str, *, needed: set[str], allowed: Set[str] = frozenset()) -> None:
    """No key is missing, and none stands there that nobody reads."""
    missing, unknown = needed - plain.keys(), plain.keys() - needed - allowed
    assert not missing, f"{where} does not say {', '.join(sorted(missing))}"
    assert not unknown, f"{where} says {', '.join(sorted(unknown))}, which nobody reads"


def _published_settings(protocol: str, setting: str) -> Iterator[tuple[str, str | None]]:
    yield setting, None
    for entry in SETTINGS:
        if (entry.protocol, entry.ours) == (protocol, setting):
            yield entry.paper, entry.note


def _figures_of(column: PaperColumn, architecture: str) -> Iterator[tuple[str, PaperFigure]]:
    for table in paper_tables():
        for row in table.rows:
            for figure in (figure for at, figure in zip(table.columns, row.figures, strict=True) if at == column):
                if figure is not None and row.architecture == architecture:
                    yield row.method, figure


def _longest_trained(figures: list[PaperFigure]) -> PaperFigure:
    # of equal ones the first: the main tables stand before the appendix
    longest = max(figures, key=lambda figure: figure.epochs or 0)
    *others, last = sorted({figure.epochs or 0 for figure in figures})
    shorter = " and ".join(str(epochs) for epochs in others if epochs)
    if not shorter:
        return longest
    return _with_note(
        longest, f"after {last} epochs, the longest pre-training the paper has figures for (others: {shorter})"
    )


def _with_note(figure: PaperFigure, note: str | None) -> PaperFigure:
    return figure if note is None else replace(figure, notes=(*figure.notes, note))


def _table(plain: dict[str, Any], notes: dict[str, str]) -> PaperTable:
    checked_keys(
        plain,
        plain["id"],
        needed={"id", "label", "caption", "columns", "rows"},
        allowed={*_MEASURED, "note", "remarks"},
    )
    shared = {key: plain[key] for key in _MEASURED if key in plain}
    columns = [{**shared, **column} for column in plain["columns"]]
    noted_by_columns = [[plain.get("note"), column.pop("note", None)] for column in columns]
    for column in columns:
        checked_keys(column, f"{plain['id']}, column {column}", needed=set(_MEASURED))
    return PaperTable(
        id=plain["id"],
        label=plain["label"],
        caption=plain["caption"],
        remarks=tuple(notes[name] for name in plain.get("remarks", ())),
        columns=tuple(PaperColumn(**column) for column in columns),
        rows=tuple(_row(row, noted_by_columns, notes=notes, table=plain["id"]) for row in plain["rows"]),
    )


def _row(
    plain: dict[str, Any], noted_by_columns: list[list[str | None]], *, notes: dict[str, str], table: str
) -> PaperRow:
    where = f"{table}, {plain['method']}"
    checked_keys(plain, where, needed={"method", "architecture", "values"}, allowed={"epochs", "note"})
    assert len(plain["values"]) == len(noted_by_columns), (
        f"{where}: {len(plain['values'])} values in {len(noted_by_columns)} columns"
    )
    epochs = plain.get("epochs")
    figures: list[PaperFigure | None] = []
    for cell, noted in zip(plain["values"], noted_by_columns, strict=True):
        parts = cell if isinstance(cell, dict) else {"value": cell}
        checked_keys(parts, where, needed={"value"}, allowed={"deviation", "note"})
        names = [name for name in (*noted, plain.get("note"), parts.get("note")) if name is not None]
        figures.append(_figure(parts, notes=tuple(notes[name] for name in names), epochs=epochs, table=table))
    return PaperRow(method=plain["method"], architecture=plain["architecture"], epochs=epochs, figures=tuple(figures))


def _figure(parts: dict[str, Any], *, notes: tuple[str, ...], epochs: int | None, table: str) -> PaperFigure | None:
    if parts["value"] == "--":
        return None
    assert isinstance(parts["value"], float), f"{table}: {parts['value']!r} is no figure"
    return PaperFigure(value=parts["value"], deviation=parts.get("deviation"), notes=notes, epochs=epochs, table=table)
