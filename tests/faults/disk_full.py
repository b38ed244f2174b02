"""A disk that is full: in the middle of every kind of file, and in whole commands."""

import contextlib
import errno
import functools
import io
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import yaml

import massl
from massl.commands.report.files import write_page
from massl.config import MasslError
from massl.data.loading.given_images import given_source
from massl.data.sources.base import ImageSource
from massl.evaluations.features import ExtractionSettings, Extractor
from massl.evaluations.measurement import Setting
from massl.evaluations.results import ResultRow, append_rows, read_rows
from massl.training.checkpoint import CheckpointStore, load_checkpoint
from massl.training.metrics_log import MetricsLog, read_metrics
from massl.weights.models import open_model
from tests.reliability.frame import Case, Crash, Lost, Wrong, fault_class, made_once
from tests.reliability.processes import server
from tests.reliability.world import TINY_RECIPE, RunReader, difference, tiny_images

_FULL = (errno.EFBIG, errno.ENOSPC)


@contextlib.contextmanager
def _no_room_beyond(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond this size: the system refuses the write, whatever library makes it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def _no_room_at_fsync() -> Iterator[None]:
    """Some disks accept every write and refuse when it is to be kept: quotas, NFS."""
    with mock.patch.object(os, "fsync", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
        yield


# ---- one file --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Written:
    """A kind of file: `write` adds its nth content, `read` is what can be read back after `num` of them."""

    write: Callable[[Path, int], object]
    read: Callable[[Path, int], object]
    size: int  # about how long the file gets
    num_before: int = 2  # contents that were written while there was room


def _state(number: int) -> dict[str, Any]:
    return {"step": number, "weights": torch.full((2000,), float(number)), "name": "x" * number}


def _write_checkpoint(folder: Path, number: int) -> None:
    CheckpointStore(folder, keep_last=9).save(number, _state(number), milestone_every=0)


def _read_checkpoints(folder: Path, num: int) -> object:
    store = CheckpointStore(folder, keep_last=9)
    return [load_checkpoint(store.path(step))["weights"].sum().item() for step in store.steps()]


def _write_metrics(folder: Path, number: int) -> None:
    resume_step = number - 1 if number > 1 else None
    log = MetricsLog(folder, resume_step=resume_step, warn=_not_expected)
    try:
        log.write({"step": number, "loss": 1 / number, **{f"metric_{n}": n / 7 for n in range(40)}})
    finally:
        log.close()


def _not_expected(message: str) -> None:
    if "half written" not in message:
        raise Wrong(f"warned of {message}")


def _read_metrics(folder: Path, num: int) -> object:
    return [(row["step"], len(row)) for row in read_metrics(folder / "metrics.jsonl")][:num]


def _row(number: int) -> ResultRow:
    text = dict.fromkeys(("protocol", "data", "metric", "weights", "model", "architecture", "run", "images"), "a" * 40)
    setting = Setting.parse("k=20")
    return ResultRow(
        **text, setting=setting, value=float(number), num_samples=1, seconds=1.0, precision="fp32", train="photos"
    )


def _read_results(folder: Path, num: int) -> object:
    return [row.value for row in read_rows(folder / "results.jsonl")]


def _write_features(folder: Path, number: int) -> None:
    _extractor(folder).features(_source(number), view=_extractor(folder).centre_view(), feature="pooled")


def _read_features(folder: Path, num: int) -> object:
    """From the cache alone, for what was kept."""
    extractor = _extractor(folder)
    with mock.patch.object(Extractor, "_extract", side_effect=Lost("kept features are computed again")):
        found = [
            extractor.features(_source(number), view=extractor.centre_view(), feature="pooled").rows
            for number in range(1, num + 1)
        ]
    return [rows.double().sum().item() for rows in found]


@functools.cache
def _source(number: int) -> ImageSource:
    return given_source(tiny_images(4 * number)[-4:])


def _extractor(folder: Path) -> Extractor:
    settings = ExtractionSettings(num_workers=0)
    return Extractor(model=_model(), settings=settings, device=torch.device("cpu"), cache=folder / "cache")


@functools.cache
def _model() -> Any:
    return open_model(_trained())


def _write_embedding(folder: Path, number: int) -> None:
    suffix = (folder.parent / "suffix").read_text()
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        massl.embed(_trained(), data=tiny_images(4), output=folder / f"features{suffix}")


def _read_bytes(folder: Path, num: int) -> object:
    return [path.read_bytes() for path in sorted(folder.iterdir())]


_KINDS = {
    "checkpoint": _Written(_write_checkpoint, _read_checkpoints, 10_000),
    "metrics": _Written(_write_metrics, _read_metrics, 1_000),
    "results": _Written(
        lambda folder, number: append_rows(folder / "results.jsonl", [_row(number)]), _read_results, 1_400
    ),
    "features": _Written(_write_features, _read_features, 700, num_before=1),
    "page": _Written(
        lambda folder, number: write_page(folder / "page.html", b"<!doctype html>" + b"x" * 5000 * number),
        _read_bytes,
        10_000,
    ),
    "embed": _Written(_write_embedding, _read_bytes, 1_500, num_before=0),
}


@fault_class("disk full within a file", quick=24, more=300)
def full_within_a_file(case: Case) -> None:
    """What was there stays, the error is clear, and when there is room again the same call succeeds."""
    name = case.pick(list(_KINDS))
    kind, folder = _KINDS[name], case.folder / "output"
    folder.mkdir()
    (case.folder / "suffix").write_text(str(case.random.choice([".npz", ".parquet", ".safetensors"])))  # of embed
    num = kind.num_before
    for number in range(1, num + 1):
        kind.write(folder, number)
    before = kind.read(folder, num)
    at_fsync = case.random.random() < 0.2
    full = _no_room_at_fsync() if at_fsync else _no_room_beyond(int(case.random.integers(kind.size)))
    try:
        with full:
            kind.write(folder, num + 1)
        is_written = True
    except (OSError, MasslError) as error:
        _check_error(error)
        is_written = False
    kept = kind.read(folder, num)
    if kept != before and not is_written:
        raise Lost(f"{name}: what was there has changed")
    if leftovers := [path.name for path in folder.rglob("*.partial")]:
        raise Wrong(f"{name}: left {leftovers}")
    if is_written:
        kind.read(folder, num + 1)
        return
    with case.recovery():
        kind.write(folder, num + 1)
    kind.read(folder, num + 1)


def _check_error(error: Exception) -> None:
    """The system's reason is in the message, or is the error itself."""
    if isinstance(error, OSError) and not isinstance(error, MasslError):
        if error.errno not in _FULL and not _says_full(error):
            raise Wrong(f"another error: {error!r}") from error
    elif not _says_full(error):
        raise Wrong(f"the message does not say why: {error}") from error


def _says_full(error: Exception) -> bool:
    return bool(
        re.search(r"File too large|No space left|Errno (27|28)|os error (27|28)|bytes could be written", str(error))
    )


# ---- whole commands --------------------------------------------------------------------------------------------------


@fault_class("disk full within a command", kind="processes", quick=1, more=4)
def full_within_a_command(case: Case) -> None:
    """A clear line and status 1, nothing that was there changed; with room again, the result of a disk never full."""
    name = case.pick(list(_COMMANDS))
    world, work = disk_world(), case.folder / "work"
    shutil.copytree(world / "before", work)
    before = _contents(work)
    written = _contents(world / "after" / name)
    largest = max(len(content) for path, content in written.items() if before.get(path) != content)
    if case.random.random() < 0.5:
        hooks = {"limit_file_size": [int(case.random.integers(_LOG_SIZE[name], largest))]}
    else:
        hooks = {"full_at_call": ["os:fsync", int(case.random.integers(1, _NUM_FSYNCS[name] + 1))]}
    answer = server().run(*_COMMANDS[name](world, work), **hooks)
    if answer.status not in (0, 1) or "Traceback" in answer.text:
        raise Crash(f"{name}: status {answer.status}: {answer.text[-700:]}")
    if answer.status == 1 and not re.search(r"File too large|No space left|disk full", answer.text):
        raise Wrong(f"{name}: the message does not say why: {answer.text[-500:]}")
    _check_run_is_intact(name, before, work)
    if answer.status == 1:
        with case.recovery():
            answer = server().run(*_COMMANDS[name](world, work))
        if answer.status != 0:
            raise Lost(f"{name}: the same command again: {answer.text[-700:]}")
        if name == "pretrain" and "continuing at step" not in answer.text:
            raise Lost(f"the run began anew: {answer.text[:500]}")
    _check_result(name, work, world / "after" / name)


_LOG_SIZE = {"pretrain": 5000, "embed": 2000, "evaluate": 3000, "report": 3000}  # what they print goes to a file, too
_NUM_FSYNCS = {"pretrain": 8, "embed": 1, "evaluate": 2, "report": 1}


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _check_run_is_intact(name: str, before: dict[Path, bytes], work: Path) -> None:
    """Only pretrain may write into the run; it still has the checkpoint and the rows that were there."""
    after = _contents(work)
    for path, content in before.items():
        may_grow = name == "pretrain" and path.name == "metrics.jsonl"
        may_change = name == "pretrain" and path.suffix != ".pt" and not may_grow
        is_kept = after.get(path, b"").startswith(content) if may_grow else after.get(path) == content
        if not (may_change or is_kept):
            raise Lost(f"{name}: {path} has changed")


def _check_result(name: str, work: Path, reference: Path) -> None:
    if name == "pretrain":
        RunReader().assert_bitwise_equal(work / "run", reference / "run")
    elif name == "evaluate":
        values, expected = (
            {(row.metric, str(row.setting)): row.value for row in read_rows(folder / "results" / "results.jsonl")}
            for folder in (work, reference)
        )
        if values != expected:
            raise Wrong(f"{values} instead of {expected}")
    elif name == "embed":
        found, expected_rows = (np.load(folder / "features.npz")["features"] for folder in (work, reference))
        if difference(torch.from_numpy(found), torch.from_numpy(expected_rows), "features"):
            raise Wrong("other features")
    elif b"</html>" not in (work / "report.html").read_bytes()[-100:]:
        raise Wrong("half a page")


def _pretrain(world: Path, work: Path) -> list[str | Path]:
    images = ["--data.source", world / "images.npz"]
    return ["pretrain", "--recipe", world / "recipe.yaml", *images, "--output", work / "run"]


_COMMANDS: dict[str, Callable[[Path, Path], list[str | Path]]] = {
    "pretrain": lambda world, work: [*_pretrain(world, work), "--trainer.max_steps", "8"],
    "embed": lambda world, work: [
        "embed",
        work / "run",
        "--data",
        world / "images.npz",
        "--output",
        work / "features.npz",
    ],
    "evaluate": lambda world, work: [
        *("evaluate", work / "run", "--protocol", "knn", "--train", world / "images.npz"),
        *("--test", world / "images.npz", "--output", work / "results"),
    ],
    "report": lambda world, work: ["report", work / "run", "--output", work / "report.html"],
}


def _trained() -> Path:
    return disk_world() / "before" / "run"


def disk_world() -> Path:
    """before/run: a run of 4 steps; after/COMMAND: the same after a command on a disk that was never full."""
    return made_once("disk full", _make_world)


def _make_world(folder: Path) -> None:
    np.savez(folder / "images.npz", images=tiny_images(48), labels=np.arange(48) % 4)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(TINY_RECIPE))
    (folder / "before").mkdir()
    first = [*_pretrain(folder, folder / "before"), "--trainer.max_steps", "4"]
    answers = [server().run(*first)]
    for name, command in _COMMANDS.items():
        shutil.copytree(folder / "before", folder / "after" / name)
        answers.append(server().run(*command(folder, folder / "after" / name)))
    for answer in answers:
        assert answer.status == 0, answer.text
