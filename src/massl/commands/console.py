"""What commands print: plain lines, tables, and the command that repeats a result."""

import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from massl.config import MasslError, Settings
from massl.failures import printable
from massl.reports.tables import ResultsTable

_FILE_WIDTH = 160  # columns of a table that is piped to a file
_NAME_WIDTH = 10  # characters of a text column below which the table is split
_SEPARATOR = 2  # characters between columns
_SECONDS_BETWEEN_LINES = 60.0  # of progress where there is no bar


def message_console(*, quiet: bool = False) -> Console:
    """Standard error: progress and remarks."""
    return Console(stderr=True, quiet=quiet, highlight=False)


def result_console() -> Console:
    """Standard output: the result itself."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


def print_line(console: Console, text: str, *, style: str | None = None) -> None:
    """Print text as it is: rich neither wraps it nor reads [brackets] and :colons: in it, no name moves the cursor."""
    console.print(printable(text), style=style, markup=False, emoji=False, soft_wrap=True)


@contextmanager
def working(console: Console, text: str) -> Iterator[None]:
    """Say what is done while inside: a moving line with the time on a terminal, elsewhere a plain line."""
    if not console.is_terminal or console.quiet:
        print_line(console, text)
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        shown.add_task(text)
        yield


@contextmanager
def progress_on(console: Console) -> Iterator[Callable[[str, int, int], None]]:  # what, done, total
    """A progress bar on a terminal; elsewhere one line a minute."""
    description = TextColumn("{task.description}", markup=False)  # names of files may look like markup
    columns = (BarColumn(bar_width=30), MofNCompleteColumn(), description, TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    tasks: dict[str, TaskID] = {}
    last_line = time.monotonic()

    def show(what: str, done: int, total: int) -> None:
        nonlocal last_line
        if not console.is_terminal and time.monotonic() - last_line > _SECONDS_BETWEEN_LINES:
            last_line = time.monotonic()
            print_line(console, f"{what}: {min(done, total):,} of {total:,}")
        if what not in tasks:
            for task in tasks.values():
                bar.update(task, visible=False)
            tasks[what] = bar.add_task(what, total=total)
        bar.update(tasks[what], completed=min(done, total), total=total, visible=done < total)

    with bar:
        yield show


def print_table(console: Console, table: ResultsTable) -> None:
    """Print a table. Long words are folded, numbers never; numbers that do not fit follow in a second table."""
    for part in _parts(table, console.width):
        console.print(_as_rich(part), "", sep="\n")


def _parts(table: ResultsTable, width: int) -> list[ResultsTable]:
    """Tables that leave room for names: all text columns, and as many of the numbers as fit."""
    needed = {
        column: _SEPARATOR + max(map(len, [*column.split(), *(line[at] for line in table.lines)]), default=0)
        for at, column in enumerate(table.columns)
    }
    names = [column for column in table.columns if column in table.text_columns]
    room = width - sum(min(needed[column], _SEPARATOR + _NAME_WIDTH) for column in names)
    parts: list[list[str]] = [[]]
    for column in table.columns:
        if column not in names:
            if parts[-1] and sum(needed[other] for other in [*parts[-1], column]) > room + _SEPARATOR:
                parts.append([])
            parts[-1].append(column)
    if len(parts) == 1:
        return [table]
    return [_only(table, {*names, *numbers}, title=table.title if numbers is parts[0] else "") for numbers in parts]


def _only(table: ResultsTable, columns: set[str], *, title: str) -> ResultsTable:
    chosen = [at for at, column in enumerate(table.columns) if column in columns]
    lines = tuple(tuple(line[at] for at in chosen) for line in table.lines)
    return replace(table, title=title, columns=tuple(table.columns[at] for at in chosen), lines=lines)


def _as_rich(table: ResultsTable) -> Table:
    shown = Table(
        title=Text(table.title) if table.title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
    )
    for column in table.columns:
        if column in table.text_columns:
            shown.add_column(column, overflow="fold")
        else:
            shown.add_column(Text(column.replace(" ", "\n")), justify="right", no_wrap=True)
    groups = [line[table.columns.index(table.group_by)] if table.group_by else "" for line in table.lines]
    for line, group, following in zip(table.lines, groups, [*groups[1:], *groups[-1:]], strict=True):
        shown.add_row(*(Text(cell) for cell in line), end_section=group != following)
    return shown


def require_writable(folder: Path, *, option: str = "output") -> None:
    """Make the folder. Raise before the work starts if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MasslError(f"cannot make the folder {folder} ({error.strerror}); choose another --{option}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise MasslError(f"cannot write to {folder}; change its permissions or choose another --{option}")


def command_text(command: str, settings: Settings, *, positional: Iterable[str] = (), has_flags: bool = False) -> str:
    """The command line that gives these settings; options at their default are left out.

    `has_flags`: as in `arguments.parse`, --no-figures instead of --figures False.
    """
    words = ["massl", command]
    for key, value in _changed_options(settings):
        if key in positional:
            words += as_words(value)
    for key, value in _changed_options(settings):
        if has_flags and isinstance(value, bool):
            words += [f"--{key}" if value else f"--no-{key}"]
        elif key not in positional:
            words += ["--data" if key == "data.source" else f"--{key}", *as_words(value)]
    return shlex.join(words)


def _changed_options(settings: Settings, prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, field in type(settings).model_fields.items():
        value, default = getattr(settings, name), field.get_default(call_default_factory=True)
        if isinstance(value, Settings):
            yield from _changed_options(value, f"{prefix}{name}.")
        elif default is PydanticUndefined or value != default:
            yield prefix + name, value


def as_words(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [word for key, item in value.items() for word in (str(key), *as_words(item))]
    return [str(item) for item in value] if isinstance(value, tuple | list) else [str(value)]
