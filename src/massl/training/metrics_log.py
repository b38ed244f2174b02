"""The logs of a run: metrics.jsonl and warnings.jsonl (one JSON object per line), and TensorBoard events."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from massl.files import write_atomically

# Entries that depend on the machine; two runs of one recipe agree in all others.
TIMING_KEYS = frozenset({"images_per_second", "peak_memory_gib"})


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Rows of a metrics.jsonl; a last line cut off by a crash is ignored."""
    return _read_rows(path)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


class MetricsLog:
    """Appends rows; when a run resumes, rows after its `resume_step` are dropped first."""

    def __init__(self, folder: Path, *, resume_step: int | None) -> None:
        self.path = folder / "metrics.jsonl"
        self._warnings = folder / "warnings.jsonl"  # created by the first warning
        _keep_rows(self.path, up_to=resume_step)
        if self._warnings.exists():
            _keep_rows(self._warnings, up_to=resume_step)
        self._file = self.path.open("a", encoding="utf-8")
        purge_step = None if resume_step is None else resume_step + 1
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)

    def write(self, row: Mapping[str, float]) -> None:
        bad = [name for name, value in row.items() if not math.isfinite(value)]
        if bad:
            raise ValueError(f"metrics of step {row['step']} are not finite: {', '.join(bad)}")
        self._file.write(_line(row))
        self._file.flush()
        for name, value in row.items():
            if name not in ("step", "epoch"):
                self._tensorboard.add_scalar(name, value, int(row["step"]))

    def warn(self, step: int, warning: str) -> None:
        with self._warnings.open("a", encoding="utf-8") as file:
            file.write(_line({"step": step, "warning": warning}))

    def caution(self, step: int, warning: str) -> None:
        """A warning from before training; a run that continues does not repeat it."""
        if not any(row.get("warning") == warning for row in _read_rows(self._warnings)):
            self.warn(step, warning)

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()


def _keep_rows(path: Path, *, up_to: int | None) -> None:
    """Keep only rows of steps up to `up_to`; None keeps no row."""
    kept = [row for row in _read_rows(path) if up_to is not None and row["step"] <= up_to]
    write_atomically(path, "".join(map(_line, kept)))


def _line(row: Mapping[str, float | str]) -> str:
    return json.dumps(row) + "\n"
