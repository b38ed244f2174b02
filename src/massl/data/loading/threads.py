"""A pool of threads for reads that may never return, as on a network drive that is gone."""

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, ParamSpec, TypeVar

_CLOSING_SECONDS = 1.0

Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")
_Task = tuple[Future[Any], Callable[[], Any]]


class DaemonThreads(Executor):
    """As ThreadPoolExecutor, but a thread that is stuck delays neither `shutdown` nor the end of Python for long."""

    def __init__(
        self, num_threads: int, *, thread_name_prefix: str, initializer: Callable[[], None] | None = None
    ) -> None:
        self._num_threads = num_threads
        self._prefix = thread_name_prefix
        self._initializer = initializer
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._is_closed = False
        self._lock = Lock()

    def submit(
        self, function: Callable[Parameters, Value], /, *positional: Parameters.args, **named: Parameters.kwargs
    ) -> Future[Value]:
        future: Future[Value] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._tasks.put((future, lambda: function(*positional, **named)))
            if len(self._threads) < self._num_threads:
                name = f"{self._prefix}_{len(self._threads)}"
                thread = Thread(target=_work, args=(self._tasks, self._initializer), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads; with `wait`, within a second."""
        with self._lock:
            if cancel_futures:
                _cancel(self._tasks)
            if not self._is_closed:
                self._is_closed = True
                for _ in self._threads:
                    self._tasks.put(None)
        deadline = time.monotonic() + _CLOSING_SECONDS
        for thread in self._threads if wait else ():
            with suppress(RuntimeError):  # Ctrl-C came while it was being started
                thread.join(max(0.0, deadline - time.monotonic()))


def _cancel(tasks: SimpleQueue[_Task | None]) -> None:
    num_ends = 0
    while True:
        try:
            task = tasks.get_nowait()
        except Empty:
            break
        if task is None:
            num_ends += 1
        else:
            task[0].cancel()
    for _ in range(num_ends):
        tasks.put(None)


def _work(tasks: SimpleQueue[_Task | None], initializer: Callable[[], None] | None) -> None:
    if initializer is not None:
        initializer()
    while (task := tasks.get()) is not None:
        future, call = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(call())
        except BaseException as error:  # it belongs to whoever waits for the result
            future.set_exception(error)
        del task, future, call  # images are freed before the next task comes
