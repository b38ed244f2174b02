"""The file of a report, and the run folders of a comparison that may be named for it."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from massl.commands.console import require_writable
from massl.config import MasslError
from massl.files import write_atomically

_PAGE_BEGINS = b"<!doctype html"


def require_page_file(file: Path) -> None:
    """Refuse what cannot be written, or is there and no page, before the work is done."""
    if _is_folder(file):
        raise MasslError(f"{file} is a folder; name a file with --output, e.g. {file / 'report.html'}")
    require_writable(file.absolute().parent)
    try:
        begins = _beginning(file)
        (probe := file.with_name(f".massl-report-{os.getpid()}")).touch()  # only a try tells whether it can be written
        probe.unlink()
    except OSError as error:
        raise _cannot_write(file, error) from None
    if begins not in (b"", _PAGE_BEGINS):
        raise MasslError(
            f"{file} is there and no HTML page, so it is not replaced; name another file with --output, or remove it first"
        )


def _is_folder(file: Path) -> bool:
    try:
        return file.is_dir()
    except OSError as error:  # such as a name that is too long
        raise _cannot_write(file, error) from None


def _beginning(file: Path) -> bytes:
    """Of a file that is there, in lower case; empty where there is none."""
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        return b""
    if not stat.S_ISREG(mode):
        raise MasslError(f"{file} is no plain file; name another with --output")
    with file.open("rb") as opened:
        return opened.read(len(_PAGE_BEGINS)).lower()


def write_page(file: Path, page: bytes) -> None:
    try:
        write_atomically(file, page)
    except OSError as error:
        raise _cannot_write(file, error) from None


def _cannot_write(file: Path, error: OSError) -> MasslError:
    return MasslError(f"cannot write {file} ({error.strerror}); name another place with --output")


def runs_of_comparison(folder: Path) -> list[Path]:
    """The runs in the --output of a massl compare, in its order; any other folder as it is."""
    file = folder / "comparison.json"
    if (folder / "recipe.yaml").exists() or not file.is_file():
        return [folder]
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
        names = [_name(run) for run in plain["runs"]] + [str(name) for name in plain["failed"]]
    except (ValueError, TypeError, KeyError):
        raise MasslError(f"{file} is not what massl compare writes; name the run folders themselves") from None
    runs = [folder / name for name in dict.fromkeys(names) if (folder / name / "recipe.yaml").is_file()]
    if not runs:
        raise MasslError(
            f"{folder} holds a comparison but none of its runs; name the run folders themselves: {', '.join(names)}"
        )
    return runs


def _name(run: dict[str, Any]) -> str:
    return Path(run["folder"]).name
