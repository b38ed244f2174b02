"""The folder of a run: its files, the lock on it, and whether a command may continue it."""

import contextlib
import fcntl
import itertools
import json
import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from massl.config import MasslError, RecipeError, Settings, flatten, read_yaml, to_yaml, validate
from massl.data.identity import DataIdentity
from massl.data.sources.base import DataError
from massl.data.sources.rules import PixelRanges
from massl.files import is_leftover, make_folder, open_in_place, write_atomically
from massl.json_lines import read_json
from massl.training.checkpoint import CheckpointStore
from massl.training.data_record import DataRecord
from massl.training.ranks import stop_together
from massl.weights.io import BACKBONE_FILE, BEST_FILE

# Settings of where, how long and how often, not of what is computed: a continued run may change them.
MAY_CHANGE = frozenset(
    {
        "data.source",  # the images themselves are compared, see data_record.py
        "data.num_workers",
        "data.worker_kind",
        "data.cache_gib",
        "data.max_file_mib",
        "data.max_megapixels",
        "trainer.max_steps",
        "trainer.device",
        "trainer.accumulation_steps",
        "trainer.activation_checkpointing",
        "trainer.kernels",
        "trainer.residual",
        "trainer.cuda_graph",
        "trainer.skip_bad_steps",
        "trainer.stop_when_flat",
        "trainer.guard",
        "trainer.log_every_steps",
        "trainer.checkpoint_every_steps",
        "trainer.checkpoint_every_minutes",
        "trainer.keep_checkpoints",
        "trainer.milestone_every_epochs",
    }
)

_LOCK = ".lock"
_START = "start.json"
PLAN_FILE = "plan.txt"  # what the recipe auto chose, and why
_OWN = frozenset({_LOCK, _START, PLAN_FILE, *DataRecord.FILES})  # written before training
_LOGS = ("metrics.jsonl", "metrics.rejected.jsonl", "warnings.jsonl", "warnings.rejected.jsonl")
_FILES = (*sorted(_OWN), "recipe.yaml", "environment.json", BACKBONE_FILE, BEST_FILE, *_LOGS)  # all training writes
_FOLDERS = ("checkpoints", "tensorboard")


class RunFolderError(MasslError, ValueError):
    """The output folder cannot be used for this run; the message says why and what to do."""


def _binding_values(recipe: Settings, *, may_change: Collection[str] = MAY_CHANGE) -> dict[str, Any]:
    """The settings of a recipe that affect the result of a run."""
    return {key: value for key, value in flatten(recipe).items() if key not in may_change}


@dataclass(frozen=True)
class RunFolder:
    path: Path
    recipe: Settings
    data: DataIdentity | None = None  # the images to train on; None: not looked at

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def binding_text(self) -> str:
        """The binding values as text, stored in each checkpoint."""
        return json.dumps(_binding_values(self.recipe), sort_keys=True)

    @property
    def data_digest(self) -> str:
        """Of the images, stored in each checkpoint; "" if they were not looked at."""
        return "" if self.data is None else self.data.digest

    def differences_from(self, kept: str, *, data_digest: str = "") -> list[str]:
        """Differences of a checkpoint, by its binding values and images; settings added since then are ignored."""
        now = json.loads(self.binding_text())
        try:
            before = dict(json.loads(kept).items())
        except (ValueError, AttributeError, RecursionError):
            return ["its recipe cannot be read"]
        differences = [
            f"{key} was {value!r}, now {now.get(key)!r}"
            for key, value in before.items()
            if key not in MAY_CHANGE and now.get(key) != value
        ]
        if data_digest and self.data is not None and data_digest not in DataRecord(self.path).digests():
            differences.append("it was trained on other images")
        return differences

    @property
    def has_start(self) -> bool:
        """Whether the run started from trained weights."""
        return (self.path / _START).exists()

    @property
    def start_from(self) -> Path | None:
        """The weights this run started from, a path or a name; None: random weights."""
        file = self.path / _START
        if not file.exists():
            return None
        try:
            start = read_json(file)["from"]
            if not isinstance(start, str) or not start or "\0" in start:
                raise ValueError("it names no folder")
            return Path(start)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunFolderError(
                f"{file} cannot be read ({error!r}), so it is not known which weights this run started from; copy it "
                "back from a backup, or choose another --output"
            ) from None

    def write_start(self, run: Path, *, step: int | None = None) -> None:
        self.write_json(_START, {"from": str(run), "step": step})

    @contextlib.contextmanager
    def claimed(self, *, is_writer: bool, accept_changes: bool = False) -> Iterator[None]:
        """Lock the folder while inside, and record recipe and images; only the writing process does so.

        If the folder cannot be used, all processes stop. `accept_changes`: the images may differ from those before.
        An error before training leaves nothing of a new run behind.
        """
        with contextlib.ExitStack() as held:
            with stop_together():
                if is_writer:
                    self._refuse_foreign_folder()
                    is_new, missing = not self.recipe_file.exists(), self._missing_folders()
                    self._refuse_links()
                    held.enter_context(self._locked())
                    if is_new:
                        held.enter_context(self._removed_unless_begun(missing))
                    self.refuse_unusable()
                    if self.data is not None and self.has_begun and not accept_changes:
                        DataRecord(self.path).refuse_changes(self.data)
                    self._record()
            yield

    def refuse_unusable(self) -> None:
        """Whether a run with this recipe can begin or continue here; only looks."""
        self._refuse_foreign_folder()
        self._refuse_links()
        self._refuse_lost_checkpoints()
        self._refuse_other_recipe()

    def _refuse_foreign_folder(self) -> None:
        """Accept a new folder, an empty one, or one that holds a run."""
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"{self.path} is a file; --output must be a folder")
        if not self.path.is_dir() or self.recipe_file.exists():
            return
        # A run that was killed while it started has its lock, which is made first.
        names = {path.name for path in self.path.iterdir() if not is_leftover(path)}
        if names and not {_LOCK} <= names <= _OWN:
            raise RunFolderError(
                f"{self.path} is not empty and is not a massl run; choose another --output (nothing was changed)"
            )

    def _refuse_links(self) -> None:
        """A run folder of a stranger could lead to files of the user; a link to the run folder itself is fine."""
        for name in (*_FILES, *_FOLDERS):
            path, kind = self.path / name, "folder" if name in _FOLDERS else "file"
            if path.is_symlink():
                raise RunFolderError(
                    f"{path} is a link, through which massl does not write; put the {kind} itself in its place. To "
                    "keep a run on another disk, link its whole folder, or choose another --output"
                )
            if path.exists() and not (path.is_dir() if kind == "folder" else path.is_file()):
                raise RunFolderError(f"{path} is not a {kind}; remove it, or choose another --output")

    def _refuse_lost_checkpoints(self) -> None:
        """The backbone is first written after the first checkpoint: where it is alone, the checkpoints were lost.

        A run that was killed before its first checkpoint has none, and starts again by itself.
        """
        if (self.path / BACKBONE_FILE).exists() and not CheckpointStore(self.checkpoints, keep_last=1).steps():
            raise RunFolderError(
                f"{self.path} holds a trained {BACKBONE_FILE} but no checkpoint to continue from; a new start would "
                f"overwrite it, so nothing was changed. Put the files back into {self.checkpoints}, choose another "
                f"--output, or move {BACKBONE_FILE} elsewhere to train anew in this folder"
            )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        taken = RunFolderError(f"another process is training in {self.path}; wait for it or choose another --output")
        try:
            make_folder(self.path)
            lock = open_in_place(self.path / _LOCK, 0)
        except OSError as error:
            raise RunFolderError(f"cannot write to {self.path}: {error}") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the system however the process ends
            except BlockingIOError:
                raise taken from None
            if os.fstat(lock.fileno()).st_nlink == 0:  # a start that was refused has just removed the file
                raise taken
            yield

    def _missing_folders(self) -> list[Path]:
        """The folders that a new run has to make, the innermost first."""
        return list(itertools.takewhile(lambda folder: not folder.exists(), (self.path, *self.path.parents)))

    @contextlib.contextmanager
    def _removed_unless_begun(self, made: Iterable[Path]) -> Iterator[None]:
        """On an error before training, remove all files of the run, and the folders made for it.

        Images and recipes that turn out wrong in the first batch or probe count as well: only step 0 is logged then.
        """
        try:
            yield
        except BaseException as error:
            if not self.has_begun or (isinstance(error, DataError | RecipeError) and not self._has_trained):
                events = (self.path / "tensorboard").glob("events.out.tfevents.*")
                for file in (*events, *(self.path / name for name in _FILES if name != _LOCK), self.path / _LOCK):
                    file.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # another process has put a file there
                    for folder in (*self.path.glob("tensorboard"), *made):
                        folder.rmdir()
            raise

    @property
    def _has_trained(self) -> bool:
        log = self.path / "metrics.jsonl"
        return self.checkpoints.is_dir() or (log.exists() and log.read_bytes().count(b"\n") > 1)

    def _record(self) -> None:
        try:
            for file in (*self.path.iterdir(), *self.checkpoints.glob("*")):
                if is_leftover(file):
                    file.unlink()
            if self.data is not None:
                steps = CheckpointStore(self.checkpoints, keep_last=1).steps()
                DataRecord(self.path).write(self.data, after_step=max(steps, default=0), is_new=not self.has_begun)
            self.write_text("recipe.yaml", to_yaml(self.recipe))
        except OSError as error:
            raise RunFolderError(f"cannot write to {self.path}: {error}") from error

    @property
    def has_begun(self) -> bool:
        """Whether training has written anything; until then the recipe may still be corrected."""
        return self.recipe_file.exists() and ((self.path / "metrics.jsonl").exists() or self.checkpoints.is_dir())

    @property
    def lists_as_before(self) -> bool:
        """Whether the run began with a version that listed other files and classes."""
        record = DataRecord(self.path)
        return self.has_begun and (record.as_before if record.exists else True)

    @property
    def known_ranges(self) -> PixelRanges | None:
        """Of images with more than 8 bits, if the run has begun; None: they are sampled."""
        return DataRecord(self.path).ranges if self.has_begun else None

    def _refuse_other_recipe(self) -> None:
        if not self.has_begun:
            return
        try:
            recipe = validate(type(self.recipe), read_yaml(self.recipe_file), origin="recipe.yaml")
        except RecipeError as error:
            raise RunFolderError(
                f"{self.recipe_file} is not a valid recipe ({error}); choose another --output"
            ) from None
        # of a run of an older version only the name tells which images it had
        may_change = MAY_CHANGE if DataRecord(self.path).exists else MAY_CHANGE - {"data.source"}
        before, now = (_binding_values(values, may_change=may_change) for values in (recipe, self.recipe))
        differences = [
            f"{key} was {before.get(key)!r}, now {now.get(key)!r}"
            for key in sorted({*before, *now})
            if before.get(key) != now.get(key)
        ]
        if differences:
            advice = "Give the same values to continue it, or another --output."
            if now.get("trainer.epochs", 0) > before.get("trainer.epochs", 0):
                advice += (
                    " To train for longer, start a new run from its weights: "
                    f"massl pretrain --init {shlex.quote(str(self.path))} --output NEW_FOLDER --trainer.epochs "
                    f"{now['trainer.epochs']}"
                )
            raise RunFolderError(f"{self.path} holds a run of another recipe: {'; '.join(differences)}. {advice}")

    def write_text(self, name: str, text: str) -> Path:
        path = self.path / name
        write_atomically(path, text)
        return path

    def write_json(self, name: str, values: Mapping[str, object]) -> Path:
        return self.write_text(name, json.dumps(values, indent=2) + "\n")

    def write_bytes(self, name: str, content: bytes) -> Path:
        path = self.path / name
        write_atomically(path, content)
        return path
