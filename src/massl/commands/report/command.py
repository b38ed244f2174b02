"""`massl report`: gathers runs, results and pictures and writes the page."""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import tyro
from pydantic import Field, model_validator

from massl.commands.arguments import parse
from massl.commands.console import command_text, message_console, print_line
from massl.commands.device import Device
from massl.commands.recipe import load_recipe
from massl.commands.recipes import shipped_recipes
from massl.commands.report.files import require_page_file, runs_of_comparison, write_page
from massl.config import MasslError, Settings, flatten, validate
from massl.evaluations.measurement import EvaluationError
from massl.evaluations.results import RESULTS_FILE, ResultRow, newest, read_rows
from massl.reports.page.assembly import report_page
from massl.reports.page.sections.ablations import ablation_files, ablations_section
from massl.reports.page.sections.public import tables_with_ours
from massl.reports.page.sections.reproduction import PackagedRecipe, changes_between, reproduction_section
from massl.reports.page.sections.results import results_section
from massl.reports.page.templates import Section
from massl.reports.published.data_sets import require_known
from massl.reports.run_reader import read_run
from massl.reports.runs import Run, distinct_labels
from massl.reports.tables import transfer_averages

_LARGE_MIB = 10  # more is slow on a phone and too much for many mail boxes

DESCRIPTION = """Put runs, their results and pictures on one HTML page that needs nothing but a browser.

massl report runs/a --output report.html
massl report runs/a runs/b runs/ablation --results results --output report.html --no-figures"""


class ReportSettings(Settings):
    """What goes into the page, and where the page goes."""

    runs: tyro.conf.Positional[tuple[str, ...]] = Field(
        description="folders of runs (massl pretrain), finished or under way, and of ablations (massl ablate)"
    )
    output: str = Field(description="the HTML file; an existing page is replaced, any other file refused")
    results: tuple[str, ...] = Field(
        (), description="folders of massl evaluate, besides those inside the runs' folders"
    )
    figures: bool = Field(
        True, description="draw attention maps, patch PCA, matches, neighbours and a map of the features"
    )
    data_set: str | None = Field(
        None, description="what the runs were trained on, for public tables, if data.source does not tell: CIFAR-10"
    )
    data: str | None = Field(None, description="images for the figures; default: those of each run's probe or training")
    device: Device = Field("auto", description="where to compute the figures")

    @model_validator(mode="after")
    def _options_of_figures_need_figures(self) -> Self:
        given = {"--data": self.data is not None, "--device": self.device != "auto"}
        if not self.figures and any(given.values()):
            options = " and ".join(option for option, is_given in given.items() if is_given)
            raise ValueError(f"{options} would have no effect without figures; leave out {options} or --no-figures")
        return self


@dataclass(frozen=True, kw_only=True)
class Report:
    file: Path
    runs: tuple[Run, ...]
    num_ablations: int


def report(
    runs: str | Path | Sequence[str | Path],
    *,
    output: str | Path,
    results: str | Path | Sequence[str | Path] = (),
    data_set: str | None = None,
    figures: bool = True,
    data: str | Path | None = None,
    device: Device = "auto",
) -> Report:
    """Write a page about the folders of `massl pretrain`, `massl compare` and `massl ablate`."""
    values = {
        "runs": _names(runs),
        "output": str(output),
        "results": _names(results),
        "data_set": data_set,
        "figures": figures,
        "data": None if data is None else str(data),
        "device": device,
    }
    return run_report(validate(ReportSettings, values, origin="report"))


def _names(folders: str | Path | Sequence[str | Path]) -> list[str]:
    return [str(folder) for folder in ([folders] if isinstance(folders, str | Path) else folders)]


def main(arguments: Sequence[str]) -> int:
    print(run_report(parse(ReportSettings, "report", DESCRIPTION, arguments, has_flags=True)).file.absolute().as_uri())
    return 0


def run_report(settings: ReportSettings) -> Report:
    """`report` with all settings in one object. Reads everything before it draws figures, so that errors come early."""
    console = message_console()
    file = Path(settings.output).expanduser()
    require_page_file(file)
    require_known(settings.data_set)
    runs, ablations = _read(settings.runs)
    for run in runs:
        for remark in run.remarks:
            print_line(console, f"{run.label}: {remark}", style="yellow")
    command = command_text("report", settings, positional=["runs"], has_flags=True)
    sections = _sections(runs, ablations, settings, command)
    page = report_page(runs, sections, title=_title(runs, ablations), created=datetime.now(UTC))
    encoded = page.encode("utf-8", errors="backslashreplace")  # names of files need not be UTF-8
    write_page(file, encoded)
    mebibytes = len(encoded) / 2**20
    print_line(console, f"{mebibytes:.1f} MiB")
    if mebibytes > _LARGE_MIB:
        print_line(console, "a large page: fewer runs make it smaller, or --no-figures", style="yellow")
    return Report(file=file, runs=tuple(runs), num_ablations=len(ablations))


def _read(folders: Sequence[str]) -> tuple[list[Run], list[Path]]:
    """Runs with distinct labels, and the files of ablations."""
    if not folders:
        raise MasslError("runs are missing: name folders of massl pretrain, massl compare or massl ablate")
    paths = [path for folder in folders for path in runs_of_comparison(Path(folder).expanduser())]
    ablations = {path: ablation_files(path) for path in paths if path.is_dir() and not (path / "recipe.yaml").exists()}
    of_runs = [path for path in paths if not ablations.get(path)]
    runs = [read_run(path, label=label) for path, label in zip(of_runs, distinct_labels(of_runs), strict=True)]
    return runs, list(dict.fromkeys(file for files in ablations.values() for file in files))


def _title(runs: Sequence[Run], ablations: Sequence[Path]) -> str:
    if len(runs) == 1:
        return runs[0].label
    return f"{len(runs)} runs" if runs else "Ablation" if len(ablations) == 1 else "Ablations"


def _sections(runs: Sequence[Run], ablations: Sequence[Path], settings: ReportSettings, command: str) -> list[Section]:
    rows, remarks = _results(runs, settings.results)
    sections = []
    if runs or rows or remarks:
        sections.append(
            results_section(
                [*rows, *transfer_averages(rows)],
                remarks=remarks,
                public=tables_with_ours(runs, data_set=settings.data_set),
            )
        )
    if ablations:
        sections.append(ablations_section(ablations))
    with_backbones = {run.label: run.folder for run in runs if (run.folder / "backbone.safetensors").exists()}
    if settings.figures and with_backbones:
        from massl.commands.report.figures import figures_of  # opens networks: not needed with --no-figures

        sections += figures_of(with_backbones, data=settings.data, device=settings.device)
    return [*sections, reproduction_section(runs, packaged_recipes(runs), command=command)]


def _results(runs: Sequence[Run], folders: Sequence[str]) -> tuple[list[ResultRow], list[str]]:
    """The newest row of every measurement, and remarks on files that could not be read."""
    files = [
        file for run in runs for file in (run.folder / RESULTS_FILE, *sorted(run.folder.glob(f"*/{RESULTS_FILE}")))
    ]
    for folder in folders:
        named = Path(folder).expanduser()
        file = named / RESULTS_FILE if named.is_dir() else named
        if not file.is_file():
            raise MasslError(f"--results {folder}: no {RESULTS_FILE} there; name the --output of a massl evaluate")
        files.append(file)
    rows: list[ResultRow] = []
    remarks: list[str] = []
    for file in dict.fromkeys(Path(os.path.realpath(path)) for path in files):
        try:
            rows += read_rows(file, warn=remarks.append)
        except EvaluationError as error:
            remarks.append(str(error))
    return newest(rows), remarks


def packaged_recipes(runs: Sequence[Run]) -> dict[str, PackagedRecipe]:
    """Label of a run -> the packaged recipe that its command names, or else the most similar one."""
    found = {}
    for run in runs:
        named = _named_recipe(run.environment)
        own = _flat_recipe(run.folder / "recipe.yaml") or run.settings
        packaged = {
            name: _flat_recipe(name, {"method.name": run.method})
            for name in (shipped_recipes() if named is None else [named])
        }
        changes = {name: changes_between(values, own) for name, values in packaged.items() if values}
        if changes:
            nearest = min(changes, key=lambda name: len(changes[name]))
            found[run.label] = PackagedRecipe(name=nearest, is_named=named is not None, changes=changes[nearest])
    return found


def _flat_recipe(recipe: str | Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Dotted key -> value, with today's defaults; empty if this version cannot read it or has no such method."""
    try:
        return flatten(load_recipe(recipe, overrides))
    except MasslError:
        return {}


def _named_recipe(environment: Mapping[str, Any]) -> str | None:
    """The packaged recipe after --recipe in the command that started a run."""
    command = environment.get("first_command") or environment.get("command")
    words = [word for given in (command if isinstance(command, list) else []) for word in str(given).split("=", 1)]
    names = [name for option, name in itertools.pairwise(words) if option == "--recipe"]
    return names[-1] if names and names[-1] in shipped_recipes() else None
