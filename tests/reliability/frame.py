"""What a fault class is, and how one case of it is run: see README.md."""

import atexit
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import importlib
import os
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import numpy as np

Option = TypeVar("Option")
Kind = Literal["cases", "processes"]
Verdict = Literal["survived", "wrong", "lost", "crash", "hang"]
TESTS = Path(__file__).parents[1]
ROOMS = ("faults", "fuzz")
_ROOM_BYTES = 1 << 30
_PREFIX = "massl-reliability-"
_YOUNG_SECONDS = 60.0  # a session that has just begun may not have locked its folder yet
_locks: list[IO[str]] = []
_PYTEST_SECONDS = 600.0  # of a case at least: other tests and an installation may run beside it
_SHARED = "MASSL_RELIABILITY_SHARED"  # folder of what all cases share, when several processes run one session


class Failure(Exception):
    """The end of a case that was not survived."""

    verdict: Verdict


class Wrong(Failure):
    """A wrong result in silence, or a message that misleads."""

    verdict = "wrong"


class Lost(Failure):
    """Something already computed is gone."""

    verdict = "lost"


class Crash(Failure):
    verdict = "crash"


class Hang(Failure):
    verdict = "hang"


class _Alarm(BaseException):
    """Not an Exception: code under test must not swallow it."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    verdict: Verdict
    detail: str = ""  # what went wrong, in a line
    trace: str = ""
    recovery_s: float = 0.0
    peak_mib: float = 0.0


class Case:
    """One case: its number decides everything that happens in it."""

    def __init__(self, class_name: str, number: int, folder: Path) -> None:
        self.number, self.folder = number, folder
        self.random = random_of(class_name, number)
        self.recovery_s = 0.0
        self.child_mib = 0.0

    def pick(self, options: Sequence[Option]) -> Option:
        """Options in turn, so that the first cases have seen each of them."""
        return options[self.number % len(options)]

    @contextlib.contextmanager
    def recovery(self) -> Iterator[None]:
        """Around what comes after the fault, until it works again."""
        start = time.monotonic()
        yield
        self.recovery_s = max(self.recovery_s, time.monotonic() - start)

    def children_mib(self, peak: float) -> None:
        self.child_mib = max(self.child_mib, peak)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultClass:
    name: str
    run: Callable[[Case], None]
    kind: Kind
    seconds: float
    mib: float | None
    quick: int  # cases in `make test`
    more: int  # cases of `make test` and `make test-slow` together

    @property
    def room(self) -> str:
        return next(room for room in ROOMS if f"tests.{room}." in f"{self.run.__module__}.")

    def command_of(self, number: int) -> str:
        return f'python -m tests.reliability --only "{self.name}" --case {number}'


_classes: dict[str, FaultClass] = {}


def fault_class(
    name: str,
    *,
    kind: Kind = "cases",
    seconds: float | None = None,
    mib: float | None = None,
    quick: int | None = None,
    more: int | None = None,
) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Register a function of one case."""
    is_cheap = kind == "cases"

    def register(run: Callable[[Case], None]) -> Callable[[Case], None]:
        assert name not in _classes or _classes[name].run.__qualname__ == run.__qualname__, f"two classes named {name}"
        _classes[name] = FaultClass(
            name=name,
            run=run,
            kind=kind,
            seconds=seconds or (10.0 if is_cheap else 120.0),
            mib=mib,
            quick=quick if quick is not None else (30 if is_cheap else 1),
            more=more if more is not None else (500 if is_cheap else 5),
        )
        return run

    return register


def all_classes(*rooms: str, broken: dict[str, Exception] | None = None) -> list[FaultClass]:
    """Every class of the rooms, in the order of files and of their lines.

    With `broken`, files that cannot be imported are left out and put there with their error.
    """
    for room in ROOMS:
        for path in sorted((TESTS / room).glob("*.py")):
            if path.name.startswith(("test_", "_")):
                continue
            try:
                importlib.import_module(f"tests.{room}.{path.stem}")
            except Exception as error:
                if broken is None:
                    raise
                broken[f"tests/{room}/{path.name}"] = error
    return [found for found in _classes.values() if found.room in (rooms or ROOMS)]


def random_of(class_name: str, number: int) -> np.random.Generator:
    """Random numbers of one case, whatever cases came before it."""
    name = int.from_bytes(hashlib.sha256(class_name.encode()).digest()[:8])
    return np.random.Generator(np.random.Philox(key=[name, number]))


@functools.cache
def session_folder() -> Path:
    """Where this session keeps what its cases share; deleted when the process that made it ends."""
    if _SHARED in os.environ:
        return Path(os.environ[_SHARED])
    # in memory where possible: thousands of cases wait for fsync otherwise
    memory = Path("/dev/shm")
    is_roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > _ROOM_BYTES
    room, owner = memory if is_roomy else Path(tempfile.gettempdir()), os.getpid()
    _remove_abandoned(room)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=room))
    os.environ[_SHARED] = str(folder)
    lock = (folder / "owner.lock").open("w")  # held until this process ends
    fcntl.flock(lock, fcntl.LOCK_EX)
    _locks.append(lock)

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def _remove_abandoned(room: Path) -> None:
    """Delete folders of sessions that were killed: nobody holds their lock."""
    for path in room.glob(f"{_PREFIX}*/owner.lock"):
        with contextlib.suppress(OSError), path.open() as lock:
            if time.time() - path.stat().st_mtime < _YOUNG_SECONDS:
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)


def made_once(name: str, make: Callable[[Path], Any]) -> Path:
    """The folder that `make` filled: the first process that asks makes it, the others wait for it."""
    folder = session_folder() / name.replace(" ", "-")
    with (session_folder() / f"{folder.name}.lock").open("w") as lock, untimed():
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder


@contextlib.contextmanager
def untimed() -> Iterator[None]:
    """What is made once does not count as time of the case that happened to ask first."""
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        if left:
            signal.setitimer(signal.ITIMER_REAL, left)


def run_case(found: FaultClass, number: int, folder: Path) -> Outcome:
    """Run one case in an empty folder and judge it. Main thread only: the time limit is an alarm."""
    from tests.reliability import processes

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    case = Case(found.name, number, folder)
    before = _reset_peak_mib()
    previous = signal.signal(signal.SIGALRM, _ring)
    failure: BaseException | None = None
    try:
        signal.setitimer(signal.ITIMER_REAL, found.seconds)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.run(case)
    except _Alarm as alarm:
        failure = alarm
    except Exception as error:
        failure = error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        case.children_mib(processes.end_all())
        shutil.rmtree(folder, ignore_errors=True)
    own = peak_mib()
    if failure is None and found.mib is not None and own - before > found.mib:
        failure = Crash(f"memory grew by {own - before:.0f} MiB; {found.mib:.0f} are allowed")
    return _outcome(failure, found, recovery_s=case.recovery_s, peak_mib=max(own, case.child_mib))


def _ring(*_: object) -> None:
    raise _Alarm


def _outcome(failure: BaseException | None, found: FaultClass, **measured: float) -> Outcome:
    if failure is None:
        return Outcome("survived", **measured)
    trace = "".join(traceback.format_exception(failure))
    if isinstance(failure, _Alarm):
        return Outcome("hang", f"longer than {found.seconds:.0f} s", trace, **measured)
    if isinstance(failure, Failure):
        return Outcome(failure.verdict, str(failure), trace, **measured)
    verdict: Verdict = "wrong" if isinstance(failure, AssertionError) else "crash"
    return Outcome(verdict, f"{type(failure).__name__}: {failure}", trace, **measured)


def _reset_peak_mib() -> float:
    """Start measuring the peak of this process anew; its memory now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return memory_mib("self", "VmRSS")


def peak_mib() -> float:
    return memory_mib("self", "VmHWM")


def memory_mib(process: int | str, field: str) -> float:
    """A field of /proc/PROCESS/status in MiB; 0 if the process is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) / 1024
    return 0.0


def assert_survived(found: FaultClass, numbers: range) -> None:
    """For pytest: some cases of a class; the first that is not survived fails the test."""
    patient = dataclasses.replace(found, seconds=max(found.seconds, _PYTEST_SECONDS))
    for number in numbers:
        outcome = run_case(patient, number, session_folder() / "case")
        assert outcome.verdict == "survived", (
            f"{outcome.verdict}: {outcome.detail}\nto repeat: {found.command_of(number)}\n{outcome.trace}"
        )
