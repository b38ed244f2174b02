"""The folder of a run: its files, the lock on it, and whether a command may continue it."""

import contextlib
import fcntl
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from massl import distributed
from massl.config import MasslError, RecipeError, Settings, flatten, read_yaml, to_yaml, validate
from massl.files import is_leftover, write_atomically

# Settings of where, how long and how often, not of what is computed: a continued run may change them.
MAY_CHANGE = frozenset(
    {
        "data.num_workers",
        "data.worker_kind",
        "data.cache_gib",
        "trainer.max_steps",
        "trainer.device",
        "trainer.accumulation_steps",
        "trainer.activation_checkpointing",
        "trainer.kernels",
        "trainer.residual",
        "trainer.cuda_graph",
        "trainer.checkpoint_every_steps",
        "trainer.keep_checkpoints",
        "trainer.milestone_every_epochs",
    }
)

_LOCK = ".lock"


class RunFolderError(MasslError, ValueError):
    """The output folder cannot be used for this run; the message says why and what to do."""


def _binding_values(recipe: Settings) -> dict[str, Any]:
    """The settings of a recipe that affect the result of a run."""
    return {key: value for key, value in flatten(recipe).items() if key not in MAY_CHANGE}


@dataclass(frozen=True)
class RunFolder:
    path: Path
    recipe: Settings

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def binding_text(self) -> str:
        """The binding values as text, stored in each checkpoint."""
        return json.dumps(_binding_values(self.recipe), sort_keys=True)

    def differences_from(self, kept: str) -> list[str]:
        """Differences of a checkpoint's binding values, in words; settings added since then are ignored."""
        now = json.loads(self.binding_text())
        return [
            f"{key} was {value!r}, now {now.get(key)!r}"
            for key, value in json.loads(kept).items()
            if now.get(key) != value
        ]

    @contextlib.contextmanager
    def claimed(self, *, is_writer: bool) -> Iterator[None]:
        """Lock the folder while inside; only the writing process does so, the other ranks wait for it."""
        with contextlib.ExitStack() as held:
            if is_writer:
                self._refuse_foreign_folder()
                held.enter_context(self._locked())
                self._refuse_other_recipe()
                for file in (*self.path.iterdir(), *self.checkpoints.glob("*")):
                    if is_leftover(file):
                        file.unlink()
                self._write_recipe()
            distributed.barrier()
            yield

    def _refuse_foreign_folder(self) -> None:
        """Accept a new folder, an empty one, or one that holds a run."""
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"{self.path} is a file; --output must be a folder")
        if (
            self.path.is_dir()
            and not self.recipe_file.exists()
            and any(path.name != _LOCK and not is_leftover(path) for path in self.path.iterdir())
        ):
            raise RunFolderError(
                f"{self.path} is not empty and is not a massl run; choose another --output (nothing was changed)"
            )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / _LOCK).open("w")
        except OSError as error:
            raise RunFolderError(f"cannot write to {self.path}: {error}") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the system however the process ends
            except BlockingIOError:
                raise RunFolderError(
                    f"another process is training in {self.path}; wait for it or choose another --output"
                ) from None
            yield

    def _write_recipe(self) -> None:
        try:
            self.write_text("recipe.yaml", to_yaml(self.recipe))
        except OSError as error:
            raise RunFolderError(f"cannot write to {self.path}: {error}") from error

    def _has_begun(self) -> bool:
        """Whether training has written anything; until then the recipe may still be corrected."""
        return self.recipe_file.exists() and ((self.path / "metrics.jsonl").exists() or self.checkpoints.is_dir())

    def _refuse_other_recipe(self) -> None:
        if not self._has_begun():
            return
        try:
            before = _binding_values(validate(type(self.recipe), read_yaml(self.recipe_file), origin="recipe.yaml"))
        except RecipeError as error:
            raise RunFolderError(
                f"{self.recipe_file} is not a valid recipe ({error}); choose another --output"
            ) from None
        now = _binding_values(self.recipe)
        differences = [
            f"{key} was {before.get(key)!r}, now {now.get(key)!r}"
            for key in sorted({*before, *now})
            if before.get(key) != now.get(key)
        ]
        if differences:
            raise RunFolderError(
                f"{self.path} holds a run of another recipe: {'; '.join(differences)}. "
                "Give the same values to continue it, or another --output."
            )

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
