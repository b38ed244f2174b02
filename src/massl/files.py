"""The one atomic file write: readers see the old file or the new one, never half of one."""

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`. On success it is flushed to disk and renamed; on an error it is removed."""
    # Host and process in the name: two evaluations may write the same file. Cut short: names end at 255 bytes.
    partial = path.with_name(f".{path.name[:60]}.{platform.node()[:40]}-{os.getpid()}.partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_atomically(path: Path, content: bytes | str) -> None:
    with replacing(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def is_leftover(path: Path) -> bool:
    """Whether a killed process left this file behind in `replacing`."""
    return path.name.startswith(".") and path.name.endswith(".partial")
