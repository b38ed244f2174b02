"""`massl ablate`: the paper's ablations with any recipe of massl."""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
import tyro
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from rich.console import Console

from massl.commands.ablate.grids import Grid, PlannedRun, massl_settings, plan_grid
from massl.commands.ablate.outcomes import Yardstick, choose_yardstick, finished_outcome, planned_outcome
from massl.commands.arguments import exit_status, parse
from massl.commands.console import (
    command_text,
    message_console,
    print_line,
    print_table,
    require_writable,
    result_console,
)
from massl.commands.device import release_memory
from massl.commands.images import download_named
from massl.commands.pretrain import RunInterrupted, pretrain
from massl.commands.recipe import PretrainRecipe, TrainingImages, as_set_options, load_recipe, parse_set_options
from massl.config import RecipeError, Settings, validate
from massl.data.sources import open_source
from massl.files import write_atomically
from massl.reports.ablation.documents import ablation_document, ablation_values
from massl.reports.ablation.records import ABLATIONS, AblationName, AblationReport, RunOutcome, report_of, table_of
from massl.reports.ablation.trends import sentences_of
from massl.training.bad_steps import TrainingStopped
from massl.training.run_folder import RunFolder

_NAME = "ablation"

DESCRIPTION = """Repeat one of the paper's ablations on your images.

massl ablate memory-size --recipe massl-cifar --data photos/ --output runs/ablation
massl ablate block-size --recipe massl-cifar --data photos/ --values 512 2048 --seeds 0 1 --output runs/ablation
massl ablate block-sampling --recipe demo-vit --set trainer.epochs=6 --output runs/ablation

Each value is a run in its own folder; the same command again continues. Table, trend and figure, with the paper's
values beside, go to OUTPUT/KIND/ablation.md, .json, .png and .svg."""


class AblateSettings(Settings):
    """A recipe, images, and how the grid differs from the paper's."""

    kind: tyro.conf.Positional[AblationName] = Field(description="what is varied")
    recipe: str = Field(description="a recipe of massl: name of a shipped one (see `massl recipes`) or a YAML file")
    data: TrainingImages = TrainingImages()
    output: str = Field(description="folder for the runs, each in its own folder; the same command continues them")
    values: tuple[PositiveInt, ...] = Field(
        (),
        description="sizes to run (K for memory-size, otherwise N_b); default: the paper's, scaled to the recipe's own",
    )
    seeds: tuple[NonNegativeInt, ...] = Field(
        (), description="run each value with each of these seeds; default: the recipe's seed"
    )
    set: tuple[str, ...] = Field(
        (), description="changes to the recipe for all runs, e.g. trainer.epochs=20 trainer.device=cpu"
    )
    train: str | None = Field(
        None, description="with test: judge runs by the protocol knn, not by their last probe; images to search"
    )
    test: str | None = Field(None, description="with train: images to classify")
    plan: bool = Field(
        False,
        description="train nothing, only print the command of every run, e.g. for several GPUs; without plan, the same "
        "command then reads the runs",
    )

    @model_validator(mode="after")
    def _protocol_has_both_its_sets(self) -> Self:
        if (self.train is None) != (self.test is None):
            raise ValueError("train and test go together: the images to search for neighbours, and those to classify")
        return self


@dataclass(frozen=True, kw_only=True)
class AblationResult:
    folder: Path  # of ablation.md, .json, .png and .svg
    report: AblationReport
    signal_number: int | None  # the signal that stopped it; the same command continues

    @property
    def failed(self) -> dict[str, str]:
        """Run folder -> what stopped its training."""
        return {run.folder: run.error for point in self.report.points for run in point.runs if run.state == "failed"}


def ablate(
    kind: AblationName,
    *,
    recipe: str | Path,
    output: str | Path,
    data: str | Path | None = None,
    values: Sequence[int] = (),
    seeds: Sequence[int] = (),
    train: str | Path | None = None,
    test: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> AblationResult:
    """Run one of the paper's ablations: "memory-size", "block-size" or "block-sampling".

    Each run is kept in a folder below `output`; the same call again continues where it stopped. `values` replaces the
    paper's grid, scaled to the recipe; `seeds` repeats every value; `train` and `test` are images for the protocol
    knn; `overrides` changes the recipe for all runs, e.g. {"trainer.epochs": 20}.
    """
    named = {"kind": kind, "recipe": recipe, "output": output, "train": train, "test": test}
    plain: dict[str, Any] = {key: str(value) for key, value in named.items() if value is not None}
    plain |= {"values": list(values), "seeds": list(seeds), "data": {} if data is None else {"source": str(data)}}
    plain["set"] = as_set_options(overrides or {})
    return run_ablation(validate(AblateSettings, plain, origin="ablate"))


def main(arguments: Sequence[str]) -> int:
    result = run_ablation(parse(AblateSettings, "ablate", DESCRIPTION, arguments))
    return exit_status(result.signal_number, failed=bool(result.failed))


def run_ablation(settings: AblateSettings) -> AblationResult:
    """`ablate` with all settings in one object, as the command line gives them."""
    work = _prepare(settings)
    return _plan(work) if settings.plan else _run(work)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """An ablation with everything checked that can be checked before training."""

    settings: AblateSettings
    base: PretrainRecipe
    grid: Grid
    yardstick: Yardstick
    num_images: int
    console: Console

    @property
    def folder(self) -> Path:
        return Path(self.settings.output).expanduser() / self.grid.kind

    @property
    def ours(self) -> str:
        """What is trained on what, in words."""
        trainer = self.base.trainer
        epochs = f"{trainer.epochs} epoch{'' if trainer.epochs == 1 else 's'}"
        cut = "" if trainer.max_steps is None else f", cut at step {trainer.max_steps:,}"
        return (
            f"{self.settings.recipe} ({self.base.backbone.name}) on {self.base.data.source} "
            f"({self.num_images:,} images), {epochs}{cut}, batch {trainer.batch_size:,}"
        )

    def report(self, outcomes: Sequence[RunOutcome]) -> AblationReport:
        return report_of(
            self.grid.kind,
            outcomes,
            default=self.grid.default,
            measured=self.yardstick.measured,
            num_classes=self.yardstick.num_classes,
        )


def _prepare(settings: AblateSettings) -> _Work:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RecipeError(
            "ablate runs in one process; --plan True prints the commands to train its runs with torchrun or elsewhere"
        )
    overrides = parse_set_options(settings.set)
    images = {"data.source": settings.data.source} if settings.data.source else {}
    base = load_recipe(settings.recipe, {**overrides, **images})
    massl_settings(base)  # first: with another method nothing else matters
    is_named = "data.source" in {**overrides, **images}
    num_images = len(open_source(base.data.source, may_download=is_named))
    download_named(overrides, "probes.database", "probes.queries")
    download_named(settings.model_dump(), "train", "test")
    yardstick = choose_yardstick(base, train=settings.train, test=settings.test)
    output = Path(settings.output).expanduser()
    grid = plan_grid(
        settings.kind,
        base,
        output=output,
        values=settings.values,
        seeds=settings.seeds,
        overridden=overrides.keys(),
        num_images=num_images,
    )
    require_writable(output / settings.kind)
    for run in grid.runs:  # a folder that cannot be used is an error now, not after hours
        with RunFolder(run.folder, run.recipe).claimed(is_writer=True):
            pass
    work = _Work(
        settings=settings,
        base=base,
        grid=grid,
        yardstick=yardstick,
        num_images=num_images,
        console=message_console(),
    )
    print_line(work.console, f"{ABLATIONS[settings.kind].title}: {len(grid.runs)} runs of {work.ours}")
    for caution in grid.cautions:
        print_line(work.console, f"caution: {caution}", style="yellow")
    return work


def _plan(work: _Work) -> AblationResult:
    """Print every run's command; the recipes are in the run folders."""
    for run in work.grid.runs:
        recipe, output = str(run.folder / "recipe.yaml"), str(run.folder)
        print(shlex.join(["massl", "pretrain", "--recipe", recipe, "--output", output]))
    report = work.report([planned_outcome(run) for run in work.grid.runs])
    return AblationResult(folder=work.folder, report=report, signal_number=None)


def _run(work: _Work) -> AblationResult:
    """Train one run after another; results so far are written after each."""
    runs = work.grid.runs
    outcomes = [planned_outcome(run) for run in runs]
    report, signal_number = work.report(outcomes), None
    for number, run in enumerate(runs):
        sizes = f"K={run.memory.num_rows:,}, N_b={run.memory.block_size:,}, {run.strategy} blocks, seed {run.seed}"
        print_line(work.console, f"\nrun {number + 1} of {len(runs)}: {sizes}, in {run.folder}", style="bold")
        outcomes[number], signal_number = _trained(run, work)
        report = work.report(outcomes)
        _write(report, work)
        if signal_number is not None:
            break
    _show(report, work)
    return AblationResult(folder=work.folder, report=report, signal_number=signal_number)


def _trained(run: PlannedRun, work: _Work) -> tuple[RunOutcome, int | None]:
    """The outcome of a run, and the signal that stopped it, if any. A training that fails is an outcome too."""
    release_memory()
    try:
        result = pretrain(recipe=run.recipe, output=run.folder)
    except RunInterrupted as interrupted:
        result = interrupted.result
    except (TrainingStopped, torch.OutOfMemoryError) as error:
        print_line(work.console, f"{run.folder}: {error}", style="red")
        return replace(planned_outcome(run), state="failed", error=str(error)), None
    if not result.finished:
        return replace(planned_outcome(run), state="unfinished"), result.signal_number
    return finished_outcome(run, work.yardstick, results=work.folder / "evaluation"), result.signal_number


def _write(report: AblationReport, work: _Work) -> None:
    from massl.reports.ablation.plots import ablation_figure  # imports matplotlib, which takes 0.7 s
    from massl.reports.figures import save_figure

    command, cautions = command_text("ablate", work.settings, positional=["kind"]), work.grid.cautions
    save_figure(ablation_figure(report, ours=work.ours), work.folder / _NAME)
    values = ablation_values(report, command=command, ours=work.ours, cautions=cautions)
    write_atomically(work.folder / f"{_NAME}.json", json.dumps(values, indent=2) + "\n")
    page = ablation_document(report, command=command, ours=work.ours, cautions=cautions, picture=f"{_NAME}.png")
    write_atomically(work.folder / f"{_NAME}.md", page)


def _show(report: AblationReport, work: _Work) -> None:
    console = result_console()
    table = table_of(report)
    print_table(console, table)
    for line in (*table.footnotes, *sentences_of(report)):
        print_line(console, line)
    print_line(console, f"ablation: {work.folder / _NAME}.md, .json, .png, .svg")
