"""Checkpoints: written atomically; the last few are kept, milestones for good."""

import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from massl.config import MasslError
from massl.files import replacing

_NAME = re.compile(r"step_(\d{9})\.pt")


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
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as partial, partial.open("wb") as file:
                torch.save(dict(state), file)
        except (OSError, RuntimeError) as error:
            safe = self.steps()
            kept = f"The checkpoint of step {safe[-1]} is intact." if safe else "No earlier checkpoint exists."
            raise CheckpointError(
                f"could not write {path}: {_root_cause(error)}. Is the disk full? {kept} "
                "Free some space and give the same command again to continue."
            ) from error
        for old in self.steps()[: -self.keep_last]:
            if not (milestone_every and old % milestone_every == 0):
                self.path(old).unlink(missing_ok=True)
        return path

    def load_latest(self, warn: Callable[[str], None]) -> dict[str, Any] | None:
        """The newest readable checkpoint; unreadable ones are reported and skipped."""
        steps = self.steps()
        for step in reversed(steps):
            try:
                return load_checkpoint(self.path(step))
            except CheckpointError as error:
                warn(str(error))
        if steps:
            raise CheckpointError(
                f"none of the {len(steps)} checkpoints in {self.folder} can be read; choose another --output"
            )
        return None


def _root_cause(error: BaseException) -> BaseException:
    """torch.save hides the system's error ("No space left on device") behind one of its own."""
    return error if error.__context__ is None else _root_cause(error.__context__)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Tensors and plain values only: nothing in the file is executed."""
    try:
        with zipfile.ZipFile(path) as archive:
            # torch.load does not verify checksums: a block of zeros would load without an error
            damaged = archive.testzip()
        if damaged is not None:
            raise OSError(f"{damaged} is damaged")
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises anything for a damaged file: KeyError, UnicodeDecodeError, ...
        raise CheckpointError(f"cannot read the checkpoint {path}: {error}") from error
    return state
