"""A pre-training run as reports and comparisons see it: what it learnt, how far it came and what that cost.

The paper compares methods in the same way under "Training Time and GPU Memory": k-NN, hours and GB of DINO, iBOT and
MaSSL after the same epochs. `run_reader` makes a `Run` from a folder.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from massl.config import MasslError
from massl.training.best import SCORE, ended_early


class RunError(MasslError, ValueError):
    """A run folder cannot be used; the message says what it lacks."""


class KnnPoint(NamedTuple):
    """One k-NN probe of a run."""

    epoch: float  # passes over the data so far
    gpu_minutes: float  # training so far, without probes, times the number of processes
    knn_top1: float  # percent


class MetricPoint(NamedTuple):
    """One number of a run's probes."""

    epoch: float
    gpu_minutes: float
    value: float


PROBE_METRICS = ("knn_top1", "other_view_top1", "effective_rank")  # a probe logs some of these; most telling first


class TrainingWarning(NamedTuple):
    step: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Run:
    folder: Path
    label: str  # its name in tables and charts
    settings: Mapping[str, Any]  # dotted key -> value, of the whole recipe
    recipe: str  # text of recipe.yaml
    environment: Mapping[str, Any]  # environment.json of the last start
    rows: tuple[Mapping[str, float], ...]  # metrics.jsonl by step; finite numbers only; empty before the first probe
    warnings: tuple[TrainingWarning, ...] = ()
    raw_pixel_knn: float | None = None  # percent
    num_queries: int | None = None  # images that each probe classifies or finds again; None: not recorded
    plan: str = ""  # text of plan.txt: what auto chose and why; "" for runs of other recipes
    remarks: tuple[str, ...] = ()  # problems in the files, and whether the run is unfinished

    @property
    def method(self) -> str:
        return str(self.settings["method.name"])

    @property
    def num_epochs(self) -> int:
        """Length of the schedule; `epochs_done` says how far the run is."""
        return int(self.settings["trainer.epochs"])

    @property
    def batch_size(self) -> int:
        """Images per step, over all processes."""
        return int(self.settings["trainer.batch_size"])

    @property
    def num_processes(self) -> int:
        return int(self.environment["world_size"])

    @property
    def device(self) -> str:
        """A GPU's name, or cpu."""
        return str(self.environment["device"])

    @property
    def machine(self) -> str:
        return f"{self.num_processes} x {self.device}"

    @property
    def launcher(self) -> list[str]:
        """How `massl` is called with as many processes."""
        if self.num_processes == 1:
            return ["massl"]
        return ["torchrun", "--nproc-per-node", str(self.num_processes), "-m", "massl"]

    @property
    def command_again(self) -> list[str]:
        """Trains the same recipe into a new folder."""
        recipe, output = self.folder / "recipe.yaml", f"{self.folder}-again"
        return [*self.launcher, "pretrain", "--recipe", str(recipe), "--output", output]

    @property
    def start_words(self) -> str:
        """What the first probe looked at."""
        return "the weights it started from" if self.is_continued else "random weights"

    @property
    def is_continued(self) -> bool:
        """Whether it started from trained weights."""
        return (self.folder / "start.json").is_file()

    # ---- k-NN probes: `first`, `last` and `best` need at least one; runs without labels have none --------------------

    @cached_property
    def probes(self) -> tuple[KnnPoint, ...]:
        return tuple(KnnPoint(*point) for point in self.measured("knn_top1"))

    def measured(self, *keys: str) -> tuple[MetricPoint, ...]:
        """A metric over the run; of several keys, the first that a row has."""
        rows = zip(self.rows, self.epochs_at_rows, self.gpu_minutes_at_rows, strict=True)
        found = ((next((key for key in keys if key in row), None), row, epoch, minutes) for row, epoch, minutes in rows)
        return tuple(MetricPoint(epoch, minutes, row[key]) for key, row, epoch, minutes in found if key is not None)

    @property
    def last_probe(self) -> MetricPoint | None:
        """Where the run was last probed, with or without labels; None before the first probe."""
        return next(reversed(self.measured(*PROBE_METRICS)), None)

    @property
    def is_best_untrained(self) -> bool:
        """Whether no probe in training was better than that of the untrained network."""
        return len(self.probes) > 1 and self.best.gpu_minutes == 0

    @property
    def first(self) -> KnnPoint:
        return self.probes[0]

    @property
    def last(self) -> KnnPoint:
        return self.probes[-1]

    @property
    def best(self) -> KnnPoint:
        """The earliest of equally good probes."""
        return max(self.probes, key=lambda point: point.knn_top1)

    @property
    def best_row(self) -> Mapping[str, float] | None:
        """The probe whose weights are in best.safetensors, chosen without labels; None: older runs, or no probes."""
        step = next((row["best_step"] for row in reversed(self.rows) if "best_step" in row), None)
        return next((row for row in self.rows if row["step"] == step), None)

    @property
    def best_words(self) -> str:
        """Which probe the rule without labels chose, beside the last one; "" if it chose none."""
        best, last = self.best_row, next((row for row in reversed(self.rows) if "best_step" in row), None)
        if best is None or last is None:
            return ""
        if best is last:
            return f"best.safetensors: the last probe, of step {best['step']:.0f} (by other_view_top1, without labels)"
        both = "knn_top1" in best and "knn_top1" in last
        knn = f", k-NN {best['knn_top1']:.1f} against {last['knn_top1']:.1f} %" if both else ""
        return (
            f"best.safetensors: step {best['step']:.0f}, not the last probe of step {last['step']:.0f}; another view "
            f"found its image in {best[SCORE]:.1f} %, at the end in {last[SCORE]:.1f} %{knn}. To use it: --which best"
        )

    def last_within(self, gpu_minutes: float) -> KnnPoint | None:
        """The last probe within this much training; the probe of the untrained network does not count."""
        return next((point for point in reversed(self.probes) if 0 < point.gpu_minutes <= gpu_minutes), None)

    def place_of(self, probe: KnnPoint) -> str:
        """ "epoch 12.5", or "step 8" in the first epoch, of which rows give no fractions."""
        if self.epochs_done > 0:
            return f"epoch {probe.epoch:.3g}"
        steps = [row["step"] for row in self.rows if "knn_top1" in row]
        return f"step {steps[self.probes.index(probe)]:,.0f}"

    # ---- progress ----------------------------------------------------------------------------------------------------

    @cached_property
    def epochs_at_rows(self) -> tuple[float, ...]:
        """Fractional epochs. Rows give whole epochs only, so the first epoch stays 0 until a row has ended it."""
        steps = (int(row["step"]) // int(row["epoch"]) for row in self.rows if row["epoch"] >= 1)
        steps_per_epoch = min(steps, default=0)  # the most it can be; exact once a row ends an epoch
        return tuple(row["step"] / steps_per_epoch if steps_per_epoch else row["epoch"] for row in self.rows)

    @property
    def epochs_done(self) -> float:
        return self.epochs_at_rows[-1] if self.rows else 0.0

    @property
    def images_seen(self) -> int:
        return int(self.rows[-1]["step"]) * self.batch_size if self.rows else 0

    @property
    def has_all_epochs(self) -> bool:
        """Whether it reached the end of its schedules; trainer.max_steps may finish a run earlier."""
        return bool(self.rows) and self.rows[-1]["epoch"] >= self.num_epochs

    @property
    def finished(self) -> bool:
        max_steps = self.settings.get("trainer.max_steps")
        at_max = bool(self.rows) and max_steps is not None and self.rows[-1]["step"] >= max_steps
        return self.has_all_epochs or at_max or bool(self.ended_early)

    @property
    def ended_early(self) -> str:
        """Why it ended before its schedule by its own settings; "" if it did not."""
        flat, guard = self.settings.get("trainer.stop_when_flat", 0), str(self.settings.get("trainer.guard", "off"))
        flat = flat if isinstance(flat, int) else 0
        return ended_early(self.rows[-1], stop_when_flat=flat, guard=guard) if self.rows else ""

    @property
    def state(self) -> str:
        if not self.rows:
            return "no row yet"
        if self.ended_early and not self.has_all_epochs:
            return f"ended early at step {self.rows[-1]['step']:,.0f}"
        if self.finished and not self.has_all_epochs:
            return f"ended by trainer.max_steps at step {self.rows[-1]['step']:,.0f}"
        return "finished" if self.finished else "in progress or stopped"

    @property
    def progress(self) -> str:
        """ "12.5 of 200" epochs."""
        is_in_first_epoch = bool(self.rows) and self.rows[-1]["step"] > 0 and self.epochs_done == 0
        return f"{'<1' if is_in_first_epoch else f'{self.epochs_done:.3g}'} of {self.num_epochs}"

    # ---- cost --------------------------------------------------------------------------------------------------------

    @cached_property
    def gpu_minutes_at_rows(self) -> tuple[float, ...]:
        """Training until each row, without probes, times the number of processes."""
        minutes, step, so_far = [], 0.0, 0.0
        for row in self.rows:  # its rate is that of the steps since the row before; the clock stops during probes
            if row["step"] > step:
                so_far += (row["step"] - step) * self.batch_size / row["images_per_second"] / 60 * self.num_processes
            step = row["step"]
            minutes.append(so_far)
        return tuple(minutes)

    @property
    def gpu_minutes(self) -> float:
        return self.gpu_minutes_at_rows[-1] if self.rows else 0.0

    @property
    def images_per_second(self) -> float | None:
        """Median over rows, for all processes together; None if there are too few rows.

        The first row is left out because it includes compiling: 5,300 instead of 21,700 in docs/results/cifar10.
        """
        timed = [row["images_per_second"] for row in self.rows if row["step"] > 0][1:]
        return statistics.median(timed) if timed else None

    @property
    def peak_memory_gib(self) -> float | None:
        """Most memory allocated on one GPU; None on a CPU."""
        return max((row["peak_memory_gib"] for row in self.rows if "peak_memory_gib" in row), default=None)


def minutes_in_common(runs: Sequence[Run]) -> float:
    """GPU-minutes that every run with k-NN had trained by its last probe: runs are compared at this equal cost."""
    return min((run.last.gpu_minutes for run in runs if run.probes), default=0.0)


def distinct_labels(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as much of the path as tells them apart."""
    parts = [folder.expanduser().resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        twice = next(folder for number, folder in enumerate(folders) if parts[number] in parts[:number])
        raise RunError(f"{twice} is named twice; name every run once")
    labels = []
    for own in parts:
        num_parts = 1
        while sum(other[-num_parts:] == own[-num_parts:] for other in parts) > 1:
            num_parts += 1
        labels.append(str(Path(*own[-num_parts:])))
    return labels
