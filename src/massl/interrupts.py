"""Signals to a `massl` command: the first asks it to stop, the second ends it at once."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import NoReturn, Self

# SIGHUP: the terminal was closed. SIGUSR1: Slurm's notice before the end of a job.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# Two signals within this time count as one: a launcher passes on what the terminal or queue sent to this process too.
SAME_SIGNAL_SECONDS = 0.2
_AGAIN_SECONDS = 0.01
_SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"  # a progress bar hides it


class Interrupts:
    """While active, SIGINT ends a command that still starts, and a second signal ends any command.

    A thread watches for the second signal: the main thread may be stuck in a read or wait for another process, where
    Python runs no signal handler.
    """

    is_interrupted = False  # by SIGINT, once started
    _has_timer = False

    def __enter__(self) -> Self:
        self._is_active = threading.current_thread() is threading.main_thread()  # where signals arrive
        if not self._is_active:
            return self
        self._handler, self._show_unraisable = signal.getsignal(signal.SIGINT), sys.unraisablehook
        if self._handler is signal.default_int_handler:  # a background job of a script ignores SIGINT
            signal.signal(signal.SIGINT, _end_the_start)
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._previous = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        threading.Thread(target=_end_at_second, args=(self._reading,), daemon=True).start()
        return self

    def started(self) -> None:
        """Everything is imported: from now on SIGINT raises KeyboardInterrupt, so that files are closed."""
        if self._is_active:
            is_default = self._handler is signal.default_int_handler
            signal.signal(signal.SIGINT, self._interrupt if is_default else self._handler)
            sys.unraisablehook = self._unraisable

    def _interrupt(self, number: int, frame: FrameType | None) -> NoReturn:
        self.is_interrupted = True
        raise KeyboardInterrupt

    def _unraisable(self, swallowed: "sys.UnraisableHookArgs") -> None:
        if swallowed.exc_type is KeyboardInterrupt and self.is_interrupted:
            # The signal came while `__del__` or a weakref's callback ran; Python drops what these raise: once more.
            if not self._has_timer:
                self._has_timer, self._alarm_handler = True, signal.getsignal(signal.SIGALRM)
            signal.signal(signal.SIGALRM, self._interrupt)
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
        else:
            self._show_unraisable(swallowed)

    def _stop_timer(self) -> None:
        if self._has_timer:  # otherwise a timer is that of the program that called massl
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._alarm_handler or signal.SIG_DFL)

    def ending(self) -> None:
        """The command has done its work: from now on only a second signal ends it, and no traceback shows."""
        if self._is_active:
            self._stop_timer()
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, lambda number, frame: None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_active:
            self._stop_timer()
            sys.unraisablehook = self._show_unraisable
            signal.signal(signal.SIGINT, self._handler)
            signal.set_wakeup_fd(self._previous)
            os.close(self._writing)  # ends the thread


def _end_the_start(number: int, frame: FrameType | None) -> NoReturn:
    # Not by an exception: modules that are half imported turn it into others, or print and swallow it.
    _end(number, "interrupted while starting; nothing was changed")


def _end_at_second(reading: int) -> None:
    first: float | None = None
    while received := os.read(reading, 1):  # the number of each signal that has a handler
        now = time.monotonic()
        if received[0] not in STOP_SIGNALS:
            continue
        if first is None:
            first = now
        elif now - first > SAME_SIGNAL_SECONDS:
            _end(received[0], "stopped at once; what was saved so far is intact")
    os.close(reading)


def _end(number: int, text: str) -> NoReturn:
    with suppress(OSError):  # the terminal may be gone
        os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + f"massl: {text}\n".encode())
    os._exit(128 + number)
