"""Run folders as a page shows them: whatever can be read is shown, and what cannot is said in a remark.

`training_curves.read_run` is for comparisons and refuses a run without k-NN; here a run may have only begun, be half
written, or hold numbers that are none.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from massl.config import MasslError, read_yaml
from massl.reports.run_curves import KnnPoint, RunCurve, flat_values, is_count, wrong_counts
from massl.reports.run_notes import TrainingWarning, read_baseline, read_warnings

_IN_EVERY_RECIPE = ("method.name", "backbone.name", "data.source", "trainer.epochs", "trainer.batch_size")
_IN_EVERY_ROW = ("step", "epoch", "images_per_second")
# a number beyond is a sign of divergence, not a place in a chart; differences and squares of what is below it are
# finite
_MOST = 1e100
_MOST_STEPS, _LEAST_RATE = 1e15, 1e-6  # beyond them minutes would be infinite


class PageError(MasslError, ValueError):
    """Something named for the page cannot be shown at all; the message says what to name instead."""


@dataclass(frozen=True)
class PageRun:
    """A run and what a reader must know about its files."""

    curve: RunCurve  # its rows hold finite numbers only, and may be none
    recipe: str  # recipe.yaml as it lies in the folder
    remarks: tuple[str, ...]
    raw_pixel_knn: float | None = None  # percent
    warnings: tuple[TrainingWarning, ...] = ()  # said during training

    @property
    def label(self) -> str:
        return self.curve.label

    @property
    def rows(self) -> tuple[Mapping[str, float], ...]:
        return self.curve.rows

    @property
    def probes(self) -> tuple[KnnPoint, ...]:
        return self.curve.knn if self.rows else ()

    @property
    def best(self) -> KnnPoint | None:
        return self.curve.best if self.probes else None

    @property
    def last(self) -> KnnPoint | None:
        return self.curve.last if self.probes else None

    @property
    def gpu_minutes(self) -> float | None:
        return self.minutes[-1] if self.rows else None

    @property
    def finished(self) -> bool:
        return bool(self.rows) and self.curve.finished

    @property
    def has_all_epochs(self) -> bool:
        """Whether it came to the end of its schedules; trainer.max_steps may have ended a finished run before."""
        return bool(self.rows) and self.rows[-1]["epoch"] >= self.curve.epochs

    @property
    def epochs_done(self) -> float:
        return self.epochs[-1] if self.rows else 0.0

    @property
    def state(self) -> str:
        """How far it is, in words."""
        if not self.rows:
            return "no row yet"
        if self.finished and not self.has_all_epochs:
            return f"ended by trainer.max_steps at step {self.rows[-1]['step']:,.0f}"
        return "finished" if self.finished else "in progress or stopped"

    @property
    def progress(self) -> str:
        """ "12.5 of 200"; rows say no fractions of the first epoch."""
        is_within_first = bool(self.rows) and self.rows[-1]["step"] > 0 and self.epochs_done == 0
        return f"{'<1' if is_within_first else f'{self.epochs_done:.3g}'} of {self.curve.epochs}"

    def place_of(self, probe: KnnPoint) -> str:
        """ "epoch 12.5", or "step 8" while rows cannot tell the part of an epoch."""
        if self.epochs_done > 0:
            return f"epoch {probe.epoch:.3g}"
        steps = [row["step"] for row in self.rows if "knn_top1" in row]
        return f"step {steps[self.probes.index(probe)]:,.0f}"

    @cached_property
    def epochs(self) -> tuple[float, ...]:
        """Of each row, with fractions once a row has ended an epoch: rows say whole epochs only."""
        lengths = [int(row["step"]) // int(row["epoch"]) for row in self.rows if row["epoch"] >= 1]
        return tuple(row["step"] / min(lengths) if lengths else row["epoch"] for row in self.rows)

    @cached_property
    def minutes(self) -> tuple[float, ...]:
        """Training until each row, probes not counted, times the number of processes."""
        spent, step, so_far = [], 0.0, 0.0
        for row in self.rows:
            if row["step"] > step:
                so_far += (
                    (row["step"] - step)
                    * self.curve.batch_size
                    / row["images_per_second"]
                    / 60
                    * self.curve.num_processes
                )
            step = row["step"]
            spent.append(so_far)
        return tuple(spent)


def read_page_run(folder: Path, *, label: str) -> PageRun:
    """The run in a folder; a PageError where the folder holds none."""
    if not folder.is_dir():
        raise PageError(f"{folder} is no folder; name the --output of a massl pretrain or of a massl ablate")
    file = folder / "recipe.yaml"
    if not file.is_file():
        raise PageError(
            f"{folder} holds no recipe.yaml, so it is no run of massl; name the --output of a massl pretrain or massl ablate"
        )
    settings = dict(flat_values(read_yaml(file)))
    missing = [key for key in _IN_EVERY_RECIPE if key not in settings]
    if missing:
        raise PageError(
            f"{file} does not say {', '.join(missing)}; massl pretrain writes a whole recipe there, was it edited?"
        )
    wrong = wrong_counts(settings)
    if wrong:
        raise PageError(f"{file}: {'; '.join(wrong)}; massl pretrain writes whole numbers there, was it edited?")
    environment, about_environment = _environment(folder / "environment.json")
    rows, about_rows = _rows(folder / "metrics.jsonl")
    accuracy, about_baseline = read_baseline(folder)
    warnings, about_warnings = read_warnings(folder)
    curve = RunCurve(folder=folder, label=label, settings=settings, environment=environment, rows=rows)
    remarks = (*about_environment, *about_rows, *about_baseline, *about_warnings)
    run = PageRun(curve, file.read_text(encoding="utf-8"), remarks, raw_pixel_knn=accuracy, warnings=warnings)
    if rows and not run.finished:
        under_way = f"in progress or stopped: at step {rows[-1]['step']:,.0f}, epoch {run.progress}"
        return replace(run, remarks=(under_way, *remarks))
    return run


def _environment(file: Path) -> tuple[dict[str, Any], list[str]]:
    """What environment.json says, with one process of an unknown device where it does not."""
    unknown = {"device": "unknown device", "world_size": 1}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return unknown, [
            "there is no environment.json: machine, versions and command are not known, minutes are counted for one process"
        ]
    except ValueError as error:
        return unknown, [f"environment.json is not valid JSON ({error}): minutes are counted for one process"]
    if not isinstance(values, dict):
        return unknown, ["environment.json holds no entries: minutes are counted for one process"]
    if "world_size" in values and not is_count(values["world_size"]):
        wrong = f"world_size in environment.json is {values['world_size']!r}, no number of processes: minutes are counted for one process"
        return {**unknown, **values, "world_size": 1}, [wrong]
    return unknown | values, []


def _rows(file: Path) -> tuple[tuple[Mapping[str, float], ...], list[str]]:
    """Rows in the order of steps, and what had to be left out. Of rows of one step the later counts, as after a resume."""
    if not file.exists():
        return (), ["there is no metrics.jsonl: its training has not begun"]
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    by_step: dict[float, Mapping[str, float]] = {}
    remarks: list[str] = []
    left_out: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _row(line)
        if row is None and number == len(lines):
            remarks.append("the last line of metrics.jsonl is half written and left out")
        elif row is None:
            remarks.append(f"line {number} of metrics.jsonl is no row of a run and left out")
        else:
            problems = _problems(row)
            for key, problem in problems.items():
                left_out[f"{key} {problem}"] = left_out.get(f"{key} {problem}", 0) + 1
            by_step[row["step"]] = {key: value for key, value in row.items() if key not in problems}
    remarks += [f"{problem} in {count:,} row{'' if count == 1 else 's'}" for problem, count in sorted(left_out.items())]
    if not by_step and not remarks:
        remarks.append("metrics.jsonl is empty so far: the first row comes after the first probe")
    return tuple(by_step[step] for step in sorted(by_step)), remarks


def _row(line: str) -> dict[str, float] | None:
    """The numbers of a line; None where it is cut short or lacks what every row has."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or any(not _is_number(values.get(key)) for key in _IN_EVERY_ROW):
        return None
    if not 0 <= values["epoch"] <= values["step"] <= _MOST_STEPS or (
        values["step"] > 0 and values["images_per_second"] < _LEAST_RATE
    ):
        return None
    return {
        key: value for key, value in values.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST


def _problems(row: Mapping[str, float]) -> dict[str, str]:
    """What cannot be drawn, and why."""
    problems = {}
    for key, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            problems[key] = "is not a finite number"
        elif abs(value) > _MOST:
            problems[key] = f"is beyond ±{_MOST:g}, too large to draw,"
    return problems
