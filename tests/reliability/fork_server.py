"""Starts `massl` commands as processes of their own without a new interpreter each time: importing it all takes 4 s.

This process imports every command once and then forks a child for each job, read from stdin as one JSON line. It
computes nothing itself, so children inherit a single thread. A child runs `massl.cli.main` and then leaves as a Python
process does: threads joined, exit functions called.
"""

import atexit
import contextlib
import ctypes
import errno
import functools
import importlib
import json
import os
import pkgutil
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
import tyro  # noqa: F401 (every command parses with it)
from torch.utils import tensorboard  # noqa: F401 (every run writes with it)

import massl.cli
import massl.commands
from massl.training.metrics_log import MetricsLog
from massl.training.step import TrainingStep


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def count_events(path: str) -> None:
    """Write down how many calls and returns of Python and C functions the main thread makes in the whole run."""
    num_events = 0

    def count(*_: object) -> None:
        nonlocal num_events
        num_events += 1

    original = massl.cli.main

    def main(arguments: list[str] | None = None) -> int:
        sys.setprofile(count)
        try:
            return original(arguments)
        finally:
            sys.setprofile(None)
            Path(path).write_text(str(num_events))

    massl.cli.main = main  # type: ignore[assignment]


def kill_at_event(num_events: int) -> None:
    """kill -9 at the given call or return, counted as above: a moment that does not depend on the machine."""
    left = num_events

    def count_down(*_: object) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            _die()

    sys.setprofile(count_down)


def _wrap(target: str, wrapper: Callable[..., Any]) -> None:
    """Put `wrapper(original, ...)` in the place of `module:Class.function`."""
    module, _, qualified = target.partition(":")
    *parents, name = qualified.split(".")
    owner = functools.reduce(getattr, parents, importlib.import_module(module))
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*positional: Any, **named: Any) -> Any:
        return wrapper(original, *positional, **named)

    setattr(owner, name, wrapped)


def kill_at_call(target: str, nth: int, moment: str, number: int = signal.SIGKILL) -> None:
    """Send this process a signal before or after the nth call of `module:Class.function`."""
    num_calls = 0

    def wrapped(original: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == nth and moment == "before":
            os.kill(os.getpid(), number)
        result = original(*positional, **named)
        if num_calls == nth and moment == "after":
            os.kill(os.getpid(), number)
        return result

    _wrap(target, wrapped)


def full_at_call(target: str, nth: int) -> None:
    """Raise "No space left on device" in the nth call of `module:Class.function` and in all later ones."""
    num_calls = 0

    def wrapped(original: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls >= nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*positional, **named)

    _wrap(target, wrapped)


def kill_in_half_a_checkpoint(nth: int) -> None:
    """kill -9 when the nth checkpoint is half on the disk."""
    original, num_calls = torch.save, 0

    def save_half(state: object, file: IO[bytes]) -> None:
        nonlocal num_calls
        num_calls += 1
        original(state, file)
        if num_calls == nth:
            file.truncate(file.tell() // 2)
            file.flush()
            _die()

    torch.save = save_half


def kill_in_half_a_metrics_line(nth: int) -> None:
    """kill -9 when the nth row of metrics.jsonl is half on the disk."""
    original, num_calls = MetricsLog.write, 0

    def write_half(log: Any, row: dict[str, float]) -> None:
        nonlocal num_calls
        num_calls += 1
        original(log, row)
        if num_calls == nth:
            os.truncate(log.path, log.path.stat().st_size - 20)
            _die()

    MetricsLog.write = write_half  # type: ignore[method-assign]


def limit_file_size(num_bytes: int) -> None:
    """Make writing beyond this size fail, as on a full disk (EFBIG, not ENOSPC; Python ignores the signal)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def hang_at_file(name: str, flag: str, may_be_interrupted: bool) -> None:
    """Reading this file never returns once `flag` exists, as from a network drive that is gone.

    Not `may_be_interrupted`: the thread does not even come back to Python for a signal.
    """
    original = os.open

    def open_or_hang(path: Any, *positional: Any, **named: Any) -> int:
        if os.fspath(path).endswith(name) and Path(flag).exists():
            Path(f"{flag}.reached").touch()
            if not may_be_interrupted:
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                ctypes.CDLL(None).sleep(10**6)
            time.sleep(10**6)
        return original(path, *positional, **named)

    os.open = open_or_hang  # type: ignore[assignment]


def slow_steps(seconds: float) -> None:
    """Each part of a step takes so long at least."""
    original = TrainingStep.forward_backward

    def slow(*positional: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return original(*positional, **named)

    TrainingStep.forward_backward = slow  # type: ignore[method-assign]


def spoil_image(index: int) -> None:
    """Views of one image hold NaN, in the process that trains on it."""

    def wrapped(original: Callable[..., Any], maker: Any, images: Any, **named: Any) -> Any:
        views = original(maker, images, **named)
        views.global_views[:, images.indices == index] = float("nan")
        return views

    _wrap("massl.training.view_maker:ViewMaker.__call__", wrapped)


HOOKS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        count_events,
        kill_at_event,
        kill_at_call,
        full_at_call,
        kill_in_half_a_checkpoint,
        kill_in_half_a_metrics_line,
        limit_file_size,
        hang_at_file,
        slow_steps,
        spoil_image,
    )
}


def _listen(original: Callable[..., Any], interrupts: Any) -> Any:
    """From here on the command answers SIGINT. Sooner, Python itself would: what it says then is not massl's."""
    result = original(interrupts)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    return result


def _run_child(job: dict[str, Any]) -> NoReturn:
    os.setpgid(0, 0)  # a group of its own: it can be signalled with its workers, as by a terminal
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job["environment"])
    sys.argv = ["massl", *job["arguments"]]
    torch.set_num_threads(1)
    for name, values in job["hooks"].items():
        HOOKS[name](*values)
    _wrap("massl.cli:Interrupts.__enter__", _listen)
    try:
        status = massl.cli.main()
    except SystemExit as exit_request:
        status = exit_request.code if isinstance(exit_request.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)  # not sys.exit: taking torch's modules apart one by one takes longer than the training


def _poll(pid: int) -> dict[str, float | None]:
    """Exit status of a child, minus the signal that ended it, or None while it runs; its peak of memory."""
    ended, status, used = os.wait4(pid, os.WNOHANG) if pid else (0, 0, resource.getrusage(resource.RUSAGE_SELF))
    return {"status": os.waitstatus_to_exitcode(status) if ended else None, "peak_mib": used.ru_maxrss / 1024}


def serve() -> None:
    """Answer jobs until stdin ends."""
    for module in pkgutil.walk_packages(massl.commands.__path__, "massl.commands."):
        importlib.import_module(module.name)  # massl.cli imports only the command it runs
    assert threading.active_count() == 1
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    print(json.dumps({"ready": True}), flush=True)
    running: set[int] = set()
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "poll" in request:
            answer = _poll(request["poll"])
            if answer["status"] is not None:
                running.discard(request["poll"])
        else:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # the child unblocks it in _listen
            pid = os.fork()
            if pid == 0:
                _run_child(request)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            running.add(pid)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)
    for pid in running:  # whoever asked is gone
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve()
    os._exit(0)
