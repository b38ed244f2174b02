"""The one reader of run folders: recipe.yaml, plan.txt, environment.json, metrics.jsonl, baseline.json, warnings.jsonl.

A page shows whatever can be read and lists problems as remarks. A comparison reads strictly: a problem that would make
its numbers wrong is an error.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from massl.config import flatten, read_yaml
from massl.files import read_limited
from massl.json_lines import MOST_DAMAGED, JsonLine, read_json, read_json_lines
from massl.reports.runs import PROBE_METRICS, Run, RunError, TrainingWarning

_IN_EVERY_RECIPE = ("method.name", "backbone.name", "data.source", "trainer.epochs", "trainer.batch_size")
_IN_EVERY_ROW = ("step", "epoch", "images_per_second")
_COMPARED = (*PROBE_METRICS, "peak_memory_gib")  # what comparisons need besides, in some rows
_COUNTS = ("trainer.epochs", "trainer.batch_size", "trainer.max_steps")
_UNKNOWN_MACHINE = {"device": "unknown device", "world_size": 1}
# Larger numbers are a sign of divergence and cannot be drawn; differences and squares of smaller ones are finite.
_LARGEST = 1e100
# What a page can show; massl's own runs have at most 40 metrics. The longest are in characters.
_MOST_REMARKS, _MOST_METRICS, _MOST_WARNINGS, _LONGEST_NAME, _LONGEST_WARNING = 20, 100, 200, 80, 2000
_MOST_STEPS, _LEAST_RATE = 1e15, 1e-6  # beyond these, minutes would be infinite
_LARGEST_PLAN = 1 << 16  # bytes; massl writes about 3,000


class _Remarks(list[str]):
    """Collects problems of a folder; when `strict`, a problem is raised instead."""

    def __init__(self, folder: Path, *, strict: bool) -> None:
        super().__init__()
        self.folder, self.strict = folder, strict

    def problem(self, problem: str, consequence: str = "") -> None:
        """`consequence` says what a page does about it."""
        if self.strict:
            raise RunError(f"{self.folder}: {problem}")
        self.append(f"{problem}: {consequence}" if consequence else problem)


def read_run(folder: str | Path, *, label: str | None = None, strict: bool = False) -> Run:
    """The run in a folder, finished or not; a RunError if there is none.

    With `strict`, a RunError is also raised if the run has not been probed yet, or if its cost or accuracy is not known
    for sure. Without a `label` the run is labelled by its folder's name.
    """
    path = Path(folder).expanduser()
    remarks = _Remarks(path, strict=strict)
    settings, recipe = _read_recipe(path, made_by="massl pretrain" if strict else "massl pretrain or massl ablate")
    environment = _read_environment(path / "environment.json", remarks)
    rows = _read_rows(path / "metrics.jsonl", remarks)
    if strict and not any(key in row for row in rows for key in PROBE_METRICS):
        raise RunError(f"{path} was never probed: train with probes.every_epochs above 0")
    raw_pixel_knn, num_queries = _read_baseline(path / "baseline.json", remarks)
    run = Run(
        folder=path,
        label=path.resolve().name if label is None else label,
        settings=settings,
        recipe=recipe,
        environment=environment,
        rows=rows,
        raw_pixel_knn=raw_pixel_knn,
        num_queries=num_queries,
        warnings=_read_warnings(path / "warnings.jsonl", remarks),
        plan=_read_plan(path / "plan.txt", remarks),
    )
    if rows and not run.finished:
        remarks.insert(0, f"in progress or stopped: at step {rows[-1]['step']:,.0f}, epoch {run.progress}")
    return replace(run, remarks=tuple(remarks))


def _read_recipe(folder: Path, *, made_by: str) -> tuple[dict[str, Any], str]:
    """Flat settings, and the text of the file."""
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder; name the --output of {made_by}")
    file = folder / "recipe.yaml"
    if not file.is_file():
        raise RunError(f"{folder} has no recipe.yaml, so it is not a run of massl; name the --output of {made_by}")
    settings = flatten(read_yaml(file))
    missing = [key for key in _IN_EVERY_RECIPE if key not in settings]
    if missing:
        raise RunError(f"{file} lacks {', '.join(missing)}; massl pretrain writes a whole recipe there, was it edited?")
    wrong = [
        f"{key} is {settings.get(key)!r}"
        for key in _COUNTS
        if not _is_count(settings.get(key)) and not (key == "trainer.max_steps" and settings.get(key) is None)
    ]
    if wrong:
        raise RunError(f"{file}: {'; '.join(wrong)}; massl pretrain writes whole numbers there, was it edited?")
    return settings, file.read_text(encoding="utf-8")


def _read_environment(file: Path, remarks: _Remarks) -> dict[str, Any]:
    for_one = "minutes are counted for one process"
    try:
        values = read_json(file)
    except (OSError, ValueError) as error:
        remarks.problem(f"environment.json cannot be read ({error}), so device and versions are unknown", for_one)
        return _UNKNOWN_MACHINE
    known: dict[str, Any] = values if isinstance(values, dict) else {}
    missing = [key for key in _UNKNOWN_MACHINE if key not in known]
    if missing and (remarks.strict or not known):
        remarks.problem(f"environment.json lacks {', '.join(missing)}", for_one)
    if "world_size" in known and not _is_count(known["world_size"]):
        remarks.problem(
            f"world_size in environment.json is {known['world_size']!r}, not a number of processes", for_one
        )
        known = {**known, "world_size": 1}
    return known | {key: _UNKNOWN_MACHINE[key] for key in missing}


def _lines_of(file: Path, remarks: _Remarks) -> Iterator[JsonLine]:
    try:
        return read_json_lines(file)
    except OSError as error:  # a folder, too large, or no permission
        remarks.problem(f"{file.name} cannot be read ({error.strerror})", "it is left out")
        return iter(())


def _read_rows(file: Path, remarks: _Remarks) -> tuple[Mapping[str, float], ...]:
    """Rows by step. If several have the same step the last counts, as after a resume; strict reading refuses them."""
    if not file.exists():
        remarks.problem("metrics.jsonl is missing, so training has not begun")
        return ()
    rows: dict[float, Mapping[str, float]] = {}
    damaged: list[str] = []
    num_lines = 0
    names: dict[str, None] = {}  # of the metrics, in the order they appear
    unusable: Counter[str] = Counter()
    for line in _lines_of(file, remarks):
        if remarks.strict and not line.is_ended:
            continue
        num_lines += 1
        try:
            row = _parsed(line)
            if remarks.strict:
                _require_comparable(row, after=max(rows, default=-1))
        except ValueError as error:
            if line.is_ended:
                damaged.append(f"line {line.number} of metrics.jsonl {error}")
                if len(damaged) > MOST_DAMAGED:
                    remarks.problem(
                        f"more than {MOST_DAMAGED:,} lines of metrics.jsonl are no rows", "it is read no further"
                    )
                    break
            else:
                remarks.append("the last line of metrics.jsonl is half written and left out")
            continue
        drawn = {key: value for key, value in row.items() if _is_number(value)}
        names |= dict.fromkeys(drawn)
        rows[row["step"]] = drawn
        unusable.update(_why_unusable(key, value) for key, value in row.items() if not _is_number(value))
    if not num_lines:
        remarks.problem("metrics.jsonl is empty so far; the first row comes after the first probe")
    for problem in damaged[:_MOST_REMARKS]:
        remarks.problem(problem, "it is left out")
    if len(damaged) > _MOST_REMARKS:
        remarks.append(f"{len(damaged) - _MOST_REMARKS:,} more lines of metrics.jsonl are left out")
    counted = [f"{problem} in {count:,} row{'' if count == 1 else 's'}" for problem, count in sorted(unusable.items())]
    remarks += counted[:_MOST_REMARKS]
    if len(counted) > _MOST_REMARKS:
        remarks.append(f"{len(counted) - _MOST_REMARKS:,} more entries of rows are left out")
    shown = set([name for name in names if len(name) <= _LONGEST_NAME][:_MOST_METRICS])
    if len(names) > len(shown):
        remarks.append(f"{len(names) - len(shown):,} metrics are left out: too many, or their names are too long")
    return tuple({key: value for key, value in rows[step].items() if key in shown} for step in sorted(rows))


def _parsed(line: JsonLine) -> dict[str, Any]:
    """The entries of a row; a ValueError says why the line is not one."""
    row = line.row
    if row is None:
        raise ValueError(line.problem)
    missing = [key for key in _IN_EVERY_ROW if key not in row]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}")
    _require_numbers(row, *_IN_EVERY_ROW)
    if not 0 <= row["epoch"] <= row["step"] <= _MOST_STEPS:
        raise ValueError(f"has the impossible step {row['step']} of epoch {row['epoch']}")
    if row["step"] > 0 and row["images_per_second"] < _LEAST_RATE:
        raise ValueError(f"has {row['images_per_second']} images a second, so its training time is unknown")
    return row


def _require_comparable(row: Mapping[str, Any], *, after: float) -> None:
    _require_numbers(row, *(key for key in _COMPARED if key in row))
    if row["step"] <= after:
        raise ValueError(f"goes back to step {row['step']:.0f}; did two runs write to it?")


def _require_numbers(row: Mapping[str, Any], *keys: str) -> None:
    wrong = [key for key in keys if not _is_number(row[key])]
    if wrong:
        raise ValueError(f"has no finite number for {', '.join(wrong)}")


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """Whether it can be drawn; of NaN no comparison holds."""
    return _is_real(value) and abs(value) <= _LARGEST


def _why_unusable(key: str, value: Any) -> str:
    key = key if len(key) <= _LONGEST_NAME else f"{key[:_LONGEST_NAME]}..."
    if not _is_real(value):
        return f"{key} is not a number"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{key} is not a finite number"
    return f"{key} is beyond ±{_LARGEST:g}, too large to draw,"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**15


# ---- optional files: problems are remarks, even when reading strictly ------------------------------------------------


def _read_baseline(file: Path, remarks: _Remarks) -> tuple[float | None, int | None]:
    """k-NN accuracy of raw pixels in percent, if there are labels, and the number of images of each probe."""
    if not file.is_file():
        return None, None
    try:
        values = read_json(file)
    except (OSError, ValueError) as error:
        remarks.append(f"{file.name} is not valid JSON ({error}) and left out")
        return None, None
    known = values if isinstance(values, dict) else {}
    accuracy, num_queries = known.get("raw_pixel_knn"), known.get("num_queries")
    if accuracy is not None and not (_is_number(accuracy) and 0 <= accuracy <= 100):
        remarks.append(f"raw_pixel_knn in {file.name} is not a percentage and left out")
        accuracy = None
    return None if accuracy is None else float(accuracy), num_queries if _is_count(num_queries) else None


def _read_plan(file: Path, remarks: _Remarks) -> str:
    """The text; a link could bring any file of the user onto the page."""
    if file.is_symlink():
        remarks.append(f"{file.name} is a link and is left out")
        return ""
    if not file.exists():
        return ""
    try:
        return read_limited(file, max_bytes=_LARGEST_PLAN).decode(errors="replace").strip()
    except OSError as error:
        remarks.append(f"{file.name} cannot be read ({error.strerror}) and is left out")
        return ""


def _read_warnings(file: Path, remarks: _Remarks) -> tuple[TrainingWarning, ...]:
    """Warnings of the training in their order, without repetitions."""
    if not file.exists():
        return ()
    problems = _Remarks(remarks.folder, strict=False)
    different: dict[TrainingWarning, None] = {}
    num_lost = 0
    for line in _lines_of(file, problems):
        warning = _warning(line.row or {})
        if warning is None:
            num_lost += 1
        else:
            different[warning] = None
        if num_lost + len(different) > MOST_DAMAGED:
            problems.append(f"{file.name} has too many lines: it is read no further than line {line.number:,}")
            break
    remarks += problems
    if num_lost:
        remarks.append(f"{num_lost:,} line{'' if num_lost == 1 else 's'} of {file.name} cannot be read and left out")
    if len(different) > _MOST_WARNINGS:
        remarks.append(f"{len(different) - _MOST_WARNINGS:,} more warnings of {file.name} are left out")
    return tuple(different)[:_MOST_WARNINGS]


def _warning(values: Mapping[str, Any]) -> TrainingWarning | None:
    step, text = values.get("step"), values.get("warning")
    if not _is_number(step) or not isinstance(text, str):
        return None
    return TrainingWarning(int(step), text[:_LONGEST_WARNING])  # type: ignore[arg-type]
