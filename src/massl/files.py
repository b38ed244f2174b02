"""The one atomic file write: readers see the old file or the new one, never half of one."""

import contextlib
import errno
import os
import platform
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_LOST = (errno.EIO, errno.ENOSPC, errno.EDQUOT)  # the disk did not store it; other errors: it cannot flush folders
_SECONDS_OF_NO_WRITER = 3600.0  # a leftover unchanged for so long belongs to no running process


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`. On success it is flushed to disk and renamed; on an error it is removed."""
    # Host, process and thread in the name: two evaluations may write the same file. Cut short: names end at 255 bytes.
    name, writer = os.fsdecode(os.fsencode(path.name)[:60]), f"{os.getpid()}-{threading.get_ident():x}"
    partial = path.with_name(f".{name}.{platform.node()[:40]}-{writer}.partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    _flush_folder(path.parent)


def write_atomically(path: Path, content: bytes | str) -> None:
    with replacing(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, so that they outlast a power failure."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    path.mkdir(exist_ok=True)
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    """Flush the names in a folder: without this, a power failure after a rename may bring the old file back."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in _LOST:
            raise


def is_leftover(path: Path) -> bool:
    """Whether a killed process left this file behind in `replacing`."""
    return path.name.startswith(".") and path.name.endswith(".partial")


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left in a folder that several may write to at the same time."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another process removes it, too
            if is_leftover(path) and time.time() - path.stat().st_mtime > _SECONDS_OF_NO_WRITER:
                path.unlink()
