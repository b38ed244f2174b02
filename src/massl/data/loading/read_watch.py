"""Names the file of a read that does not return: a disk or network drive may be gone."""

import sys
import time
from contextlib import suppress
from threading import Lock, Thread, current_thread, get_ident

from massl.data.sources.base import ImageSource
from massl.failures import printable

_WARN_SECONDS = 60.0
_reading: dict[int, tuple[float, ImageSource, int]] = {}  # thread -> since when it reads which image
_watcher: Thread | None = None
_lock = Lock()


def begin(source: ImageSource, index: int) -> None:
    """This thread begins to read an image."""
    _reading[get_ident()] = time.monotonic(), source, index
    if _watcher is None:
        _start()


def end() -> None:
    """It has been read, or refused."""
    _reading.pop(get_ident(), None)


def _start() -> None:
    global _watcher
    with _lock:
        if _watcher is None:
            _watcher = Thread(target=_watch, name="read-watch", daemon=True)
            _watcher.start()


def _watch() -> None:
    told: set[tuple[int, float]] = set()  # reads, by thread and start
    while _watcher is current_thread():
        time.sleep(_WARN_SECONDS / 4)
        now, reading = time.monotonic(), dict(_reading)
        told &= {(thread, since) for thread, (since, _, _) in reading.items()}
        for thread, (since, source, index) in reading.items():
            if now - since >= _WARN_SECONDS and (thread, since) not in told:
                told.add((thread, since))
                _tell(source, index, seconds=now - since)


def _tell(source: ImageSource, index: int, *, seconds: float) -> None:
    with suppress(OSError, ValueError):  # standard error may be gone or closed; the read goes on
        print(
            f"warning: has been reading {printable(source.key_of(index))} of {printable(source.name)} for "
            f"{seconds:.0f} s and still waits. Is the disk or network drive there? Ctrl-C stops.",
            file=sys.stderr,
            flush=True,
        )
