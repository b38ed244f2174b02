"""Ctrl-C and SIGTERM make the training loop stop soon, save and exit; a second signal kills it at once."""

import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class StepAbandoned(Exception):
    """A signal arrived between the parts of a step; nothing of the step may remain."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step  # which is also the number of updates done before it


class StopRequest:
    """While active, stores the first signal instead of exiting, and acknowledges it at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, acknowledge: Callable[[], None]) -> None:
        self.received: signal.Signals | None = None
        self._acknowledge = acknowledge
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        try:
            self._previous = {number: signal.signal(number, self._remember) for number in self.SIGNALS}
        except ValueError:  # not the main thread, where signals arrive
            self._previous = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()
        try:
            self._acknowledge()
        except RuntimeError:  # Python refuses to print while the main thread is inside a write to the same stream
            os.write(2, b"stopping\n")

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
