"""The recipe `auto`: looks at the images and the device, chooses every value, and says why."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from massl.commands.console import message_console, print_line
from massl.commands.device import choose_device
from massl.commands.pretrain_arguments import checked_for_auto, recipe_of_run, resolve_recipe
from massl.commands.recipe import PretrainRecipe
from massl.commands.recipes import AUTO
from massl.commands.start import network_of, with_network_of
from massl.commands.timing import (
    epochs_lasting,
    images_per_epoch,
    refuse_other_length,
    shortened_warm_ups,
    steady_speed,
    training_images,
)
from massl.config import RecipeError, dotted, merge, validate
from massl.data.sources import ImageSource, open_source
from massl.planning.choice import Plan, choose
from massl.planning.costs import Speed
from massl.planning.facts import DeviceFacts, ImageFacts, look_at_device, look_at_images
from massl.planning.rules import FEW_IMAGES, LEAST_IMAGES, NETWORKS, PUBLISHED, REDUCTION, NetworkRow
from massl.training.run_folder import PLAN_FILE

_OF_SPEED = ("backbone.name", "views.global_size", "views.num_local", "trainer.batch_size")
__all__ = ["PLAN_FILE", "Resolved", "plan_images", "planned_recipe", "resolve"]
_INSTEAD = "chooses for method massl; for another give its recipe, e.g. --recipe {0}-tiny"


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A complete recipe, and how it came about."""

    recipe: PretrainRecipe
    plan: Plan | None = None  # of auto
    images: ImageFacts | None = None
    speed: Speed | None = None  # where --minutes asked for a trial
    has_start: bool = False  # weights of --init

    @property
    def explanation(self) -> str:
        """What auto chose and why, one line for each value; "" for another recipe."""
        if self.plan is None or self.images is None:
            return ""
        num_images = f"{self.images.num_images:,} images"
        head = f"auto chooses for your {num_images} (every value can be set, e.g. --trainer.batch_size 128):"
        lines = [head, *(f"  {line}" for line in self.plan.lines())]
        if self.images.num_images < FEW_IMAGES and not self.has_start:
            lines.append(
                f"{num_images} are few: published weights may serve better, as they are (massl embed {PUBLISHED}) or "
                f"as a start (--init {PUBLISHED})"
            )
        return "\n".join(lines) + "\n"


def resolve(
    recipe: str | Path | PretrainRecipe | None,
    *,
    data: str | Path | None,
    overrides: Mapping[str, Any],
    run: Path | None = None,
    init: str | Path | None = None,
    minutes: float | None = None,
    quiet: bool = False,
) -> Resolved:
    """The recipe that is asked for: a given one, that of the run, or auto, whose choices are printed.

    A run that exists is never planned anew.
    """
    if minutes is not None and "trainer.epochs" in dotted(overrides, PretrainRecipe):
        raise RecipeError("minutes and trainer.epochs both set the length of training; give one of them")
    console = message_console(quiet=quiet or os.environ.get("RANK", "0") != "0")

    def tell(text: str) -> None:
        print_line(console, text)

    has_run = run is not None and (run / "recipe.yaml").is_file()
    init_run = Path(init).expanduser() if init is not None else None
    has_init_run = init_run is not None and (init_run / "recipe.yaml").is_file()
    is_auto = recipe == AUTO or (recipe is None and not has_run and not has_init_run and data is not None)
    if is_auto and has_run:
        assert run is not None
        if not (run / PLAN_FILE).is_file():
            raise RecipeError(f"{run} holds a run that auto did not plan; choose another --output")
        is_auto, recipe = False, None
    if is_auto:
        chosen = _automatic(data, dotted(overrides, PretrainRecipe), init, minutes, tell)
        tell(chosen.explanation.rstrip())
        return chosen
    found = resolve_recipe(recipe or recipe_of_run(run, init_run, data=data), data, overrides)
    if minutes is not None and has_run:
        tell(f"the run exists and keeps its length, trainer.epochs {found.trainer.epochs}")
    if minutes is None or has_run:
        return Resolved(recipe=found)
    source, given = training_images(found, may_download=data is not None), dotted(overrides, PretrainRecipe)
    return _lasting(found, with_network_of(found, init, given), source, minutes, given, tell)


def planned_recipe(plan: Plan) -> PretrainRecipe:
    values = merge({"method": {"name": "massl"}}, plan.values, PretrainRecipe)
    return validate(PretrainRecipe, values, origin="recipe auto")


def plan_images(
    source: ImageSource,
    given: Mapping[str, Any],
    *,
    device: DeviceFacts | None = None,
    init: str | Path | None = None,
) -> tuple[ImageFacts, Plan]:
    """What the images are, and what suits them and the weights to start from."""
    facts, choosing = _look(source, given, device, init)
    return facts, choosing(given)


def _look(
    source: ImageSource, given: Mapping[str, Any], device: DeviceFacts | None, init: str | Path | None
) -> tuple[ImageFacts, Callable[..., Plan]]:
    """What the images are, and `choose` for them, this device and these weights."""
    method = given.get("method.name", "massl")
    if method != "massl":
        raise RecipeError(f"auto {_INSTEAD.format(method)}")
    chosen = choose_device(str(given.get("trainer.device", "auto")), option="trainer.device")
    facts = replace(look_at_images(source), num_probed=_num_probed(source, given))
    return facts, partial(choose, facts, device or look_at_device(chosen), start=_network_row(init))


def _num_probed(source: ImageSource, given: Mapping[str, Any]) -> int:
    """Images that the probes read and training does not."""
    share = float(given.get("data.hold_out", 0.0))
    named = {str(given[key]) for key in ("probes.database", "probes.queries") if given.get(key)}
    others = [open_source(uri) for uri in sorted(named - {str(given.get("data.source"))})]
    return round(len(source) * share / (1.0 - share)) + sum(len(other) for other in others if other.pixels is None)


def _network_row(init: str | Path | None) -> NetworkRow | None:
    if init is None:
        return None
    values = {f"backbone.{key}": value for key, value in network_of(init).model_dump().items()}
    name, _ = values.pop("backbone.name"), values.pop("backbone.drop_path_rate")
    options = {key: value for key, value in values.items() if value is not None}
    rows = (row.options for row in NETWORKS.values() if row.name == name)
    measured = next((row for row in rows if row.get("backbone.stem", "") == options.get("backbone.stem", "")), {})
    has_small_map = options.get("backbone.patch_size") is None and not options.get("backbone.stem")
    return NetworkRow(
        name=name,
        kind="",
        reduction=REDUCTION if has_small_map else 0,
        options={**measured, **options},
        origin=f"from --init {init}",
    )


def _automatic(
    data: str | Path | None,
    overrides: dict[str, Any],
    init: str | Path | None,
    minutes: float | None,
    tell: Callable[[str], None],
) -> Resolved:
    given = overrides | ({} if data is None else {"data.source": str(data)})
    if not given.get("data.source"):
        raise RecipeError("no images named: give a folder of images, e.g. massl pretrain photos/")
    if given.get("method.name", "massl") == "massl":  # another one is refused, once the images are known
        given = checked_for_auto(given)
    reading = {key: value for key, value in given.items() if key.startswith("data.")}
    source = training_images(
        validate(PretrainRecipe, merge({}, reading, PretrainRecipe), origin="auto"), may_download=True
    )
    if len(source) < LEAST_IMAGES:
        raise RecipeError(
            f"{len(source)} images are too few to learn from; {LEAST_IMAGES} is the least that auto trains on, and "
            f"some thousands are sensible. Published weights need no training: massl embed {PUBLISHED} --data ..."
        )
    facts, choosing = _look(source, given, None, init)
    plan = choosing(given)
    recipe = planned_recipe(plan)
    if minutes is None:
        return Resolved(recipe=recipe, plan=plan, images=facts, has_start=init is not None)
    speed, epochs, why = _trial(recipe, source, minutes, facts, tell)
    shorter = choosing({**given, "trainer.epochs": epochs})
    if any(shorter.values.get(key) != plan.values.get(key) for key in _OF_SPEED):
        tell("so short a run is chosen like one on fewer images; a trial of that")
        speed, epochs, why = _trial(planned_recipe(shorter), source, minutes, facts, tell)
    # the first trial decides: a faster network does not make it a long run
    plan = choosing({**given, "trainer.epochs": epochs}, as_of=shorter.num_images)
    plan.reasons["trainer.epochs"] = why
    return Resolved(recipe=planned_recipe(plan), plan=plan, images=facts, speed=speed, has_start=init is not None)


def _lasting(
    recipe: PretrainRecipe,
    timed: PretrainRecipe,
    source: ImageSource,
    minutes: float,
    given: Mapping[str, Any],
    tell: Callable[[str], None],
) -> Resolved:
    """The recipe with the epochs that fill the minutes, and shorter warm-ups. `timed`: with the network of --init."""
    speed, epochs, why = _trial(timed, source, minutes, None, tell)
    tell(f"trainer.epochs {epochs}: {why}")
    warm_ups = shortened_warm_ups(recipe, epochs=epochs, given=given)
    for key, value in warm_ups.items():
        tell(f"{key} {value:g}: shorter with the epochs")
    changes = {"trainer.epochs": epochs, **warm_ups}
    return Resolved(recipe=resolve_recipe(recipe, None, changes), speed=speed)


def _trial(
    recipe: PretrainRecipe, source: ImageSource, minutes: float, facts: ImageFacts | None, tell: Callable[[str], None]
) -> tuple[Speed, int, str]:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RecipeError("--minutes measures the speed in one process; under torchrun give --trainer.epochs")
    refuse_other_length(recipe)
    tell("a short trial to measure the speed")
    speed = steady_speed(recipe, source, facts=facts)
    epochs, _ = epochs_lasting(minutes, speed, num_images=images_per_epoch(recipe, len(source)))
    return (
        speed,
        epochs,
        f"they fill {minutes:g} minute{'' if minutes == 1 else 's'} at {speed.images_per_second:,.0f} images a second",
    )
