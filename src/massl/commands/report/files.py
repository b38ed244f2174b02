"""The file that a report is written to, and the run folders of a comparison."""

import os
from pathlib import Path

from massl.commands.console import require_writable
from massl.config import MasslError
from massl.files import write_atomically
from massl.json_lines import read_json

_PAGE_BEGINS = b"<!doctype html"


def require_page_file(file: Path) -> None:
    """Raise before the work starts if the page cannot be written, or would replace something that is no page."""
    try:
        if file.is_dir():
            raise MasslError(f"{file} is a folder; name a file with --output, e.g. {file / 'report.html'}")
        require_writable(file.absolute().parent)
        if file.exists() and not file.is_file():
            raise MasslError(f"{file} is not a regular file; choose another --output")
        if file.exists() and not _begins_like_a_page(file):
            raise MasslError(f"{file} exists and is no HTML page; choose another --output, or remove it first")
        (probe := file.with_name(f".massl-report-{os.getpid()}")).touch()  # only a try tells whether it can be written
        probe.unlink()
    except OSError as error:
        raise _cannot_write(file, error) from None


def _begins_like_a_page(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(_PAGE_BEGINS)).lower() in (b"", _PAGE_BEGINS)


def write_page(file: Path, page: bytes) -> None:
    try:
        write_atomically(file, page)
    except OSError as error:
        raise _cannot_write(file, error) from None


def _cannot_write(file: Path, error: OSError) -> MasslError:
    return MasslError(f"cannot write {file} ({error.strerror}); choose another --output")


def runs_of_comparison(folder: Path) -> list[Path]:
    """The runs in the --output of a massl compare, in its order; any other folder as it is."""
    file = folder / "comparison.json"
    if (folder / "recipe.yaml").exists() or not file.is_file():
        return [folder]
    try:
        plain = read_json(file)
        names = [Path(name).name for name in (*(run["folder"] for run in plain["runs"]), *plain["failed"])]
        runs = [folder / name for name in dict.fromkeys(names) if (folder / name / "recipe.yaml").is_file()]
    except (OSError, ValueError, TypeError, KeyError):
        raise MasslError(f"{file} is not what massl compare writes; name the run folders themselves") from None
    if not runs:
        raise MasslError(f"{folder}: the runs of this comparison are gone; name their folders: {', '.join(names[:20])}")
    return runs
