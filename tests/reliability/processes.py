"""`massl` commands as processes of their own, forked from one that has imported everything (fork_server.py)."""

import atexit
import contextlib
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.reliability.frame import Hang, session_folder, untimed

_DEADLINE_SECONDS = 300.0  # only for a process that hangs


@dataclass(frozen=True)
class Answer:
    status: int
    output: str
    error: str

    @property
    def text(self) -> str:
        """All that a person saw, on one line: messages may be wrapped to the terminal."""
        return " ".join(f"{self.output} {self.error}".replace("│", " ").split())


class Process:
    """A `massl` command that runs beside the test."""

    def __init__(self, server: "ForkServer", pid: int, log: Path) -> None:
        self.pid, self.log = pid, log
        self.peak_mib = 0.0  # known when it has ended
        self._server = server
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            answer = self._server.ask({"poll": self.pid})
            self._status, self.peak_mib = answer["status"], answer["peak_mib"]
        return self._status

    def kill(self, number: int = signal.SIGKILL, *, whole_group: bool = False) -> None:
        """Send a signal to the process, or to it and its workers as a terminal does; nothing if it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if whole_group else os.kill)(self.pid, number)

    def group_ends(self, *, seconds: float = 120.0) -> bool:
        """Whether the processes that it started end by themselves after it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.02)
        return False

    def wait_until(self, condition: Callable[[], bool], *, seconds: float = _DEADLINE_SECONDS) -> None:
        """Until the condition holds or the process has ended."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and not condition():
            if time.monotonic() > deadline:
                self.kill(whole_group=True)
                raise Hang(f"massl hangs; it said:\n{self.log.read_text()}")
            time.sleep(0.01)

    def wait(self, *, seconds: float = _DEADLINE_SECONDS) -> Answer:
        """Exit status (minus the signal that ended it) and everything it printed."""
        self.wait_until(lambda: False, seconds=seconds)
        assert self._status is not None
        return Answer(self._status, "", self.log.read_text(errors="replace"))


class ForkServer:
    """Client of fork_server.py."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._num_started = 0
        self.started: list[Process] = []
        script = Path(__file__).with_name("fork_server.py")
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["TMPDIR"] = str(session_folder())  # what killed processes leave goes with it
        command = [sys.executable, "-W", "always::ResourceWarning", str(script)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._is_ready = False

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        if not self._is_ready:
            assert self._read() == {"ready": True}
            self._is_ready = True
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"fork_server.py has ended with {self._process.wait()}: does massl import?")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def start(self, *arguments: str | Path, environment: dict[str, str] | None = None, **hooks: list[Any]) -> Process:
        """Start `massl ARGUMENTS` as a process; `hooks` name functions of fork_server.py and their arguments."""
        self._num_started += 1
        log = self._logs / f"{self._num_started}.txt"
        log.touch()
        job = {
            "arguments": [str(argument) for argument in arguments],
            "log": str(log),
            "environment": environment or {},
            "hooks": hooks,
        }
        process = Process(self, self.ask(job)["pid"], log)
        self.started.append(process)
        return process

    def run(self, *arguments: str | Path, environment: dict[str, str] | None = None, **hooks: list[Any]) -> Answer:
        return self.start(*arguments, environment=environment, **hooks).wait()

    def start_ranks(
        self, num_ranks: int, *arguments: str | Path, of_last: Sequence[str | Path] = (), **hooks: list[Any]
    ) -> list[Process]:
        """The processes that torchrun would start, as massl sees them.

        `of_last` are further arguments of the last rank alone, as of a command given on another machine.
        """
        port = _free_port()
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(num_ranks),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        environments = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
        further = [()] * (num_ranks - 1) + [tuple(of_last)]
        pairs = zip(environments, further, strict=True)
        return [self.start(*arguments, *own, environment=environment, **hooks) for environment, own in pairs]

    def end_all(self) -> float:
        """Kill what still runs; the highest peak of all that were started since the last call, in MiB."""
        for process in self.started:
            process.kill()
        for process in self.started:
            process.wait_until(lambda: False)
            if not process.group_ends():
                os.killpg(process.pid, signal.SIGKILL)
            process.log.unlink(missing_ok=True)
        peak = max((process.peak_mib for process in self.started), default=0.0)
        self.started.clear()
        return peak

    def close(self) -> None:
        self._process.communicate()


def _free_port() -> int:
    """A port that nobody listens on, below those that the system gives away: no connection takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


_servers: dict[int, ForkServer] = {}  # by process: a forked one must not share the pipe


def server() -> ForkServer:
    """The fork server of this process, started when it is first wanted."""
    if os.getpid() not in _servers:
        logs = session_folder() / f"logs-{os.getpid()}"
        logs.mkdir(exist_ok=True)
        with untimed():
            found = ForkServer(logs)
            found.ask({"poll": 0})  # wait until it is ready
        _servers[os.getpid()] = found
        atexit.register(functools.partial(_close, os.getpid()))
    return _servers[os.getpid()]


def start_ranks(num_ranks: int, *arguments: str | Path, **others: Any) -> list[Process]:
    return server().start_ranks(num_ranks, *arguments, **others)


def end_all() -> float:
    found = _servers.get(os.getpid())
    return found.end_all() if found else 0.0


def _close(owner: int) -> None:
    if os.getpid() == owner:
        _servers[owner].close()
