"""Images read and decoded by processes of their own, for photographs on many cores.

Threads of one process wait for its interpreter lock long before 16 cores are busy. Each process here is a fresh
interpreter: nothing is forked, since the training process has threads and a GPU, and nothing of the user's script is
imported. Pixels come back in shared memory without a name, which vanishes with the processes that hold it, however they
end.
"""

import mmap
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from massl.data.loading.cache import ImageCache
from massl.data.loading.image_reader import Reading, ReadResult, label_number
from massl.data.loading.worker_main import Answer, Entry
from massl.data.sources.base import DataError, ImageSource, Pixels

_MAX_TASKS = 2  # of a worker at a time: one at work, one to go on with at once
_SCRIPT = Path(__file__).with_name("worker_main.py")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_INSTEAD = "choose data.worker_kind threads"


@dataclass(kw_only=True, eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    arena_file: int
    is_ready: bool = False
    tasks: set[int] = field(default_factory=set)  # numbers of those under way
    given_back: list[int] = field(default_factory=list)  # blocks to tell it of with the next task
    # its shared memory as far as it is mapped here
    memory: Pixels = field(default_factory=lambda: np.empty(0, np.uint8))

    def pixels_from(self, start: int, num_bytes: int) -> Pixels:
        memory = self.memory
        # it has grown; images may still lie in the old mapping, which is the same memory
        if start + num_bytes > len(memory):
            self.memory = memory = np.frombuffer(mmap.mmap(self.arena_file, 0), np.uint8)
        return memory[start : start + num_bytes]


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """What a worker has answered. Its pixels stay as they are until the block is given back."""

    worker: _Worker
    block: int
    entries: list[Entry]

    def results(self) -> Iterator[ReadResult]:
        num_bytes = [0 if what is None else 3 * what[2] * what[3] for what, _ in self.entries]
        pixels = self.worker.pixels_from(self.block, sum(num_bytes))
        start = 0
        for (what, tried), size in zip(self.entries, num_bytes, strict=True):
            if what is None:
                yield ReadResult(None, tried)
                continue
            index, label, height, width = what
            image = torch.from_numpy(pixels[start : start + size].reshape(3, height, width))
            yield ReadResult(Reading(pixels=image, label=label, index=index), tried)
            start += size


class WorkerProcesses:
    """Processes that read images as ImageReader.read_or_replace does; they start when they are first needed.

    Several threads may read at once. The cache is here: workers only see what it does not hold.
    """

    def __init__(
        self,
        source: ImageSource,
        *,
        num_workers: int,
        chunk_size: int,
        seed: int,
        max_side: int,
        cache: ImageCache | None = None,
    ) -> None:
        self._source = source
        self._num_workers = num_workers
        self._chunk_size = chunk_size
        self._seed = seed
        self._max_side = max_side
        self._cache = cache
        self._workers: list[_Worker] = []
        self._receiver = Thread(target=self._receive, name="massl-receive", daemon=True)
        self._lock = Lock()  # of all below
        # tasks for the next free worker, in the order of the batches
        self._waiting: deque[tuple[int, list[int]]] = deque()
        self._futures: dict[int, Future[_Chunk]] = {}  # by number of the task; who takes one out answers it
        self._num_tasks = 0
        self._failure: str | None = None
        self._is_closed = False

    @contextmanager
    def reading(self, indices: list[int]) -> Iterator[list[ReadResult]]:
        """The images in this order; their pixels are there only inside the `with`."""
        results = [self._cached(index) for index in indices]
        missing = [position for position, result in enumerate(results) if result is None]
        chunks = [missing[start : start + self._chunk_size] for start in range(0, len(missing), self._chunk_size)]
        futures = self._submit([[indices[position] for position in chunk] for chunk in chunks])
        try:
            for chunk, future in zip(chunks, futures, strict=True):
                for position, result in zip(chunk, future.result().results(), strict=True):
                    results[position] = result
                    self._keep(result.reading)
            yield [result for result in results if result is not None]
        finally:
            for future in futures:
                # at once, or when it is done after all: another chunk has failed
                future.add_done_callback(self._give_back)

    def _cached(self, index: int) -> ReadResult | None:
        pixels = None if self._cache is None else self._cache.get(self._source.name, index)
        if pixels is None:
            return None
        return ReadResult(
            Reading(pixels=pixels, label=label_number(self._source.label_of(index)), index=index), {index: None}
        )

    def _keep(self, reading: Reading | None) -> None:
        if (
            self._cache is not None
            and not self._cache.is_full
            and reading is not None
            and isinstance(reading.pixels, Tensor)
        ):
            self._cache.keep(self._source.name, reading.index, torch.from_numpy(reading.pixels.numpy().copy()))

    def _give_back(self, future: Future[_Chunk]) -> None:
        if not future.cancelled() and future.exception() is None:
            chunk = future.result()
            with self._lock:
                chunk.worker.given_back.append(chunk.block)

    def _submit(self, chunks: list[list[int]]) -> list[Future[_Chunk]]:
        futures: list[Future[_Chunk]] = [Future() for _ in chunks]
        with self._lock:
            if chunks and not self._workers and self._failure is None and not self._is_closed:
                self._start()
            if self._failure is not None:
                raise DataError(self._failure)
            for future, chunk in zip(futures, chunks, strict=True):
                if self._is_closed:
                    future.cancel()
                    continue
                self._futures[self._num_tasks] = future
                self._waiting.append((self._num_tasks, chunk))
                self._num_tasks += 1
            self._hand_out()
        return futures

    def _hand_out(self) -> None:
        """Tasks to the workers that have the fewest."""
        while self._waiting:
            worker = min(
                (worker for worker in self._workers if worker.is_ready),
                key=lambda worker: len(worker.tasks),
                default=None,
            )
            if worker is None or len(worker.tasks) >= _MAX_TASKS:
                return
            number, chunk = self._waiting.popleft()
            worker.tasks.add(number)
            given_back, worker.given_back = worker.given_back, []
            try:
                worker.connection.send((number, chunk, given_back))
            except OSError:  # it has died; the receiver hears of it too, and fails all that waits
                return

    def _start(self) -> None:
        try:
            setup = pickle.dumps(sys.path) + pickle.dumps((self._source, self._seed, self._max_side))
        except Exception as error:  # whatever a foreign data set's members raise
            self._failure = f"{self._source.name} cannot be sent to worker processes ({error}); {_INSTEAD}"
            return
        setup_file = _shared_file()
        try:
            with os.fdopen(os.dup(setup_file), "wb") as file:
                file.write(setup)
            for _ in range(self._num_workers):
                self._workers.append(_start_worker(setup_file))
        except OSError as error:
            self._failure = (
                f"worker processes cannot be started ({error.strerror}); lower data.num_workers, or {_INSTEAD}"
            )
        finally:
            os.close(setup_file)
        if self._workers:
            self._receiver.start()

    def _receive(self) -> None:
        """The life of the receiving thread."""
        try:
            with selectors.DefaultSelector() as selector:
                for worker in self._workers:
                    selector.register(worker.connection, selectors.EVENT_READ, worker)
                while True:
                    for key, _ in selector.select():
                        try:
                            answer = key.data.connection.recv()
                        except (EOFError, OSError):
                            self._fail(_obituary(key.data.process))
                            return
                        if not self._take(key.data, answer):
                            return
        except Exception as error:  # a bug; without this thread all others would wait for ever
            self._fail(
                f"the answers of the worker processes cannot be received ({type(error).__name__}: {error}); {_INSTEAD}"
            )
            raise

    def _take(self, worker: _Worker, answer: Answer) -> bool:
        """False: nothing more will come."""
        number, block, entries, error = answer
        if number is None and error is not None:
            self._fail(
                f"a worker process cannot open {self._source.name} ({type(error).__name__}: {error}); {_INSTEAD}"
            )
            return False
        with self._lock:
            worker.is_ready = True
            future = None
            if number is not None:
                worker.tasks.discard(number)
                future = self._futures.pop(number, None)
            self._hand_out()
        if future is not None and error is not None:
            future.set_exception(error)
        elif future is not None:
            future.set_result(_Chunk(worker=worker, block=block, entries=entries))
        return True

    def _fail(self, message: str) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._failure = message
            futures, self._futures = self._futures, {}
            self._waiting.clear()
        for future in futures.values():
            future.set_exception(DataError(message))

    def close(self) -> None:
        """End the processes; who waits for images gets a CancelledError."""
        with self._lock:
            self._is_closed = True
            futures, self._futures = self._futures, {}
            self._waiting.clear()
            workers, self._workers = self._workers, []
        for future in futures.values():
            future.cancel()
        for worker in workers:
            worker.process.kill()  # nothing is lost: they only read
        for worker in workers:
            worker.process.wait()
        if workers:
            self._receiver.join()
        for worker in workers:
            worker.connection.close()
            worker.memory = np.empty(0, np.uint8)
            os.close(worker.arena_file)


def _shared_file() -> int:
    """Memory without a name, to be mapped by several processes."""
    if sys.platform == "linux":
        return os.memfd_create("massl")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _start_worker(setup_file: int) -> _Worker:
    here, there = socket.socketpair()
    arena_file = _shared_file()
    files = (there.fileno(), arena_file, setup_file)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT), *map(str, files)],
            stdin=subprocess.DEVNULL,
            pass_fds=files,
            env=os.environ | _ONE_THREAD,
            process_group=0,  # Ctrl-C is for the training process alone
        )
    except OSError:
        here.close()
        os.close(arena_file)
        raise
    finally:
        there.close()
    return _Worker(process=process, connection=Connection(here.detach()), arena_file=arena_file)


def _obituary(process: subprocess.Popen[Any]) -> str:
    try:
        status = process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        status = 0
    if status >= 0:
        return f"a worker process has ended (status {status}; it may have said why above); {_INSTEAD}"
    cause = (
        "killed, mostly by the system for want of memory" if status == -signal.SIGKILL else signal.strsignal(-status)
    )
    return f"a worker process died (signal {-status}: {cause}); lower data.num_workers, or {_INSTEAD}"
