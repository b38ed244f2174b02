"""Reads single arrays out of a .npz archive of unknown origin.

`numpy.load` allocates whatever a header claims and passes on the errors of zipfile, zlib and tokenize. Here a claim is
compared with the size of the file first, and every error names the file and the member.
"""

import math
import os
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from massl.data.sources.base import DataError

_MAX_RATIO: Final = 256  # bytes of an array per byte of the archive; black-and-white sprites reach 115
_SMALL_BYTES: Final = 2**28  # below this no ratio is suspicious
_CHUNK_BYTES: Final = 2**24
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what numpy writes
_WRITE_IT: Final = "write it with numpy.savez(path, images=..., labels=...)"


def read_npz(path: Path, kinds: dict[str, str]) -> dict[str, NDArray[Any]]:
    """The arrays named in `kinds` that the archive holds; the value lists the kinds of dtype allowed, as "iu".

    An array of another kind or with a claim that the file cannot fulfil is refused before anything is allocated.
    """
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is not a file; expected a .npz archive with 'images'")
    member = ""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            held = _members(archive, kinds)
            arrays = {}
            for member, info in held.items():
                arrays[member] = _read_array(archive, info, kinds[member], file_size=os.fstat(file.fileno()).st_size)
            return arrays
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; expected a .npz archive with 'images'") from None
    except Exception as error:  # a foreign file: zipfile, zlib, ast, tokenize and numpy each have errors of their own
        part = f": array {member!r} cannot be read" if member else " is not a .npz archive of plain arrays"
        reason = str(error) if isinstance(error, _Refused) else f"{type(error).__name__}: {error}"
        raise DataError(f"{path}{part} ({reason}); {_WRITE_IT}") from None


class _Refused(Exception):
    """An array that is not read; the message is the reason."""


def _members(archive: zipfile.ZipFile, names: Collection[str]) -> dict[str, zipfile.ZipInfo]:
    held: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = info.filename.removesuffix(".npy")
        if name in names:
            if name in held:
                raise _Refused(f"it holds two arrays named {name!r}")
            held[name] = info
    return held


def _read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, kinds: str, *, file_size: int) -> NDArray[Any]:
    if info.compress_type not in _METHODS:
        raise _Refused("compressed by a method that numpy does not write")
    with archive.open(info) as member:
        shape, is_fortran, dtype = _header(member)
        if dtype.hasobject:
            raise _Refused("it holds Python objects, not plain arrays")
        if dtype.kind not in kinds or dtype.subdtype is not None or dtype.itemsize == 0:
            raise _Refused(f"its values are {dtype} {list(shape)}")
        num_bytes = math.prod(shape) * dtype.itemsize
        _require_plausible(num_bytes, claimed=info.file_size, file_size=file_size)
        flat = np.empty(num_bytes, dtype=np.uint8)
        _fill(flat, member)
    array = flat.view(dtype)
    return array.reshape(shape[::-1]).T if is_fortran else array.reshape(shape)


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(member)  # type: ignore[no-untyped-call,unused-ignore]
    if version == (1, 0):
        header = np.lib.format.read_array_header_1_0(member)  # type: ignore[no-untyped-call,unused-ignore]
    elif version == (2, 0):
        header = np.lib.format.read_array_header_2_0(member)  # type: ignore[no-untyped-call,unused-ignore]
    else:
        raise _Refused(f"version {version} of the .npy format is not for plain arrays")
    shape, is_fortran, dtype = header
    if any(isinstance(side, bool) or side < 0 for side in shape):
        raise _Refused(f"its shape is {list(shape)}")
    return shape, is_fortran, dtype


def _require_plausible(num_bytes: int, *, claimed: int, file_size: int) -> None:
    """Compare what the header claims with the sizes of the member, of the file and of this machine's memory."""
    if num_bytes > claimed:
        raise _Refused(f"its header claims {num_bytes:,} bytes, its part of the archive {claimed:,}")
    if num_bytes > max(_SMALL_BYTES, _MAX_RATIO * file_size):
        raise _Refused(f"its header claims {num_bytes:,} bytes, more than {_MAX_RATIO} times those of the file")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > memory:
        raise _Refused(f"it takes {num_bytes / 2**30:.1f} GiB; this machine has {memory / 2**30:.1f} GiB of memory")


def _fill(flat: NDArray[np.uint8], member: IO[bytes]) -> None:
    start = 0
    while start < len(flat):
        part = member.read(min(_CHUNK_BYTES, len(flat) - start))
        if not part:
            raise _Refused(f"it ends after {start:,} of {len(flat):,} bytes")
        flat[start : start + len(part)] = np.frombuffer(part, dtype=np.uint8)
        start += len(part)
    if member.read(1):  # the end: zipfile compares its checksum here
        raise _Refused("it holds more values than its header claims")
