"""What a run's folder may hold besides curves: the accuracy of raw pixels, and warnings that were said during training."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

BASELINE_FILE, WARNINGS_FILE = "baseline.json", "warnings.jsonl"


class TrainingWarning(NamedTuple):
    step: int
    text: str


def read_baseline(folder: Path) -> tuple[float | None, list[str]]:
    """k-NN accuracy of raw pixels in percent, None where no file says it, and a remark where the file cannot be read."""
    file = folder / BASELINE_FILE
    if not file.is_file():
        return None, []
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        return None, [f"{BASELINE_FILE} is not valid JSON ({error}) and left out"]
    accuracy = values.get("raw_pixel_knn") if isinstance(values, dict) else None
    if accuracy is None:
        return None, []
    if not _is_number(accuracy) or not 0 <= accuracy <= 100:
        return None, [f"raw_pixel_knn in {BASELINE_FILE} is no percentage and left out"]
    return float(accuracy), []


def read_warnings(folder: Path) -> tuple[tuple[TrainingWarning, ...], list[str]]:
    """In the order they were said, each once a step, and a remark where lines cannot be read."""
    file = folder / WARNINGS_FILE
    if not file.is_file():
        return (), []
    lines = [line for line in file.read_text(encoding="utf-8", errors="replace").split("\n") if line.strip()]
    found = [_warning(line) for line in lines]
    num_lost = found.count(None)
    remarks = (
        [f"{num_lost:,} line{'' if num_lost == 1 else 's'} of {WARNINGS_FILE} cannot be read and left out"]
        if num_lost
        else []
    )
    return tuple(dict.fromkeys(warning for warning in found if warning is not None)), remarks


def _warning(line: str) -> TrainingWarning | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or not _is_number(values.get("step")) or not isinstance(values.get("warning"), str):
        return None
    return TrainingWarning(int(values["step"]), values["warning"])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15 and math.isfinite(value)
