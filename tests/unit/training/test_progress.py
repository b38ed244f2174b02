import io
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from massl.training import progress
from massl.training.progress import Pace, ProgressDisplay, duration_text


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


def silent(*, num_steps: int = 100, probe_every_steps: int = 0) -> ProgressDisplay:
    return ProgressDisplay(
        num_steps=num_steps, steps_per_epoch=10, batch_size=8, visible=False, probe_every_steps=probe_every_steps
    )


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (3599, "1 h"),
        (7800, "2 h 10 min"),
        (47.5 * 3600, "47 h 30 min"),
        (76 * 3600, "3 days 4 h"),
        (3e8, "3,472 days"),
    ],
)
def test_durations_are_words(seconds: float, words: str) -> None:
    assert duration_text(seconds) == words


def test_the_pace_forgets_the_first_half_of_the_steps() -> None:
    pace = Pace()
    assert pace.seconds_per_step is None
    pace.mark(0, 0.0)
    assert pace.seconds_per_step is None
    pace.mark(1, 60.0)  # compiles
    assert pace.seconds_per_step == 60.0
    assert not pace.is_sure
    for step in range(2, 11):
        pace.mark(step, 60.0 + step)
    assert pace.seconds_per_step == 1.0
    assert pace.is_sure


def test_a_part_of_a_step_is_enough_for_a_pace() -> None:
    pace = Pace()
    for part in range(3):
        pace.mark(part / 16, 50.0 * part)
    assert pace.seconds_per_step == 800.0
    assert pace.is_sure


def test_every_step_moves_the_bar_and_names_speed_and_time_left(clock: Clock) -> None:
    display = silent()
    display.start(0)
    assert "step 0/100" in display.text()
    assert "img/s" not in display.text()  # nothing is known: no 0 img/s, no 0:00:00 left
    clock.now += 2
    display.advance(1, loss=5.5)
    assert display._bar.tasks[0].completed == 0  # no terminal, no bar
    assert "step 1/100  epoch 0" in display.text()
    assert "loss 5.5000" in display.text()
    assert "4 img/s" in display.text()
    assert "0:03:18 left" in display.text()
    clock.now += 2
    display.advance(25.5, loss=5.5)
    assert "step 25/100  epoch 2" in display.text()


def test_on_a_terminal_each_step_moves_the_bar(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    display = ProgressDisplay(num_steps=4, steps_per_epoch=10, batch_size=8, visible=True)
    display.start(0)
    for done in (0.5, 1, 2):
        clock.now += 1
        display.advance(done, loss=1.0)
        assert display._bar.tasks[0].completed == done


def test_time_of_probes_counts_in_what_is_left_but_not_in_the_pace(clock: Clock) -> None:
    display = silent(num_steps=10, probe_every_steps=4)
    with display.busy("probing", is_probe=True):
        clock.now += 30
    display.start(0)
    for done in range(1, 5):
        clock.now += 1
        display.advance(done, loss=1.0)
    assert display.seconds_left == 6 + 2 * 30  # probes at 8 and 10
    with display.busy("probing", is_probe=True):
        clock.now += 7
        assert "probing, 0:00:07 so far" in display.text()
    clock.now += 1
    display.advance(5, loss=1.0)
    assert display.seconds_left == 5 + 2 * 7


@pytest.mark.parametrize(("start", "words"), [(0, "about 20 min in all"), (200, "about 17 min left")])
def test_the_duration_is_told_once_within_the_first_steps(
    start: int, words: str, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    display = ProgressDisplay(num_steps=1200, steps_per_epoch=10, batch_size=8, visible=True)
    display.start(start)
    for done in range(start + 1, start + 40):
        clock.now += 1
        display.advance(done, loss=1.0)
    error = capsys.readouterr().err
    assert error.count(words) == 1
    assert error.count("about") == 1


def test_a_run_of_seconds_needs_no_duration(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay(num_steps=25, steps_per_epoch=10, batch_size=8, visible=True)
    display.start(0)
    for done in range(1, 26):
        clock.now += 1
        display.advance(done, loss=1.0)
    assert "about" not in capsys.readouterr().err


def test_without_a_terminal_a_line_comes_after_each_silence_even_in_a_long_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = ProgressDisplay(num_steps=4, steps_per_epoch=10, batch_size=8, visible=True, line_seconds=0.01)
    lines, deadline = 0, time.monotonic() + 120
    with display:
        display.start(0)
        display.advance(1, loss=2.0)
        while lines < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
            lines += capsys.readouterr().err.count("step 1/4")
    assert lines >= 3
    assert display._ticker is not None
    assert not display._ticker.is_alive()


def test_without_a_terminal_a_probe_is_named_once_and_soon(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_BUSY_SECONDS", 0.01)
    display = ProgressDisplay(num_steps=4, steps_per_epoch=10, batch_size=8, visible=True, line_seconds=1000.0)
    said, deadline = "", time.monotonic() + 120
    with display:
        for what in ("first batch", "probing"):
            with display.busy(what):
                while what not in said and time.monotonic() < deadline:
                    time.sleep(0.01)
                    said += capsys.readouterr().err
                time.sleep(0.05)
        display.start(0)
        while "first step" not in said and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capsys.readouterr().err
        time.sleep(0.05)
    said += capsys.readouterr().err
    assert [said.count(what) for what in ("first batch", "probing", "first step")] == [1, 1, 1]


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay(num_steps=4, steps_per_epoch=10, batch_size=8, visible=False, line_seconds=0.0)
    with display:
        display.say("words")
    assert display._ticker is None
    assert capsys.readouterr().err == ""


def test_rows_are_shown_with_the_speed_they_measured(capsys: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay(num_steps=4, steps_per_epoch=10, batch_size=8, visible=True)
    row = {"step": 2, "epoch": 1, "loss": 1.5, "lr": 0.1, "images_per_second": 123.0}
    display.log(row)
    display.log({**row, "effective_rank": 3.0, "knn_top1": 50.0})
    error = capsys.readouterr().err
    assert "step 2/4  epoch 1  loss 1.5000  lr 1.00e-01  123 img/s" in error
    assert "k-NN 50.0 %  effective rank 3.0" in error
    display.log({**row, "effective_rank": 3.0, "other_view_top1": 40.0})  # without labels
    assert "found again by another view 40.0 %  effective rank 3.0" in capsys.readouterr().err


@pytest.mark.parametrize(("columns", "is_whole"), [(120, True), (80, True), (60, False), (40, False)])
def test_the_line_of_the_bar_never_wraps_and_drops_the_time_left_last(
    columns: int, is_whole: bool, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    display = ProgressDisplay(num_steps=100_000, steps_per_epoch=1000, batch_size=1024, visible=True)
    display.start(50_000)
    for step in range(50_001, 50_010):
        clock.now += 0.4
        display.advance(step, loss=5.1234)
    shown = Console(width=columns, file=io.StringIO(), color_system=None)
    shown.print(display._bar)
    (line,) = shown.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(line) <= columns
    assert ("img/s" in line and "epoch" in line) == is_whole
    assert ("left" in line) == (columns >= 60)
