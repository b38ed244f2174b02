"""Public tables of other projects that list a run of ours, because it was trained and probed by their rules."""

from collections.abc import Sequence
from typing import Any

from massl.config import MasslError
from massl.reports.page.tables import MISSING, Cell, Line, PageTable
from massl.reports.published.data_sets import DATA_SETS, data_set_named, require_known
from massl.reports.published.public import (
    PublicColumn,
    PublicRow,
    PublicTable,
    RankedRow,
    Rules,
    public_tables,
    with_ours,
)
from massl.reports.runs import Run

# Rules that must be equal for a run to be listed in a table; a note mentions other differences.
_DECISIVE = ("data", "backbone", "stem", "epochs", "batch_size", "num_neighbours")
_RANKED_BY = "knn_top1"
_IMAGES = ("data.source", "probes.database", "probes.queries")
_EVALUATE_THE_TEACHER = frozenset({"massl", "dino", "ibot", "carp"})  # others evaluate the network that is trained


def tables_with_ours(runs: Sequence[Run], *, data_set: str | None = None) -> list[PageTable]:
    """Every public table that a finished run of ours belongs in, with the run as a row.

    `data_set` is what the runs were trained and probed on, if the names of their sources do not tell.
    """
    require_known(data_set)
    data = {run.label: data_of(run, data_set=data_set) for run in runs}
    found = []
    for table in public_tables():
        ours = [_row_of(run, table, data=data[run.label]) for run in runs if belongs(run, table, data=data[run.label])]
        if ours:
            found.append(_page_table(table, with_ours(table, ours)))
    return found


def data_of(run: Run, *, data_set: str | None = None) -> str:
    """The data set that a run was trained and probed on; its source as written if that is not one known set.

    A source that names no set is taken for `data_set`; one that names another contradicts it.
    """
    named = {key: data_set_named(str(run.settings[key])) for key in _IMAGES if run.settings.get(key)}
    for key, name in named.items():
        if data_set is not None and name not in (None, data_set):
            source = f"{key} of {run.label} is {name} ({run.settings[key]})"
            raise MasslError(f"--data_set {data_set}, but {source}; leave out --data_set or this run")
    found = {name or data_set for name in named.values()}
    return (found.pop() if len(found) == 1 else None) or str(run.settings["data.source"])


def belongs(run: Run, table: PublicTable, *, data: str) -> bool:
    """Whether it was trained and probed as some row of the table: without labels, to the end, by the same rules."""
    if table.columns[0].name != _RANKED_BY or run.method == "supervised" or not run.has_all_epochs or not run.probes:
        return False
    own = _rules_of(run, table, data=data)
    return any(all(getattr(own, name) == getattr(row.rules, name) for name in _DECISIVE) for row in table.rows)


def _rules_of(run: Run, table: PublicTable, *, data: str) -> Rules:
    """The recipe by the names of the tables. A probe knows the best epoch and the last, whichever the table wants."""
    settings = run.settings
    return Rules(
        data=data,
        backbone=str(settings["backbone.name"]),
        stem="small" if settings.get("backbone.stem") == "small" else "",
        epochs=run.num_epochs,
        batch_size=run.batch_size,
        num_neighbours=settings.get("probes.num_neighbours"),
        temperature=settings.get("probes.temperature"),
        best_epoch=table.rules.best_epoch,
    )


def _row_of(run: Run, table: PublicTable, *, data: str) -> PublicRow:
    """The run's figures for the columns of the table."""
    accuracy = run.best.knn_top1 if table.rules.best_epoch else run.last.knn_top1
    known = {_RANKED_BY: accuracy, "minutes": run.gpu_minutes, "peak_gib": run.peak_memory_gib}
    values = [known.get(column.name) for column in table.columns]
    return PublicRow(
        method=f"{run.method} ({run.label})",
        rules=_rules_of(run, table, data=data),
        values=tuple(None if value is None else float(value) for value in values),
        notes=departures(run, data=data),
    )


def departures(run: Run, *, data: str) -> tuple[str, ...]:
    """Conditions of our row that no rule covers: views, which network and images were probed, what the time is of."""
    settings = run.settings
    views = [(settings.get(f"views.num_{kind}"), settings.get(f"views.{kind}_size")) for kind in ("global", "local")]
    every_epochs = settings.get("probes.every_epochs", 1)
    notes = [" + ".join(f"{number} × {size} px" for number, size in views if number) + " views"]
    notes += ["features of the moving average"] if run.method in _EVALUATE_THE_TEACHER else []
    notes += [f"probed every {every_epochs:g} epochs"] if every_epochs != 1 else []
    notes += [] if settings.get("probes.queries") else ["probed on held-out training images"]
    notes += _limit(settings.get("probes.max_database"), DATA_SETS[data].num_train, "database")
    notes += _limit(settings.get("probes.max_queries"), DATA_SETS[data].num_test, "query")
    return (*notes, f"time without probes, on {run.num_processes} × {run.device}")


def _limit(most: Any, num_images: int, what: str) -> list[str]:
    """A note if the probe used fewer images than the data set has."""
    return [f"at most {most:,} {what} images"] if isinstance(most, int) and most < num_images else []


def _page_table(table: PublicTable, ranked: Sequence[RankedRow]) -> PageTable:
    has_remarks = any(entry.row.notes for entry in ranked)
    titles = tuple(f"{column.title}, {column.unit}" for column in table.columns)
    source = table.source
    return PageTable(
        columns=("method", "place", *titles, *(("remarks",) if has_remarks else ())),
        lines=tuple(
            Line(cells=_cells(entry, table.columns, has_remarks=has_remarks), is_ours=entry.ours) for entry in ranked
        ),
        caption=table.title,
        footnotes=(
            f"Source: {source.address} ({source.date:%d.%m.%Y}).",
            f"Its rules: {source.measured}; views: {source.views}; optimiser: {source.optimiser}; "
            f"hardware: {source.hardware}.",
            *table.notes,
        ),
    )


def _cells(entry: RankedRow, columns: Sequence[PublicColumn], *, has_remarks: bool) -> tuple[Cell, ...]:
    numbers = (
        Cell(text=MISSING if value is None else _text(value, column, is_ours=entry.ours), number=value)
        for value, column in zip(entry.row.values, columns, strict=True)
    )
    remarks = (Cell(text="; ".join(entry.row.notes) or MISSING),) if has_remarks else ()
    return (Cell(text=entry.row.method), Cell(text=str(entry.place), number=float(entry.place)), *numbers, *remarks)


def _text(value: float, column: PublicColumn, *, is_ours: bool) -> str:
    """Theirs as published; our accuracies with two digits, so that 84.75 does not look like their 84.8."""
    has_two_digits = column.unit == "%" if is_ours else round(value, 1) != value
    return f"{value:,.2f}" if has_two_digits else f"{value:,.1f}"
