"""The readers of JSON files, which may be damaged or a stranger's.

Of a file with a JSON object on each line, damaged lines are returned too, with the reason. Reading writes nothing.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from massl.files import open_in_place, read_limited

MAX_LOG_BYTES = 256 * 2**20  # half a million rows of 500 bytes
MOST_DAMAGED = 100_000  # a file with more such lines is no log of massl
_MAX_LINE_BYTES = 2**20
_MAX_FILE_BYTES = 16 * 2**20
_BOM = b"\xef\xbb\xbf"


class JsonLine(NamedTuple):
    number: int  # counted from 1
    content: bytes  # without its line break
    row: dict[str, Any] | None  # None: not a JSON object
    problem: str  # "" for a row; otherwise what the line is: "is not JSON (...)"
    is_ended: bool  # False: the last line has no line break, so it may be half written


def parse_json_lines(content: bytes) -> Iterator[JsonLine]:
    """Every line that is not blank, one at a time. Nothing is raised, whatever the bytes."""
    content = content.removeprefix(_BOM)
    number, end = 1, 0
    for found in re.finditer(rb"[^\n]+", content):
        number += content.count(b"\n", end, found.start())
        line, end = found.group(), found.end()
        if line.strip():
            yield JsonLine(number, line, *_parsed(line), is_ended=end < len(content))


def read_json_lines(path: Path, *, max_bytes: int = MAX_LOG_BYTES) -> Iterator[JsonLine]:
    """The lines of a file; none if there is no file. An OSError at once for what is too large or no readable file."""
    try:
        return parse_json_lines(read_limited(path, max_bytes=max_bytes))
    except FileNotFoundError:
        return iter(())


def read_json(path: Path) -> Any:
    """The content of a small JSON file; an OSError or a ValueError if there is none."""
    try:
        return json.loads(read_limited(path, max_bytes=_MAX_FILE_BYTES).decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("nested too deep") from None


def rejected_file(path: Path) -> Path:
    """Where damaged lines of a file are kept: metrics.jsonl -> metrics.rejected.jsonl."""
    return path.with_name(f"{path.stem}.rejected{path.suffix}")


def set_aside(path: Path, lines: Iterable[bytes]) -> None:
    """Append damaged lines of `path` to `rejected_file(path)`, byte for byte, before they are removed from `path`."""
    content = b"".join(line + b"\n" for line in lines)
    if content:
        with open_in_place(rejected_file(path), os.O_APPEND) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def in_words(path: Path, damaged: Sequence[tuple[int, str]], *, most: int = 3) -> str:
    """ "line 3 of metrics.jsonl is not JSON (...); line 5 ...", for a warning."""
    shown = [f"line {number} of {path.name} {problem}" for number, problem in damaged[:most]]
    return "; ".join([*shown, *([f"{len(damaged) - most:,} more lines"] if len(damaged) > most else [])])


def _parsed(line: bytes) -> tuple[dict[str, Any] | None, str]:
    if len(line) > _MAX_LINE_BYTES:
        return None, f"is longer than {_MAX_LINE_BYTES:,} bytes"
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        return None, "is not UTF-8 text"
    except (ValueError, RecursionError) as error:  # RecursionError: nested thousands of levels deep
        return None, f"is not JSON ({str(error)[:100]})"
    return (row, "") if isinstance(row, dict) else (None, "is not a JSON object")
