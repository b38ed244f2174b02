"""The live display of a run: a bar that moves at every step on a terminal, a line at least every 30 s elsewhere."""

import collections
import contextlib
import datetime
import math
import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import NamedTuple, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.text import Text

_LINE_SECONDS = 30.0  # the longest silence where there is no bar
_BUSY_SECONDS = 3.0  # the longest silence there before a probe or the first step is named
# The duration is announced once the pace was measured over this much, whichever comes first.
_SURE_SECONDS, _SURE_STEPS = 5.0, 5
_SHORT_SECONDS = 30.0  # a run of less than this needs no announcement
_BAR_WIDTH = 12  # leaves 67 of 80 columns to the words


def duration_text(seconds: float) -> str:
    """ "40 s", "12 min", "2 h 10 min", "3 days 4 h"."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
    hours = round(seconds / 3600)
    return f"{hours // 24:,} days {hours % 24} h" if hours < 14 * 24 else f"{hours // 24:,} days"


class _Mark(NamedTuple):
    steps: float  # done so far; a part of a step is a fraction
    seconds: float  # of training so far, without probes


class Pace:
    """Seconds per step, from the host's clock alone: measuring never waits for a GPU.

    The host is at most one step ahead of a GPU, because LossWatch waits for the loss of the step before. Only the last
    half of the steps counts, at most 100: the first ones compile and record.
    """

    def __init__(self) -> None:
        self._marks = collections.deque[_Mark](maxlen=201)

    def mark(self, steps: float, seconds: float) -> None:
        self._marks.append(_Mark(steps, seconds))

    @property
    def _window(self) -> _Mark:
        marks = list(self._marks)
        if len(marks) < 2:
            return _Mark(0.0, 0.0)
        first, last = marks[(len(marks) - 1) // 2], marks[-1]
        return _Mark(last.steps - first.steps, last.seconds - first.seconds)

    @property
    def seconds_per_step(self) -> float | None:
        """None before the first step or part."""
        window = self._window
        return window.seconds / window.steps if window.steps > 0 and window.seconds > 0 else None

    @property
    def is_sure(self) -> bool:
        """Whether enough was measured to tell the duration; never from the first step or part alone."""
        window = self._window
        return len(self._marks) > 2 and (window.seconds >= _SURE_SECONDS or window.steps >= _SURE_STEPS)


class ProgressDisplay:
    """Shows step, loss, images per second and time left; messages appear above the bar."""

    def __init__(
        self,
        *,
        num_steps: int,
        steps_per_epoch: int,
        batch_size: int,
        visible: bool,
        probe_every_steps: int = 0,
        line_seconds: float = _LINE_SECONDS,
    ) -> None:
        self._console = Console(stderr=True, quiet=not visible, highlight=False)
        self._num_steps, self._steps_per_epoch, self._batch_size = num_steps, steps_per_epoch, batch_size
        self._probe_every_steps = probe_every_steps
        has_bar = visible and self._console.is_terminal
        self._bar = Progress(
            BarColumn(bar_width=_BAR_WIDTH),
            _LiveText(self),
            console=self._console,
            disable=not has_bar,
            transient=True,
        )
        self._task = self._bar.add_task("", total=num_steps)
        self._line_seconds = line_seconds
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True) if visible and not has_bar else None
        self._pace = Pace()
        self._steps, self._start_step, self._loss = 0.0, 0, math.nan
        self._busy, self._busy_since = "starting", time.perf_counter()
        self._probe_seconds = self._paused_seconds = 0.0
        self._clock_start = self._said_at = time.perf_counter()
        self._announced = False
        self._told: object = None  # the probe or first step that a line has named already

    def __enter__(self) -> Self:
        self._bar.start()
        if self._ticker is not None:
            self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._ticker is not None:
            self._ticker.join()
        self._bar.stop()

    def say(self, message: str, *, style: str | None = None) -> None:
        self._said_at = time.perf_counter()
        with contextlib.suppress(OSError):  # a terminal or pipe that is gone must not end the training
            self._console.print(message, style=style, markup=False, emoji=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        self.say(f"warning: {message}", style="yellow")

    def start(self, step: int) -> None:
        """Training begins at this step: the time left is measured from now on."""
        self._busy, self._start_step, self._steps = "", step, step
        self._paused_seconds, self._clock_start = 0.0, time.perf_counter()
        self._pace.mark(step, 0.0)
        self._bar.update(self._task, completed=step)

    def advance(self, steps: float, *, loss: float) -> None:
        """So many steps are done, the last one perhaps in part; ignored before `start`."""
        if self._busy:
            return
        now = time.perf_counter()
        self._steps, self._loss = steps, loss
        self._pace.mark(steps, now - self._clock_start - self._paused_seconds)
        if not self._announced and self._pace.is_sure:
            self._announce(now)
        if not self._bar.disable:
            self._bar.update(self._task, completed=steps)

    @contextlib.contextmanager
    def busy(self, what: str, *, is_probe: bool = False) -> Iterator[None]:
        """Names what is done instead of training; its time does not count in the pace."""
        before, self._busy, self._busy_since = self._busy, what, time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - self._busy_since
            self._paused_seconds += seconds
            if is_probe:
                self._probe_seconds = seconds
            self._busy = before

    def log(self, row: Mapping[str, float]) -> None:
        """Show a row of metrics.jsonl."""
        step, images_per_second, loss = int(row["step"]), row["images_per_second"], row["loss"]
        self._loss = loss
        if "effective_rank" in row:
            found = "found again by another view"  # without labels
            score = f"{found} {row['other_view_top1']:.1f} %  " if "other_view_top1" in row else ""
            score = f"k-NN {row['knn_top1']:.1f} %  " if "knn_top1" in row else score
            health = f"{score}effective rank {row['effective_rank']:.1f}  loss {loss:.4f}"
            self.say(f"step {step}/{self._num_steps}  {health}", style="green")
        elif not self._console.is_terminal:
            speed = f"{images_per_second:,.0f} img/s  {self._left_text()}" if step else "before training"
            place = f"step {step}/{self._num_steps}  epoch {int(row['epoch'])}"
            self.say(f"{place}  loss {loss:.4f}  lr {row['lr']:.2e}  {speed}")

    # ---- words -------------------------------------------------------------------------------------------------------

    def text(self, *, width: int | None = None) -> str:
        """Where the run is now; in a narrow terminal without the epoch, then without the speed, then the loss."""
        step = math.floor(self._steps)
        place = f"step {step}/{self._num_steps}"
        if self._busy:
            elapsed = datetime.timedelta(seconds=round(time.perf_counter() - self._busy_since))
            return f"{place}  {self._busy}, {elapsed} so far"
        pace = self._pace.seconds_per_step
        if pace is None:
            return f"{place}  the first step is under way"
        images_per_second = self._batch_size / pace
        loss = "" if math.isnan(self._loss) else f"loss {self._loss:.4f}"
        speed = f"{images_per_second:,.0f}" if images_per_second >= 10 else f"{images_per_second:.2g}"
        parts = {"": place, "epoch": f"epoch {step // self._steps_per_epoch}", "loss": loss, "speed": f"{speed} img/s"}
        parts["left"] = self._left_text()
        for dropped in ("", "epoch", "speed", "loss"):
            parts |= {dropped: ""} if dropped else {}
            text = "  ".join(filter(None, parts.values()))
            if width is None or len(text) <= width:
                break
        return text

    @property
    def words_width(self) -> int:
        """Columns beside the bar and the space after it."""
        return self._console.width - _BAR_WIDTH - 1

    def _left_text(self) -> str:
        seconds = self.seconds_left
        return "time left unknown" if seconds is None else f"{datetime.timedelta(seconds=round(seconds))} left"

    @property
    def seconds_left(self) -> float | None:
        """Of the remaining steps and probes; None before the first step or part."""
        pace = self._pace.seconds_per_step
        if pace is None:
            return None
        num_probes, done, end = 0, math.floor(self._steps), self._num_steps
        if interval := self._probe_every_steps:  # and one at the end
            num_probes = end // interval - done // interval + (end % interval != 0 and done < end)
        return (end - self._steps) * pace + num_probes * self._probe_seconds

    def _announce(self, now: float) -> None:
        left = self.seconds_left
        self._announced = True
        if left is None or left < _SHORT_SECONDS:
            return
        if self._start_step:
            self.say(f"about {duration_text(left)} left")
        else:
            self.say(f"about {duration_text(now - self._clock_start + left)} in all")

    def _tick(self) -> None:
        """Print a line after each silence, also in the middle of a long step; soon if it is a probe or the first."""
        while not self._ended.wait(min(1.0, self._line_seconds, _BUSY_SECONDS)):
            silence = time.perf_counter() - self._said_at
            if silence >= self._line_seconds or (silence >= _BUSY_SECONDS and self._is_untold()):
                self.say(self.text())

    def _is_untold(self) -> bool:
        """Whether something slower than a usual step is under way that no line has named yet."""
        under_way = (self._busy, self._busy_since) if self._busy else "" if self._pace.seconds_per_step else "first"
        is_untold, self._told = under_way not in ("", self._told), under_way
        return is_untold


class _LiveText(ProgressColumn):
    """The words beside the bar, made anew at each refresh; the training loop formats nothing."""

    def __init__(self, display: ProgressDisplay) -> None:
        super().__init__()
        self._display = display

    def render(self, task: Task) -> Text:
        return Text(self._display.text(width=self._display.words_width), no_wrap=True, overflow="ellipsis")
