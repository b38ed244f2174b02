"""Runs side by side, trained here first where asked: who learns how much at what cost, as the paper's table of time and
memory shows it.
"""

import gc
import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
import yaml
from pydantic import Field, model_validator
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from massl.commands.compare.minutes import TrialStopped, filling, refuse_other_minutes
from massl.commands.evaluate.command import FILE_WIDTH, require_writable, say
from massl.commands.pretrain import pretrain
from massl.commands.recipe import load_recipe
from massl.config import MasslError, RecipeError, Settings
from massl.reports.comparison.tables import as_plain, cautions, comparison_document, comparison_table, equal_cost
from massl.reports.run_curves import RunCurve, distinct_labels, read_run
from massl.reports.tables import ResultsTable

_NAME = "comparison"
_WORDS = frozenset({"run", "method"})  # columns to set flush left; all others hold numbers


class TrainingImages(Settings):
    source: str = Field("", description="images to train on, as in pretrain; default: those of each recipe")


class CompareSettings(Settings):
    """Runs to compare: folders that are there, or recipes or methods that are trained first."""

    runs: tuple[str, ...] = Field((), description="folders of runs, finished or under way")
    recipes: tuple[str, ...] = Field(
        (), description="recipes to train and compare: names or YAML files, with commas or spaces between"
    )
    methods: tuple[str, ...] = Field(
        (), description="methods to train by one recipe and compare: names, with commas or spaces between"
    )
    recipe: str = Field("", description="the recipe of --methods")
    data: TrainingImages = TrainingImages()
    set: tuple[str, ...] = Field((), description="values of all recipes, e.g. trainer.epochs=40 trainer.batch_size=256")
    minutes: float | None = Field(
        None,
        gt=0,
        description="train each for this many minutes, probes not counted, instead of its epochs; a short trial tells how many",
    )
    output: str = Field(
        "",
        description="folder in which each recipe or method gets a run folder of its own; continued where it is there",
    )
    out: str = Field("", description="folder for comparison.md, .json, .png and .svg; default: that of --output")

    @model_validator(mode="after")
    def _is_one_kind_of_comparison(self) -> Self:
        given = [option for option in ("runs", "recipes", "methods") if getattr(self, option)]
        if len(given) != 1:
            wanted = (
                "what is to be compared? Give"
                if not given
                else f"{' and '.join(f'--{option}' for option in given)} do not go together; give"
            )
            raise ValueError(
                f"{wanted} --runs FOLDER FOLDER, or --recipes NAME,NAME, or --methods NAME,NAME --recipe NAME"
            )
        if bool(self.methods) != bool(self.recipe):
            raise ValueError("--methods and --recipe go together: the methods, and the one recipe they are trained by")
        if self.runs and (self.output or self.set or self.data.source or self.minutes):
            raise ValueError(
                "--runs are compared as they are; --output, --set, --minutes and --data.source are for --recipes and --methods"
            )
        if self.minutes and any(item.startswith("trainer.epochs=") for item in self.set):
            raise ValueError("--minutes and --set trainer.epochs both say how long to train; give one of them")
        if self.runs and not self.out:
            raise ValueError("where to? Give --out FOLDER for comparison.md, .json, .png and .svg")
        if not self.runs and not self.output:
            raise ValueError("where to? Give --output FOLDER for the runs that are trained")
        return self


@dataclass(frozen=True, kw_only=True)
class Comparison:
    folder: Path  # where comparison.md, .json, .png and .svg lie
    curves: tuple[RunCurve, ...]  # of the runs that could be read, labelled apart
    cautions: tuple[str, ...]  # in what they are not comparable
    failed: Mapping[str, str]  # recipe, method or folder -> what went wrong
    signal_number: int | None = None  # of the signal that ended the training early; the same command continues


@dataclass(frozen=True, kw_only=True)
class _Training:
    """One run to be trained."""

    recipe: str
    output: Path
    overrides: Mapping[str, Any]


def compare_runs(folders: Sequence[str | Path], *, out: str | Path) -> Comparison:
    """Read run folders, finished or under way, and write comparison.md, .json, .png and .svg into the folder `out`.

    A folder that cannot be read does not lose the others: it is named in `failed`. Where none can be read, that is an
    error.
    """
    return _compare([Path(folder).expanduser() for folder in folders], Path(out).expanduser(), command="", failed={})


def run_comparison(settings: CompareSettings) -> Comparison:
    """`massl compare`: train what is asked for, then compare, and show the table."""
    out = Path(settings.out or settings.output).expanduser()
    require_writable(out, option="out" if settings.out else "output")
    command = _command(settings)
    if settings.runs:
        comparison = _compare([Path(folder).expanduser() for folder in settings.runs], out, command=command, failed={})
    else:
        if settings.minutes is not None:
            refuse_other_minutes(Path(settings.output).expanduser(), settings.minutes)
        trained, failed, signal_number = _train_all(_trainings(settings), settings.data.source, settings.minutes)
        # in the first trial of --minutes: there is nothing yet to compare
        if signal_number is not None and not trained:
            return Comparison(folder=out, curves=(), cautions=(), failed=failed, signal_number=signal_number)
        comparison = replace(_compare(trained, out, command=command, failed=failed), signal_number=signal_number)
    _show(comparison)
    return comparison


# ---- training --------------------------------------------------------------------------------------------------------


def _trainings(settings: CompareSettings) -> list[_Training]:
    common = parse_overrides(settings.set)
    folder = Path(settings.output).expanduser()
    if settings.methods:
        if "method.name" in common:
            raise RecipeError("--set method.name: --methods says which methods are trained")
        return [
            _Training(recipe=settings.recipe, output=folder / method, overrides={**common, "method.name": method})
            for method in _distinct(_names(settings.methods), "method")
        ]
    recipes = _names(settings.recipes)
    names = _distinct([Path(recipe).name.removesuffix(".yaml").removesuffix(".yml") for recipe in recipes], "recipe")
    return [
        _Training(recipe=recipe, output=folder / name, overrides=common)
        for recipe, name in zip(recipes, names, strict=True)
    ]


def parse_overrides(items: Iterable[str]) -> dict[str, Any]:
    """ "trainer.epochs=40" -> {"trainer.epochs": 40}; values are read as YAML, as in a recipe."""
    overrides: dict[str, Any] = {}
    for item in items:
        key, sign, text = item.partition("=")
        if not sign or not key:
            raise RecipeError(f"--set {item}: expected KEY=VALUE, e.g. trainer.epochs=40")
        if key in overrides:
            raise RecipeError(f"--set {key} is given twice")
        try:
            overrides[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise RecipeError(f"--set {item}: the value is not valid YAML: {error}") from None
    return overrides


def _names(given: Sequence[str]) -> list[str]:
    return [name for part in given for name in part.split(",") if name]


def _distinct(names: list[str], what: str) -> list[str]:
    """Each gets a folder of its name."""
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    if twice:
        raise RecipeError(
            f"two runs would share the folder {twice[0]}: name every {what} once, or give one of the files another name"
        )
    return names


def _train_all(
    trainings: Sequence[_Training], data: str, minutes: float | None
) -> tuple[list[Path], dict[str, str], int | None]:
    """One after another; returns the folders of those that trained, what failed, and the signal that ended it early, if
    one did.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RecipeError(
            "compare trains in one process; train each recipe with torchrun -m massl pretrain, then massl compare --runs"
        )
    screen = Console(stderr=True, highlight=False)
    trained: list[Path] = []
    failed: dict[str, str] = {}
    for training in trainings:
        say(screen, f"\n{training.output.name}", style="bold")
        _forget_memory_of_others()
        try:
            overrides = training.overrides if minutes is None else _overrides_filling(minutes, training, data, screen)
            result = pretrain(recipe=training.recipe, output=training.output, data=data or None, overrides=overrides)
        except TrialStopped as stopped:
            return trained, failed, stopped.signal_number
        except MasslError as error:
            failed[training.output.name] = str(error)
        except torch.OutOfMemoryError as error:  # what one method needs and another does not is a result of its own
            failed[training.output.name] = (
                f"out of GPU memory ({error}); try --set trainer.accumulation_steps=2 for all"
            )
        else:
            trained.append(training.output)
            if result.signal_number is not None:
                return trained, failed, result.signal_number
        if training.output.name in failed:
            say(screen, f"{training.output.name}: {failed[training.output.name]}", style="red")
    return trained, failed, None


def _overrides_filling(minutes: float, training: _Training, data: str, screen: Console) -> dict[str, Any]:
    """The overrides of a training with those that make it last so long."""
    images = {"data.source": data} if data else {}
    recipe = load_recipe(training.recipe, {**training.overrides, **images})

    def tell(what: str) -> None:
        say(screen, f"{training.output.name}: {what}")

    length = filling(minutes, recipe, run=training.output, given=training.overrides, tell=tell)
    _forget_memory_of_others()
    return {**training.overrides, **length}


def _forget_memory_of_others() -> None:
    """A run's peak must not be that of the run before it."""
    if torch.cuda.is_available():
        gc.collect()  # networks and optimiser hold each other, so they do not go by themselves
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# ---- comparing -------------------------------------------------------------------------------------------------------


def _compare(folders: Sequence[Path], out: Path, *, command: str, failed: Mapping[str, str]) -> Comparison:
    """Read what can be read and write the four files."""
    from massl.reports.comparison.plots import (  # matplotlib: 0.7 s that no other command should wait for
        comparison_figure,
        save_figure,
    )

    labels = distinct_labels(folders)
    curves: list[RunCurve] = []
    problems = dict(failed)
    for folder, label in zip(folders, labels, strict=True):
        try:
            curves.append(replace(read_run(folder), label=label))
        except MasslError as error:
            problems[label] = str(error)
    if not curves:
        raise MasslError(
            "there is no run to compare. " + " ".join(f"{name}: {problem}." for name, problem in problems.items())
        )
    require_writable(out, option="out")
    comparison = Comparison(folder=out, curves=tuple(curves), cautions=cautions(curves), failed=problems)
    save_figure(comparison_figure(curves), out / _NAME)
    plain = {
        "runs": [as_plain(curve) for curve in curves],
        "equal_cost": equal_cost(curves),
        "cautions": comparison.cautions,
        "failed": problems,
    }
    (out / f"{_NAME}.json").write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    document = comparison_document(curves, failed=problems, command=command, picture=f"{_NAME}.png")
    (out / f"{_NAME}.md").write_text(document, encoding="utf-8")
    return comparison


def _command(settings: CompareSettings) -> str:
    """The command that gives these settings."""
    words = ["massl", "compare"]
    given = {
        "runs": settings.runs,
        "recipes": settings.recipes,
        "methods": settings.methods,
        "recipe": [settings.recipe],
    }
    given |= {"minutes": [] if settings.minutes is None else [repr(settings.minutes)]}
    given |= {
        "data.source": [settings.data.source],
        "set": settings.set,
        "output": [settings.output],
        "out": [settings.out],
    }
    for option, values in given.items():
        if any(values):
            words += [f"--{option}", *values]
    return shlex.join(words)


def _show(comparison: Comparison) -> None:
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = FILE_WIDTH
    table = comparison_table(comparison.curves)
    screen.print(_as_rich(table))
    for note in table.footnotes:
        say(screen, note, style="yellow" if note in comparison.cautions else None)
    for name, problem in comparison.failed.items():
        say(screen, f"failed: {name}. {problem}", style="red")
    say(screen, f"comparison: {comparison.folder / _NAME}.md, .json, .png, .svg")


def _as_rich(table: ResultsTable) -> Table:
    """For the terminal, in the manner of reports.tables.as_rich, which is for results of protocols."""
    shown = Table(
        title=Text(table.title) if table.title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in table.columns:
        if column in _WORDS:
            shown.add_column(column, overflow="fold")
        else:  # a number is never broken; a long heading stands on several lines instead
            shown.add_column(Text(column.replace(" ", "\n")), justify="right", no_wrap=True)
    for line in table.lines:
        shown.add_row(*(Text(cell) for cell in line))
    return shown
