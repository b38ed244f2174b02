"""How each run was made: commands, machine, versions, recipe, and how that differs from the packaged one."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from massl.reports.page.tables import Cell, Line, PageTable, table_markup
from massl.reports.page.templates import Section, rendered
from massl.reports.runs import Run


@dataclass(frozen=True, kw_only=True)
class PackagedRecipe:
    """A recipe that comes with massl, to compare a run's with."""

    name: str
    is_named: bool  # whether the run's command names it; otherwise it is the most similar
    changes: Mapping[str, tuple[Any, Any]]  # dotted key -> its value and the run's, where they differ


def changes_between(packaged: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> the packaged value and the run's; a recipe without the key has None."""
    keys = dict.fromkeys([*packaged, *own])
    return {key: (packaged.get(key), own.get(key)) for key in keys if packaged.get(key) != own.get(key)}


def reproduction_section(runs: Sequence[Run], packaged: Mapping[str, PackagedRecipe], *, command: str) -> Section:
    """`packaged`: label of a run -> the recipe to compare it with; `command` makes the page again."""
    parts = [
        {
            "label": run.label,
            "facts": _facts(run),
            "commands": commands_of(run),
            "recipe": run.recipe,
            "plan": run.plan,
            "packaged": packaged.get(run.label),
            "differences": _differences(packaged.get(run.label)),
        }
        for run in runs
    ]
    values = {"parts": parts, "command": command, "names_runs": len(runs) > 1}
    return Section(id="reproduction", title="Reproduction", html=rendered("reproduction.html.j2", values))


def commands_of(run: Run) -> list[tuple[str, str]]:
    """Description and command: as it was given, and one that needs only the run's folder."""
    found = [("The same recipe into a new folder", shlex.join(run.command_again))]
    given = run.environment.get("first_command") or run.environment.get("command")
    if isinstance(given, list) and given:
        program, *arguments = map(str, given)
        name = PurePath(program).name
        words = [*run.launcher, *arguments] if name in ("massl", "__main__.py") else ["python", name, *arguments]
        found.insert(0, ("As it was started", shlex.join(words)))
    return found


def _facts(run: Run) -> list[tuple[str, str]]:
    """What environment.json says, in words."""
    environment = run.environment
    packages = environment.get("packages")
    versions = packages.items() if isinstance(packages, Mapping) else ()
    facts = {
        "Device": f"{run.num_processes} × {run.device}",
        "CUDA": environment.get("cuda"),
        "CPU threads": environment.get("num_cpu_threads"),
        "Platform": environment.get("platform"),
        "Python": environment.get("python"),
        "Packages": ", ".join(f"{name} {version}" for name, version in versions if version),
        "Commit of massl": environment.get("massl_commit"),
        "Images": run.settings["data.source"],
        "Folder": str(run.folder),
    }
    return [(what, str(value)) for what, value in facts.items() if value not in (None, "")]


def _differences(packaged: PackagedRecipe | None) -> str:
    """A table of the changes, "" without any."""
    if packaged is None or not packaged.changes:
        return ""
    lines = []
    for key, values in packaged.changes.items():
        texts = ["not set" if value is None else "empty" if value == "" else str(value) for value in values]
        lines.append(Line(cells=tuple(Cell(text=text) for text in (key, *texts))))
    return table_markup(PageTable(columns=("setting", packaged.name, "this run"), lines=tuple(lines)))
