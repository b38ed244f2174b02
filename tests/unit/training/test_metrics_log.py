import contextlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from massl.config import MasslError
from massl.json_lines import rejected_file
from massl.training.metrics_log import TIMING_KEYS, MetricsLog, read_metrics


@contextmanager
def log(folder: Path, *, resume_step: int | None) -> Iterator[MetricsLog]:
    with closing(MetricsLog(folder, resume_step=resume_step, warn=print)) as opened:
        yield opened


def write_steps(folder: Path, *steps: int, resume_step: int | None = None) -> None:
    with log(folder, resume_step=resume_step) as opened:
        for step in steps:
            opened.write({"step": step, "epoch": 0, "loss": step / 10})


def steps_in(folder: Path) -> list[float]:
    return [row["step"] for row in read_metrics(folder / "metrics.jsonl")]


def test_rows_are_on_disk_as_soon_as_they_are_written(tmp_path: Path) -> None:
    with log(tmp_path, resume_step=None) as opened:
        opened.write({"step": 1, "loss": 0.5})
        assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 0.5}]


def test_every_line_is_a_json_object(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_a_resumed_run_drops_what_was_written_after_its_checkpoint(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 5, 10, 15, 20)
    write_steps(tmp_path, 11, 12, resume_step=10)
    assert steps_in(tmp_path) == [0, 5, 10, 11, 12]


def test_a_run_that_starts_anew_drops_all_rows(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 5)
    write_steps(tmp_path, 0, 1)
    assert steps_in(tmp_path) == [0, 1]


def test_half_a_last_line_is_dropped(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "lo')
    assert steps_in(tmp_path) == [0, 5]
    write_steps(tmp_path, 11, resume_step=10)
    assert steps_in(tmp_path) == [0, 5, 11]


def test_without_a_file_there_are_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def warnings_in(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "warnings.jsonl").read_text().splitlines()]


def test_warnings_are_on_disk_at_once_and_without_any_there_is_no_file(tmp_path: Path) -> None:
    with log(tmp_path, resume_step=None) as opened:
        assert not (tmp_path / "warnings.jsonl").exists()
        opened.warn(388, "training may have collapsed")
        assert warnings_in(tmp_path) == [{"step": 388, "warning": "training may have collapsed"}]
    assert steps_in(tmp_path) == []


@pytest.mark.parametrize(("resume_step", "kept"), [(None, []), (10, [5, 10]), (20, [5, 10, 15])])
def test_a_run_keeps_the_warnings_up_to_the_step_it_resumes_from(
    tmp_path: Path, resume_step: int | None, kept: list[int]
) -> None:
    with log(tmp_path, resume_step=None) as opened:
        for step in (5, 10, 15):
            opened.warn(step, "slow")
    with (tmp_path / "warnings.jsonl").open("a") as file:
        file.write('{"step": 18, "war')
    with log(tmp_path, resume_step=resume_step) as opened:
        opened.warn(30, "slow again")
    assert [row["step"] for row in warnings_in(tmp_path)] == [*kept, 30]


# ---- damaged rows ----------------------------------------------------------------------------------------------------

DAMAGED = [
    b"{}",
    b'{"step": 5, "loss": \xff0.5}',
    b'{"step": 5, "epoch": 0, "lo',
    b"[5]",
    b'{"step": "5"}',
    b'{"step": NaN}',
    b'{"step": true}',
    b'{"step": {"step": 5}}',
    b'{"step": 1e400}',
    b"\x00\x00\x00",
]


@pytest.mark.parametrize("line", DAMAGED, ids=str)
@pytest.mark.parametrize("name", ["metrics.jsonl", "warnings.jsonl"])
def test_a_damaged_row_is_set_aside_and_named_and_all_other_rows_stay(tmp_path: Path, name: str, line: bytes) -> None:
    rows = [json.dumps({"step": step, "warning": "slow"}).encode() for step in (0, 5, 10, 15)]
    (tmp_path / name).write_bytes(b"\n".join([*rows[:2], line, *rows[2:]]) + b"\n")
    said: list[str] = []
    with closing(MetricsLog(tmp_path, resume_step=10, warn=said.append)):
        pass
    assert (tmp_path / name).read_bytes() == b"\n".join(rows[:3]) + b"\n"
    assert rejected_file(tmp_path / name).read_bytes() == line + b"\n"
    assert len(said) == 1
    assert f"line 3 of {name}" in said[0]
    assert str(rejected_file(tmp_path / name)) in said[0]
    with closing(MetricsLog(tmp_path, resume_step=10, warn=said.append)):
        pass
    assert len(said) == 1


def test_a_damaged_row_does_not_hide_the_later_ones_from_readers(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 5, 10)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(lines[0] + b"{}\n\xff\n" + lines[1] + lines[2])
    assert steps_in(tmp_path) == [0, 5, 10]


def test_a_row_whose_step_does_not_fit_its_place_is_set_aside_not_dropped(tmp_path: Path) -> None:
    """As after one flipped digit: rows come in the order of their steps."""
    write_steps(tmp_path, 0, 9005, 10, 15)
    said: list[str] = []
    with closing(MetricsLog(tmp_path, resume_step=10, warn=said.append)):
        pass
    assert steps_in(tmp_path) == [0, 10]
    assert json.loads(rejected_file(tmp_path / "metrics.jsonl").read_text())["step"] == 9005
    assert len(said) == 1


def test_rows_that_are_kept_are_kept_byte_for_byte(tmp_path: Path) -> None:
    kept = b'{"step": 1, "nested": {"a": [1, NaN]}, "word": "\xc3\xa4", "big": 1e999}\n{"step": 1, "again": 2}\n'
    (tmp_path / "metrics.jsonl").write_bytes(kept)
    write_steps(tmp_path, resume_step=3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == kept


def test_a_run_that_starts_anew_sets_damaged_rows_aside_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n\xff\xfe\n')
    write_steps(tmp_path, 0)
    assert steps_in(tmp_path) == [0]
    assert rejected_file(tmp_path / "metrics.jsonl").read_bytes() == b"\xff\xfe\n"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_out_of_its_row_and_named_once(tmp_path: Path, value: float) -> None:
    said: list[str] = []
    with closing(MetricsLog(tmp_path, resume_step=None, warn=said.append)) as opened:
        for step in (3, 4):
            opened.write({"step": step, "epoch": 0, "loss": 1.0, "top1": value})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": step, "epoch": 0, "loss": 1.0} for step in (3, 4)]
    assert len(said) == 1
    assert "top1" in said[0]
    assert [row["step"] for row in warnings_in(tmp_path)] == [3]


def test_tensorboard_shows_the_same_values_and_none_of_those_a_resumed_run_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files of one second are read in the order of their counter as text, in which 10 comes before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    write_steps(tmp_path, 5, 10, 15)
    write_steps(tmp_path, 15, 20, resume_step=10)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, pytest.approx(event.value)) for event in events.Scalars("loss")] == [
        (5, 0.5),
        (10, 1.0),
        (15, 1.5),
        (20, 2.0),
    ]


def test_only_time_and_memory_may_differ_between_two_runs() -> None:
    assert frozenset({"images_per_second", "peak_memory_gib"}) == TIMING_KEYS


# ---- folders of strangers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["metrics.jsonl", "warnings.jsonl"])
@pytest.mark.parametrize("content", [None, "own notes", '{"step": 1}\n{"step": 99}\nown notes'])
@pytest.mark.parametrize("is_rejected_file", [True, False])
def test_logs_write_through_no_link(tmp_path: Path, name: str, content: str | None, is_rejected_file: bool) -> None:
    own = tmp_path / "notes.txt"
    if content is not None:
        own.write_text(content)
    folder = tmp_path / "theirs"
    folder.mkdir()
    link = rejected_file(folder / name) if is_rejected_file else folder / name
    if is_rejected_file:
        (folder / name).write_text("touch pwned")
    link.symlink_to(own)
    with contextlib.suppress(OSError), log(folder, resume_step=5) as opened:
        opened.write({"step": 6, "loss": 0.5})
        opened.warn(6, "slow")
    assert (own.read_text() if own.exists() else None) == content
    if is_rejected_file:
        assert (folder / name).read_text() == "touch pwned"


def test_a_fifo_blocks_no_run(tmp_path: Path, make_fifo: Callable[[Path], Path]) -> None:
    make_fifo(tmp_path / "metrics.jsonl")
    with pytest.raises(MasslError, match=r"metrics.jsonl cannot be read"), log(tmp_path, resume_step=5):
        pass


def test_a_file_of_countless_other_lines_stays_as_it_is(tmp_path: Path) -> None:
    content = b"{}\n" * 110_000
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(MasslError, match="more than 100,000 lines"), log(tmp_path, resume_step=5):
        pass
    assert (tmp_path / "metrics.jsonl").read_bytes() == content
    assert not rejected_file(tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("value", ['"x"', "[1]", "null", "true", "NaN", "1" + "0" * 400])
def test_probes_of_a_continued_run_are_numbers(tmp_path: Path, value: str) -> None:
    line = f'{{"step": 5, "effective_rank": 2.0, "other_view_top1": {value}, "flat_probes": {value}}}\n'
    (tmp_path / "metrics.jsonl").write_text(line)
    with log(tmp_path, resume_step=5) as opened:
        assert opened.probed == [{"step": 5, "effective_rank": 2.0}]
    assert (tmp_path / "metrics.jsonl").read_text() == line
