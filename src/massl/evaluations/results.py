"""results.jsonl: every measured number with its origin. Rows are only appended; the newest of its kind counts."""

import fcntl
import io
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, PlainValidator, TypeAdapter, ValidationError

from massl.config import explain
from massl.evaluations.measurement import EvaluationError, Setting
from massl.files import make_folder, open_in_place, read_limited
from massl.json_lines import MAX_LOG_BYTES, MOST_DAMAGED, JsonLine, in_words, parse_json_lines, rejected_file, set_aside
from massl.version import version as version_of_massl

RESULTS_FILE = "results.jsonl"


def _setting(value: object) -> Setting:
    if not isinstance(value, str):
        raise ValueError("expected text")
    return Setting.parse(value)


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One number and its origin. Raises for a value that is not finite."""

    protocol: str
    data: str
    setting: Annotated[Setting, PlainValidator(_setting)]  # text in the file
    metric: str
    value: float  # accuracies and scores in percent
    num_samples: int  # test images or queries
    seconds: float  # duration of the measurement
    weights: str  # fingerprint of the model's weights
    model: str  # as the user named it
    architecture: str
    precision: str
    run: str  # digest of settings, data and weights: equal for the same measurement
    train: str  # the training images, as the user named them; "" for none
    images: str  # digest of names, sizes and samples of all images, which tells data sets of the same name apart
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))  # UTC, ISO 8601
    version: str = field(default_factory=version_of_massl)  # of massl

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    def __post_init__(self) -> None:
        where = f"{self.protocol} on {self.data}, {self.setting}, {self.metric}"
        for name, number in (("value", self.value), ("seconds", self.seconds)):
            if not math.isfinite(number):
                raise EvaluationError(f"{where}: the {name} is {number}; were the features finite?")
        try:
            offset = datetime.fromisoformat(self.created).utcoffset()
        except ValueError:
            offset = None
        if offset != timedelta(0):
            expected = "expected a time in UTC such as 2024-07-21T12:00:00+00:00"
            raise EvaluationError(f"{where}: created is {self.created!r}; {expected}")


_ROW = TypeAdapter(ResultRow)


def require_own_files(path: Path) -> None:
    """Raise if `append_rows` would refuse this file: a link may lead to any file of the user."""
    for file in (path, rejected_file(path)):
        if file.is_symlink():
            raise EvaluationError(
                f"{file} is a link, and results are not written through links; remove it or name another folder"
            )


def append_rows(path: Path, rows: Sequence[ResultRow]) -> None:
    """Append rows in one write: all or, after an error, none. Half a last line, left by a crash, is set aside first."""
    if not rows:
        return
    added = "".join(json.dumps({**vars(row), "setting": str(row.setting)}) + "\n" for row in rows).encode()
    try:
        make_folder(path.parent)
        with open_in_place(path, os.O_APPEND) as opened, io.FileIO(opened.fileno(), "a+", closefd=False) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # two evaluations may share a file; released on close
            end = _mend(file, path)
            try:
                _write(file, added)
            except BaseException:
                file.truncate(end)
                raise
    except OSError as error:
        raise EvaluationError(f"cannot write results to {path}: {error}; make room or name another folder") from error


def read_rows(path: Path, *, warn: Callable[[str], None] = warnings.warn) -> list[ResultRow]:
    """All rows in file order; none if there is no file.

    `warn` is told of lines that are no results. The file stays as it is; half a last line, left by a crash, is no row.
    """
    try:
        content = read_limited(path, max_bytes=MAX_LOG_BYTES, waits_for_writer=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise EvaluationError(f"cannot read the results in {path}: {error}; name another folder") from error
    rows: list[ResultRow] = []
    damaged: list[tuple[int, str]] = []
    for line in parse_json_lines(content):
        row = _parsed(line)
        if isinstance(row, ResultRow):
            rows.append(row)
        elif line.is_ended:
            damaged.append((line.number, f"is no result of massl ({row})"))
            if len(damaged) > MOST_DAMAGED:
                raise EvaluationError(f"{path}: more than {MOST_DAMAGED:,} lines are no results; name another folder")
    if damaged:
        warn(f"{in_words(path, damaged)}: left out; correct or delete it in {path}")
    return rows


def newest(rows: Iterable[ResultRow]) -> list[ResultRow]:
    """For each measurement of the same weights, images and precision the last row, at the place of the first.

    Rows are only appended, so their order decides: a clock may have been wrong.
    """
    latest: dict[tuple[str | Setting, ...], ResultRow] = {}
    for row in rows:
        key = (row.protocol, row.data, row.setting, row.metric, row.weights, row.precision, row.images)
        latest[key] = row
    return list(latest.values())


def _parsed(line: JsonLine) -> ResultRow | str:
    """The row, or why the line is none."""
    if line.row is None:
        return f"it {line.problem}"
    missing = [entry.name for entry in fields(ResultRow) if entry.name not in line.row]
    if missing:  # also fields with defaults: a row without time was not made now
        return f"it lacks {', '.join(missing)}"
    try:
        return _ROW.validate_json(line.content)
    except ValidationError as error:
        return explain(error)


def _mend(file: io.FileIO, path: Path) -> int:
    """Complete the last line; if it is no whole row, move it to results.rejected.jsonl. Returns the size."""
    file.seek(0)
    content = file.read()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        lines = list(parse_json_lines(content[end:]))
        if lines and isinstance(_parsed(lines[0]), ResultRow):
            _write(file, b"\n")
            end = len(content) + 1
        else:
            set_aside(path, [content[end:]])
            file.truncate(end)
    return end


def _write(file: io.FileIO, content: bytes) -> None:
    num_written = file.write(content)
    if num_written != len(content):
        raise OSError(f"only {num_written} of {len(content)} bytes could be written")
    os.fsync(file.fileno())
