import json
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from massl.training.metrics_log import TIMING_KEYS, MetricsLog, read_metrics


@contextmanager
def log(folder: Path, *, resume_step: int | None) -> Iterator[MetricsLog]:
    with closing(MetricsLog(folder, resume_step=resume_step)) as opened:
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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused_by_name_and_not_written(tmp_path: Path, value: float) -> None:
    with (
        log(tmp_path, resume_step=None) as opened,
        pytest.raises(ValueError, match=r"step 3.*loss"),
    ):
        opened.write({"step": 3, "epoch": 0, "loss": value})
    assert steps_in(tmp_path) == []


def test_tensorboard_shows_the_same_values_and_none_of_those_a_resumed_run_dropped(tmp_path: Path) -> None:
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
