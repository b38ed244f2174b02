"""Detects changed files by their file-system metadata, without reading them."""

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TypeVar

from massl.data.sources.base import DataError

_CHUNK_SIZE = 2048
_NUM_THREADS = 8
_MASK64 = (1 << 64) - 1

Result = TypeVar("Result")


def in_threads(work: Callable[[list[str]], Result], keys: Iterable[str]) -> Iterator[Result]:
    """work(chunk) of all chunks, in order. Threads hide the 0.3 ms latency of a network file system."""
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        yield from threads.map(work, _chunks(keys))


def _chunks(keys: Iterable[str]) -> Iterator[list[str]]:
    remaining = iter(keys)
    while chunk := list(islice(remaining, _CHUNK_SIZE)):
        yield chunk


def digest_of_files(root: Path, keys: Iterable[str]) -> str:
    """Digest of names, sizes, inodes and times. No one can set ctime, so every write to a file changes the digest.

    Copies of the files have another digest, although their content is equal.
    """

    def stamp(chunk: list[str]) -> bytes:
        numbers = array("Q")
        for key in chunk:
            status = _status(root, key)
            # times before 1970 are negative
            numbers.extend((status.st_size, status.st_mtime_ns & _MASK64, status.st_ctime_ns & _MASK64, status.st_ino))
        return hashlib.sha256(os.fsencode("\0".join(chunk)) + b"\0\0" + numbers.tobytes()).digest()

    digest = hashlib.sha256()
    for chunk_stamp in in_threads(stamp, keys):
        digest.update(chunk_stamp)
    return digest.hexdigest()


def sizes_of_files(root: Path, keys: Iterable[str]) -> bytes:
    """Size, name and a zero byte of every file, in order; unlike `digest_of_files`, equal for copies of the files."""

    def sizes(chunk: list[str]) -> bytes:
        return b"".join(b"%d %s\0" % (_status(root, key).st_size, os.fsencode(key)) for key in chunk)

    return b"".join(in_threads(sizes, keys))


def _status(root: Path, key: str) -> os.stat_result:
    try:
        return os.stat(f"{root}/{key}")  # noqa: PTH116  # 6 s for the 1.28 million of ImageNet, pathlib 11 s
    except OSError as error:
        problem = f"{root}/{key} cannot be read: {error.strerror}"
        raise DataError(f"{problem}; it existed when its folder was listed") from None
