import fcntl
import json
import math
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from massl.evaluations.measurement import EvaluationError, Setting
from massl.evaluations.results import ResultRow, append_rows, newest, read_rows, require_own_files
from massl.json_lines import rejected_file


def result(**changes: Any) -> ResultRow:
    values: dict[str, Any] = {
        "protocol": "knn",
        "data": "Pets",
        "setting": "k=20",
        "metric": "top1",
        "value": 91.25,
        "num_samples": 3669,
        "seconds": 1.5,
        "weights": "0123456789abcdef",
        "model": "runs/Fotos für später",
        "architecture": "ViT-S/16",
        "precision": "fp32",
        "run": "fedcba9876543210",
        "train": "trainval",
        "images": "00112233",
        "created": "2024-07-21T12:00:00+00:00",
        "version": "0.1.0",
    }
    values |= changes
    return ResultRow(**{**values, "setting": Setting.parse(values["setting"])})


def as_json(row: ResultRow) -> dict[str, Any]:
    return {**vars(row), "setting": str(row.setting)}


def file_with(folder: Path, *rows: ResultRow) -> Path:
    path = folder / "results.jsonl"
    append_rows(path, rows)
    return path


# ---- a row -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["value", "seconds"])
def test_what_is_no_number_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(EvaluationError, match=rf"knn on Pets, k=20, top1: the {name} is (nan|-?inf)"):
        result(**{name: value})


@pytest.mark.parametrize("created", ["yesterday", "", "2024-07-21T12:00:00", "2024-07-21T12:00:00+02:00"])
def test_a_time_that_is_not_in_utc_is_refused(created: str) -> None:
    with pytest.raises(EvaluationError, match="expected a time in UTC"):
        result(created=created)


def test_a_new_row_knows_when_and_by_what_it_was_made() -> None:
    values = dict(vars(result()))
    del values["created"], values["version"]
    row = ResultRow(**values)
    assert abs((datetime.now(UTC) - datetime.fromisoformat(row.created)).total_seconds()) < 3600
    assert row.version[0].isdigit()


# ---- writing and reading ---------------------------------------------------------------------------------------------


def test_rows_come_back_as_they_were_in_the_order_they_were_written(tmp_path: Path) -> None:
    rows = [result(), result(setting="k=10", value=-0.1 / 3), result(data='a "b"\n|c|', value=0)]
    path = file_with(tmp_path / "new" / "folders", *rows[:2])
    append_rows(path, rows[2:])
    assert read_rows(path) == rows


def test_every_line_is_a_json_object_of_its_own(tmp_path: Path) -> None:
    path = file_with(tmp_path, result(), result(metric="top5"))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        as_json(result()),
        as_json(result(metric="top5")),
    ]


def test_without_a_file_there_are_no_rows_and_none_is_made(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "results.jsonl") == []
    append_rows(tmp_path / "results.jsonl", [])
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=30)
@given(num_bytes=st.integers(min_value=0), reads_before=st.booleans())
def test_a_file_cut_off_anywhere_keeps_its_whole_rows_and_takes_new_ones(
    tmp_path: Path, num_bytes: int, reads_before: bool
) -> None:
    path = tmp_path / "results.jsonl"
    path.unlink(missing_ok=True)
    rows = [result(), result(setting="k=10"), result(setting="k=100")]
    append_rows(path, rows)
    whole = path.read_bytes()
    kept = whole[: num_bytes % (len(whole) + 1)]
    path.write_bytes(kept)
    # a row is whole with its last brace, before its line break
    num_whole = sum(len(b"\n".join(whole.split(b"\n")[: number + 1])) <= len(kept) for number in range(3))
    if reads_before:
        assert read_rows(path) == rows[:num_whole]
        assert path.read_bytes() == kept
    append_rows(path, [result(setting="k=200")])
    assert read_rows(path) == [*rows[:num_whole], result(setting="k=200")]


def test_a_last_row_that_lacks_only_its_line_break_counts(tmp_path: Path) -> None:
    path = file_with(tmp_path, result(), result(metric="top5"))
    whole = path.read_bytes()
    path.write_bytes(whole.removesuffix(b"\n"))
    assert read_rows(path) == [result(), result(metric="top5")]
    append_rows(path, [result(metric="top3")])
    assert read_rows(path) == [result(), result(metric="top5"), result(metric="top3")]
    assert path.read_bytes().startswith(whole)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{'protocol'", "it is not JSON"),
        ("3", "it is not a JSON object"),
        ("null", "it is not a JSON object"),
        ("\udcff", "it is not UTF-8"),
        ('{"protocol": "knn"}', "it lacks data, setting"),
        (
            json.dumps({key: value for key, value in as_json(result()).items() if key != "created"}),
            r"it lacks created\)",
        ),
        (json.dumps({**as_json(result()), "colour": "red"}), "colour"),
        (json.dumps({**as_json(result()), "value": "91"}), "value: expected a number"),
        (json.dumps({**as_json(result()), "num_samples": 1.5}), "num_samples"),
        (json.dumps({**as_json(result()), "setting": 20}), "setting"),
        (json.dumps({**as_json(result()), "value": math.nan}), "the value is nan"),
    ],
)
def test_a_bad_line_is_left_out_with_its_number_and_stays_in_the_file(tmp_path: Path, line: str, problem: str) -> None:
    path = file_with(tmp_path, result())
    whole = path.read_bytes()
    content = whole + line.encode(errors="surrogateescape") + b"\n" + whole
    path.write_bytes(content)
    said: list[str] = []
    assert read_rows(path, warn=said.append) == [result(), result()]
    assert len(said) == 1
    assert re.search(rf"line 2 of results.jsonl is no result of massl \(.*{problem}", said[0])
    append_rows(path, [result(metric="top5")])
    assert path.read_bytes().startswith(content)


def test_half_a_last_line_is_set_aside_by_the_next_writer_only(tmp_path: Path) -> None:
    path = file_with(tmp_path, result())
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"protocol": \xff')
    assert read_rows(path) == [result()]
    assert (path.read_bytes(), rejected_file(path).exists()) == (whole + b'{"protocol": \xff', False)
    append_rows(path, [result()])
    assert path.read_bytes() == whole + whole
    assert rejected_file(path).read_bytes() == b'{"protocol": \xff\n'


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").mkdir()
    with pytest.raises(EvaluationError, match=r"cannot read the results .*another folder"):
        read_rows(tmp_path / "results.jsonl")


def test_empty_lines_do_no_harm(tmp_path: Path) -> None:
    path = file_with(tmp_path, result())
    path.write_text("\n" + path.read_text() + " \n")
    assert read_rows(path) == [result()]


def test_a_write_that_fails_leaves_none_of_its_rows_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_with(tmp_path, result())
    before = path.read_bytes()

    def full_disk(descriptor: int) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(EvaluationError, match=r"cannot write results to .*results.jsonl: no space left; make room"):
            append_rows(path, [result(metric="top5"), result(metric="top3")])
    assert path.read_bytes() == before


def test_a_folder_that_is_a_file_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(EvaluationError, match=r"cannot write results to .*name another folder"):
        append_rows(tmp_path / "taken" / "results.jsonl", [result()])


@pytest.mark.parametrize("work", ["read", "append"])
def test_a_write_that_is_under_way_is_waited_for_and_not_taken_for_a_crash(tmp_path: Path, work: str) -> None:
    path = file_with(tmp_path, result())
    line = json.dumps(as_json(result(metric="top5"))).encode() + b"\n"
    with ThreadPoolExecutor(1) as pool:
        with path.open("ab", buffering=0) as writer:
            fcntl.flock(writer, fcntl.LOCK_EX)
            writer.write(line[:50])
            pending = (
                pool.submit(read_rows, path)
                if work == "read"
                else pool.submit(append_rows, path, [result(metric="top3")])
            )
            with pytest.raises(TimeoutError):
                pending.result(timeout=0.2)
            writer.write(line[50:])
        found = pending.result(timeout=120)
    rows = [result(), result(metric="top5"), *([result(metric="top3")] if work == "append" else [])]
    assert read_rows(path) == rows
    assert found == (rows if work == "read" else None)


# ---- files of strangers ----------------------------------------------------------------------------------------------


def test_reading_changes_no_file_whatever_the_folder_holds(tmp_path: Path) -> None:
    own = tmp_path / ".bashrc"
    own.write_text("first\nlast line without its break")
    folder = tmp_path / "theirs"
    folder.mkdir()
    path = folder / "results.jsonl"
    path.write_text("touch pwned")
    rejected_file(path).symlink_to(own)
    before = own.read_bytes()
    assert read_rows(path) == []
    assert (own.read_bytes(), path.read_text()) == (before, "touch pwned")
    path.unlink()
    path.symlink_to(own)
    assert read_rows(path, warn=lambda message: None) == []
    assert own.read_bytes() == before


@pytest.mark.parametrize("name", ["results.jsonl", "results.rejected.jsonl"])
@pytest.mark.parametrize("is_there", [True, False])
def test_nothing_is_written_through_a_link(tmp_path: Path, name: str, is_there: bool) -> None:
    own = tmp_path / "notes.txt"
    if is_there:
        own.write_text("first\nlast line without its break")
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "results.jsonl").write_text("touch pwned")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(own)
    before = own.read_bytes() if is_there else None
    with pytest.raises(EvaluationError, match="cannot write results"):
        append_rows(folder / "results.jsonl", [result()])
    with pytest.raises(EvaluationError, match=name):
        require_own_files(folder / "results.jsonl")
    assert (own.read_bytes() if own.exists() else None) == before


def test_a_folder_that_is_a_link_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "results").symlink_to(tmp_path / "disk")
    require_own_files(tmp_path / "results" / "results.jsonl")
    file_with(tmp_path / "results", result())
    assert read_rows(tmp_path / "disk" / "results.jsonl") == [result()]


def test_a_fifo_in_place_of_the_file_is_refused(tmp_path: Path, make_fifo: Callable[[Path], Path]) -> None:
    with pytest.raises(EvaluationError, match="cannot read the results"):
        read_rows(make_fifo(tmp_path / "results.jsonl"))


def test_a_file_of_countless_other_lines_is_no_file_of_results(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_bytes(b"{}\n" * 110_000)
    with pytest.raises(EvaluationError, match="more than 100,000 lines"):
        read_rows(tmp_path / "results.jsonl")


# ---- the newest ------------------------------------------------------------------------------------------------------


def test_the_last_of_equal_rows_counts_whatever_the_clock_said() -> None:
    first, last = result(value=1.0, created="9999-07-22T00:00:00+00:00"), result(value=2.0)
    assert newest([first, last]) == [last]
    assert newest([last, first]) == [first]


def test_of_rows_of_one_second_the_last_counts() -> None:
    assert newest([result(value=1.0), result(value=2.0)]) == [result(value=2.0)]


@pytest.mark.parametrize("name", ["protocol", "data", "setting", "metric", "weights", "precision", "images"])
def test_rows_that_measure_something_else_stay_beside_each_other(name: str) -> None:
    rows = [result(), result(**{name: "other"})]
    assert newest(rows) == rows


@pytest.mark.parametrize("name", ["model", "run", "version", "architecture"])
def test_a_new_name_for_the_same_weights_replaces_the_old_row(name: str) -> None:
    assert newest([result(), result(**{name: "other"})]) == [result(**{name: "other"})]


def test_a_newer_row_takes_the_place_of_the_older_one() -> None:
    rows = [
        result(setting="k=10"),
        result(setting="k=20"),
        replace(result(setting="k=10"), created="2025-01-01T00:00:00+00:00"),
    ]
    assert newest(rows) == [rows[2], rows[1]]
