"""Runs of equal training time: a short trial measures a recipe's speed, which gives the epochs for `--minutes`."""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from massl.commands.auto import Resolved, resolve
from massl.commands.console import require_writable
from massl.commands.recipe import PretrainRecipe, load_recipe
from massl.commands.recipes import AUTO
from massl.commands.timing import (
    WARM_UPS,
    epochs_lasting,
    images_per_epoch,
    refuse_other_length,
    shortened_warm_ups,
    steady_speed,
    training_images,
)
from massl.config import MasslError, RecipeError, flatten
from massl.files import write_atomically
from massl.json_lines import read_json

_RECORD = "minutes.json"
_TOLERATED_ROUNDING = 0.1  # of the requested minutes


def timed_overrides(
    minutes: float, recipe: PretrainRecipe, *, run: Path, given: Collection[str], tell: Callable[[str], None]
) -> dict[str, Any]:
    """Overrides that make the run last `minutes`: epochs, and shorter warm-ups. Keys in `given` stay as they are.

    An existing run keeps its epochs. Otherwise a trial finds them; they are recorded in minutes.json beside the run.
    """
    refuse_other_length(recipe)
    if (run / "recipe.yaml").exists():
        epochs = _epochs_of_run(run)
        tell(f"the run exists and keeps its length, trainer.epochs {epochs}")
        return {"trainer.epochs": epochs, **shortened_warm_ups(recipe, epochs=epochs, given=given)}
    require_writable(run.parent)
    tell("a short trial to measure its speed")
    source = training_images(recipe)
    speed = steady_speed(recipe, source)
    num_images = images_per_epoch(recipe, len(source))
    epochs, exact = epochs_lasting(minutes, speed, num_images=num_images)
    overrides = {"trainer.epochs": epochs, **shortened_warm_ups(recipe, epochs=epochs, given=given)}
    images_per_second = round(speed.images_per_second, 1)
    _record(run, minutes=minutes, values={"images_per_second": images_per_second, **overrides})
    told = f"{images_per_second:,.0f} images a second, {num_images // recipe.trainer.batch_size} steps an epoch"
    before = flatten(recipe)
    changes = [f"{key} {value:g} instead of {before[key]:g}" for key, value in overrides.items()]
    tell("; ".join([f"{told}: {minutes:g} minutes are {exact:.2f} epochs", *changes]))
    _warn_of_rounding(minutes, epochs, exact, tell)
    return overrides


def timed_auto(
    minutes: float, data: str | None, *, run: Path, given: Mapping[str, Any], tell: Callable[[str], None]
) -> Resolved:
    """What auto chooses for a new run of `minutes`, recorded like `timed_overrides`."""
    require_writable(run.parent)
    found = resolve(AUTO, data=data, overrides=given, run=run, minutes=minutes)
    assert found.speed is not None
    assert found.images is not None
    epochs, exact = epochs_lasting(
        minutes, found.speed, num_images=images_per_epoch(found.recipe, found.images.num_images)
    )
    chosen = flatten(found.recipe)
    overrides = {key: chosen[key] for key in ("trainer.epochs", *WARM_UPS) if key in chosen}
    _record(run, minutes=minutes, values={"images_per_second": round(found.speed.images_per_second, 1), **overrides})
    _warn_of_rounding(minutes, epochs, exact, tell)
    return found


def _warn_of_rounding(minutes: float, epochs: int, exact: float, tell: Callable[[str], None]) -> None:
    if abs(epochs / exact - 1) > _TOLERATED_ROUNDING:
        trained = minutes * epochs / exact
        tell(f"warning: epochs are whole, so it trains for about {trained:.2f} minutes instead of {minutes:g}")


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
