"""The one reader of files with a JSON object on each line: damaged lines are returned too, with the reason."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_BOM = b"\xef\xbb\xbf"


class JsonLine(NamedTuple):
    number: int  # counted from 1
    content: bytes  # without its line break
    row: dict[str, Any] | None  # None: not a JSON object
    problem: str  # "" for a row; otherwise what the line is: "is not JSON (...)"
    is_ended: bool  # False: the last line has no line break, so it may be half written


def parse_json_lines(content: bytes) -> list[JsonLine]:
    """Every line that is not blank. Nothing is raised, whatever the bytes."""
    *ended, last = content.removeprefix(_BOM).split(b"\n")
    lines = [(line, True) for line in ended] + [(last, False)]
    return [
        JsonLine(number, line, *_parsed(line), is_ended)
        for number, (line, is_ended) in enumerate(lines, start=1)
        if line.strip()
    ]


def read_json_lines(path: Path) -> list[JsonLine]:
    """The lines of a file; none if there is no file. An OSError for what is not a readable file."""
    try:
        return parse_json_lines(path.read_bytes())
    except FileNotFoundError:
        return []


def rejected_file(path: Path) -> Path:
    """Where damaged lines of a file are kept: metrics.jsonl -> metrics.rejected.jsonl."""
    return path.with_name(f"{path.stem}.rejected{path.suffix}")


def set_aside(path: Path, lines: Iterable[bytes]) -> None:
    """Append damaged lines of `path` to `rejected_file(path)`, byte for byte, before they are removed from `path`."""
    content = b"".join(line + b"\n" for line in lines)
    if content:
        with rejected_file(path).open("ab") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def in_words(path: Path, damaged: Sequence[tuple[int, str]], *, most: int = 3) -> str:
    """ "line 3 of metrics.jsonl is not JSON (...); line 5 ...", for a warning."""
    shown = [f"line {number} of {path.name} {problem}" for number, problem in damaged[:most]]
    return "; ".join([*shown, *([f"{len(damaged) - most:,} more lines"] if len(damaged) > most else [])])


def _parsed(line: bytes) -> tuple[dict[str, Any] | None, str]:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        return None, "is not UTF-8 text"
    except (ValueError, RecursionError) as error:  # RecursionError: nested thousands of levels deep
        return None, f"is not JSON ({str(error)[:100]})"
    return (row, "") if isinstance(row, dict) else (None, "is not a JSON object")
