"""Reading and writing files of unknown origin.

The one atomic write: readers see the old file or the new one, never half of one. Reads are limited and never wait for
a FIFO; what is appended to or locked is a file in its place, not a link to another.
"""

import contextlib
import errno
import fcntl
import os
import platform
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_LOST = (errno.EIO, errno.ENOSPC, errno.EDQUOT)  # the disk did not store it; other errors: it cannot flush folders
_SECONDS_OF_NO_WRITER = 3600.0  # a leftover unchanged for so long belongs to no running process


def _partial(path: Path) -> Path:
    # Host, process and thread in the name: two evaluations may write the same file. Cut short: names end at 255 bytes.
    name, writer = os.fsdecode(os.fsencode(path.name)[:60]), f"{os.getpid()}-{threading.get_ident():x}"
    return path.with_name(f".{name}.{platform.node()[:40]}-{writer}.partial")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`. On success it is flushed to disk and renamed; on an error it is removed."""
    partial = _partial(path)
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


@contextlib.contextmanager
def making_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder beside `path`. On success its files are flushed and it gets its name; on an error it goes.

    An existing file or folder that is not empty is an OSError.
    """
    partial = _partial(path)
    partial.mkdir()
    try:
        yield partial
        for file in partial.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _flush_folder(path.parent)


def write_atomically(path: Path, content: bytes | str) -> None:
    with replacing(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def read_limited(path: Path, *, max_bytes: int, waits_for_writer: bool = False) -> bytes:
    """The bytes of a file; an OSError if it is larger, or no file but a FIFO or a device.

    `waits_for_writer`: until no process holds its lock (flock).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        size = _size_of_file(descriptor)
        if waits_for_writer:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            size = _size_of_file(descriptor)
        if size > max_bytes:
            too_large = f"{size / 2**20:,.0f} MiB are more than the {max_bytes / 2**20:,.0f} allowed"
            raise OSError(errno.EFBIG, too_large, str(path))
        return file.readall()


def open_in_place(path: Path, flags: int) -> BinaryIO:
    """Open a file for writing by flags such as os.O_APPEND, created if missing; an OSError if it is a link or no file.

    A run folder of a stranger could hold a link to one of the user's own files.
    """
    flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        _size_of_file(descriptor)
        return os.fdopen(descriptor, "ab+" if flags & os.O_APPEND else "rb+")
    except BaseException:
        os.close(descriptor)
        raise


def _size_of_file(descriptor: int) -> int:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a file")
    return status.st_size


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
