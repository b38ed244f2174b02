"""Walks a tree of folders and links of unknown origin: every walk ends, and what is left out is said."""

import errno
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from massl.data.sources.base import DataError

MAX_DEPTH: Final = 255  # folders inside each other
# How often links may lead to the same folder. Without a limit 30 folders with two links each are a tree of 10^9.
MAX_VISITS: Final = 8


class FolderWalk:
    """The folders below `root`, depth first, each with its files; links are followed, but not back to a parent.

    Neither FIFOs and devices nor links to them are files. `remarks` says what was left out.
    """

    def __init__(self, root: Path, *, skip_hidden: bool) -> None:
        self._root = root
        self._skip_hidden = skip_hidden
        self._left_out: Counter[str] = Counter()

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
            if identity in ancestors:  # a link to one of its own parent folders
                continue
            visits[identity] += 1
            if visits[identity] > MAX_VISITS:
                self._left_out[f"links to a folder that {MAX_VISITS} others lead to"] += 1
                continue
            are_folders = [is_folder(entry) for entry in entries]
            yield relative, [entry for entry, is_one in zip(entries, are_folders, strict=True) if not is_one]
            names = sorted(entry.name for entry, is_one in zip(entries, are_folders, strict=True) if is_one)
            if names and len(ancestors) + 1 > MAX_DEPTH:
                self._left_out[f"folders nested more than {MAX_DEPTH} deep"] += len(names)
                continue
            below = [f"{relative}/{name}" if relative else name for name in names]
            waiting += [(path, (*ancestors, identity)) for path in reversed(below)]

    @property
    def remarks(self) -> list[str]:
        """Complete once the walk has ended."""
        return [f"left out {num:,} {what}" for what, num in sorted(self._left_out.items())]

    def _entries(self, relative: str) -> tuple[tuple[int, int], list[os.DirEntry[str]]] | None:
        path = self._root / relative
        try:
            status = path.stat()
            with os.scandir(path) as entries:
                found = [entry for entry in entries if not (self._skip_hidden and entry.name.startswith("."))]
        except OSError as error:
            if relative and error.errno == errno.ENAMETOOLONG:
                self._left_out["folders whose path is too long for this system"] += 1
                return None
            raise DataError(f"{path} cannot be listed: {error.strerror}") from None
        return (status.st_dev, status.st_ino), found


def is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link to itself
        return False


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
