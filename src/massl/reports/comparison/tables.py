"""Runs side by side: a table of who learnt how much at what cost, in what they are not comparable, and the paper's own
such table.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from massl.reports.published.paper import PaperTable, paper_tables
from massl.reports.runs import Run, minutes_in_common
from massl.reports.tables import ResultsTable, as_markdown

# Settings that decide how long a step takes or how many make an epoch, by how their keys begin. What belongs to a
# method (method.*) and how it is tuned (optimizer.*, probabilities of views) is what a comparison is about.
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
# Settings that decide what a k-NN accuracy means. The seed is among them because it chooses the probed images.
_DECIDE_MEASURE = (
    "probes.database",
    "probes.queries",
    "probes.max_",
    "probes.num_neighbours",
    "probes.crop_ratio",
    "trainer.seed",
)
_UNKNOWN = "–"
_HOW_IT_IS_COUNTED = (
    "Minutes are those of training until the last probe, times the number of processes. Reading images, recording or compiling the first "
    "steps, and checkpoints count; probes do not. Images a second: the median over the rows of metrics.jsonl but the first. GiB: the most "
    "that was allocated on one GPU, by probes too. k-NN: the probe, in percent; the best is chosen by what it shows: it flatters."
)
_ABOUT_THE_PAPER = (
    "Other data, networks and machines: compare the ratios, not the figures. The paper's k-NN is measured on all of ImageNet, its memory "
    "in GB."
)
_BASE_METHOD = "massl"  # what ratios are to, where there is a run of it
_TEXT_COLUMNS = frozenset({"run", "method"})  # left-aligned; all others hold numbers


def differing_settings(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Dotted key -> label -> value, of the settings in which the runs are not all alike; a run without the key has
    None.

    Runs that do not use a setting, as views.local_size without local views, are left out of it.
    """
    keys = sorted({key for run in runs for key in run.settings})
    values = {key: {run.label: run.settings.get(key) for run in runs if _uses(run, key)} for key in keys}
    return {
        key: by_label
        for key, by_label in values.items()
        if any(value != next(iter(by_label.values())) for value in by_label.values())
    }


def _uses(run: Run, key: str) -> bool:
    return not (key.startswith("views.local_") and run.settings.get("views.num_local") == 0)


def cautions(runs: Sequence[Run]) -> tuple[str, ...]:
    """In what these runs cannot be compared, a sentence each; none where epochs, batch, data, probes, network and
    machine are the same.
    """
    differing = differing_settings(runs)
    machines = {run.label: f"{run.num_processes} x {run.device}" for run in runs}
    cost = [in_words(key, by_label) for key, by_label in differing.items() if key.startswith(_DECIDE_COST)]
    length = [in_words(key, by_label) for key, by_label in differing.items() if key.startswith(_DECIDE_LENGTH)]
    measure = [in_words(key, by_label) for key, by_label in differing.items() if key.startswith(_DECIDE_MEASURE)]
    under_way = [
        f"{run.label} is at epoch {_number(run.last.epoch)} of {run.num_epochs}" for run in runs if not run.finished
    ]
    sentences = {
        "not at equal cost": cost,
        "not after equal epochs": length,
        "time and memory are of different machines": [in_words("machine", machines)]
        if len(set(machines.values())) > 1
        else [],
        "k-NN is not measured alike": measure,
        "not finished": under_way,
    }
    return tuple(f"{what}: {'; '.join(details)}" for what, details in sentences.items() if details)


def other_differences(runs: Sequence[Run]) -> tuple[str, ...]:
    """Settings that differ, besides those of `cautions` and the methods' own: how each was tuned."""
    told = (*_DECIDE_COST, *_DECIDE_LENGTH, *_DECIDE_MEASURE, "method.")
    return tuple(
        in_words(key, by_label) for key, by_label in differing_settings(runs).items() if not key.startswith(told)
    )


def in_words(key: str, by_label: Mapping[str, Any]) -> str:
    """ "trainer.epochs is 14 (dino, ibot), 20 (massl)"."""
    labels: dict[str, list[str]] = {}
    for label, value in by_label.items():
        labels.setdefault("not set" if value in (None, "") else str(value), []).append(label)
    return f"{key} is " + ", ".join(f"{value} ({', '.join(having)})" for value, having in labels.items())


def comparison_table(runs: Sequence[Run]) -> ResultsTable:
    """One line a run: k-NN at its first, last and best probe and at equal cost, and what training had cost at the last."""
    base, device = base_of(runs), device_word(runs)
    has_ratios = len(runs) > 1
    has_memory = any(run.peak_memory_gib is not None for run in runs)
    common = minutes_in_common(runs)
    columns = ["run", "method", "epochs done", "k-NN start", "k-NN last", "k-NN best (epoch)"]
    at_equal_cost = f"k-NN at {minutes_text(common)} {device} min"
    columns += [f"{at_equal_cost} (probe at)"] if has_ratios else []
    columns += [f"{device} min"]
    columns += ["time ×"] if has_ratios else []
    columns += ["images a second"]
    columns += [f"GiB a {device}"] if has_memory else []
    columns += ["GiB ×"] if has_memory and has_ratios else []
    lines = []
    for run in runs:
        line = [run.label, run.method, f"{_number(run.last.epoch)}/{run.num_epochs}"]
        line += [
            f"{run.first.knn_top1:.1f}",
            f"{run.last.knn_top1:.1f}",
            f"{run.best.knn_top1:.1f} ({_number(run.best.epoch)})",
        ]
        line += [_knn_until(run, common)] if has_ratios else []
        line += [minutes_text(run.last.gpu_minutes)]
        line += [_ratio(_minutes_an_image(run), _minutes_an_image(base))] if has_ratios else []
        line += [_UNKNOWN if run.images_per_second is None else f"{run.images_per_second:,.0f}"]
        line += [_UNKNOWN if run.peak_memory_gib is None else f"{run.peak_memory_gib:.1f}"] if has_memory else []
        line += [_ratio(run.peak_memory_gib, base.peak_memory_gib)] if has_memory and has_ratios else []
        lines.append(tuple(line))
    notes = [
        f"×: as a multiple of {base.label}, time by the image seen",
        f"{at_equal_cost} is at equal cost: the last probe of each run until then, which was at the minutes in parentheses; "
        f"{_UNKNOWN}: none yet in training",
    ]
    footnotes = (*(notes if has_ratios else ()), *cautions(runs))
    return ResultsTable(
        title=shared_by(runs),
        columns=tuple(columns),
        lines=tuple(lines),
        footnotes=footnotes,
        text_columns=_TEXT_COLUMNS,
    )


def equal_cost(runs: Sequence[Run]) -> dict[str, Any]:
    """In comparison.json: the minutes that all runs have in common, and each run's last probe until then."""
    common = minutes_in_common(runs)
    points = {run.label: run.last_within(common) for run in runs}
    return {
        "gpu_minutes": common,
        "knn": {label: None if point is None else point._asdict() for label, point in points.items()},
    }


def paper_time_table() -> ResultsTable:
    """The paper's k-NN, hours and memory of DINO, iBOT and MaSSL, with the same ratios."""
    (published,) = [table for table in paper_tables() if table.id == "time-and-memory"]
    base = {
        row.epochs: _values(published, number) for number, row in enumerate(published.rows) if row.method == "MaSSL"
    }
    lines = []
    for number, row in enumerate(published.rows):
        (knn, hours, gigabytes), (_, base_hours, base_gigabytes) = _values(published, number), base[row.epochs]
        ratios = _ratio(hours, base_hours), _ratio(gigabytes, base_gigabytes)
        lines.append(
            (row.method, str(row.epochs), f"{knn:.1f}", f"{hours:.1f}", ratios[0], f"{gigabytes:.1f}", ratios[1])
        )
    return ResultsTable(
        title=f"The paper's: {published.rows[0].architecture}, {published.columns[0].data}, {published.columns[1].setting}",
        columns=("method", "epochs", "k-NN", "hours", "time ×", "GB a GPU", "GB ×"),
        lines=tuple(lines),
        footnotes=(
            "×: as a multiple of MaSSL after as many epochs",
            *dict.fromkeys(note for row in published.rows for figure in row.figures if figure for note in figure.notes),
            *published.remarks,
        ),
        text_columns=_TEXT_COLUMNS,
    )


def comparison_document(runs: Sequence[Run], *, failed: Mapping[str, str], command: str, picture: str) -> str:
    """comparison.md: table, figure, in what the runs differ, the paper's own table, and the commands that make all this
    again.
    """
    parts = [
        "# Runs side by side",
        as_markdown(comparison_table(runs)),
        f"![k-NN against cost and epochs]({picture})",
        _HOW_IT_IS_COUNTED,
    ]
    tuned = other_differences(runs)
    if tuned:
        parts += ["Settings that differ besides, those of the methods apart:", _bullets(tuned)]
    if failed:
        parts += ["## Failed", _bullets(f"{name}: {problem}" for name, problem in failed.items())]
    parts += [
        "## The paper's table of time and memory",
        as_markdown(paper_time_table()),
        _ABOUT_THE_PAPER,
        "## To make it again",
    ]
    parts += [f"```bash\n{command}\n```"] if command else []
    parts += [
        "Each run alone:",
        "```bash\n" + "\n".join(map(_command_of, runs)) + "\n```",
        _bullets(map(_made_by, runs)),
    ]
    return "\n\n".join(parts) + "\n"


def as_plain(run: Run) -> dict[str, Any]:
    """A run in comparison.json."""
    return {
        "label": run.label,
        "folder": str(run.folder),
        "method": run.method,
        "finished": run.finished,
        "epochs": run.num_epochs,
        "batch_size": run.batch_size,
        "images_seen": run.images_seen,
        "knn_first": run.first._asdict(),
        "knn_last": run.last._asdict(),
        "knn_best": run.best._asdict(),
        "gpu_minutes": run.gpu_minutes,
        "images_per_second": run.images_per_second,
        "peak_memory_gib": run.peak_memory_gib,
        "knn": [point._asdict() for point in run.probes],
        "settings": dict(run.settings),
        "environment": dict(run.environment),
    }


def base_of(runs: Sequence[Run]) -> Run:
    """What the others' costs are measured by: the first run of MaSSL, or the first of all."""
    return next((run for run in runs if run.method == _BASE_METHOD), runs[0])


def device_word(runs: Sequence[Run]) -> str:
    """What minutes are minutes of."""
    kinds = {run.device == "cpu" for run in runs}
    return "device" if len(kinds) > 1 else "CPU" if kinds == {True} else "GPU"


def minutes_text(minutes: float) -> str:
    return f"{minutes:,.0f}" if minutes >= 100 else f"{minutes:.2f}" if minutes < 10 else f"{minutes:.1f}"


def _command_of(run: Run) -> str:
    """Trains the same recipe into a new folder."""
    program = (
        ["massl"] if run.num_processes == 1 else ["torchrun", "--nproc-per-node", str(run.num_processes), "-m", "massl"]
    )
    return shlex.join(
        [*program, "pretrain", "--recipe", str(run.folder / "recipe.yaml"), "--output", f"{run.folder}-again"]
    )


def _made_by(run: Run) -> str:
    packages = run.environment.get("packages", {})
    versions = [f"{name} {packages[name]}" for name in ("massl", "torch", "timm") if packages.get(name)]
    commit = run.environment.get("massl_commit")
    versions += [f"commit {commit}"] if commit else []
    return f"{run.label}: {run.images_seen:,} images seen; {run.num_processes} x {run.device}; {', '.join(versions)}"


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _values(table: PaperTable, number: int) -> tuple[float, ...]:
    return tuple(figure.value for figure in table.rows[number].figures if figure is not None)


def shared_by(runs: Sequence[Run]) -> str:
    """What all runs have in common, in words."""

    def common(values: list[str]) -> list[str]:
        return values[:1] if len(set(values)) == 1 else []

    parts = common([_network(run) for run in runs])
    parts += common([f"on {run.settings['data.source']}" for run in runs])
    parts += common([f"batch {run.batch_size}" for run in runs])
    parts += common([f"{run.num_processes} x {run.device}" for run in runs])
    return ", ".join(parts).replace(", on ", " on ", 1)


def _network(run: Run) -> str:
    """ "vit_small_patch16_224 (patches of 8 px, images of 64 px)": its name, and where it is not as its name says."""
    sizes = {"patches": run.settings.get("backbone.patch_size"), "images": run.settings.get("backbone.image_size")}
    other = ", ".join(f"{what} of {size} px" for what, size in sizes.items() if size is not None)
    return f"{run.settings['backbone.name']} ({other})" if other else str(run.settings["backbone.name"])


def _minutes_an_image(run: Run) -> float | None:
    """By the image, so that runs of different length can be told by it too."""
    return run.gpu_minutes / run.images_seen if run.images_seen else None


def _knn_until(run: Run, gpu_minutes: float) -> str:
    """ "61.2 (1.48)": how good, and at how many minutes the run was probed so."""
    point = run.last_within(gpu_minutes)
    return _UNKNOWN if point is None else f"{point.knn_top1:.1f} ({minutes_text(point.gpu_minutes)})"


def _ratio(value: float | None, base: float | None) -> str:
    return _UNKNOWN if value is None or not base else f"{value / base:.2f}"


def _number(epoch: float) -> str:
    """12, 12.5: whole epochs without a point."""
    return f"{epoch:.1f}".removesuffix(".0")
