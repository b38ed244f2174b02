"""How long a recipe trains: a short trial of its speed, and the epochs that fill a number of minutes."""

from collections.abc import Collection
from typing import Any

import torch

from massl.commands.device import choose_device, host_threads_for
from massl.commands.recipe import PretrainRecipe
from massl.config import RecipeError, flatten
from massl.data.loading.range_sample import settle_ranges
from massl.data.order import EpochOrder
from massl.data.sources import ImageSource, held_out, open_source
from massl.planning.costs import Speed
from massl.planning.facts import ImageFacts, look_at_images
from massl.planning.trial import measure_speed, release_gpu

WARM_UPS = ("optimizer.warmup_epochs", "method.teacher.temperature_warmup_epochs")


def training_images(recipe: PretrainRecipe, *, may_download: bool = False) -> ImageSource:
    """What the recipe trains on: without the held-out images."""
    source = open_source(recipe.data.source, rules=recipe.data.rules(), may_download=may_download)
    settle_ranges(source)  # as the run that follows, which says so
    return held_out(source, recipe.data.hold_out)[0] if recipe.data.hold_out > 0 else source


def steady_speed(recipe: PretrainRecipe, source: ImageSource, *, facts: ImageFacts | None = None) -> Speed:
    """Measured on this machine's device in some seconds; nothing is written."""
    device = choose_device(recipe.trainer.device, option="trainer.device")
    cached = cached_share(recipe, source, facts)
    try:
        with host_threads_for(device):
            return measure_speed(recipe, source, device, cached_share=cached)
    except torch.OutOfMemoryError as error:
        lower = "trainer.batch_size, or raise trainer.accumulation_steps"
        raise RecipeError(
            f"the trial of its speed needs more memory than the GPU has ({error}); lower {lower}"
        ) from None
    finally:
        release_gpu(device)


def cached_share(recipe: PretrainRecipe, source: ImageSource, facts: ImageFacts | None = None) -> float:
    """Of the images that fit data.cache_gib once decoded; 0 if there is nothing to decode or to keep."""
    if recipe.data.cache_gib == 0 or source.pixels is not None:
        return 0.0
    facts = facts or look_at_images(source)
    needed = len(source) * facts.decoded_bytes(recipe.data.max_side) / 2**30
    return min(1.0, recipe.data.cache_gib / needed)


def images_per_epoch(recipe: PretrainRecipe, num_images: int) -> int:
    """The incomplete last batch of an epoch is left out."""
    order = EpochOrder(num_images, batch_size=recipe.trainer.batch_size, seed=recipe.trainer.seed)
    return order.steps_per_epoch * order.batch_size


def epochs_lasting(minutes: float, speed: Speed, *, num_images: int) -> tuple[int, float]:
    """Whole epochs that fill the minutes, and the exact number; `num_images`: of an epoch."""
    exact = speed.epochs_in(minutes * 60, images_per_epoch=num_images)
    if exact < 0.5:  # on many images a whole epoch could take hours instead
        raise RecipeError(
            f"an epoch takes {minutes / exact:.2f} minutes, and --minutes {minutes!r} is less than half of that; "
            "schedules need whole epochs: give more minutes, or fewer images"
        )
    return max(1, round(exact)), exact


def shortened_warm_ups(recipe: PretrainRecipe, *, epochs: int, given: Collection[str]) -> dict[str, Any]:
    """Warm-ups in proportion to the epochs, if these are fewer than the recipe's. Keys in `given` stay."""
    if epochs >= recipe.trainer.epochs:
        return {}
    values = flatten(recipe)
    share = epochs / recipe.trainer.epochs
    return {key: round(values[key] * share, 3) for key in WARM_UPS if values.get(key) and key not in given}


def refuse_other_length(recipe: PretrainRecipe) -> None:
    if recipe.trainer.max_steps is not None:
        raise RecipeError(
            "trainer.max_steps would end the training before the --minutes are over; leave one of them out (a recipe's "
            "own: --trainer.max_steps None, --set trainer.max_steps=null)"
        )
