"""Files of the feature cache: checked when they are read, and computed again if they are damaged.

Several evaluations may share a cache: each writes whole files, and all would write the same content.
"""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from massl.evaluations.measurement import EvaluationError
from massl.files import make_folder, remove_leftovers, write_atomically
from massl.ops.scoring.finite import num_not_finite
from massl.weights.tensor_files import read_tensors, write_tensors

_LIMITS = ("max_file_mib", "max_megapixels")  # options that reasons name; older versions left them out of the key


class DamagedCache(Exception):
    """A file of the cache cannot be used; the message says why."""


def read_rows(path: Path, *, num_rows: int) -> Tensor:  # -> [num_rows, D]
    """Features of a file. Raises DamagedCache."""
    try:
        tensors, metadata = read_tensors(path)
        rows = tensors["rows"]
    except (SafetensorError, OSError) as error:
        raise DamagedCache(str(error)) from None
    except KeyError:
        raise DamagedCache("it holds no features") from None
    if metadata.get("place", _place(path)) != _place(path):  # older files do not say
        raise DamagedCache(f"it is a copy of {metadata['place']}")
    if rows.dim() != 2 or rows.dtype != torch.float32 or len(rows) != num_rows:
        raise DamagedCache(f"it holds {[*rows.shape]} values of {rows.dtype} instead of {num_rows} features")
    if num_broken := num_not_finite(rows):  # files of older versions have no digest
        raise DamagedCache(f"{num_broken} of its {num_rows} features are not finite")
    return rows


def write_rows(path: Path, rows: Tensor) -> None:  # [n, D]
    try:
        write_tensors(path, {"rows": rows.contiguous()}, {"place": _place(path)})
        remove_leftovers(path.parent)
    except (SafetensorError, OSError) as error:
        raise EvaluationError(
            f"cannot write features to {path} ({error}); make room or choose another folder"
        ) from None


def _place(path: Path) -> str:
    """Key and part of a file's features: its path in the cache."""
    return f"{path.parent.name}/{path.name}"


def read_unreadable(path: Path) -> dict[int, str]:
    """Which images cannot be read, and why. Raises DamagedCache."""
    try:
        content = json.loads(path.read_bytes())
        reasons = content["reasons"] if "digest" in content else content  # older files have no digest
        if content.get("digest", _digest_of(reasons)) != _digest_of(reasons):
            raise DamagedCache("its content does not match its digest")
        if "limits" not in content and any(option in str(reasons) for option in _LIMITS):
            raise DamagedCache("an older version wrote it and does not say for which limits")
        return {int(index): str(reason) for index, reason in reasons.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError) as error:
        raise DamagedCache(f"{type(error).__name__}: {error}") from None


def write_unreadable(path: Path, reasons: dict[int, str]) -> None:
    named = {str(index): reason for index, reason in reasons.items()}
    make_folder(path.parent)
    write_atomically(path, json.dumps({"reasons": named, "digest": _digest_of(named), "limits": "in the key"}))


def _digest_of(reasons: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(reasons, sort_keys=True).encode()).hexdigest()
