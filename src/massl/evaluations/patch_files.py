"""Files of patch features: float16 [n, H, W, D], written batch by batch and checked when a command continues."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from massl.digests import DIGEST_TO_COME, DamagedFile, check_digest, seal_safetensors_file
from massl.evaluations.measurement import EvaluationError
from massl.files import make_folder, replacing

_PAGE = 4096  # the data begin at a multiple of it, as memory maps like
_MAX_HEADER = 16 << 20  # bytes; a shard of 1 GiB needs some 100 KiB
_BYTES_PER_NUMBER = 12  # of an image that is left out, in the header

Shape = tuple[int, int, int]  # rows and columns of patches, dimensions of a feature


def write_shard(
    path: Path, batches: Iterable[tuple[Tensor, list[int]]], *, shape: Shape, num_images: int, about: Mapping[str, str]
) -> list[int]:
    """Write float16 batches [b, *shape] of at most `num_images` in all; no more than one is in memory.

    Each comes with the numbers of the images that are left out of it; returns all of these. The header stands before
    the data but is known after them, so room is kept for it.
    """
    longest = len(_header(num_images, shape, about, [])) + _BYTES_PER_NUMBER * num_images
    size = -(-(8 + longest) // _PAGE) * _PAGE - 8
    num_written, left_out = 0, list[int]()
    try:
        make_folder(path.parent)
        with replacing(path) as partial:
            with partial.open("wb") as file:
                file.seek(8 + size)
                for rows, missing in batches:
                    left_out += missing
                    num_written += len(rows)
                    file.write(rows.contiguous().numpy().data)
                file.seek(0)
                file.write(size.to_bytes(8, "little") + _header(num_written, shape, about, left_out).ljust(size))
            seal_safetensors_file(partial)
    except (OSError, SafetensorError) as error:
        raise EvaluationError(f"cannot write {path} ({error}); make room or choose another --output") from None
    return left_out


def _header(num_rows: int, shape: Shape, about: Mapping[str, str], left_out: list[int]) -> bytes:
    """The header of a .safetensors file with one tensor."""
    tensor = {"dtype": "F16", "shape": [num_rows, *shape], "data_offsets": [0, 2 * num_rows * math.prod(shape)]}
    metadata = {**DIGEST_TO_COME, **about, "left_out": " ".join(map(str, left_out))}
    header = {"__metadata__": metadata, "patches": tensor}
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()


def whole_shard(path: Path, *, shape: Shape, images: range, about: Mapping[str, str]) -> list[int]:
    """The numbers of the images that are left out of a file, whose content is checked; `images` are all of its range.

    Raises DamagedFile if it must be computed again, EvaluationError if it is no file of this command.
    """
    if not path.is_file():
        raise EvaluationError(f"{path} is no file; move it away or choose another --output")
    try:
        with path.open("rb") as start:
            if int.from_bytes(start.read(8), "little") > _MAX_HEADER:
                raise DamagedFile("its header is too large")
        if path.stat().st_size > 8 + _MAX_HEADER + 2 * len(images) * math.prod(shape):
            raise DamagedFile("it is longer than its images need")
        is_sealed = check_digest(path)
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            found = file.get_slice("patches")
            found_shape, dtype = [*found.get_shape()], found.get_dtype()
    except (SafetensorError, OSError) as error:
        raise DamagedFile(str(error)) from None
    if not is_sealed:
        raise EvaluationError(f"{path} was not written by massl embed; move it away or choose another --output")
    for name, wanted in about.items():
        if metadata.get(name) != wanted:
            other = f"{name.replace('_', ' ')} {metadata.get(name, 'unknown')!r}, not {wanted!r}"
            raise EvaluationError(f"{path} was made with {other}; move its folder away or choose another --output")
    own, named = {str(number): number for number in images}, metadata.get("left_out", "").split()
    if not own.keys() >= set(named) or len(set(named)) < len(named):
        raise DamagedFile("it names other images than its own as left out")
    left_out = [own[number] for number in named]
    if (found_shape, dtype) != ([len(images) - len(left_out), *shape], "F16"):
        raise DamagedFile(f"it holds {found_shape} values of {dtype}")
    return left_out
