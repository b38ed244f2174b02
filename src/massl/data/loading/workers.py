"""Worker processes that read and decode images, for photographs on many cores.

Threads of one process wait for its interpreter lock long before 16 cores are busy. Each worker is a fresh interpreter:
forking is unsafe because the training process has threads and a GPU, and the user's script is not imported. Pixels
return in unnamed shared memory, which disappears with the processes that map it, however they end.
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
from threading import Lock, Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from massl.data.loading.image_reader import ImageReader, LoadedImage, ReadResult
from massl.data.loading.worker_main import Answer, Entry
from massl.data.sources.base import DataError, ImageSource, Pixels

_MAX_TASKS = 2  # per worker: the current one and the next
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_ADVICE = "choose data.worker_kind threads"


@dataclass(kw_only=True, eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    arena_file: int
    is_ready: bool = False
    tasks: set[int] = field(default_factory=set)  # numbers of its current tasks
    freed: list[int] = field(default_factory=list)  # blocks to return with the next task
    memory: Pixels = field(default_factory=lambda: np.empty(0, np.uint8))  # its arena as far as it is mapped here

    def pixels_from(self, start: int, num_bytes: int) -> Pixels:
        memory = self.memory  # other threads may replace it
        if start + num_bytes > len(memory):
            # the arena has grown; arrays in the old mapping stay valid, it is the same memory
            self.memory = memory = np.frombuffer(mmap.mmap(self.arena_file, 0), np.uint8)
        return memory[start : start + num_bytes]


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """A worker's answer. Its pixels are valid until the block is freed."""

    worker: _Worker
    block: int
    entries: list[Entry]

    def results(self) -> Iterator[ReadResult]:
        start = self.block
        for found, tried in self.entries:
            if found is None:
                yield ReadResult(None, tried)
                continue
            index, label, height, width = found
            pixels = self.worker.pixels_from(start, 3 * height * width).reshape(3, height, width)
            yield ReadResult(LoadedImage(pixels=torch.from_numpy(pixels), label=label, index=index), tried)
            start += pixels.size


class WorkerProcesses:
    """Processes that read images as ImageReader.read_or_replace does; they start with the first batch. Thread-safe.

    The cache of `reader` stays in this process: workers only read images that it does not hold.
    """

    def __init__(
        self,
        source: ImageSource,
        reader: ImageReader,
        *,
        num_workers: int,
        chunk_size: int,
        seed: int,
        max_side: int,
    ) -> None:
        self._source = source
        self._reader = reader
        self._num_workers = num_workers
        self._chunk_size = chunk_size
        self._seed = seed
        self._max_side = max_side
        self._workers: list[_Worker] = []
        self._receiver = Thread(target=self._receive, name="massl-receive", daemon=True)
        self._lock = Lock()  # guards all below
        self._waiting: deque[tuple[int, list[int]]] = deque()  # tasks for the next free worker, in batch order
        self._futures: dict[int, Future[_Chunk]] = {}  # by task number; whoever removes one must complete it
        self._num_tasks = 0
        self._failure: str | None = None
        self._is_closed = False

    @contextmanager
    def read(self, indices: list[int]) -> Iterator[list[ReadResult]]:
        """The images in this order; their pixels are valid only inside the `with`."""
        cached = [self._reader.cached(index) for index in indices]
        results = [ReadResult(image, {index: None}) for index, image in zip(indices, cached, strict=True)]
        missing = [position for position, image in enumerate(cached) if image is None]
        chunks = [missing[start : start + self._chunk_size] for start in range(0, len(missing), self._chunk_size)]
        futures = self._submit([[indices[position] for position in chunk] for chunk in chunks])
        try:
            for chunk, future in zip(chunks, futures, strict=True):
                for position, result in zip(chunk, future.result().results(), strict=True):
                    results[position] = result
                    if result.image is not None and isinstance(result.image.pixels, Tensor):
                        self._reader.keep(result.image.index, result.image.pixels)
            yield results
        finally:
            for future in futures:
                future.add_done_callback(self._free_block)  # now, or later if another chunk has failed

    def _free_block(self, future: Future[_Chunk]) -> None:
        if not future.cancelled() and future.exception() is None:
            chunk = future.result()
            with self._lock:
                chunk.worker.freed.append(chunk.block)

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
            self._assign_tasks()
        return futures

    def _assign_tasks(self) -> None:
        """Send waiting tasks to the workers that have the fewest."""
        while self._waiting:
            ready = [worker for worker in self._workers if worker.is_ready]
            worker = min(ready, key=lambda worker: len(worker.tasks), default=None)
            if worker is None or len(worker.tasks) >= _MAX_TASKS:
                return
            number, chunk = self._waiting.popleft()
            worker.tasks.add(number)
            freed, worker.freed = worker.freed, []
            try:
                worker.connection.send((number, chunk, freed))
            except OSError:  # it died; the receiver notices too and fails all waiting tasks
                return

    def _start(self) -> None:
        try:
            setup = pickle.dumps((self._source, self._seed, self._max_side))
        except Exception as error:  # members of foreign data sets may raise anything
            self._failure = f"{self._source.name} cannot be sent to worker processes ({error}); {_ADVICE}"
            return
        setup_file = _shared_file()
        try:
            with os.fdopen(os.dup(setup_file), "wb") as file:
                file.write(setup)
            for _ in range(self._num_workers):
                self._workers.append(_start_worker(setup_file))
        except OSError as error:
            reason = f"worker processes cannot be started ({error.strerror})"
            self._failure = f"{reason}; lower data.num_workers, or {_ADVICE}"
        finally:
            os.close(setup_file)
        if self._workers:
            self._receiver.start()

    def _receive(self) -> None:
        """Runs in the receiving thread."""
        try:
            with selectors.DefaultSelector() as selector:
                for worker in self._workers:
                    selector.register(worker.connection, selectors.EVENT_READ, worker)
                while True:
                    for key, _ in selector.select():
                        try:
                            answer = key.data.connection.recv()
                        except (EOFError, OSError):
                            self._fail(_cause_of_death(key.data.process))
                            return
                        if not self._accept(key.data, answer):
                            return
        except Exception as error:  # a bug; without this thread all others would wait for ever
            self._fail(f"answers of worker processes cannot be received ({type(error).__name__}: {error}); {_ADVICE}")
            raise

    def _accept(self, worker: _Worker, answer: Answer) -> bool:
        """Complete the future of an answer; False if the worker could not start."""
        number, block, entries, error = answer
        if number is None and error is not None:
            reason = f"{type(error).__name__}: {error}"
            self._fail(f"a worker process cannot open {self._source.name} ({reason}); {_ADVICE}")
            return False
        with self._lock:
            worker.is_ready = True
            future = None
            if number is not None:
                worker.tasks.discard(number)
                future = self._futures.pop(number, None)
            self._assign_tasks()
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
        """End the processes; threads that wait for images get a CancelledError."""
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
    """Unnamed memory that several processes can map."""
    if sys.platform == "linux":
        return os.memfd_create("massl")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _start_worker(setup_file: int) -> _Worker:
    here, there = socket.socketpair()
    arena_file = _shared_file()
    files = (there.fileno(), arena_file, setup_file)
    # with this process's module path: massl and the source's own modules need not be installed
    path = [str(entry) for entry in sys.path]
    program = f"import sys; sys.path[:] = {path}; from massl.data.loading.worker_main import main; main{files}"
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
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


def _cause_of_death(process: subprocess.Popen[Any]) -> str:
    try:
        status = process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        status = 0
    if status >= 0:
        return f"a worker process has ended (status {status}; see its output above); {_ADVICE}"
    cause = "killed, usually for lack of memory" if status == -signal.SIGKILL else signal.strsignal(-status)
    return f"a worker process died (signal {-status}: {cause}); lower data.num_workers, or {_ADVICE}"
