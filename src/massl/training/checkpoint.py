"""Checkpoints: written atomically, with a digest; the last few are kept, milestones for good."""

import contextlib
import errno
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from massl.config import MasslError
from massl.digests import check_zip, seal_zip
from massl.files import make_folder, replacing

_NAME = re.compile(r"step_([0-9]{9})\.pt")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class CheckpointError(MasslError, RuntimeError):
    """A checkpoint could not be written or read; the message says what is safe and what to do."""


@dataclass(frozen=True)
class CheckpointStore:
    folder: Path
    keep_last: int

    def steps(self) -> list[int]:
        """Steps with a checkpoint, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(int(match[1]) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name)))

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:09d}.pt"

    def save(self, step: int, state: Mapping[str, Any], *, milestone_every: int) -> Path:
        """Write a checkpoint, then delete all but the last few and the multiples of `milestone_every` (0: none)."""
        path = self.path(step)
        try:
            make_folder(self.folder)
            with replacing(path) as partial:
                with partial.open("wb") as file:
                    torch.save(_with_own_objects(dict(state)), file)
                seal_zip(partial)
        except (OSError, RuntimeError) as error:
            safe = self.steps()
            kept = f"The checkpoint of step {safe[-1]} is intact." if safe else "No earlier checkpoint exists."
            cause = _root_cause(error)
            is_other = isinstance(cause, OSError) and cause.errno not in _NO_SPACE
            advice = "Mend this" if is_other else "Is the disk full? Free some space"
            raise CheckpointError(
                f"could not write {path}: {cause}. {kept} {advice} and give the same command again to continue."
            ) from error
        # those of later steps could not be read when the run continued: they do not count
        for old in [other for other in self.steps() if other <= step][: -self.keep_last]:
            if not (milestone_every and old % milestone_every == 0):
                with contextlib.suppress(IsADirectoryError):  # not ours
                    self.path(old).unlink(missing_ok=True)
        return path

    def load_latest(
        self, warn: Callable[[str], None], *, like: Mapping[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """The newest usable checkpoint; those that are damaged, or lack what is in `like`, are reported and skipped."""
        steps = self.steps()
        for step in reversed(steps):
            try:
                state = load_checkpoint(self.path(step))
                if lacking := _lacking(state, like or {}) or _lacking_if_kept(state):
                    raise CheckpointError(f"the checkpoint {self.path(step)} lacks {lacking}")
                if like and state["step"] != step:
                    raise CheckpointError(f"the checkpoint {self.path(step)} is a copy of that of step {state['step']}")
                return state
            except CheckpointError as error:
                before = [other for other in steps if other < step]
                warn(f"{error}. {f'Trying the one before, of step {before[-1]}' if before else 'There is none before'}")
        if steps:
            raise CheckpointError(
                f"none of the {len(steps)} checkpoints in {self.folder} can be used (see above); nothing was deleted. "
                "Copy one back from a backup, or choose another --output to start anew"
            )
        return None


def _lacking(state: Any, like: Any, name: str = "") -> str:
    """The first entry of `like` that `state` does not have, or has with another type or shape; "" if there is none."""
    if isinstance(like, Tensor):
        return "" if fits(state, like) else f"{name} of shape {[*like.shape]} and type {like.dtype}"
    if not isinstance(state, Mapping if isinstance(like, Mapping) else type(like)):
        return name or "all entries"
    if isinstance(like, Mapping):
        inner = ((state.get(key), value, f"{name}.{key}".strip(".")) for key, value in like.items())
        return next(filter(None, (_lacking(*each) for each in inner)), "")
    return ""


def fits(value: Any, like: Tensor) -> bool:
    is_plain = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
    return is_plain and value.shape == like.shape and value.dtype == like.dtype


def _lacking_if_kept(state: dict[str, Any]) -> str:
    """Entries that only some checkpoints have: the first with values of another type; "" if there is none."""
    row, steps = state.get("unprobed"), state.get("skipped_steps", [])
    is_row = isinstance(row, dict) and "step" in row and all(map(_is_number, row.values()))
    if row is not None and not is_row:
        return "a row of metrics in its entry unprobed"
    if not isinstance(steps, list) or not all(isinstance(step, int) for step in steps):
        return "a list of steps in its entry skipped_steps"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)  # larger ones are no float


def _with_own_objects(value: Any) -> Any:
    """The same values with each equal string as one object, and each list and tuple as its own.

    pickle writes an object that it meets again as a reference, so that equal states would differ in their bytes.
    """
    if type(value) is dict:
        return {_with_own_objects(key): _with_own_objects(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_with_own_objects, value))
    return sys.intern(value) if type(value) is str else value


def _root_cause(error: BaseException) -> BaseException:
    """torch.save hides the system's error ("No space left on device") behind one of its own."""
    return error if error.__context__ is None else _root_cause(error.__context__)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Tensors and plain values only: nothing in the file is executed."""
    try:
        if not path.is_file():  # a FIFO would wait for a writer
            raise OSError("it is not a file")
        check_zip(path)
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises anything for a damaged file: KeyError, UnicodeDecodeError, ...
        raise CheckpointError(f"cannot read the checkpoint {path}: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"the checkpoint {path} holds no entries")
    return state
