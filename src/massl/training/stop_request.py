"""A signal makes the training loop stop soon, save and exit; a second one ends it at once.

SIGINT (Ctrl-C), SIGTERM (a queue), SIGHUP (a closed terminal) and SIGUSR1 (Slurm, some time before it ends a job) all
mean the same. SIGHUP and SIGUSR1 are left alone where they are ignored (nohup) or have a handler already.
"""

import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from massl import distributed
from massl.interrupts import SAME_SIGNAL_SECONDS, STOP_SIGNALS
from massl.training.exchange import Exchange

_UNLESS_TAKEN = (signal.SIGHUP, signal.SIGUSR1)


class StepAbandoned(Exception):
    """A signal arrived between the parts of a step; nothing of the step may remain."""

    def __init__(self, step: int, signal_number: int) -> None:
        super().__init__(step)
        self.step = step  # which is also the number of updates done before it
        self.signal_number = signal_number


class StopRequest:
    """While active, stores the first signal instead of exiting, and acknowledges it at once."""

    SIGNALS = STOP_SIGNALS

    def __init__(self, acknowledge: Callable[[], None], *, device: torch.device | str = "cpu") -> None:
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self._acknowledge = acknowledge
        self._previous: dict[signal.Signals, Any] = {}
        self._waiting_step: int | None = None
        self._ranks = Exchange(torch.device(device))

    def __enter__(self) -> Self:
        try:
            for number in self.SIGNALS:
                if number not in _UNLESS_TAKEN or signal.getsignal(number) == signal.SIG_DFL:
                    self._previous[number] = signal.signal(number, self._remember)
        except ValueError:  # not the main thread, where signals arrive
            self._previous = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def agreed(self, *, now: bool = False) -> int:
        """The signal to stop for, 0 if there is none: the same on all ranks, which must call this equally often.

        Ranks exchange what they received about once a second; with `now` in this call, for work that takes seconds.
        """
        received = int(self.received or 0)
        return received if distributed.world_size() == 1 else self._ranks.largest(received, now=now)

    def abandon_if_agreed(self, step: int, *, now: bool = False) -> None:
        """Raise StepAbandoned if a signal was agreed on."""
        if number := self.agreed(now=now):
            raise StepAbandoned(step, number)

    @contextmanager
    def waiting_for_images(self, step: int) -> Iterator[None]:
        """Inside, a signal abandons the step at once: a read may never return. Several ranks cannot do that alone."""
        if distributed.world_size() == 1:
            self._waiting_step = step
            self.abandon_if_agreed(step)
        try:
            yield
        finally:
            self._waiting_step = None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if time.monotonic() - self._received_at > SAME_SIGNAL_SECONDS:
                self._restore()
                signal.raise_signal(number)  # to the handler of before: KeyboardInterrupt, or the end
            return
        self.received, self._received_at = signal.Signals(number), time.monotonic()
        _leave_lost_terminal()
        try:
            self._acknowledge()
        except RuntimeError:  # Python refuses to print while the main thread is inside a write to the same stream
            os.write(2, b"stopping\n")
        if self._waiting_step is not None:
            raise StepAbandoned(self._waiting_step, number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}


def _leave_lost_terminal() -> None:
    """Send output nowhere where its terminal is gone: printing there would fail, before or after the checkpoint."""
    for stream in (1, 2):
        with suppress(OSError):  # a closed stream
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)
