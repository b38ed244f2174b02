"""Runs of equal training time: a short trial measures a recipe's speed, which gives the epochs for `--minutes`."""

import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from massl.commands.console import require_writable
from massl.commands.pretrain import RunInterrupted, pretrain
from massl.commands.recipe import PretrainRecipe, load_recipe
from massl.config import MasslError, RecipeError, flatten
from massl.data.order import EpochOrder
from massl.data.sources import open_source
from massl.files import write_atomically
from massl.json_lines import read_json

# The first interval compiles or records the step, the second may record it again (when DINO's prototypes start to
# train); the third is measured.
_NUM_INTERVALS, _STEPS_AN_INTERVAL = 3, 20
_NUM_STEPS = _NUM_INTERVALS * _STEPS_AN_INTERVAL
_WARM_UPS = ("optimizer.warmup_epochs", "method.teacher.temperature_warmup_epochs")
_RECORD = "minutes.json"
_TOLERATED_ROUNDING = 0.1  # of the requested minutes


class TrialStopped(Exception):
    """A signal ended a trial; the same command measures again."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"signal {signal_number}")
        self.signal_number = signal_number


def timed_overrides(
    minutes: float, recipe: PretrainRecipe, *, run: Path, given: Collection[str], tell: Callable[[str], None]
) -> dict[str, Any]:
    """Overrides that make the run last `minutes`: epochs, and shorter warm-ups. Keys in `given` stay as they are.

    An existing run keeps its epochs. Otherwise a trial finds them; they are recorded in minutes.json beside the run.
    """
    if recipe.trainer.max_steps is not None:
        raise RecipeError(
            "trainer.max_steps would end the training before the --minutes are over; --set trainer.max_steps=null"
        )
    if (run / "recipe.yaml").exists():
        epochs = _epochs_of_run(run)
        tell(f"the run exists and keeps its length, trainer.epochs {epochs}")
        return {"trainer.epochs": epochs, **_shortened_warm_ups(recipe, epochs=epochs, given=given)}
    require_writable(run.parent)
    tell(f"a trial of {_NUM_STEPS} steps to measure its speed")
    images_per_second = measured_images_per_second(recipe, name=run.name, beside=run.parent)
    num_images, batch_size = len(open_source(recipe.data.source)), recipe.trainer.batch_size
    steps_per_epoch = EpochOrder(num_images, batch_size=batch_size, seed=recipe.trainer.seed).steps_per_epoch
    exact = minutes * 60 * images_per_second / (steps_per_epoch * batch_size)
    if exact < 0.5:  # on many images a whole epoch could take hours instead
        raise RecipeError(
            f"an epoch takes {minutes / exact:.2f} minutes, and --minutes {minutes!r} is less than half of that; "
            "schedules need whole epochs: give more minutes, or fewer images"
        )
    epochs = max(1, round(exact))
    overrides = {"trainer.epochs": epochs, **_shortened_warm_ups(recipe, epochs=epochs, given=given)}
    _record(run, minutes=minutes, values={"images_per_second": images_per_second, **overrides})
    speed = f"{images_per_second:,.0f} images a second, {steps_per_epoch} steps an epoch"
    before = flatten(recipe)
    changes = [f"{key} {value:g} instead of {before[key]:g}" for key, value in overrides.items()]
    tell("; ".join([f"{speed}: {minutes:g} minutes are {exact:.2f} epochs", *changes]))
    if abs(epochs / exact - 1) > _TOLERATED_ROUNDING:
        trained = minutes * epochs / exact
        tell(f"warning: epochs are whole, so it trains for about {trained:.2f} minutes instead of {minutes:g}")
    return overrides


def measured_images_per_second(recipe: PretrainRecipe, *, name: str, beside: Path) -> float:
    """The speed of the last steps of a trial. Its folder is removed unless the trial fails."""
    folder = Path(tempfile.mkdtemp(prefix=f"trial-{name}-", dir=beside))
    trial = {
        "trainer.epochs": max(recipe.trainer.epochs, _NUM_STEPS),  # an epoch may be a single step
        "trainer.max_steps": _NUM_STEPS,
        "trainer.log_every_steps": _STEPS_AN_INTERVAL,
        "trainer.checkpoint_every_steps": _NUM_STEPS,
        "trainer.milestone_every_epochs": 0,
        "probes.every_epochs": 0,
    }
    try:
        result = pretrain(recipe=recipe, output=folder, overrides=trial)
    except RunInterrupted as interrupted:
        result = interrupted.result
    except MasslError as error:
        raise MasslError(f"the speed trial failed, see {folder}: {error}") from error
    shutil.rmtree(folder)
    if result.signal_number is not None:
        raise TrialStopped(result.signal_number)
    return result.metrics[-1]["images_per_second"]


def refuse_other_minutes(folder: Path, minutes: float) -> None:
    """Raise if the folder's runs were planned for another length."""
    recorded = _recorded(folder).get("minutes", minutes)
    if recorded != minutes:
        raise RecipeError(
            f"{folder} holds runs of --minutes {recorded!r}, not {minutes!r}; give the same to continue them, or "
            "choose another --output"
        )


def _epochs_of_run(run: Path) -> int:
    """Epochs of an existing run, which must have been planned by --minutes."""
    epochs = load_recipe(run / "recipe.yaml").trainer.epochs
    planned = _recorded(run.parent).get("runs", {}).get(run.name, {})
    if planned.get("trainer.epochs") != epochs:
        raise RecipeError(f"{run} was not trained with --minutes; choose another --output")
    return epochs


def _shortened_warm_ups(recipe: PretrainRecipe, *, epochs: int, given: Collection[str]) -> dict[str, float]:
    """Warm-ups in proportion to the epochs, if these are fewer than the recipe's."""
    if epochs >= recipe.trainer.epochs:
        return {}
    values = flatten(recipe)
    share = epochs / recipe.trainer.epochs
    return {key: round(values[key] * share, 3) for key in _WARM_UPS if values.get(key) and key not in given}


def _recorded(folder: Path) -> dict[str, Any]:
    """The content of minutes.json; empty if there is none."""
    file = folder / _RECORD
    if not file.exists():
        return {}
    try:
        values = read_json(file)
        runs = {name: dict(planned) for name, planned in values["runs"].items()}
        return {"minutes": float(values["minutes"]), "runs": runs}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise MasslError(f"{file} is not as massl compare --minutes writes it; choose another --output") from None


def _record(run: Path, *, minutes: float, values: Mapping[str, float]) -> None:
    runs = _recorded(run.parent).get("runs", {}) | {run.name: dict(values)}
    write_atomically(run.parent / _RECORD, json.dumps({"minutes": minutes, "runs": runs}, indent=2) + "\n")
