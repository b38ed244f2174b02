"""Which database images answer which query: the ground truth of the revisited Oxford and Paris benchmark (Radenović et
al., 2018).

It is published as a pickle, and a pickle may ask its reader to call anything. This reader calls nothing: of the few
names that a pickle of numpy arrays needs it writes the calls down and makes the values of them itself; any other name
is refused.
"""

import io
import pickle
import pickletools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from massl.data.sources.base import DataError

_WHERE_FROM: Final = "the files gnd_roxford5k.pkl and gnd_rparis6k.pkl are on the site of the revisitop benchmark"
_DTYPE_KINDS: Final = "biufSU"  # booleans, whole and real numbers, text


@dataclass(frozen=True, kw_only=True)
class QueryTruth:
    """What counts for one query; images are given as int64 [n] positions in the database."""

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
        return _truth(_unpickled(path.read_bytes()))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); {_WHERE_FROM}") from None
    except DataError as error:
        raise DataError(f"{path}: {error}; {_WHERE_FROM}") from None
    except (
        Exception
    ) as error:  # on a damaged pickle: UnpicklingError, EOFError, IndexError, TypeError, MemoryError and others
        raise DataError(
            f"{path} is no pickle, or a damaged one ({type(error).__name__}: {error}); {_WHERE_FROM}"
        ) from None


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
    if not isinstance(value, dict):
        raise DataError(f"{place} holds {_kind(value)}; expected a dictionary of {', '.join(names)}")
    fields = {_text(_leaf(key)): item for key, item in value.items()}
    for name in names:
        if name not in fields:
            raise DataError(f"{place} has no {name}; expected a dictionary of {', '.join(names)}")
    return fields


def _image_names(value: Any, *, place: str) -> tuple[str, ...]:
    names = tuple(_text(item) for item in _items(value, place=place))
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
    easy, hard, junk = (
        _positions(fields[field], num_images, place=f"{field} in {place}") for field in ("easy", "hard", "junk")
    )
    return QueryTruth(box=(box[0], box[1], box[2], box[3]), easy=easy, hard=hard, junk=junk)


def _positions(value: Any, num_images: int, *, place: str) -> Tensor:  # -> int64 [n]
    numbers = _numbers(value, place=place)
    for number in numbers:
        if not (0 <= number < num_images and number.is_integer()):
            raise DataError(f"{place} holds {number:g}; expected positions in imlist, 0 to {num_images - 1}")
    return torch.tensor(numbers, dtype=torch.int64)


def _numbers(value: Any, *, place: str) -> list[float]:
    items = _items(value, place=place)
    for item in items:
        if not isinstance(item, int | float):
            raise DataError(f"{place} holds {_kind(item)}; expected numbers")
        if not abs(item) < 2**53:  # nor NaN; larger ones are not exact as floats
            raise DataError(f"{place} holds {item!r:.80}; expected numbers of a sensible size")
    return [float(item) for item in items]


# ---- values ----------------------------------------------------------------------------------------------------------


class _WrittenDown:
    """A call that the pickle asks for, and the state it wants set afterwards."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Array(_WrittenDown):
    """(ndarray, (0,), b"b"), then the state (version, shape, dtype, is_fortran, data)."""


class _ArrayOfBuffer(_WrittenDown):
    """(data, dtype, shape, order): arrays in protocol 5."""


class _Scalar(_WrittenDown):
    """(dtype, data)."""


class _Dtype(_WrittenDown):
    """(code, ...), then the state (version, byte order, ...)."""


class _Encoded(_WrittenDown):
    """(text, "latin1"), or () for none at all: bytes, as Python 3 writes them in protocol 2."""


class _NamedOnly(_WrittenDown):
    """numpy.ndarray, which is an argument and never called."""


def _items(value: Any, *, place: str) -> list[Any]:
    """The elements of a list or an array of any shape."""
    if isinstance(value, _Array):
        _, _, dtype, _, data = value.state
        # The elements of an array of objects are stored as a list. The shape plays no part: rows and columns hold the
        # same positions.
        items = data if isinstance(data, list) else _elements(data, dtype)
    elif isinstance(value, _ArrayOfBuffer):
        items = _elements(*value.arguments[:2])
    elif isinstance(value, list | tuple):
        items = list(value)
    else:
        raise DataError(f"{place} is {_kind(value)}; expected a list or an array")
    return [_leaf(item) for item in items]


def _leaf(value: Any) -> Any:
    """A number, or bytes, of what was written down for it; anything else as it is."""
    if isinstance(value, _Scalar):
        dtype, data = value.arguments
        return _elements(data, dtype)[0]
    return _bytes(value) if isinstance(value, _Encoded) else value


def _elements(data: Any, dtype: Any) -> list[Any]:
    code, *_ = dtype.arguments
    element_type = np.dtype(_text(_leaf(code)))
    if element_type.kind not in _DTYPE_KINDS:
        raise DataError(f"it holds an array of type {element_type}")
    if dtype.state is not None and _text(_leaf(dtype.state[1])) == ">":
        element_type = element_type.newbyteorder(">")
    content = _bytes(data)
    elements: list[Any] = np.frombuffer(content, dtype=element_type).tolist() if content else []
    return elements


def _bytes(value: Any) -> bytes:
    if isinstance(value, _Encoded) and value.arguments[1:] in ((), ("latin1",)):
        return "".join(value.arguments[:1]).encode("latin1")
    if isinstance(value, str):
        return value.encode("latin1")
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    raise DataError(f"it holds {_kind(value)} instead of the bytes of an array")


def _text(value: Any) -> str:
    if not isinstance(value, str | bytes):
        raise DataError(f"it holds {_kind(value)} where a name is expected")
    return value.decode("latin1") if isinstance(value, bytes) else value


def _kind(value: Any) -> str:
    return f"a value of type {type(value).__name__.removeprefix('_')}"


# ---- pickle ----------------------------------------------------------------------------------------------------------

_NUMPY_CORES: Final = ("numpy.core", "numpy._core")  # its name before and since numpy 2
_KNOWN_NAMES: Final[dict[tuple[str, str], type[_WrittenDown]]] = {
    **{(f"{core}.multiarray", "_reconstruct"): _Array for core in _NUMPY_CORES},
    **{(f"{core}.numeric", "_frombuffer"): _ArrayOfBuffer for core in _NUMPY_CORES},
    **{(f"{core}.multiarray", "scalar"): _Scalar for core in _NUMPY_CORES},
    ("numpy", "ndarray"): _NamedOnly,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _Encoded,
    ("__builtin__", "bytes"): _Encoded,
}


class _WritingUnpickler(pickle.Unpickler):
    """Gives out the classes above instead of what a pickle names: nothing is imported, and nothing but they can be
    called.
    """

    def find_class(self, module_name: str, global_name: str) -> type[_WrittenDown]:
        try:
            return _KNOWN_NAMES[module_name, global_name]
        except KeyError:
            raise DataError(
                f"it asks for {module_name}.{global_name}, which no ground truth needs; such a file could run any program, and is not read"
            ) from None


def _unpickled(data: bytes) -> Any:
    # The unpickler takes memory for as many values as the largest number under which one is remembered: a damaged file
    # of 100 bytes can make it ask for 60 GB. An honest file remembers no more values than it has bytes.
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(data):
            raise pickle.UnpicklingError(f"a file of {len(data)} bytes remembers value number {argument}")
    # latin1: the strings of Python 2, among them the data of its arrays, become text of the same bytes.
    return _WritingUnpickler(io.BytesIO(data), encoding="latin1").load()
