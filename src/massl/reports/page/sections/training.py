"""The head of the page and the training curves."""

from collections.abc import Sequence

from markupsafe import Markup

from massl.reports.comparison.tables import cautions, device_word, equal_cost, minutes_text
from massl.reports.page.charts import static_chart
from massl.reports.page.series import charts_of, default_axis, plain
from massl.reports.page.tables import MISSING, Cell, Line, PageTable, table_markup
from massl.reports.page.templates import Section, rendered
from massl.reports.runs import Run

_OPTIONAL = frozenset({"raw pixels, %", "peak GiB"})  # columns that are left out where no run has a number


def summary_section(runs: Sequence[Run]) -> Section:
    """Each run with what it reached at what cost."""
    values = {
        "remarks": remarks_of(runs),
        "merits": _merits(runs[0]) if len(runs) == 1 else (),
        "table": table_markup(summary_table(runs)) if len(runs) > 1 else "",
        "unlike": unlike(runs),
        "warnings": [
            _named(run, f"step {warning.step:,}: {warning.text}", runs) for run in runs for warning in run.warnings
        ],
    }
    return Section(id="summary", title="Summary", html=rendered("summary.html.j2", values))


def training_section(runs: Sequence[Run]) -> tuple[Section, dict[str, object]]:
    """The curves, and their data for the page's scripts."""
    main, further = charts_of(runs)
    data = plain([*main, *further], runs, minutes_of=minutes_of(runs))
    axis = default_axis(runs)
    titles = {"step": "step", "epoch": "epoch", "minutes": f"{minutes_of(runs)}-minutes"}
    drawn = [
        [
            (chart, static_chart(chart, axis=chart.axis or axis, axis_title=titles[chart.axis or axis]))
            for chart in charts
        ]
        for charts in (main, further)
    ]
    html = rendered("training.html.j2", {"main": drawn[0], "further": drawn[1]})
    return Section(id="training", title="Training", html=html), data


def minutes_of(runs: Sequence[Run]) -> str:
    """What minutes are minutes of: GPU, CPU or device."""
    return device_word(runs)


def summary_table(runs: Sequence[Run]) -> PageTable:
    """One line a run; what tells most comes first, for a telephone shows two columns."""
    device = minutes_of(runs)
    columns = [
        ("run", [Cell(text=run.label, run=number) for number, run in enumerate(runs)]),
        ("k-NN last, %", [_number(run.last.knn_top1 if run.probes else None, ".1f") for run in runs]),
        ("k-NN best, %", [_number(run.best.knn_top1 if run.probes else None, ".1f") for run in runs]),
        *_at_equal_cost(runs),
        ("raw pixels, %", [_number(run.raw_pixel_knn, ".1f") for run in runs]),
        ("method", [Cell(text=run.method) for run in runs]),
        ("epochs", [Cell(text=run.progress, number=run.epochs_done) for run in runs]),
        (f"{device}-minutes", [_minutes(run) for run in runs]),
        ("images/s", [_number(run.images_per_second, ",.0f") for run in runs]),
        ("peak GiB", [_number(run.peak_memory_gib, ".1f") for run in runs]),
        ("state", [Cell(text=run.state) for run in runs]),
    ]
    shown = [
        (name, cells)
        for name, cells in columns
        if name not in _OPTIONAL or any(cell.number is not None for cell in cells)
    ]
    return PageTable(
        columns=tuple(name for name, _ in shown),
        lines=tuple(Line(cells=cells) for cells in zip(*(cells for _, cells in shown), strict=True)),
        footnotes=(
            "k-NN: the run's own probe; the best is chosen by what it shows, so it flatters. Minutes: training, times processes, probes "
            "not counted. Images/s: the median of all rows but the first.",
            *(
                f"{name.removesuffix(', %')} is at equal cost: the last probe of each run until then; –: none yet in training."
                for name, _ in _at_equal_cost(runs)
            ),
        ),
    )


def _at_equal_cost(runs: Sequence[Run]) -> list[tuple[str, list[Cell]]]:
    """The column of k-NN after as many minutes as all probed runs have; none where fewer than two have any."""
    curves = [run for run in runs if run.probes]
    if len(curves) < 2:
        return []
    cost = equal_cost(curves)
    if cost["gpu_minutes"] == 0:  # one of them has only begun
        return []
    probes = [cost["knn"].get(run.label) for run in runs]
    name = f"k-NN at {minutes_text(cost['gpu_minutes'])} {minutes_of(runs)} min, %"
    return [(name, [_number(None if probe is None else probe["knn_top1"], ".1f") for probe in probes])]


def unlike(runs: Sequence[Run]) -> list[str]:
    """In what the runs cannot be compared; that one is not finished, the table says."""
    curves = [run for run in runs if run.probes]
    found = cautions(curves) if len(curves) > 1 else ()
    return [f"{caution[0].upper()}{caution[1:]}." for caution in found if not caution.startswith("not finished")]


def remarks_of(runs: Sequence[Run]) -> list[str]:
    """What a reader must know of the files, with the run's name where there are several."""
    return [_named(run, remark, runs) for run in runs for remark in run.remarks]


def _named(run: Run, sentence: str, runs: Sequence[Run]) -> str:
    return f"{run.label}: {sentence}" if len(runs) > 1 else sentence


def _merits(run: Run) -> list[tuple[str, str, str]]:
    """What, how much, and a few words on it."""
    rate, memory = run.images_per_second, run.peak_memory_gib
    best, last = (run.best, run.last) if run.probes else (None, None)
    device = minutes_of([run])
    beside = "" if run.raw_pixel_knn is None else f"; raw pixels {run.raw_pixel_knn:.1f} %"
    merits = [
        ("Method", run.method, str(run.settings["backbone.name"])),
        ("Epochs", run.progress, run.state),
        (
            "k-NN, last",
            MISSING if last is None else f"{last.knn_top1:.1f} %",
            "" if last is None else f"at {run.place_of(last)}{beside}",
        ),
        (
            "k-NN, best",
            MISSING if best is None else f"{best.knn_top1:.1f} %",
            "" if best is None else f"at {run.place_of(best)}",
        ),
        ("Images/s", MISSING if rate is None else f"{rate:,.0f}", "median"),
        (f"{device}-minutes", _minutes(run).text, f"{run.num_processes} × {run.device}"),
    ]
    return [*merits, ("Peak memory", f"{memory:.1f} GiB", "on one GPU")] if memory is not None else merits


def _number(number: float | None, form: str) -> Cell:
    return Cell(text=MISSING if number is None else f"{number:{form}}", number=number)


def _minutes(run: Run) -> Cell:
    return Cell(text=minutes_text(run.gpu_minutes), number=run.gpu_minutes) if run.rows else Cell(text=MISSING)


def legend_markup(runs: Sequence[Run]) -> Markup:
    """One button a run, which shows or hides it in all charts."""
    return rendered("legend.html.j2", {"labels": [run.label for run in runs]})
