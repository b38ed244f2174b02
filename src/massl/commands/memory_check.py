"""Whether a recipe fits the device, asked before the first step."""

import math

import torch
from rich.console import Console

from massl import distributed
from massl.commands.console import working
from massl.commands.recipe import PretrainRecipe
from massl.config import RecipeError, flatten
from massl.data.sources import ImageSource
from massl.planning.costs import Memory
from massl.planning.facts import free_memory_gib
from massl.planning.memory import computed_gib
from massl.planning.trial import measure_memory, release_gpu

_MARGIN = 1.2  # the count is rough
_SURE_SHARE = 0.5  # of the free memory: what is less by count needs no trial


def counted_gib(recipe: PretrainRecipe, device: torch.device) -> float | None:
    """GiB of one process by count; None for networks that cannot be counted."""
    values = {**flatten(recipe), "backbone.timm_options": recipe.backbone.timm_options}
    return computed_gib(values, device_kind=device.type, num_processes=distributed.world_size())


def require_memory(recipe: PretrainRecipe, source: ImageSource, device: torch.device, console: Console) -> str:
    """Refuse a run that cannot fit. By count first; a GPU that is near its limit is tried with small batches.

    Returns a warning where the count alone says so, else "". Networks that cannot be counted are not tried:
    `massl plan` measures them.
    """
    counted, free = counted_gib(recipe, device), free_memory_gib(device)
    if counted is None or counted <= _SURE_SHARE * free:
        return ""
    if device.type == "cuda" and distributed.world_size() == 1:
        with working(console, "measuring the memory of a step"):
            memory = measured_memory(recipe, source, device)
        if memory.needed > free:
            raise RecipeError(too_large(recipe, memory.needed, free, "the GPU"))
    elif counted > free:
        where = "this machine" if device.type == "cpu" else "the GPU"
        return too_large(recipe, counted, free, where)
    return ""


def measured_memory(recipe: PretrainRecipe, source: ImageSource, device: torch.device) -> Memory:
    try:
        return measure_memory(recipe, source, device)
    except torch.OutOfMemoryError:  # already an eighth or a quarter of the batch
        return Memory(allocated=float("inf"), reserved=float("inf"))
    finally:
        release_gpu(device)


def too_large(recipe: PretrainRecipe, needed: float, free: float, where: str) -> str:
    """How much is missing, and what to lower, the harmless first."""
    settings, view = recipe.trainer, recipe.views
    # of the batch; a little more than by count, and where an eighth of it did not fit, an eighth of that
    times = 8 if needed == float("inf") else 2 ** max(1, math.ceil(math.log2(_MARGIN * needed / max(free, 0.1))))
    size = max(1, settings.batch_size // times)
    parts = min(settings.accumulation_steps * times, settings.batch_size)
    advice = [f"--trainer.accumulation_steps {parts} (the same batch in more parts)"]
    is_vit = recipe.backbone.name.startswith("vit_")
    if is_vit and not settings.activation_checkpointing:
        advice.append("--trainer.activation_checkpointing True (some time instead of memory)")
    advice.append(f"--trainer.batch_size {size}")
    image_size = f" --backbone.image_size {view.global_size // 2}" if is_vit else ""
    advice.append(
        f"--views.global_size {view.global_size // 2}{image_size}, with one of the others if it is not enough"
    )
    amount = "far more memory than" if needed == float("inf") else f"about {needed:.1f} GiB, but"
    has = f"{where} has" if needed == float("inf") else f"{where} has {free:.1f} free"
    return f"a step of this run needs {amount} {has}. Lower it by one of: {'; '.join(advice)}"
