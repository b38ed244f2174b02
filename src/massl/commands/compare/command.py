"""Runs side by side, trained here first where asked: who learns how much at what cost, as the paper's table of time and
memory shows it.
"""

import gc
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from rich.console import Console

from massl.commands.arguments import exit_status, parse
from massl.commands.compare.minutes import TrialStopped, filling, refuse_other_minutes
from massl.commands.console import (
    command_text,
    message_console,
    print_line,
    print_table,
    require_writable,
    result_console,
)
from massl.commands.pretrain import pretrain
from massl.commands.recipe import TrainingImages, as_set_options, load_recipe, parse_set_options
from massl.config import MasslError, RecipeError, Settings, validate
from massl.reports.comparison.tables import as_plain, cautions, comparison_document, comparison_table, equal_cost
from massl.reports.run_reader import read_run
from massl.reports.runs import Run, distinct_labels

_NAME = "comparison"

DESCRIPTION = """Put runs side by side: k-NN accuracy, time and memory.

massl compare --runs runs/a runs/b --output comparison
massl compare --methods massl,dino,ibot --recipe demo --output runs/compare
massl compare --recipes massl-tiny,dino-tiny --data.source photos/ --set trainer.epochs=20 --output runs/compare
massl compare --recipes massl-tiny,dino-tiny --data.source photos/ --minutes 10 --output runs/compare

The last three train first, each into a folder of its own below --output; the same command again continues. Table,
commands and figure go to comparison.md, .json, .png and .svg."""


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
        description="folder for comparison.md, .json, .png and .svg, and for the runs that are trained; the same command continues"
    )

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
        if self.runs and (self.set or self.data.source or self.minutes):
            raise ValueError(
                "--runs are compared as they are; --set, --minutes and --data.source are for --recipes and --methods"
            )
        if self.minutes and any(item.startswith("trainer.epochs=") for item in self.set):
            raise ValueError("--minutes and --set trainer.epochs both say how long to train; give one of them")
        return self


@dataclass(frozen=True, kw_only=True)
class Comparison:
    folder: Path  # where comparison.md, .json, .png and .svg lie
    runs: tuple[Run, ...]  # of the runs that could be read, labelled apart
    cautions: tuple[str, ...]  # in what they are not comparable
    failed: Mapping[str, str]  # recipe, method or folder -> what went wrong
    signal_number: int | None = None  # of the signal that ended the training early; the same command continues


@dataclass(frozen=True, kw_only=True)
class _Training:
    """One run to be trained."""

    recipe: str
    output: Path
    overrides: Mapping[str, Any]


def compare(
    runs: Sequence[str | Path] = (),
    *,
    output: str | Path,
    recipes: Sequence[str] = (),
    methods: Sequence[str] = (),
    recipe: str | Path = "",
    data: str | Path | None = None,
    minutes: float | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Comparison:
    """Compare run folders, or train recipes or methods first; write comparison.md, .json, .png and .svg to `output`.

    Give one of `runs` (folders, finished or in progress), `recipes` (names or files) or `methods` (trained by `recipe`).
    What is trained gets a run folder below `output`. `data` names its images, `minutes` its training time, `overrides`
    changes values of all recipes, e.g. {"trainer.epochs": 20}. What cannot be read or trained is named in `failed`.
    """
    plain: dict[str, Any] = {"runs": [str(run) for run in runs], "recipes": list(recipes), "methods": list(methods)}
    plain |= {"recipe": str(recipe), "minutes": minutes, "output": str(output), "set": as_set_options(overrides or {})}
    plain |= {} if data is None else {"data": {"source": str(data)}}
    return run_comparison(validate(CompareSettings, plain, origin="compare"))


def main(arguments: Sequence[str]) -> int:
    result = run_comparison(parse(CompareSettings, "compare", DESCRIPTION, arguments))
    return exit_status(result.signal_number, failed=bool(result.failed))


def run_comparison(settings: CompareSettings) -> Comparison:
    """`massl compare`: train what is asked for, then compare, and show the table."""
    out = Path(settings.output).expanduser()
    require_writable(out)
    command = command_text("compare", settings)
    if settings.runs:
        comparison = _compare([Path(folder).expanduser() for folder in settings.runs], out, command=command, failed={})
    else:
        if settings.minutes is not None:
            refuse_other_minutes(Path(settings.output).expanduser(), settings.minutes)
        trained, failed, signal_number = _train_all(_trainings(settings), settings.data.source, settings.minutes)
        # in the first trial of --minutes: there is nothing yet to compare
        if signal_number is not None and not trained:
            return Comparison(folder=out, runs=(), cautions=(), failed=failed, signal_number=signal_number)
        comparison = replace(_compare(trained, out, command=command, failed=failed), signal_number=signal_number)
    _show(comparison)
    return comparison


# ---- training --------------------------------------------------------------------------------------------------------


def _trainings(settings: CompareSettings) -> list[_Training]:
    common = parse_set_options(settings.set)
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
    screen = message_console()
    trained: list[Path] = []
    failed: dict[str, str] = {}
    for training in trainings:
        print_line(screen, f"\n{training.output.name}", style="bold")
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
            print_line(screen, f"{training.output.name}: {failed[training.output.name]}", style="red")
    return trained, failed, None


def _overrides_filling(minutes: float, training: _Training, data: str, screen: Console) -> dict[str, Any]:
    """The overrides of a training with those that make it last so long."""
    images = {"data.source": data} if data else {}
    recipe = load_recipe(training.recipe, {**training.overrides, **images})

    def tell(what: str) -> None:
        print_line(screen, f"{training.output.name}: {what}")

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
    runs: list[Run] = []
    problems = dict(failed)
    for folder, label in zip(folders, labels, strict=True):
        try:
            runs.append(read_run(folder, label=label, strict=True))
        except MasslError as error:
            problems[label] = str(error)
    if not runs:
        raise MasslError(
            "there is no run to compare. " + " ".join(f"{name}: {problem}." for name, problem in problems.items())
        )
    comparison = Comparison(folder=out, runs=tuple(runs), cautions=cautions(runs), failed=problems)
    save_figure(comparison_figure(runs), out / _NAME)
    plain = {
        "runs": [as_plain(run) for run in runs],
        "equal_cost": equal_cost(runs),
        "cautions": comparison.cautions,
        "failed": problems,
    }
    (out / f"{_NAME}.json").write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    document = comparison_document(runs, failed=problems, command=command, picture=f"{_NAME}.png")
    (out / f"{_NAME}.md").write_text(document, encoding="utf-8")
    return comparison


def _show(comparison: Comparison) -> None:
    screen = result_console()
    table = comparison_table(comparison.runs)
    print_table(screen, table)
    for note in table.footnotes:
        print_line(screen, note, style="yellow" if note in comparison.cautions else None)
    for name, problem in comparison.failed.items():
        print_line(screen, f"failed: {name}. {problem}", style="red")
    print_line(screen, f"comparison: {comparison.folder / _NAME}.md, .json, .png, .svg")
