"""results.jsonl: every number that was measured, with what made it. Rows are only ever added; the newest of its kind
counts.
"""

import contextlib
import fcntl
import io
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, PlainValidator, TypeAdapter, ValidationError

from massl.config import explain
from massl.evaluations.measurement import EvaluationError, Setting

RESULTS_FILE = "results.jsonl"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _version() -> str:
    try:
        return metadata.version("massl")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"


def _setting(value: object) -> Setting:
    if not isinstance(value, str):
        raise ValueError("expected text")
    return Setting.parse(value)


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One number and what made it. A value that is no number is refused, so that none can get into a table."""

    protocol: str
    data: str
    setting: Annotated[Setting, PlainValidator(_setting)]  # text in the file
    metric: str
    value: float  # accuracies and scores in percent
    num_samples: int  # test images or queries it was measured over
    seconds: float  # that the measurement took
    weights: str  # fingerprint of the model's weights
    model: str  # as the user named it
    architecture: str
    precision: str
    run: str  # digest of settings, data and weights: equal exactly when the measurement was the same
    train: str  # the training images, as the user named them; empty where there are none
    images: str  # digest of all images: two data sets of one name are not taken for one
    created: str = field(default_factory=_now)  # UTC, ISO 8601
    version: str = field(default_factory=_version)  # of massl

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    def __post_init__(self) -> None:
        where = f"{self.protocol} on {self.data}, {self.setting}, {self.metric}"
        for name, number in (("value", self.value), ("seconds", self.seconds)):
            if not math.isfinite(number):
                raise EvaluationError(f"{where}: the {name} is {number}, which is no result; were the features finite?")
        try:
            offset = datetime.fromisoformat(self.created).utcoffset()
        except ValueError:
            offset = None
        if offset != timedelta(0):
            raise EvaluationError(
                f"{where}: created is {self.created!r}; expected a time in UTC such as 2024-07-21T12:00:00+00:00"
            )


_ROW = TypeAdapter(ResultRow)


def append_rows(path: Path, rows: Sequence[ResultRow]) -> None:
    """Add rows in one write: all of them are in the file afterwards, or none and an error."""
    if not rows:
        return
    added = "".join(json.dumps({**vars(row), "setting": str(row.setting)}) + "\n" for row in rows).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # two evaluations may share a file; released when it is closed
            end = _mend(file)
            try:
                _write(file, added)
            except BaseException:
                file.truncate(end)
                raise
    except OSError as error:
        raise EvaluationError(f"cannot write results to {path}: {error}; make room or name another folder") from error


def read_rows(path: Path) -> list[ResultRow]:
    """All rows in the order they were written; none where there is no file. Half a last line, left by a crash, is taken
    away.
    """
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # a write that is under way is waited for, not taken for a crash
            *lines, last = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    rows = [_parsed(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if last:
        with contextlib.suppress(EvaluationError):
            rows.append(_parsed(last, "the last line"))
        # where one may only read, it stays as it is
        with contextlib.suppress(OSError), path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            _mend(file)
    return rows


def newest(rows: Iterable[ResultRow]) -> list[ResultRow]:
    """Of rows that measure the same of the same weights and images in the same precision the latest, at the place of
    the first.
    """
    latest: dict[tuple[str | Setting, ...], ResultRow] = {}
    for row in rows:
        key = (row.protocol, row.data, row.setting, row.metric, row.weights, row.precision, row.images)
        before = latest.get(key)
        if before is None or datetime.fromisoformat(row.created) >= datetime.fromisoformat(before.created):
            latest[key] = row
    return list(latest.values())


def _parsed(line: bytes, where: str) -> ResultRow:
    try:
        values = json.loads(line)
        missing = [
            entry.name for entry in fields(ResultRow) if not isinstance(values, dict) or entry.name not in values
        ]
        if not missing:  # those with defaults are asked for too: a row without its time is not of now
            return _ROW.validate_json(line)
        problem = f"it lacks {', '.join(missing)}"
    except ValidationError as error:
        problem = explain(error)
    except ValueError:
        problem = "it is not JSON"
    raise EvaluationError(f"{where} is no result of massl ({problem}); correct or delete the line")


def _mend(file: io.FileIO) -> int:
    """Let the file end with a whole line: a row without its line break gets one, anything less is cut off. Returns the
    size.
    """
    file.seek(0)
    content = file.read()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        try:
            _parsed(content[end:], "the last line")
        except EvaluationError:
            file.truncate(end)
        else:
            _write(file, b"\n")
            end = len(content) + 1
    return end


def _write(file: io.FileIO, content: bytes) -> None:
    num_written = file.write(content)
    if num_written != len(content):
        raise OSError(f"only {num_written} of {len(content)} bytes could be written")
    os.fsync(file.fileno())
