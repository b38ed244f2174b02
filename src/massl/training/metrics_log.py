"""The logs of a run: metrics.jsonl and warnings.jsonl (one JSON object per line), and TensorBoard events."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from massl.config import MasslError
from massl.files import open_in_place, write_atomically
from massl.json_lines import MOST_DAMAGED, JsonLine, in_words, read_json_lines, rejected_file, set_aside

# Entries that depend on the machine; two runs of one recipe agree in all others.
TIMING_KEYS = frozenset({"images_per_second", "peak_memory_gib"})
_MOVE_IT = "move it elsewhere, and the run continues without it"
_MAX_BYTES = 2**30  # of the run's own logs; two million rows of 500 bytes


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl; damaged ones are left out."""
    return [line.row for line in read_json_lines(path) if line.row is not None and not _problem(line)]


class MetricsLog:
    """Appends rows; when a run resumes, rows after its `resume_step` are dropped first.

    Damaged rows are moved to metrics.rejected.jsonl (or warnings.rejected.jsonl), and `warn` names them.
    """

    def __init__(self, folder: Path, *, resume_step: int | None, warn: Callable[[str], None]) -> None:
        self.path = folder / "metrics.jsonl"
        self._warnings = folder / "warnings.jsonl"  # created by the first warning
        self._show = warn
        self.probed = _keep_rows(self.path, up_to=resume_step, warn=warn)  # rows of earlier probes
        if os.path.lexists(self._warnings):
            _keep_rows(self._warnings, up_to=resume_step, warn=warn)
        self._written = [row.get("warning") for row in read_metrics(self._warnings)]
        self._file = open_in_place(self.path, os.O_APPEND)
        purge_step = None if resume_step is None else resume_step + 1
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)

    def write(self, row: Mapping[str, float]) -> None:
        """Append a row. Values that are not finite are left out; a warning names each metric once."""
        step = int(row["step"])
        finite = {name: value for name, value in row.items() if math.isfinite(value)}
        for name in row.keys() - finite.keys():
            warning = f"{name} is not finite and is left out of metrics.jsonl"
            if warning not in self._written:
                self._show(f"step {step}: {warning}")
            self.caution(step, warning)
        self._file.write(_line(finite))
        self._file.flush()
        for name, value in finite.items():
            if name not in ("step", "epoch"):
                self._tensorboard.add_scalar(name, value, step)

    def warn(self, step: int, warning: str) -> None:
        self._written.append(warning)
        with open_in_place(self._warnings, os.O_APPEND) as file:
            file.write(_line({"step": step, "warning": warning}))

    def caution(self, step: int, warning: str) -> None:
        """A warning that is written once, also if the run is continued."""
        if warning not in self._written:
            self.warn(step, warning)

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()


def _keep_rows(path: Path, *, up_to: int | None, warn: Callable[[str], None]) -> list[dict[str, Any]]:
    """Keep only rows of steps up to `up_to`, byte for byte; None keeps no row. Damaged rows are set aside.

    Returns the rows of probes that are kept.
    """
    limit = -math.inf if up_to is None else up_to
    kept: list[bytes] = []
    probed: list[dict[str, Any]] = []
    last_kept = 0
    later: list[tuple[int, bytes, float]] = []  # number, content and step
    damaged: list[tuple[int, bytes, str]] = []  # number, content and problem
    for line in _own_lines(path):
        if problem := _problem(line):
            damaged.append((line.number, line.content, problem))
            if len(damaged) > MOST_DAMAGED:
                raise MasslError(f"{path}: more than {MOST_DAMAGED:,} lines are no rows of massl; {_MOVE_IT}")
        elif line.row is not None and line.row["step"] <= limit:
            kept.append(line.content)
            last_kept = line.number
            numbers = {name: value for name, value in line.row.items() if _is_number(value)}
            probed += [numbers] if "effective_rank" in numbers else []
        elif line.row is not None:
            later.append((line.number, line.content, line.row["step"]))
    damaged += [
        (number, content, f"has step {step} before rows of smaller steps")  # rows are written in the order of steps
        for number, content, step in later
        if number < last_kept
    ]
    if damaged:
        damaged.sort()
        set_aside(path, [content for _, content, _ in damaged])
        named = in_words(path, [(number, problem) for number, _, problem in damaged])
        warn(f"{named}: kept aside in {rejected_file(path)}; all other rows are kept")
    write_atomically(path, b"".join(content + b"\n" for content in kept))
    return probed


def _own_lines(path: Path) -> Iterator[JsonLine]:
    try:
        return read_json_lines(path, max_bytes=_MAX_BYTES)
    except OSError as error:
        raise MasslError(f"{path} cannot be read ({error.strerror}); {_MOVE_IT}") from error


def _problem(line: JsonLine) -> str:
    """Why a line is no row of a log; "" if it is one."""
    if line.row is None:
        return line.problem if line.is_ended else "is half written"
    step = line.row.get("step")
    return "" if _is_number(step) else "has no step"


def _is_number(value: Any) -> bool:
    """Finite and no larger than what a float holds; a stranger's JSON has anything."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _line(row: Mapping[str, float | str]) -> bytes:
    return json.dumps(row).encode() + b"\n"
