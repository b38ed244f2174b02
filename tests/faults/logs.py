"""Damaged and hostile .jsonl files of a run: nothing intact is lost, what is left out is named, the page is made."""

import functools
import json
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import numpy as np
import yaml

from massl.commands.report.command import report
from massl.evaluations.measurement import Setting
from massl.evaluations.results import ResultRow, append_rows, newest, read_rows
from massl.json_lines import parse_json_lines, rejected_file
from massl.reports.page.assembly import report_page
from massl.reports.page.sections.results import results_section
from massl.reports.page.series import charts_of
from massl.reports.run_reader import read_run
from massl.reports.runs import RunError
from massl.reports.tables import transfer_averages
from massl.reports.verdict import verdict
from massl.training.metrics_log import MetricsLog, read_metrics
from tests.reliability.frame import Case, Lost, Wrong, fault_class

HOSTILE_LINES = [
    b"{}",
    b"[]",
    b"null",
    b"\xff\xfe\x00",
    b'{"step": ',
    b'{"step": NaN}',
    b'{"step": -Infinity}',
    b'{"step": "7"}',
    b'{"step": true}',
    b'{"step": [7]}',
    b'{"step": 1e999}',
    b'{"step": ' + b"9" * 5000 + b"}",
    b"[" * 5000,
    b'{"step":' * 3000,
    b"\x00" * 100,
    b'{"warning": "no step"}',
    '{"step": 3, "größe": "\u2028"}'.encode(),
    b'\xef\xbb\xbf{"step": 3}',
    b"\r",
]
HOSTILE_VALUES: list[Any] = [
    None, True, "low", "", [], {}, [1, 2], {"a": {"b": [1.0]}}, float("nan"), float("inf"), -float("inf"), 1e308,
    -1e308, 5e-324, 10**400, -(10**400), 0, -0.0, -1, 1e15, "\ud800", "<script>", "x" * 5000,
]  # fmt: skip
HOSTILE_NAMES = [
    "loss", "knn_top1", "effective_rank", "teacher_entropy", "epoch", "step", "images_per_second", "lr",
    "other_view_top1", "peak_memory_gib", "embedding_spread", "memory_winner_share", "warning", "", " ",
    "<script>alert(1)</script>", "a\nb", "\u202ename", "\ud800", "__proto__", "x" * 300, "größe",
    "constructor", "a.b", "{{ 7 * 7 }}",
]  # fmt: skip


def damaged(content: bytes, random: np.random.Generator) -> bytes:
    """One to three faults, as of a disk, an editor or a program that died."""
    for _ in range(random.integers(1, 4)):
        place = int(random.integers(0, len(content) + 1))
        end = min(len(content), place + int(random.integers(1, 40)))
        lines = content.split(b"\n")
        number = int(random.integers(0, len(lines)))
        match int(random.integers(0, 9)):
            case 0 if content:
                flipped = content[place % len(content)] ^ (1 << int(random.integers(0, 8)))
                content = content[: place % len(content)] + bytes([flipped]) + content[place % len(content) + 1 :]
            case 1:
                content = content[:place] + content[end:]
            case 2:
                content = content[:place] + random.bytes(end - place) + content[end:]
            case 3:
                content = content[:place]
            case 4:
                content = b"\n".join([*lines[:number], lines[number], *lines[number:]])
            case 5:
                content = b"\r\n".join(lines)
            case 6:
                content = b"\xef\xbb\xbf" + content
            case 7:
                content = content[:place] + b"\x00" * (end - place) + content[end:]
            case _:
                hostile = HOSTILE_LINES[int(random.integers(0, len(HOSTILE_LINES)))]
                content = b"\n".join([*lines[:number], hostile, *lines[number:]])
    return content


def intact_lines(content: bytes, originals: set[bytes]) -> list[bytes]:
    return [line for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line in originals]


@fault_class("damaged metrics.jsonl")
def damaged_metrics(case: Case) -> None:
    name = case.pick(["metrics.jsonl", "warnings.jsonl"])
    rows = [{"step": step, "epoch": step // 4, "loss": step / 7, "warning": "slow"} for step in range(0, 24, 2)]
    whole = [json.dumps(row).encode() for row in rows]
    content = damaged(b"\n".join(whole) + b"\n", case.random)
    (case.folder / name).write_bytes(content)
    resume_step = int(case.random.integers(0, 24))
    said: list[str] = []
    with case.recovery(), closing(MetricsLog(case.folder, resume_step=resume_step, warn=said.append)) as log:
        log.write({"step": resume_step + 1, "epoch": 1, "loss": 0.5})
        log.warn(resume_step + 1, "again")
    kept = (case.folder / name).read_bytes().split(b"\n")
    aside = rejected_file(case.folder / name)
    rejected = aside.read_bytes().split(b"\n") if aside.exists() else []
    wanted = [line for line in intact_lines(content, set(whole)) if json.loads(line)["step"] <= resume_step]
    if [line for line in kept if line in set(whole)] != wanted:
        raise Lost("an intact row up to the checkpoint is gone")
    for line in parse_json_lines(content):
        is_later = line.row is not None and isinstance(step := line.row.get("step"), int | float) and step > resume_step
        if line.content not in kept and line.content not in rejected and not is_later:
            raise Lost(f"line {line.number} is neither kept nor set aside: {line.content[:80]!r}")
    if bool(said) != bool(rejected):
        raise Wrong(f"set aside: {len(rejected)} lines, said: {said}")
    if read_metrics(case.folder / name)[-1]["step"] != resume_step + 1:
        raise Wrong("the run did not go on after the damage")


@functools.cache
def some_results() -> tuple[ResultRow, ...]:
    common: dict[str, Any] = {
        "protocol": "knn", "data": "photos", "metric": "top1", "num_samples": 10, "seconds": 1.0, "weights": "w",
        "model": "m", "architecture": "vit", "precision": "fp32", "train": "t", "images": "i",
        "created": "2024-07-21T12:00:00+00:00", "version": "0",
    }  # fmt: skip
    return tuple(
        ResultRow(**common, setting=Setting.parse(f"cosine k={k}"), value=50.0 + k, run=f"run {k}") for k in (1, 5, 20)
    )


@fault_class("damaged results.jsonl")
def damaged_results(case: Case) -> None:
    path = case.folder / "results.jsonl"
    append_rows(path, some_results())
    whole = path.read_bytes()
    content = damaged(whole, case.random)
    path.write_bytes(content)
    said: list[str] = []
    with case.recovery():
        rows = read_rows(path, warn=said.append)
        append_rows(path, some_results()[:1])
        again = read_rows(path, warn=lambda message: None)
    num_intact = len(intact_lines(content, set(whole.split(b"\n")) - {b""}))
    if len(rows) < num_intact:
        raise Lost(f"{num_intact} rows are intact, {len(rows)} were read")
    if again != [*rows, some_results()[0]]:
        raise Wrong("a row added after the damage is not read as the last one")
    aside = rejected_file(path)
    everything = path.read_bytes() + (aside.read_bytes() if aside.exists() else b"")
    if any(line not in everything for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n")):
        raise Lost("a damaged line is neither in the file nor set aside")
    results_section([*newest(rows), *transfer_averages(newest(rows))], remarks=said, public=[])


@functools.cache
def recipe_text() -> str:
    values = {
        "data": {"source": "photos"},
        "views": {"num_global": 2, "num_local": 4},
        "backbone": {"name": "vit_tiny_patch16_224"},
        "method": {"name": "massl", "memory": {"num_rows": 2048, "block_size": 512}},
        "optimizer": {"learning_rate": 1e-3},
        "trainer": {"seed": 0, "epochs": 2, "max_steps": None, "batch_size": 60},
        "probes": {"queries": "", "num_neighbours": 20},
    }
    return yaml.safe_dump(values)


def hostile_rows(random: np.random.Generator, num_rows: int) -> list[dict[str, Any]]:
    rows = []
    for number in range(num_rows):
        row: dict[str, Any] = {
            "step": 5 * number, "epoch": number // 2, "images_per_second": 10.0 * number, "loss": 3.0, "lr": 0.1,
            "knn_top1": 20.0 + number, "effective_rank": 5.0, "other_view_top1": 50.0,
        }  # fmt: skip
        for _ in range(random.integers(0, 3)):
            name = HOSTILE_NAMES[int(random.integers(0, len(HOSTILE_NAMES)))]
            row[name] = HOSTILE_VALUES[int(random.integers(0, len(HOSTILE_VALUES)))]
        for name in [name for name in row if random.random() < 0.03]:
            del row[name]
        rows.append(row)
    if random.random() < 0.02:
        rows[-1] |= {f"metric {number}": 1.0 for number in range(2000)}
    return rows


@fault_class("reports of hostile metrics")
def hostile_metrics(case: Case) -> None:
    folder = case.folder / "run"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(recipe_text())
    (folder / "environment.json").write_text(json.dumps({"device": "cpu", "world_size": 1}))
    rows = hostile_rows(case.random, int(case.random.integers(0, 9)) or 1)
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (folder / "metrics.jsonl").write_bytes(damaged(content, case.random) if case.number % 2 else content)
    if case.number % 3 == 0:
        warnings = [{"step": value, "warning": other} for value, other in _pairs(case.random)]
        (folder / "warnings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in warnings))
    if case.number % 5 == 0:
        (folder / "baseline.json").write_text(json.dumps({"raw_pixel_knn": _value(case.random), "num_queries": 5}))
    run = read_run(folder)
    verdict(run)
    charts_of([run])
    page = "</html>"
    if case.number % 300 == 299:  # the whole command, which reads all recipes of the package
        page = report([folder], output=case.folder / "page.html", figures=False).file.read_text()
    elif case.number % 4 == 1:  # a page takes 50 ms
        page = report_page([run], [], title=run.label, created=datetime.now(UTC))
    if "<script>alert" in page or "</html>" not in page:
        raise Wrong("the page is not whole, or runs a name")
    try:
        read_run(folder, strict=True)  # as comparisons do
    except RunError as error:
        if str(folder) not in str(error):
            raise Wrong(f"the message does not name the folder: {error}") from error


def _value(random: np.random.Generator) -> Any:
    return HOSTILE_VALUES[int(random.integers(0, len(HOSTILE_VALUES)))]


def _pairs(random: np.random.Generator) -> list[tuple[Any, Any]]:
    return [(_value(random), _value(random)) for _ in range(random.integers(1, 5))]
