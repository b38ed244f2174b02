"""`massl compare`: runs side by side, trained first if asked, like the paper's table of time and memory."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from rich.console import Console

from massl.commands.arguments import exit_status, parse
from massl.commands.auto import resolve
from massl.commands.compare.minutes import refuse_other_minutes, timed_auto, timed_overrides
from massl.commands.console import (
    command_text,
    message_console,
    print_line,
    print_table,
    require_writable,
    result_console,
)
from massl.commands.device import release_memory
from massl.commands.pretrain import PretrainResult, RunInterrupted, pretrain, pretrain_as_resolved
from massl.commands.recipe import PretrainRecipe, TrainingImages, as_set_options, load_recipe, parse_set_options
from massl.commands.recipes import AUTO
from massl.config import MasslError, RecipeError, Settings, validate
from massl.data.sources import open_source
from massl.files import write_atomically
from massl.reports.comparison.documents import comparison_document, comparison_values
from massl.reports.comparison.tables import cautions, comparison_table
from massl.reports.published.data_sets import require_known
from massl.reports.run_reader import read_run
from massl.reports.runs import Run, distinct_labels

_NAME = "comparison"

DESCRIPTION = """Put runs side by side: k-NN accuracy (without labels: measures of the features), time and memory.

massl compare --runs runs/a runs/b --output comparison
massl compare --methods massl,dino,ibot --recipe demo-vit --output runs/compare
massl compare --recipes massl-tiny,dino-tiny --data photos/ --set trainer.epochs=20 --output runs/compare
massl compare --recipes auto,mocov3-tiny --data photos/ --minutes 10 --output runs/compare

The last three train first, each run in its own folder below --output; the same command again continues. Table,
commands and figure go to comparison.md, .json, .png and .svg."""


class CompareSettings(Settings):
    """What to compare: existing run folders, or recipes or methods that are trained first."""

    runs: tuple[str, ...] = Field((), description="run folders, finished or in progress")
    recipes: tuple[str, ...] = Field(
        (), description="recipes to train and compare: auto, names or YAML files, separated by commas or spaces"
    )
    methods: tuple[str, ...] = Field(
        (), description="methods to train with one recipe and compare: names, separated by commas or spaces"
    )
    recipe: str = Field("", description="the recipe of --methods")
    data: TrainingImages = TrainingImages()
    set: tuple[str, ...] = Field(
        (), description="changes to all recipes, e.g. trainer.epochs=40 trainer.batch_size=256"
    )
    minutes: float | None = Field(
        None,
        gt=0,
        description="train each run for this many minutes (probes not counted); a short trial finds the epochs",
    )
    data_set: str | None = Field(
        None, description="ImageNet adds the paper's table of time and memory; default: if data.source tells so"
    )
    output: str = Field(
        description="folder for comparison.md, .json, .png and .svg and for trained runs; the same command continues"
    )

    @model_validator(mode="after")
    def _is_one_kind_of_comparison(self) -> Self:
        given = [f"--{option}" for option in ("runs", "recipes", "methods") if getattr(self, option)]
        if len(given) != 1:
            problem = f"{' and '.join(given)} do not go together" if given else "nothing to compare"
            choices = "--runs FOLDER FOLDER, or --recipes NAME,NAME, or --methods NAME,NAME --recipe NAME"
            raise ValueError(f"{problem}; give {choices}")
        if bool(self.methods) != bool(self.recipe):
            raise ValueError("--methods and --recipe go together: the methods, and the recipe to train them with")
        if self.runs and (self.set or self.data.source or self.minutes):
            raise ValueError("--runs are compared as they are; --set, --minutes and --data need training")
        if self.minutes and "trainer.epochs" in parse_set_options(self.set):
            raise ValueError("--minutes and --set trainer.epochs both set the length of training; give one of them")
        return self


@dataclass(frozen=True, kw_only=True)
class Comparison:
    folder: Path  # of comparison.md, .json, .png and .svg
    runs: tuple[Run, ...]  # those that could be read, with distinct labels
    failed: Mapping[str, str]  # recipe, method or folder -> what went wrong
    signal_number: int | None  # the signal that stopped the training; the same command continues

    @property
    def cautions(self) -> tuple[str, ...]:
        """Differences that make the runs incomparable."""
        return cautions(self.runs)


@dataclass(frozen=True, kw_only=True)
class _Training:
    """One run to train."""

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
    data_set: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Comparison:
    """Compare run folders, or train recipes or methods first; write comparison.md, .json, .png and .svg to `output`.

    Give one of `runs` (folders, finished or in progress), `recipes` (names or files) or `methods` (with `recipe`).
    What is trained gets a run folder below `output`. `data` names its images, `minutes` its training time, `overrides`
    changes values of all recipes, e.g. {"trainer.epochs": 20}; `data_set="ImageNet"` adds the paper's table.
    What cannot be read or trained is named in `failed`.
    """
    plain: dict[str, Any] = {"runs": [str(run) for run in runs], "recipes": list(recipes), "methods": list(methods)}
    plain |= {"recipe": str(recipe), "minutes": minutes, "data_set": data_set, "output": str(output)}
    plain |= {"set": as_set_options(overrides or {})}
    plain |= {} if data is None else {"data": {"source": str(data)}}
    return run_comparison(validate(CompareSettings, plain, origin="compare"))


def main(arguments: Sequence[str]) -> int:
    result = run_comparison(parse(CompareSettings, "compare", DESCRIPTION, arguments))
    return exit_status(result.signal_number, failed=bool(result.failed))


def run_comparison(settings: CompareSettings) -> Comparison:
    """`compare` with all settings in one object, as the command line gives them."""
    output = Path(settings.output).expanduser()
    require_known(settings.data_set)
    require_writable(output)
    folders = [Path(folder).expanduser() for folder in settings.runs]
    failed: dict[str, str] = {}
    signal_number = None
    if not settings.runs:
        if settings.minutes is not None:
            refuse_other_minutes(output, settings.minutes)
        folders, failed, signal_number = _train_all(_trainings(settings), settings.data.source, settings.minutes)
    runs, unreadable = _read(folders)
    failed |= unreadable
    if not runs:
        reasons = " ".join(f"{name}: {problem}." for name, problem in failed.items())
        raise MasslError(f"there is no run to compare. {reasons}")
    _write(runs, output, settings, failed=failed)
    comparison = Comparison(folder=output, runs=tuple(runs), failed=failed, signal_number=signal_number)
    _show(comparison)
    return comparison


# ---- training --------------------------------------------------------------------------------------------------------


def _trainings(settings: CompareSettings) -> list[_Training]:
    common = parse_set_options(settings.set)
    folder = Path(settings.output).expanduser()
    if settings.methods:
        if "method.name" in common:
            raise RecipeError("--set method.name contradicts --methods, which names the methods to train")
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
    """The names of run folders; raises if two are equal."""
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    if twice:
        raise RecipeError(f"two runs would share the folder {twice[0]}: name every {what} once, or rename a file")
    return names


def _train_all(
    trainings: Sequence[_Training], data: str, minutes: float | None
) -> tuple[list[Path], dict[str, str], int | None]:
    """Train one after another: folders that trained, what failed, and the signal that stopped it, if any."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RecipeError(
            "compare trains in one process; train each with torchrun -m massl pretrain, then massl compare --runs"
        )
    console = message_console()
    trained: list[Path] = []
    failed: dict[str, str] = {}
    for training in trainings:
        name = training.output.name
        print_line(console, f"\n{name}", style="bold")
        release_memory()
        try:
            result = _train(training, data or None, minutes, console)
        except RunInterrupted as interrupted:
            return [*trained, training.output], failed, interrupted.result.signal_number
        except MasslError as error:
            failed[name] = str(error)
        except torch.OutOfMemoryError as error:  # a result: this method needs more memory than the others
            failed[name] = f"out of GPU memory ({error}); try --set trainer.accumulation_steps=2 for all"
        else:
            trained.append(training.output)
            if result.signal_number is not None:
                return trained, failed, result.signal_number
        if name in failed:
            print_line(console, f"{name}: {failed[name]}", style="red")
    return trained, failed, None


def _train(training: _Training, data: str | None, minutes: float | None, console: Console) -> PretrainResult:
    output, overrides = training.output, training.overrides

    def tell(what: str) -> None:
        print_line(console, f"{output.name}: {what}")

    if minutes is not None and training.recipe == AUTO and not (output / "recipe.yaml").exists():
        found = timed_auto(minutes, data, run=output, given=overrides, tell=tell)
        release_memory()
        return pretrain_as_resolved(found, output, data=data, overrides=overrides)
    if minutes is not None:
        recipe = _recipe_to_time(training, data)
        overrides = {**overrides, **timed_overrides(minutes, recipe, run=output, given=overrides, tell=tell)}
        release_memory()
    return pretrain(recipe=training.recipe, output=output, data=data, overrides=overrides)


def _recipe_to_time(training: _Training, data: str | None) -> PretrainRecipe:
    """The recipe with the values of the command."""
    if training.recipe == AUTO:  # of the run, which exists
        return resolve(AUTO, data=data, overrides=training.overrides, run=training.output, quiet=True).recipe
    asked = {**training.overrides, **({"data.source": data} if data else {})}
    recipe = load_recipe(training.recipe, asked)
    if "data.source" in asked:
        open_source(recipe.data.source, may_download=True)  # the trial takes the recipe, which starts no download
    return recipe


# ---- comparing -------------------------------------------------------------------------------------------------------


def _read(folders: Sequence[Path]) -> tuple[list[Run], dict[str, str]]:
    """The runs that can be compared, and why the others cannot."""
    runs: list[Run] = []
    problems: dict[str, str] = {}
    for folder, label in zip(folders, distinct_labels(folders), strict=True):
        try:
            runs.append(read_run(folder, label=label, strict=True))
        except MasslError as error:
            problems[label] = str(error)
    return runs, problems


def _write(runs: Sequence[Run], output: Path, settings: CompareSettings, *, failed: Mapping[str, str]) -> None:
    from massl.reports.comparison.plots import comparison_figure  # imports matplotlib, which takes 0.7 s
    from massl.reports.figures import save_figure

    save_figure(comparison_figure(runs), output / _NAME)
    values = comparison_values(runs, failed=failed)
    write_atomically(output / f"{_NAME}.json", json.dumps(values, indent=2) + "\n")
    command, picture = command_text("compare", settings), f"{_NAME}.png"
    document = comparison_document(runs, failed=failed, command=command, picture=picture, data_set=settings.data_set)
    write_atomically(output / f"{_NAME}.md", document)


def _show(comparison: Comparison) -> None:
    console = result_console()
    table = comparison_table(comparison.runs)
    print_table(console, table)
    for note in table.footnotes:
        print_line(console, note, style="yellow" if note in comparison.cautions else None)
    for name, problem in comparison.failed.items():
        print_line(console, f"failed: {name}. {problem}", style="red")
    print_line(console, f"comparison: {comparison.folder / _NAME}.md, .json, .png, .svg")
