"""Tables of other projects in which a run of ours has a place, because it was trained and probed by their rules."""

from collections.abc import Sequence
from typing import Any

from massl.config import MasslError
from massl.reports.page.tables import MISSING, Cell, Line, PageTable
from massl.reports.published.data_sets import DATA_SETS, data_set_named, require_known
from massl.reports.published.public import (
    OurResult,
    PublicColumn,
    PublicTable,
    RankedRow,
    Rules,
    public_tables,
    with_ours,
)
from massl.reports.runs import Run

# What a run and a row must share to stand in one table; what else differs is said beside our row.
_DECISIVE = ("data", "backbone", "stem", "epochs", "batch_size", "num_neighbours")
_RANKED_BY = "knn_top1"
_IMAGES = ("data.source", "probes.database", "probes.queries")
# the others' backbone_to_evaluate is the network that is trained
_EVALUATE_THE_TEACHER = frozenset({"massl", "dino", "ibot", "carp"})


def tables_with_ours(runs: Sequence[Run], *, data_set: str | None = None) -> list[PageTable]:
    """Every public table that a finished run of ours belongs in, with the run as a row.

    `data_set` is what the runs were trained and probed on, where the names of their sources do not tell.
    """
    require_known(data_set)
    for run in runs:
        data_of(run, data_set=data_set)  # so that a contradiction is told of runs that are in no table too
    found = []
    for table in public_tables():
        ours = [result_of(run, table, data_set=data_set) for run in runs if belongs(run, table, data_set=data_set)]
        if ours:
            found.append(_shown(table, with_ours(table, ours)))
    return found


def belongs(run: Run, table: PublicTable, *, data_set: str | None = None) -> bool:
    """Whether it was trained and probed as some row of the table was: without labels, to the end, on the same data."""
    if table.columns[0].name != _RANKED_BY or run.method == "supervised" or not run.has_all_epochs or not run.probes:
        return False
    own = rules_of(run, best_epoch=table.rules.best_epoch, data_set=data_set)
    return any(all(getattr(own, name) == getattr(row.rules, name) for name in _DECISIVE) for row in table.rows)


def data_of(run: Run, *, data_set: str | None = None) -> str:
    """The one data set of the images that a run was trained and probed on; its source as it is written where that is
    not one known set.

    A source that names no set is taken for `data_set`; one that names another contradicts it.
    """
    settings = run.settings
    named = {key: data_set_named(str(settings[key])) for key in _IMAGES if settings.get(key)}
    for key, name in named.items():
        if data_set is not None and name not in (None, data_set):
            raise MasslError(
                f"--data_set {data_set}, but {key} of {run.label} is {name} ({settings[key]}); leave out --data_set or this run"
            )
    found = {name or data_set for name in named.values()}
    return (found.pop() if len(found) == 1 else None) or str(settings["data.source"])


def rules_of(run: Run, *, best_epoch: bool | None, data_set: str | None = None) -> Rules:
    """What the recipe says, by the names of the tables; a probe can give the best epoch or the last, whichever is asked
    for.
    """
    settings = run.settings
    return Rules(
        data=data_of(run, data_set=data_set),
        backbone=str(settings["backbone.name"]),
        stem="small" if settings.get("backbone.stem") == "small" else "",
        epochs=run.num_epochs,
        batch_size=run.batch_size,
        num_neighbours=settings.get("probes.num_neighbours"),
        temperature=settings.get("probes.temperature"),
        best_epoch=best_epoch,
    )


def result_of(run: Run, table: PublicTable, *, data_set: str | None = None) -> OurResult:
    """The run's figures for the columns of the table."""
    accuracy = run.best.knn_top1 if table.rules.best_epoch else run.last.knn_top1
    known = {_RANKED_BY: accuracy, "minutes": run.gpu_minutes, "peak_gib": run.peak_memory_gib}
    columns = {column.name for column in table.columns}
    rules = rules_of(run, best_epoch=table.rules.best_epoch, data_set=data_set)
    return OurResult(
        method=f"{run.method} ({run.label})",
        rules=rules,
        values={name: value for name, value in known.items() if name in columns and value is not None},
        notes=departures(run, data=rules.data),
    )


def departures(run: Run, *, data: str) -> tuple[str, ...]:
    """What a reader must know of our row that no rule says: views, whose features, which images, what the time is of."""
    settings = run.settings
    views = [(settings.get(f"views.num_{kind}"), settings.get(f"views.{kind}_size")) for kind in ("global", "local")]
    every_epochs = settings.get("probes.every_epochs", 1)
    notes = [" + ".join(f"{number} × {size} px" for number, size in views if number) + " views"]
    notes += ["features of the moving average"] if run.method in _EVALUATE_THE_TEACHER else []
    notes += [f"probed every {_plain(every_epochs)} epochs"] if every_epochs != 1 else []
    notes += [] if settings.get("probes.queries") else ["probed on held-out training images"]
    notes += _limit(settings.get("probes.max_database"), DATA_SETS[data].num_train, "database")
    notes += _limit(settings.get("probes.max_queries"), DATA_SETS[data].num_test, "query")
    return (*notes, f"time without probes, on {run.num_processes} × {run.device}")


def _limit(most: Any, num_images: int, kind: str) -> list[str]:
    """A note where the probe looked at fewer images than the data set has."""
    return [f"at most {most:,} {kind} images"] if isinstance(most, int) and most < num_images else []


def _plain(number: Any) -> str:
    """10 for 10.0."""
    return f"{number:g}" if isinstance(number, int | float) else str(number)


def _shown(table: PublicTable, ranked: Sequence[RankedRow]) -> PageTable:
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
            f"Its rules: {source.measured}; views: {source.views}; optimiser: {source.optimiser}; hardware: {source.hardware}.",
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
