"""Ranks agree during training, about once a second, without waiting for each other at every step."""

import time
from collections.abc import Callable

import torch

from massl import distributed

_EXCHANGE_SECONDS = 1.0  # between two exchanges of ranks, about
# Calls between two exchanges of ranks at most: if steps suddenly take much longer, so many of them pass unasked.
_MOST_CALLS = 8


class Exchange:
    """Ranks find out together what the largest number of any of them is.

    All ranks call `largest` equally often, and exchange numbers in the same calls: how many calls pass until the next
    exchange follows from the slowest call of any rank, which they exchange too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._interval = self._calls_left = 1
        self._slowest_seconds, self._called_at = 0.0, time.perf_counter()
        self._result: Callable[[], list[int]] | None = None  # of an exchange that is under way

    def largest(self, number: int, *, now: bool) -> int:
        """The largest number as of the last exchange; 0 in calls that learn nothing new."""
        clock = time.perf_counter()
        self._slowest_seconds = max(self._slowest_seconds, clock - self._called_at)
        self._called_at = clock
        if self._result is None or now:
            self._calls_left -= 1
            if self._calls_left > 0 and not now:
                return 0
            slowest_milliseconds = int(self._slowest_seconds * 1000)
            self._result = distributed.start_largest((number, slowest_milliseconds), self._device)
            self._slowest_seconds = 0.0
            # The GPU works on this step until the host has queued the next one: waiting for it now would leave it idle.
            # Steps of seconds can afford that.
            if self._device.type == "cuda" and self._interval > 1 and not now:
                return 0
        largest, slowest_milliseconds = self._result()
        self._result = None
        calls = int(_EXCHANGE_SECONDS * 1000) // max(1, slowest_milliseconds)
        self._interval = self._calls_left = min(max(1, calls), _MOST_CALLS)
        return largest
