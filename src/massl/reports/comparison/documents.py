"""The files of a comparison: comparison.md and comparison.json."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from massl.reports.comparison.tables import (
    SPREADS,
    cautions,
    comparison_table,
    equal_cost,
    other_differences,
    paper_time_table,
)
from massl.reports.published.data_sets import data_set_named
from massl.reports.runs import Run
from massl.reports.tables import as_markdown

_HOW_NUMBERS_ARE_MADE = (
    "Minutes: training until the last probe, times the number of processes. They include reading images, compiling or "
    "recording the first steps, and checkpoints, but not probes. Images a second: the median over the rows of "
    "metrics.jsonl except the first. GiB: the most memory allocated on one GPU, including probes. k-NN: the run's own "
    "probe, in percent; the best is chosen by its own result, so it is optimistic. Without labels there is no k-NN: "
    "effective rank and spread only show whether features collapsed, and the other view how well images are told apart."
)
_ABOUT_THE_PAPER = (
    "Networks and machines are others than here: compare the ratios, not the figures. The paper's k-NN is "
    "measured on all of ImageNet, its memory in GB."
)


def comparison_document(
    runs: Sequence[Run], *, failed: Mapping[str, str], command: str, picture: str, data_set: str | None = None
) -> str:
    """comparison.md: table, figure, differences, and the commands that repeat all this; for ImageNet the paper's table.

    `data_set` is what the runs were trained on, if the names of their sources do not tell.
    """
    parts = [
        "# Runs side by side",
        as_markdown(comparison_table(runs)),
        f"![The probes against cost and epochs]({picture})",
        _HOW_NUMBERS_ARE_MADE,
    ]
    tuned = other_differences(runs)
    if tuned:
        parts += ["Other settings that differ, apart from those of the methods:", _bullets(tuned)]
    if failed:
        parts += ["## Failed", _bullets(f"{name}: {problem}" for name, problem in failed.items())]
    if any((data_set_named(str(run.settings["data.source"])) or data_set) == "ImageNet" for run in runs):
        parts += ["## The paper's table of time and memory", as_markdown(paper_time_table()), _ABOUT_THE_PAPER]
    parts += [
        "## To repeat it",
        f"```bash\n{command}\n```",
        "Each run alone:",
        "```bash\n" + "\n".join(shlex.join(run.command_again) for run in runs) + "\n```",
        _bullets(map(_made_by, runs)),
    ]
    return "\n\n".join(parts) + "\n"


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _made_by(run: Run) -> str:
    packages, commit = run.environment.get("packages", {}), run.environment.get("massl_commit")
    versions = [f"{name} {packages[name]}" for name in ("massl", "torch", "timm") if packages.get(name)]
    versions += [f"commit {commit}"] if commit else []
    return f"{run.label}: {run.images_seen:,} images seen; {run.machine}; {', '.join(versions)}"


def comparison_values(runs: Sequence[Run], *, failed: Mapping[str, str]) -> dict[str, Any]:
    """comparison.json."""
    return {
        "runs": [_run_values(run) for run in runs],
        "equal_cost": equal_cost(runs),
        "cautions": cautions(runs),
        "failed": failed,
    }


def _run_values(run: Run) -> dict[str, Any]:
    return {
        "label": run.label,
        "folder": str(run.folder),
        "method": run.method,
        "finished": run.finished,
        "epochs": run.num_epochs,
        "batch_size": run.batch_size,
        "images_seen": run.images_seen,
        "knn_first": run.first._asdict() if run.probes else None,
        "knn_last": run.last._asdict() if run.probes else None,
        "knn_best": run.best._asdict() if run.probes else None,
        "gpu_minutes": run.gpu_minutes,
        "images_per_second": run.images_per_second,
        "peak_memory_gib": run.peak_memory_gib,
        "knn": [probe._asdict() for probe in run.probes],
        "effective_rank": [point._asdict() for point in run.measured("effective_rank")],
        "spread": [point._asdict() for point in run.measured(*SPREADS)],
        "other_view_top1": [point._asdict() for point in run.measured("other_view_top1")],
        "settings": dict(run.settings),
        "environment": dict(run.environment),
    }
