"""The logs of a run: metrics.jsonl and warnings.jsonl (one JSON object per line), and TensorBoard events."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from massl.files import write_atomically
from massl.json_lines import JsonLine, in_words, read_json_lines, rejected_file, set_aside

# Entries that depend on the machine; two runs of one recipe agree in all others.
TIMING_KEYS = frozenset({"images_per_second", "peak_memory_gib"})


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
        kept = _keep_rows(self.path, up_to=resume_step, warn=warn)
        self.probed = [row for row in kept if "effective_rank" in row]  # rows of earlier probes
        if self._warnings.exists():
            _keep_rows(self._warnings, up_to=resume_step, warn=warn)
        self._written = [row.get("warning") for row in read_metrics(self._warnings)]
        self._file = self.path.open("a", encoding="utf-8")
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
        with self._warnings.open("a", encoding="utf-8") as file:
            file.write(_line({"step": step, "warning": warning}))

    def caution(self, step: int, warning: str) -> None:
        """A warning that is written once, also if the run is continued."""
        if warning not in self._written:
            self.warn(step, warning)

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()


def _keep_rows(path: Path, *, up_to: int | None, warn: Callable[[str], None]) -> list[dict[str, Any]]:
    """Keep only rows of steps up to `up_to`, byte for byte; None keeps no row. Damaged rows are set aside."""
    limit = -math.inf if up_to is None else up_to
    lines = read_json_lines(path)
    problems = {line.number: _problem(line) for line in lines}
    sound = [line for line in lines if not problems[line.number]]
    kept = [line for line in sound if _step(line) <= limit]
    last_kept = kept[-1].number if kept else 0
    for line in sound:  # rows are written in the order of their steps
        if _step(line) > limit and line.number < last_kept:
            problems[line.number] = f"has step {_step(line)} before rows of smaller steps"
    damaged = [line for line in lines if problems[line.number]]
    if damaged:
        set_aside(path, [line.content for line in damaged])
        named = in_words(path, [(line.number, problems[line.number]) for line in damaged])
        warn(f"{named}: kept aside in {rejected_file(path)}; all other rows are kept")
    write_atomically(path, b"".join(line.content + b"\n" for line in kept))
    return [line.row for line in kept if line.row is not None]


def _step(line: JsonLine) -> float:
    assert line.row is not None
    step: float = line.row["step"]
    return step


def _problem(line: JsonLine) -> str:
    """Why a line is no row of a log; "" if it is one."""
    if line.row is None:
        return line.problem if line.is_ended else "is half written"
    step = line.row.get("step")
    if not isinstance(step, int | float) or isinstance(step, bool) or not abs(step) < math.inf:
        return "has no step"
    return ""


def _line(row: Mapping[str, float | str]) -> str:
    return json.dumps(row) + "\n"
