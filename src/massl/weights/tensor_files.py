"""Tensors in .safetensors files that carry a digest: written whole or not at all, checked when they are read."""

import errno
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from safetensors import safe_open
from torch import Tensor

from massl.digests import DIGEST_TO_COME, check_digest, seal_safetensors, seal_safetensors_file
from massl.files import make_folder, replacing

_MAX_HEADER = 16 << 20  # bytes: names and shapes of more than 100,000 tensors
_MAX_TENSORS = 20_000  # of a file; safetensors needs minutes for ten times as many


def tensor_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The content of a file: always the same for the same tensors and metadata."""
    content = bytearray(safetensors.torch.save(dict(tensors), {**metadata, **DIGEST_TO_COME}))
    seal_safetensors(content)
    return bytes(content)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """The same as a file; its folder is created. Raises OSError or SafetensorError."""
    make_folder(path.parent)
    with replacing(path) as partial:
        safetensors.torch.save_file(dict(tensors), partial, {**(metadata or {}), **DIGEST_TO_COME})
        seal_safetensors_file(partial)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file. Raises OSError (DamagedFile if its digest is wrong) or SafetensorError."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > _MAX_HEADER:
        too_large = f"its header of {size / 2**20:,.0f} MiB is larger than the {_MAX_HEADER >> 20} allowed"
        raise OSError(errno.EFBIG, f"it is damaged or no weights file: {too_large}")
    check_digest(path)  # files of other projects and older versions have none
    with safe_open(path, framework="pt") as file:  # from the page cache: the disk was read just now
        metadata: dict[str, str] = file.metadata() or {}
        names = list(file.keys())
        if len(names) > _MAX_TENSORS:
            raise OSError(errno.EFBIG, f"it is no weights file: {len(names):,} tensors are more than {_MAX_TENSORS:,}")
        return {name: file.get_tensor(name) for name in names}, metadata
