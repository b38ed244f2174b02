"""Tables of other projects in which a run of ours has a place, because it was trained and probed by their rules."""

import re
from collections.abc import Sequence

from massl.config import MasslError
from massl.reports.page_runs import PageRun
from massl.reports.page_tables import MISSING, Cell, Line, PageTable
from massl.reports.public import OurResult, PublicTable, RankedRow, Rules, public_tables, with_ours

# Data sets of public tables, and how sources of theirs are named: torchvision:CIFAR10?root=data, /data/cifar-10/train.npz
_DATA = {
    "CIFAR-10": re.compile(r"cifar[-_]?10(?!\d)", re.IGNORECASE),
    "CIFAR-100": re.compile(r"cifar[-_]?100(?!\d)", re.IGNORECASE),
    "Imagenette": re.compile(r"imagenette", re.IGNORECASE),
    "ImageNet-100": re.compile(r"imagenet[-_]?100(?!\d)", re.IGNORECASE),
}
# What a run and a row must share to stand in one table; what else differs is said beside our row.
_DECISIVE = ("data", "backbone", "stem", "epochs", "batch_size", "num_neighbours")
_RANKED_BY = "knn_top1"


def tables_with_ours(runs: Sequence[PageRun], *, data_set: str | None = None) -> list[PageTable]:
    """Every public table that a finished run of ours belongs in, with the run as a row.

    `data_set` is what the runs were trained on, where the names of their sources do not tell.
    """
    if data_set is not None and data_set not in _DATA:
        raise MasslError(f"no public table is about {data_set!r}; --data_set may be {', '.join(_DATA)}")
    found = []
    for table in public_tables():
        ours = [result_of(run, table, data_set=data_set) for run in runs if belongs(run, table, data_set=data_set)]
        if ours:
            found.append(_shown(table, with_ours(table, ours)))
    return found


def belongs(run: PageRun, table: PublicTable, *, data_set: str | None = None) -> bool:
    """Whether it was trained and probed as some row of the table was."""
    if table.columns[0].name != _RANKED_BY or not run.finished or run.last is None:
        return False
    own = rules_of(run, best_epoch=table.rules.best_epoch, data_set=data_set)
    return any(all(getattr(own, name) == getattr(row.rules, name) for name in _DECISIVE) for row in table.rows)


def rules_of(run: PageRun, *, best_epoch: bool | None, data_set: str | None = None) -> Rules:
    """What the recipe says, by the names of the tables; a probe can give the best epoch or the last, whichever is asked for."""
    settings = run.curve.settings
    source = str(settings["data.source"])
    return Rules(
        data=data_set or next((name for name, pattern in _DATA.items() if pattern.search(source)), source),
        backbone=str(settings["backbone.name"]),
        stem="small" if settings.get("backbone.stem") == "small" else "",
        epochs=run.curve.epochs,
        batch_size=run.curve.batch_size,
        num_neighbours=settings.get("probes.num_neighbours"),
        temperature=settings.get("probes.temperature"),
        best_epoch=best_epoch,
    )


def result_of(run: PageRun, table: PublicTable, *, data_set: str | None = None) -> OurResult:
    """The run's figures for the columns of the table."""
    assert run.best is not None
    assert run.last is not None
    accuracy = run.best.knn_top1 if table.rules.best_epoch else run.last.knn_top1
    known = {_RANKED_BY: accuracy, "minutes": run.gpu_minutes, "peak_gib": run.curve.peak_memory_gib}
    columns = {column.name for column in table.columns}
    return OurResult(
        method=f"{run.curve.method} ({run.label})",
        rules=rules_of(run, best_epoch=table.rules.best_epoch, data_set=data_set),
        values={name: value for name, value in known.items() if name in columns and value is not None},
        notes=departures(run),
    )


def departures(run: PageRun) -> tuple[str, ...]:
    """What a reader must know of our row that no rule says: views, whose features, which images, what the time is of."""
    settings = run.curve.settings
    views = [(settings.get(f"views.num_{kind}"), settings.get(f"views.{kind}_size")) for kind in ("global", "local")]
    notes = [" + ".join(f"{number} × {size} px" for number, size in views if number) + " views"]
    notes += ["features of the moving average"] if any(key.startswith("method.teacher.") for key in settings) else []
    notes += [f"probed every {settings['probes.every_epochs']:g} epochs"] if settings.get("probes.every_epochs", 1) != 1 else []
    notes += [] if settings.get("probes.queries") else ["probed on held-out training images"]
    limits = {"database images": settings.get("probes.max_database"), "query images": settings.get("probes.max_queries")}
    notes += [f"at most {most:,} {what}" for what, most in limits.items() if most is not None]
    return (*notes, f"time without probes, on {run.curve.num_processes} × {run.curve.device}")


def _shown(table: PublicTable, ranked: Sequence[RankedRow]) -> PageTable:
    has_remarks = any(entry.row.notes for entry in ranked)
    titles = tuple(f"{column.title}, {column.unit}" for column in table.columns)
    source = table.source
    return PageTable(
        columns=("method", "place", *titles, *(("remarks",) if has_remarks else ())),
        lines=tuple(Line(cells=_cells(entry, has_remarks=has_remarks), is_ours=entry.ours) for entry in ranked),
        caption=table.title,
        footnotes=(
            f"Source: {source.address} ({source.date:%d.%m.%Y}).",
            f"Its rules: {source.measured}; views: {source.views}; optimiser: {source.optimiser}; hardware: {source.hardware}.",
            *table.notes,
        ),
    )


def _cells(entry: RankedRow, *, has_remarks: bool) -> tuple[Cell, ...]:
    numbers = (Cell(text=MISSING if value is None else f"{value:,.1f}", number=value) for value in entry.row.values)
    remarks = (Cell(text="; ".join(entry.row.notes) or MISSING),) if has_remarks else ()
    return (Cell(text=entry.row.method), Cell(text=str(entry.place), number=float(entry.place)), *numbers, *remarks)
