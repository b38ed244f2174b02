"""Ground truth of the revisited Oxford and Paris benchmark (Radenović et al., 2018): which images answer which query.

It is published as a pickle, and a pickle can make its reader call anything. Here `find_class` accepts only the names
that pickled numpy arrays need, and gives out small functions instead of numpy's own: numpy's `dtype.__setstate__`
accepts flags that corrupt memory.
"""

import io
import pickle
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from massl.data.sources.base import DataError

_WHERE_FROM: Final = "the files gnd_roxford5k.pkl and gnd_rparis6k.pkl are on the site of the revisitop benchmark"
_MAX_BYTES: Final = 1 << 26  # 64 MiB; the published files have less than one
_DTYPE_KINDS: Final = "biufSU"  # booleans, whole and real numbers, text


@dataclass(frozen=True, kw_only=True)
class QueryTruth:
    """What counts for one query; images are int64 [n] positions in the database."""

    box: tuple[float, float, float, float]  # left, top, right, bottom of the object in the query image, in pixels
    easy: Tensor
    hard: Tensor
    junk: Tensor  # neither right nor wrong


@dataclass(frozen=True, kw_only=True)
class RetrievalTruth:
    """Names of images, without extension, and what counts for each query."""

    database: tuple[str, ...]
    queries: tuple[str, ...]
    answers: tuple[QueryTruth, ...]  # one per query


def read_ground_truth(path: Path) -> RetrievalTruth:
    """The content of gnd_<dataset>.pkl, every field checked."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        return _truth(_unpickled(data))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); {_WHERE_FROM}") from None
    except DataError as error:
        raise DataError(f"{path}: {error}; {_WHERE_FROM}") from None
    except Exception as error:  # a damaged pickle raises UnpicklingError, EOFError, IndexError, TypeError and others
        problem = f"{type(error).__name__}: {error}"
        raise DataError(f"{path} is no pickle, or a damaged one ({problem}); {_WHERE_FROM}") from None


# ---- fields ----------------------------------------------------------------------------------------------------------


def _truth(content: Any) -> RetrievalTruth:
    fields = _fields(content, ("imlist", "qimlist", "gnd"), place="the file")
    database, queries = (_image_names(fields[field], place=field) for field in ("imlist", "qimlist"))
    entries = _items(fields["gnd"], place="gnd")
    if len(entries) != len(queries):
        raise DataError(f"gnd has {len(entries)} entries; expected one for each of the {len(queries)} names in qimlist")
    answers = tuple(
        _answer(entry, len(database), place=f"gnd of {name}") for name, entry in zip(queries, entries, strict=True)
    )
    if not any(len(answer.easy) + len(answer.hard) for answer in answers):
        raise DataError("no query has an easy or a hard answer, so there is nothing to measure")
    return RetrievalTruth(database=database, queries=queries, answers=answers)


def _fields(value: Any, names: tuple[str, ...], *, place: str) -> dict[str, Any]:
    fields = {_text(key): item for key, item in value.items()} if isinstance(value, dict) else {}
    missing = [name for name in names if name not in fields]
    if missing:
        raise DataError(f"{place} has no {missing[0]}; expected a dictionary of {', '.join(names)}")
    return fields


def _image_names(value: Any, *, place: str) -> tuple[str, ...]:
    names = tuple(map(_text, _items(value, place=place)))
    if not names:
        raise DataError(f"{place} is empty; expected names of images")
    for name in names:
        if not name or any(sign in name for sign in "/\\\0"):
            raise DataError(f"{place} holds {name!r}; expected names of images in the folder jpg, without extension")
    return names


def _answer(entry: Any, num_images: int, *, place: str) -> QueryTruth:
    fields = _fields(entry, ("bbx", "easy", "hard", "junk"), place=place)
    box = _numbers(fields["bbx"], place=f"bbx in {place}")
    if len(box) != 4 or box[0] >= box[2] or box[1] >= box[3]:
        raise DataError(f"bbx in {place} is {box}; expected left, top, right and bottom of a box")
    positions = {}
    for field in ("easy", "hard", "junk"):
        numbers = _numbers(fields[field], place=f"{field} in {place}")
        for number in numbers:
            if not (0 <= number < num_images and number.is_integer()):
                raise DataError(
                    f"{field} in {place} holds {number:g}; expected positions 0 to {num_images - 1} in imlist"
                )
        positions[field] = torch.tensor(numbers, dtype=torch.int64)
    return QueryTruth(box=(box[0], box[1], box[2], box[3]), **positions)


def _numbers(value: Any, *, place: str) -> list[float]:
    items = _items(value, place=place)
    for item in items:
        # neither NaN nor so large that a float is not exact
        if not isinstance(item, int | float) or not abs(item) < 2**53:
            raise DataError(f"{place} holds {item!r:.80}; expected numbers")
    return [float(item) for item in items]


def _items(value: Any, *, place: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise DataError(f"{place} is of type {type(value).__name__}; expected a list or an array")
    return list(value)


def _text(value: Any) -> str:
    if not isinstance(value, str | bytes):
        raise DataError(f"it holds a value of type {type(value).__name__} instead of a name")
    return value.decode("latin1") if isinstance(value, bytes) else value


# ---- pickle ----------------------------------------------------------------------------------------------------------


class _Function:
    """What a pickle gets for an accepted name: it can be called, but not changed."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise DataError("it tries to change a function of its reader")


class _Dtype:
    """numpy.dtype(code, ...), then the state (version, byte order, ...)."""

    def __init__(self, code: Any, *_: Any) -> None:
        self._type = np.dtype(_text(code))

    def __setstate__(self, state: Any) -> None:
        if _text(state[1]) == ">":
            self._type = self._type.newbyteorder(">")

    def elements(self, data: str | bytes) -> list[Any]:
        if self._type.kind not in _DTYPE_KINDS:
            raise DataError(f"it holds an array of type {self._type}")
        content = data.encode("latin1") if isinstance(data, str) else bytes(data)  # text: written by Python 2
        elements: list[Any] = np.frombuffer(content, dtype=self._type).tolist() if content else []
        return elements


class _Array(list[Any]):
    """An array as the list of its elements, set by the state (version, shape, dtype, is_fortran, data)."""

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        _, _, dtype, _, data = state
        self[:] = data if isinstance(data, list) else dtype.elements(data)  # a list: array of objects


def _encode(text: str = "", codec: str = "latin1") -> bytes:
    """Bytes, as Python 3 writes them in protocol 2."""
    if codec != "latin1":
        raise DataError(f"it holds bytes in the codec {codec!r:.80} instead of latin1")
    return text.encode("latin1")


_NUMPY_CORES: Final = ("numpy.core", "numpy._core")  # its name before and since numpy 2
_ACCEPTED: Final[dict[tuple[str, str], Callable[..., Any]]] = {
    **{(f"{core}.multiarray", "_reconstruct"): _Array for core in _NUMPY_CORES},
    **{(f"{core}.multiarray", "scalar"): lambda dtype, data: dtype.elements(data)[0] for core in _NUMPY_CORES},
    **{(f"{core}.numeric", "_frombuffer"): lambda data, dtype, *_: dtype.elements(data) for core in _NUMPY_CORES},
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> _Function:
        if (module_name, global_name) not in _ACCEPTED:
            name = f"{module_name}.{global_name}"
            raise DataError(f"it asks for {name}; no ground truth needs that, and it could run any program")
        return _Function(_ACCEPTED[module_name, global_name])


def _unpickled(data: bytes) -> Any:
    if len(data) > _MAX_BYTES:
        raise DataError(f"it has more than {_MAX_BYTES:,} bytes")
    # The unpickler allocates memory up to the largest memo number: a damaged file of 100 bytes can ask for 60 GB. An
    # honest file remembers no more values than it has bytes.
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(data):
            raise pickle.UnpicklingError(f"a file of {len(data)} bytes remembers value number {argument}")
    # latin1: the strings of Python 2, among them the data of its arrays, become text of the same bytes.
    return _Unpickler(io.BytesIO(data), encoding="latin1").load()
