"""Walks a tree of folders and links of unknown origin: every walk ends, and what is left out is said."""

import errno
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from massl.data.sources.base import DataError

MAX_DEPTH: Final = 255  # folders inside each other
# How often links may lead to the same folder. Without a limit 30 folders with two links each are a tree of 10^9.
MAX_VISITS: Final = 8
NOWHERE: Final = "links that lead nowhere"
_NUM_SHOWN: Final = 3  # names of what was left out


class LeftOut:
    """Counts what a listing leaves out, by kind, and keeps the first few names."""

    def __init__(self) -> None:
        self.num: Counter[str] = Counter()
        self._names: dict[str, list[str]] = {}

    def add(self, what: str, names: list[str]) -> None:
        self.num[what] += len(names)
        shown = self._names.setdefault(what, [])
        shown += names[: _NUM_SHOWN - len(shown)]

    def described(self) -> list[str]:
        """Such as "3 links that lead nowhere (a.jpg, b.jpg, c.jpg)"."""
        return [f"{num:,} {what} ({self._shown(what)})" for what, num in sorted(self.num.items())]

    def _shown(self, what: str) -> str:
        return ", ".join(self._names[what]) + (", ..." if self.num[what] > _NUM_SHOWN else "")


class FolderWalk:
    """The folders below `root`, depth first, each with its files; links are followed, but not back to a parent.

    Neither FIFOs and devices nor links to them are files. `left_out` is complete once the walk has ended.
    """

    def __init__(self, root: Path, *, skip_hidden: bool) -> None:
        self._root = root
        self._skip_hidden = skip_hidden
        self.left_out = LeftOut()

    def __iter__(self) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
        """(path relative to the root, entries that are no folders); sub-folders come in alphabetical order."""
        visits: Counter[tuple[int, int]] = Counter()
        waiting: list[tuple[str, tuple[tuple[int, int], ...]]] = [("", ())]
        while waiting:
            relative, ancestors = waiting.pop()
            found = self._entries(relative)
            if found is None:
                continue
            identity, entries = found
            if identity in ancestors:
                self.left_out.add("links back to a parent folder", [relative])
                continue
            visits[identity] += 1
            if visits[identity] > MAX_VISITS:
                self.left_out.add(f"links to a folder that {MAX_VISITS} others lead to", [relative])
                continue
            are_folders = [is_folder(entry) for entry in entries]
            yield relative, [entry for entry, is_one in zip(entries, are_folders, strict=True) if not is_one]
            names = sorted(entry.name for entry, is_one in zip(entries, are_folders, strict=True) if is_one)
            if names and len(ancestors) + 1 > MAX_DEPTH:
                self.left_out.add(f"folders nested more than {MAX_DEPTH} deep", names)
                continue
            below = [f"{relative}/{name}" if relative else name for name in names]
            waiting += [(path, (*ancestors, identity)) for path in reversed(below)]

    def _entries(self, relative: str) -> tuple[tuple[int, int], list[os.DirEntry[str]]] | None:
        path = self._root / relative
        try:
            status = path.stat()
            with os.scandir(path) as entries:
                found = [entry for entry in entries if not (self._skip_hidden and entry.name.startswith("."))]
        except OSError as error:
            if relative and error.errno == errno.ENAMETOOLONG:
                self.left_out.add("folders whose path is too long for this system", [Path(relative).name])
                return None
            raise DataError(f"{path} cannot be listed: {error.strerror}") from None
        return (status.st_dev, status.st_ino), found


def is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link to itself
        return False


def why_no_file(entry: os.DirEntry[str]) -> str:
    """What an entry that is neither a file nor a folder is, in the plural."""
    try:
        entry.stat()
    except OSError:  # a link to itself, to nothing, or into a folder without permission
        return NOWHERE
    return "FIFOs and devices"


def names_outside(entries: Iterable[os.DirEntry[str]], folder: Path, root: Path) -> list[str]:
    """Names of those files of a folder that lie outside of `root` or are links to there, sorted; `root` is no link."""
    place = Path(os.path.realpath(folder))
    is_outside = not place.is_relative_to(root)
    return sorted(
        entry.name
        for entry in entries
        if (not _target(entry, place).is_relative_to(root) if entry.is_symlink() else is_outside)
    )


def _target(link: os.DirEntry[str], folder: Path) -> Path:
    return Path(os.path.normpath(folder / Path(link.path).readlink()))


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def files_below(folder: Path) -> Iterator[str]:
    """All files relative to the folder, in an order independent of the file system."""
    names = [
        f"{relative}/{entry.name}" if relative else entry.name
        for relative, entries in FolderWalk(folder, skip_hidden=False)
        for entry in entries
        if is_file(entry)
    ]
    yield from sorted(names, key=lambda name: name.split("/"))
