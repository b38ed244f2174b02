"""Finished or running run folders as curves, who learns how much at what cost: k-NN accuracy against epochs and
GPU-minutes.

The paper compares methods so under "Training Time and GPU Memory": k-NN, hours and GB of DINO, iBOT and MaSSL after the
same epochs. A run folder is only read; recipe.yaml, environment.json and metrics.jsonl are all that is asked of it.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from massl.config import MasslError, read_yaml

# What every row of metrics.jsonl says, besides much else.
_IN_EVERY_ROW = ("step", "epoch", "images_per_second")
_IN_SOME_ROWS = ("knn_top1", "peak_memory_gib")
_IN_EVERY_RECIPE = ("method.name", "backbone.name", "data.source", "trainer.epochs", "trainer.batch_size")
_IN_EVERY_ENVIRONMENT = ("device", "world_size")
_COUNTS = ("trainer.epochs", "trainer.batch_size", "trainer.max_steps")


class CurveError(MasslError, ValueError):
    """A run folder cannot be read as a curve; the message says what it lacks."""


class KnnPoint(NamedTuple):
    """One probe of a run."""

    epoch: float  # passes over the data so far
    gpu_minutes: float  # training so far, probes not counted, times the number of processes
    knn_top1: float  # percent


@dataclass(frozen=True)
class RunCurve:
    """What a run has learnt so far, and what that cost."""

    folder: Path
    label: str  # the folder's name; `distinct_labels` where several runs share it
    settings: Mapping[str, Any]  # dotted key -> value, of the whole recipe
    environment: Mapping[str, Any]  # environment.json, as the run's last start wrote it
    rows: tuple[Mapping[str, float], ...]  # of metrics.jsonl, in the order of steps

    @property
    def method(self) -> str:
        return str(self.settings["method.name"])

    @property
    def epochs(self) -> int:
        """Length of the schedule; `last.epoch` says how far the run has come."""
        return int(self.settings["trainer.epochs"])

    @property
    def batch_size(self) -> int:
        """Images a step, over all processes."""
        return int(self.settings["trainer.batch_size"])

    @property
    def num_processes(self) -> int:
        return int(self.environment["world_size"])

    @property
    def device(self) -> str:
        """A GPU's name, or cpu."""
        return str(self.environment["device"])

    @cached_property
    def knn(self) -> tuple[KnnPoint, ...]:
        """All probes; at least one."""
        steps_per_epoch = _steps_per_epoch(self.rows)
        return tuple(
            KnnPoint(row["step"] / steps_per_epoch if steps_per_epoch else row["epoch"], minutes, row["knn_top1"])
            for row, minutes in zip(self.rows, self._gpu_minutes_at_rows, strict=True)
            if "knn_top1" in row
        )

    @property
    def first(self) -> KnnPoint:
        return self.knn[0]

    @property
    def last(self) -> KnnPoint:
        return self.knn[-1]

    @property
    def best(self) -> KnnPoint:
        """Of equal ones the earliest."""
        return max(self.knn, key=lambda point: point.knn_top1)

    def until(self, gpu_minutes: float) -> KnnPoint | None:
        """The last probe of training that had cost no more; None where there was none yet but that of the untrained
        network.
        """
        return next((point for point in reversed(self.knn) if 0 < point.gpu_minutes <= gpu_minutes), None)

    @property
    def gpu_minutes(self) -> float:
        """Training until the last row, probes not counted, times the number of processes."""
        return self._gpu_minutes_at_rows[-1]

    @property
    def images_seen(self) -> int:
        return int(self.rows[-1]["step"]) * self.batch_size

    @property
    def images_per_second(self) -> float | None:
        """The median over rows, over all processes; None while there is no row to tell it from.

        Without the first stretch of steps, which also compiles or records them: 5,300 instead of 21,700 in
        docs/results/cifar10.
        """
        timed = [row["images_per_second"] for row in self.rows if row["step"] > 0][1:]
        return statistics.median(timed) if timed else None

    @property
    def peak_memory_gib(self) -> float | None:
        """Most memory allocated on one GPU; None where no row says it, as on a CPU."""
        return max((row["peak_memory_gib"] for row in self.rows if "peak_memory_gib" in row), default=None)

    @property
    def finished(self) -> bool:
        """Whether the recipe asks for no more steps."""
        max_steps = self.settings.get("trainer.max_steps")
        return self.rows[-1]["epoch"] >= self.epochs or (max_steps is not None and self.rows[-1]["step"] >= max_steps)

    @cached_property
    def _gpu_minutes_at_rows(self) -> tuple[float, ...]:
        """A row's rate holds for the steps since the row before; the trainer's clock stands still while it probes."""
        minutes, step, so_far = [], 0.0, 0.0
        for row in self.rows:
            if row["step"] > step:
                so_far += (row["step"] - step) * self.batch_size / row["images_per_second"] / 60 * self.num_processes
            step = row["step"]
            minutes.append(so_far)
        return tuple(minutes)


def read_run(folder: str | Path) -> RunCurve:
    """The curve of a run that is finished, stopped or under way; a CurveError says what the folder lacks."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise CurveError(f"{path} is no folder; name the --output of a massl pretrain")
    settings = dict(flat_values(_recipe(path)))
    wrong = wrong_counts(settings)
    if wrong:
        raise CurveError(
            f"{path / 'recipe.yaml'}: {'; '.join(wrong)}; massl pretrain writes whole numbers there, was it edited?"
        )
    environment = _environment(path)
    rows = _rows(path / "metrics.jsonl")
    if not any("knn_top1" in row for row in rows):
        raise CurveError(
            f"{path} was never probed by k-NN: train with labelled images (probes.database and probes.queries name them where the "
            "training images have no labels) and probes.every_epochs above 0"
        )
    return RunCurve(folder=path, label=path.resolve().name, settings=settings, environment=environment, rows=rows)


def minutes_in_common(curves: Sequence[RunCurve]) -> float:
    """GPU-minutes that every run had trained by its last probe: at so many they are compared at equal cost."""
    return min(curve.last.gpu_minutes for curve in curves)


def distinct_labels(folders: Sequence[Path]) -> list[str]:
    """The folders' names; where two share one, as much of the path before it as tells them apart."""
    parts = [folder.expanduser().resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        twice = next(folder for number, folder in enumerate(folders) if parts[number] in parts[:number])
        raise CurveError(f"{twice} is named twice; name every run once")
    labels = []
    for own in parts:
        num_parts = 1
        while sum(other[-num_parts:] == own[-num_parts:] for other in parts) > 1:
            num_parts += 1
        labels.append(str(Path(*own[-num_parts:])))
    return labels


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**15


def wrong_counts(settings: Mapping[str, Any]) -> list[str]:
    """Settings that must be whole numbers above 0 and are not, in words; trainer.max_steps may be unset."""
    counted = {key: settings.get(key) for key in _COUNTS}
    wrong = {
        key: value
        for key, value in counted.items()
        if not is_count(value) and not (key == "trainer.max_steps" and value is None)
    }
    return [f"{key} is {value!r}" for key, value in wrong.items()]


def _recipe(folder: Path) -> dict[str, Any]:
    file = folder / "recipe.yaml"
    try:
        recipe = read_yaml(file)
    except FileNotFoundError:
        raise CurveError(
            f"{folder} holds no recipe.yaml, so it is no run of massl; name the --output of a massl pretrain"
        ) from None
    missing = [key for key in _IN_EVERY_RECIPE if key not in dict(flat_values(recipe))]
    if missing:
        raise CurveError(
            f"{file} does not say {', '.join(missing)}; massl pretrain writes a whole recipe there, was it edited?"
        )
    return recipe


def flat_values(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values under dotted names, as they stand in a file, whatever version of massl wrote it."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat_values(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value


def _environment(folder: Path) -> dict[str, Any]:
    file = folder / "environment.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CurveError(
            f"{folder} holds no environment.json, so nobody knows on how many GPUs it ran; did its training begin?"
        ) from None
    except ValueError as error:
        raise CurveError(f"{file} is not valid JSON: {error}") from None
    missing = [key for key in _IN_EVERY_ENVIRONMENT if not isinstance(values, dict) or key not in values]
    if missing:
        raise CurveError(f"{file} does not say {', '.join(missing)}; massl pretrain writes it there, was it edited?")
    if not is_count(values["world_size"]):
        raise CurveError(f"{file}: world_size is {values['world_size']!r}, no number of processes; was it edited?")
    return dict(values)


def _rows(file: Path) -> tuple[Mapping[str, float], ...]:
    """Checked rows; a last line without its end is still being written, or was cut short by a crash."""
    if not file.exists():
        raise CurveError(f"{file.parent} holds no metrics.jsonl: its training has not begun")
    *lines, _ = file.read_text(encoding="utf-8", errors="replace").split("\n")
    rows: list[Mapping[str, float]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise CurveError(f"{file}, line {number} is not valid JSON: {error}") from None
        missing = [key for key in _IN_EVERY_ROW if not isinstance(row, dict) or key not in row]
        if missing:
            raise CurveError(f"{file}, line {number} does not say {', '.join(missing)}")
        wrong = [key for key in (*_IN_EVERY_ROW, *_IN_SOME_ROWS) if key in row and not _is_finite(row[key])]
        if wrong:
            raise CurveError(f"{file}, line {number}: {', '.join(wrong)} must be finite numbers; was it edited?")
        if rows and row["step"] <= rows[-1]["step"]:
            raise CurveError(f"{file}, line {number} goes back to step {row['step']:.0f}; did two runs write to it?")
        if row["step"] > 0 and row["images_per_second"] <= 0:
            raise CurveError(
                f"{file}, line {number}: {row['images_per_second']} images a second, so nobody knows how long its steps took"
            )
        rows.append(row)
    if not rows:
        raise CurveError(f"{file} is empty so far: the first row comes after the first probe")
    return tuple(rows)


def _is_finite(value: Any) -> bool:
    # of NaN too: no comparison holds
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _steps_per_epoch(rows: Sequence[Mapping[str, float]]) -> int | None:
    """The most steps an epoch can have, as rows say whole epochs only; exact once a row ends one. None within the first
    epoch.
    """
    return min((int(row["step"]) // int(row["epoch"]) for row in rows if row["epoch"] >= 1), default=None)
