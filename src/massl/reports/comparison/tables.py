"""Runs side by side: a table of quality and cost, what makes the runs incomparable, and the paper's own such table."""

from collections.abc import Mapping, Sequence
from typing import Any

from massl.reports.published.paper import paper_tables
from massl.reports.runs import MetricPoint, Run, minutes_in_common
from massl.reports.tables import ResultsTable

# Beginnings of keys. These settings decide how long a step takes or how many make an epoch. Settings of the method
# (method.*) and its tuning (optimizer.*, probabilities of views) are what a comparison is about.
_DECIDE_COST = (
    "data.source",
    "views.num_",
    "views.global_size",
    "views.local_size",
    "backbone.name",
    "backbone.image_size",
    "backbone.patch_size",
    "backbone.timm_options.",
    "trainer.batch_size",
    "trainer.accumulation_steps",
    "trainer.precision",
    "trainer.activation_checkpointing",
    "trainer.kernels",
    "trainer.residual",
    "trainer.cuda_graph",
)
_DECIDE_LENGTH = ("trainer.epochs", "trainer.max_steps")
# These decide what a probe's numbers mean. The seed chooses the probed images.
_DECIDE_MEASURE = (
    "probes.database",
    "probes.queries",
    "probes.max_",
    "probes.num_neighbours",
    "probes.crop_ratio",
    "trainer.seed",
)
_UNKNOWN = "–"
SPREADS = ("embedding_spread", "feature_spread")  # a method logs one of them
_TEXT_COLUMNS = frozenset({"run", "method"})  # left-aligned; all others hold numbers


# ---- what differs ----------------------------------------------------------------------------------------------------


def differing_settings(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Dotted key -> label -> value of settings that differ between runs; None if a run lacks the key.

    Runs without local views are left out of views.local_*.
    """
    found = {}
    for key in sorted({key for run in runs for key in run.settings}):
        is_local = key.startswith("views.local_")
        using = [run for run in runs if not (is_local and run.settings.get("views.num_local") == 0)]
        by_label = {run.label: run.settings.get(key) for run in using}
        if any(value != next(iter(by_label.values())) for value in by_label.values()):
            found[key] = by_label
    return found


def cautions(runs: Sequence[Run]) -> tuple[str, ...]:
    """Differences that make the runs incomparable, a sentence each."""
    differing = differing_settings(runs)

    def told(beginnings: tuple[str, ...]) -> list[str]:
        return [in_words(key, by_label) for key, by_label in differing.items() if key.startswith(beginnings)]

    machines = {run.label: run.machine for run in runs}
    different_machines = [in_words("machine", machines)] if len(set(machines.values())) > 1 else []
    has_knn = any(run.probes for run in runs)
    sentences = {
        "not at equal cost": told(_DECIDE_COST),
        "not after equal epochs": told(_DECIDE_LENGTH),
        "time and memory are of different machines": different_machines,
        f"{'k-NN' if has_knn else 'the probe'} is not measured alike": told(_DECIDE_MEASURE),
        "not finished": [
            f"{run.label} is at epoch {_done(run)} of {run.num_epochs}" for run in runs if not run.finished
        ],
    }
    return tuple(f"{what}: {'; '.join(details)}" for what, details in sentences.items() if details)


def other_differences(runs: Sequence[Run]) -> tuple[str, ...]:
    """Further settings that differ: how the runs were tuned. The methods' own settings are left out."""
    told = (*_DECIDE_COST, *_DECIDE_LENGTH, *_DECIDE_MEASURE, "method.")
    differing = differing_settings(runs)
    return tuple(in_words(key, by_label) for key, by_label in differing.items() if not key.startswith(told))


def in_words(key: str, by_label: Mapping[str, Any]) -> str:
    """ "trainer.epochs is 14 (dino, ibot), 20 (massl)"."""
    labels: dict[str, list[str]] = {}
    for label, value in by_label.items():
        labels.setdefault("not set" if value in (None, "") else str(value), []).append(label)
    return f"{key} is " + ", ".join(f"{value} ({', '.join(having)})" for value, having in labels.items())


def shared_by(runs: Sequence[Run]) -> str:
    """What all runs have in common: "vit_small_patch16_224 on photos, batch 256, 1 x NVIDIA H200"."""
    facts = [
        (_network(run), f"on {run.settings['data.source']}", f"batch {run.batch_size}", run.machine) for run in runs
    ]
    common = [of_runs[0] for of_runs in zip(*facts, strict=True) if len(set(of_runs)) == 1]
    return ", ".join(common).replace(", on ", " on ", 1)


def _network(run: Run) -> str:
    """ "vit_small_patch16_224 (patches of 8 px, images of 64 px)": the name, and sizes set in the recipe."""
    sizes = {"patches": run.settings.get("backbone.patch_size"), "images": run.settings.get("backbone.image_size")}
    other = ", ".join(f"{what} of {size} px" for what, size in sizes.items() if size is not None)
    return f"{run.settings['backbone.name']} ({other})" if other else str(run.settings["backbone.name"])


def device_word(runs: Sequence[Run]) -> str:
    """The word before "minutes"."""
    kinds = {run.device == "cpu" for run in runs}
    return "device" if len(kinds) > 1 else "CPU" if kinds == {True} else "GPU"


# ---- tables ----------------------------------------------------------------------------------------------------------


def comparison_table(runs: Sequence[Run]) -> ResultsTable:
    """One line per run: its probes, k-NN at equal cost, and the cost until the last probe.

    k-NN has columns if some run has it. Measures without labels have columns if some run lacks k-NN.
    """
    base, device = base_of(runs), device_word(runs)
    has_ratios, has_memory = len(runs) > 1, any(run.peak_memory_gib is not None for run in runs)
    columns = {
        "run": [run.label for run in runs],
        "method": [run.method for run in runs],
        "epochs done": [f"{_done(run)}/{run.num_epochs}" for run in runs],
    }
    notes = [f"×: as a multiple of {base.label}, time per image seen"] if has_ratios else []
    for part, part_notes in (_knn_columns(runs), _label_free_columns(runs)):
        columns |= part
        notes += part_notes
    columns[f"{device} min"] = [
        minutes_text(0.0 if (last := run.last_probe) is None else last.gpu_minutes) for run in runs
    ]
    if has_ratios:
        columns["time ×"] = [_ratio(_minutes_per_image(run), _minutes_per_image(base)) for run in runs]
    columns["images a second"] = [_number(run.images_per_second, ",.0f") for run in runs]
    if has_memory:
        columns[f"GiB a {device}"] = [_number(run.peak_memory_gib, ".1f") for run in runs]
    if has_memory and has_ratios:
        columns["GiB ×"] = [_ratio(run.peak_memory_gib, base.peak_memory_gib) for run in runs]
    return ResultsTable(
        title=shared_by(runs),
        columns=tuple(columns),
        lines=tuple(zip(*columns.values(), strict=True)),
        footnotes=(*notes, *cautions(runs)),
        text_columns=_TEXT_COLUMNS,
    )


_Columns = tuple[dict[str, list[str]], list[str]]  # columns, and notes below the table


def _knn_columns(runs: Sequence[Run]) -> _Columns:
    """k-NN at the first, last and best probe and, for several runs, at equal cost; nothing if no run has labels."""
    probed = [run for run in runs if run.probes]
    if not probed:
        return {}, []
    columns = {
        "k-NN start": [f"{run.first.knn_top1:.1f}" if run.probes else _UNKNOWN for run in runs],
        "k-NN last": [f"{run.last.knn_top1:.1f}" if run.probes else _UNKNOWN for run in runs],
        "k-NN best (epoch)": [
            f"{run.best.knn_top1:.1f} ({_epoch_text(run.best.epoch)})" if run.probes else _UNKNOWN for run in runs
        ],
    }
    notes = [
        f"best before training: {run.label} was never better than {run.start_words}"
        for run in probed
        if run.is_best_untrained
    ]
    if len(probed) > 1:
        common = minutes_in_common(runs)
        at_equal_cost = f"k-NN at {minutes_text(common)} {device_word(runs)} min"
        columns[f"{at_equal_cost} (probe at)"] = [_knn_within(run, common) for run in runs]
        notes.insert(
            0,
            f"{at_equal_cost} is at equal cost: each run's last probe until then, with its minutes in parentheses; "
            f"{_UNKNOWN}: no probe in training yet",
        )
    return columns, notes


def _label_free_columns(runs: Sequence[Run]) -> _Columns:
    """Effective rank, spread and retrieval of the other view; nothing if every run has k-NN, which says more."""
    if all(run.probes for run in runs):
        return {}, []
    ranks = [run.measured("effective_rank") for run in runs]
    spreads = [run.measured(*SPREADS) for run in runs]
    found = [run.measured("other_view_top1") for run in runs]
    columns = {
        "rank start": [_of(points, 0) for points in ranks],
        "rank last": [_of(points, -1) for points in ranks],
        "spread": [_of(points, -1, ".3f") for points in spreads],
    }
    notes = [
        "rank: effective rank, how many directions the features use; spread: how far they differ, 0 (all equal) to "
        "1. Both show a collapse; higher is not always better"
    ]
    if any(found):
        columns["other view, %"] = [_of(points, -1) for points in found]
        notes.append(
            "other view: how often a random crop of an image is nearest to that image among the probe's images"
        )
    return columns, notes


def _of(points: Sequence[MetricPoint], place: int, form: str = ".1f") -> str:
    return f"{points[place].value:{form}}" if points else _UNKNOWN


def base_of(runs: Sequence[Run]) -> Run:
    """The run that ratios refer to: the first of MaSSL, or the first of all."""
    return next((run for run in runs if run.method == "massl"), runs[0])


def equal_cost(runs: Sequence[Run]) -> dict[str, Any]:
    """For comparison.json: the minutes that all runs with k-NN have in common, and each run's last probe until then."""
    common = minutes_in_common(runs)
    probes = {run.label: run.last_within(common) for run in runs}
    return {
        "gpu_minutes": common,
        "knn": {label: None if probe is None else probe._asdict() for label, probe in probes.items()},
    }


def paper_time_table() -> ResultsTable:
    """The paper's k-NN, hours and memory of DINO, iBOT and MaSSL, with the same ratios."""
    (table,) = [table for table in paper_tables() if table.id == "time-and-memory"]
    values = [tuple(figure.value for figure in row.figures if figure is not None) for row in table.rows]
    base = {row.epochs: own for row, own in zip(table.rows, values, strict=True) if row.method == "MaSSL"}
    lines = []
    for row, (knn, hours, gigabytes) in zip(table.rows, values, strict=True):
        _, base_hours, base_gigabytes = base[row.epochs]
        costs = f"{hours:.1f}", _ratio(hours, base_hours), f"{gigabytes:.1f}", _ratio(gigabytes, base_gigabytes)
        lines.append((row.method, str(row.epochs), f"{knn:.1f}", *costs))
    return ResultsTable(
        title=f"The paper's: {table.rows[0].architecture}, {table.columns[0].data}, {table.columns[1].setting}",
        columns=("method", "epochs", "k-NN", "hours", "time ×", "GB a GPU", "GB ×"),
        lines=tuple(lines),
        footnotes=(
            "×: as a multiple of MaSSL after as many epochs",
            *dict.fromkeys(note for row in table.rows for figure in row.figures if figure for note in figure.notes),
            *table.remarks,
        ),
        text_columns=_TEXT_COLUMNS,
    )


def minutes_text(minutes: float) -> str:
    return f"{minutes:,.0f}" if minutes >= 100 else f"{minutes:.2f}" if minutes < 10 else f"{minutes:.1f}"


def _minutes_per_image(run: Run) -> float | None:
    """Per image, so that runs of different length can be compared."""
    return run.gpu_minutes / run.images_seen if run.images_seen else None


def _knn_within(run: Run, gpu_minutes: float) -> str:
    """ "61.2 (1.48)": accuracy, and the minutes at which it was probed."""
    probe = run.last_within(gpu_minutes)
    return _UNKNOWN if probe is None else f"{probe.knn_top1:.1f} ({minutes_text(probe.gpu_minutes)})"


def _ratio(value: float | None, base: float | None) -> str:
    return _UNKNOWN if value is None or not base else f"{value / base:.2f}"


def _number(value: float | None, form: str) -> str:
    return _UNKNOWN if value is None else f"{value:{form}}"


def _done(run: Run) -> str:
    """The epoch of the last probe."""
    last = run.last_probe
    return _epoch_text(run.epochs_done if last is None else last.epoch)


def _epoch_text(epoch: float) -> str:
    """12, 12.5: whole epochs without a point."""
    return f"{epoch:.1f}".removesuffix(".0")
