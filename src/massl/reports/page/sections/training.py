"""The summary of the runs and their training curves."""

from collections.abc import Sequence

from markupsafe import Markup

from massl.reports.comparison.tables import SPREADS, cautions, device_word, equal_cost, minutes_text
from massl.reports.page.charts import static_chart
from massl.reports.page.series import Chart, axis_titles, charts_of, default_axis, plain
from massl.reports.page.tables import MISSING, Cell, Line, PageTable, table_markup
from massl.reports.page.templates import Section, rendered
from massl.reports.runs import Run

_BEFORE = "before training"
_LABEL_FREE = {  # column -> keys of metrics.jsonl and how the number is written
    "other view, %": (("other_view_top1",), ".1f"),
    "effective rank": (("effective_rank",), ".1f"),
    "spread": (SPREADS, ".3f"),
}


def summary_section(runs: Sequence[Run]) -> Section:
    """What each run reached, and at what cost."""
    values = {
        "remarks": [_named(run, remark, runs) for run in runs for remark in run.remarks],
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
    data = plain([*main, *further], runs, device=device_word(runs))
    axis = default_axis(runs)
    titles = axis_titles(device_word(runs))

    def drawn(charts: Sequence[Chart]) -> list[tuple[Chart, Markup]]:
        return [
            (chart, static_chart(chart, axis=chart.axis or axis, axis_title=titles[chart.axis or axis]))
            for chart in charts
        ]

    html = rendered("training.html.j2", {"main": drawn(main), "further": drawn(further)})
    return Section(id="training", title="Training", html=html), data


def summary_table(runs: Sequence[Run]) -> PageTable:
    """One line per run; what matters most comes first, because a phone shows two columns."""
    equal_cost_column = _at_equal_cost(runs)
    columns = {
        "run": [Cell(text=run.label, run=number) for number, run in enumerate(runs)],
        "k-NN last, %": [_number(run.last.knn_top1 if run.probes else None, ".1f") for run in runs],
        "k-NN best, %": [_best(run) for run in runs],
        **equal_cost_column,
        **_label_free_columns(runs),
        "raw pixels, %": [_number(run.raw_pixel_knn, ".1f") for run in runs],
        "method": [Cell(text=run.method) for run in runs],
        "epochs": [Cell(text=run.progress, number=run.epochs_done) for run in runs],
        f"{device_word(runs)}-minutes": [_minutes(run) for run in runs],
        "images/s": [_number(run.images_per_second, ",.0f") for run in runs],
        "peak GiB": [_number(run.peak_memory_gib, ".1f") for run in runs],
        "state": [Cell(text=run.state) for run in runs],
    }
    for optional in ("k-NN last, %", "k-NN best, %", *_LABEL_FREE, "raw pixels, %", "peak GiB"):
        if all(cell.number is None for cell in columns.get(optional, ())):
            columns.pop(optional, None)
    return PageTable(
        columns=tuple(columns),
        lines=tuple(Line(cells=cells) for cells in zip(*columns.values(), strict=True)),
        footnotes=(
            *(
                ["k-NN: the run's own probe; the best is chosen by what it shows, so it flatters."]
                if any(run.probes for run in runs)
                else []
            ),
            "Minutes: training, times processes, probes not counted. Images/s: the median of all rows but the first.",
            *(
                [f"{_BEFORE}: no later probe was better than the first."]
                if any(run.is_best_untrained for run in runs)
                else []
            ),
            *(
                f"{name.removesuffix(', %')} is at equal cost: the last probe of each run until then; –: none yet in "
                "training."
                for name in equal_cost_column
            ),
        ),
    )


def _best(run: Run) -> Cell:
    """The best k-NN; marked if training never improved on what it started from."""
    if not run.probes:
        return Cell(text=MISSING)
    mark = f" ({_BEFORE})" if run.is_best_untrained else ""
    return Cell(text=f"{run.best.knn_top1:.1f}{mark}", number=run.best.knn_top1)


def _label_free_columns(runs: Sequence[Run]) -> dict[str, list[Cell]]:
    """The last probe of the features; nothing if every run has k-NN or none has a row, which the table shows anyway."""
    if all(run.probes or not run.rows for run in runs):
        return {}
    return {name: [_number(_last(run, *keys), form) for run in runs] for name, (keys, form) in _LABEL_FREE.items()}


def _last(run: Run, *keys: str) -> float | None:
    points = run.measured(*keys)
    return points[-1].value if points else None


def _at_equal_cost(runs: Sequence[Run]) -> dict[str, list[Cell]]:
    """The column of k-NN after as many minutes as all probed runs have; none if fewer than two have any."""
    probed = [run for run in runs if run.probes]
    cost = equal_cost(probed) if len(probed) > 1 else None
    if cost is None or cost["gpu_minutes"] == 0:  # 0: one of them has only begun
        return {}
    probes = [cost["knn"].get(run.label) for run in runs]
    name = f"k-NN at {minutes_text(cost['gpu_minutes'])} {device_word(runs)} min, %"
    return {name: [_number(None if probe is None else probe["knn_top1"], ".1f") for probe in probes]}


def unlike(runs: Sequence[Run]) -> list[str]:
    """Differences that make runs incomparable; unfinished runs are flagged in the table."""
    probed = [run for run in runs if run.last_probe]
    found = cautions(probed) if len(probed) > 1 else ()
    return [f"{caution[0].upper()}{caution[1:]}." for caution in found if not caution.startswith("not finished")]


def _named(run: Run, sentence: str, runs: Sequence[Run]) -> str:
    return f"{run.label}: {sentence}" if len(runs) > 1 else sentence


def _merits(run: Run) -> list[tuple[str, str, str]]:
    """Title, number and a few words on it."""
    rate, memory = run.images_per_second, run.peak_memory_gib
    merits = [
        ("Method", run.method, str(run.settings["backbone.name"])),
        ("Epochs", run.progress, run.state),
        *_quality(run),
        *_chosen(run),
        ("Images/s", _number(rate, ",.0f").text, "median"),
        (f"{device_word([run])}-minutes", _minutes(run).text, f"{run.num_processes} × {run.device}"),
    ]
    return [*merits, ("Peak memory", f"{memory:.1f} GiB", "on one GPU")] if memory is not None else merits


def _chosen(run: Run) -> list[tuple[str, str, str]]:
    """The probe whose weights are in best.safetensors."""
    best = run.best_row
    if best is None:
        return []
    is_last = best is next(row for row in reversed(run.rows) if "best_step" in row)
    return [("Best without labels", f"step {best['step']:,.0f}", "the last probe" if is_last else "not the last probe")]


def _quality(run: Run) -> list[tuple[str, str, str]]:
    """k-NN, or what is known without labels."""
    if run.probes:
        beside = "" if run.raw_pixel_knn is None else f"; raw pixels {run.raw_pixel_knn:.1f} %"
        untrained = ", before training" if run.is_best_untrained else ""
        return [
            ("k-NN, last", f"{run.last.knn_top1:.1f} %", f"at {run.place_of(run.last)}{beside}"),
            ("k-NN, best", f"{run.best.knn_top1:.1f} %", f"at {run.place_of(run.best)}{untrained}"),
        ]
    ranks, found = run.measured("effective_rank"), run.measured("other_view_top1")
    merits = [("Effective rank", f"{ranks[-1].value:.1f}", f"{ranks[0].value:.1f} at the start")] if ranks else []
    if found:
        merits.insert(0, ("Other view found", f"{found[-1].value:.1f} %", f"{found[0].value:.1f} % at the start"))
    return merits or [("k-NN", MISSING, "")]


def _number(number: float | None, form: str) -> Cell:
    return Cell(text=MISSING if number is None else f"{number:{form}}", number=number)


def _minutes(run: Run) -> Cell:
    return Cell(text=minutes_text(run.gpu_minutes), number=run.gpu_minutes) if run.rows else Cell(text=MISSING)


def legend_markup(runs: Sequence[Run]) -> Markup:
    """One button per run, which shows or hides it in all charts."""
    return rendered("legend.html.j2", {"labels": [run.label for run in runs]})
