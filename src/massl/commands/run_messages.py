"""What `massl pretrain` prints before and after training."""

import math
import shlex
import time
from collections.abc import Iterable, Iterator

import torch
from rich.console import Console

from massl import distributed
from massl.commands.console import print_line, working
from massl.commands.recipe import PretrainRecipe
from massl.commands.recipes import shipped_recipes
from massl.data.loading.image_reader import label_number
from massl.data.sources import ImageSource
from massl.data.views import ViewSettings
from massl.methods.base import Method, TrainingPlan
from massl.nn.backbone import Backbone
from massl.nn.token_readout import patch_size
from massl.reports.run_reader import read_run
from massl.reports.verdict import verdict
from massl.training.probes import Probe
from massl.training.progress import duration_text
from massl.training.run_folder import RunFolder
from massl.training.schedules import Schedules
from massl.training.trainer import FitResult, Trainer

_LONG_SECONDS = 3 * 3600  # of a run on a CPU, from which on something smaller is suggested
_SMALL_SIDE = 64  # pixels of the views of the recipes named METHOD-tiny


class Cautions:
    """Prints each warning once and keeps it: the run folder remembers those from before training."""

    def __init__(self, console: Console, *, printed: Iterable[str] = ()) -> None:
        self._console = console
        self.kept = list(printed)
        self._printed = {*self.kept}

    def add(self, warning: str, *, keep: bool = True) -> None:
        if warning not in self._printed:
            self._printed.add(warning)
            print_line(self._console, f"warning: {warning}", style="yellow")
            if keep:
                self.kept.append(warning)


def announce_run(recipe: PretrainRecipe, folder: RunFolder, console: Console) -> None:
    """Print what is known before any work: what is trained, and where it is kept."""
    state = "a run that is continued" if folder.has_begun else "a new run"
    print_line(console, f"{recipe.method.name}, {recipe.backbone.name}: {state} in {folder.path}")
    print_line(console, f"reading {recipe.data.source}")


def announce_plan(
    recipe: PretrainRecipe, schedules: Schedules, num_images: int, device: torch.device, console: Console
) -> None:
    """Print the derived values once, so that no default is hidden."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    views, settings = recipe.views, recipe.trainer
    local_views = f" + {views.num_local} x {views.local_size} px" if views.num_local else ""
    print_line(
        console,
        f"{recipe.method.name} on {recipe.data.source}: {num_images:,} images, {schedules.steps_per_epoch} steps an "
        f"epoch, {schedules.num_steps:,} steps\n"
        f"{recipe.backbone.name}, {views.num_global} x {views.global_size} px{local_views} views, "
        f"batch {settings.batch_size}, peak learning rate {schedules.peak_learning_rate:.3g}, {settings.precision}, "
        f"{distributed.world_size()} x {name}",
    )


def idle_options(recipe: PretrainRecipe, *, has_start: bool, networks: str) -> Iterator[str]:
    """Options that this run will not heed, in words.

    `has_start`: it began with trained weights; `networks`: how these are computed.
    """
    settings = recipe.trainer
    has_guard = settings.guard in ("warn", "stop")
    if recipe.probes.every_epochs == 0 and (settings.stop_when_flat or has_guard):
        name = "stop_when_flat" if settings.stop_when_flat else "guard"
        yield f"trainer.{name} does nothing: this run has no probes (probes.every_epochs 0)"
    elif has_guard and recipe.init.weights is None and not has_start:
        yield "trainer.guard does nothing: this run starts from random weights, not from --init MODEL"
    if recipe.init.weights is not None and (recipe.init.head_epochs or 0) >= settings.epochs:
        yield f"init.head_epochs {recipe.init.head_epochs:g} is the whole run: only the head learns"
    if settings.residual == "fp32" and not networks.startswith("fused"):
        yield f"trainer.residual does nothing: it is for fused kernels, and this run's are {networks}"


def cautions_of(recipe: PretrainRecipe, method: Method, source: ImageSource) -> Iterator[str]:
    """What may be wrong with the settings for these images."""
    plan = TrainingPlan(
        num_images=len(source),
        batch_size=recipe.trainer.batch_size,
        num_parts=recipe.trainer.accumulation_steps,
        views=recipe.views,
        labels=lambda: torch.tensor([label_number(source.label_of(index)) for index in range(len(source))]),
    )
    yield from unseen_pixels(recipe.views, patch_size(method.backbone_to_evaluate()))
    yield from method.cautions(plan)


def unseen_pixels(views: ViewSettings, patch: int | None) -> Iterator[str]:
    """View sizes that are no whole patches."""
    for key in ("global_size", *(("local_size",) if views.num_local else ())):
        size = getattr(views, key)
        if patch and size % patch:
            rest = f"{size % patch} of {size} px at the right and the bottom of each such view are never seen"
            yield f"views.{key} is no multiple of the patch of {patch} px: {rest}"


def announce_execution(trainer: Trainer, console: Console) -> None:
    execution = trainer.execution
    graph = "yes" if execution.cuda_graph else "no"
    print_line(console, f"kernels: {execution.networks}; CUDA graph: {graph}")


def caution_on_duration(recipe: PretrainRecipe, trainer: Trainer, num_images: int, console: Console) -> str | None:
    """A warning if the run would take long on this CPU."""
    num_steps_left = trainer.end_step - max(trainer.store.steps(), default=0)
    if trainer.device.type != "cpu" or num_steps_left <= 0:
        return None
    with working(console, "measuring how fast this CPU is"):
        seconds = seconds_per_step_on_cpu(recipe, trainer.method.backbone_to_evaluate()) / distributed.world_size()
    return cpu_caution(recipe, num_images, seconds_per_step=seconds, num_steps=num_steps_left)


@torch.no_grad()
def seconds_per_step_on_cpu(recipe: PretrainRecipe, backbone: Backbone) -> float:
    """A rough guess from passes of empty images, before training.

    A view costs the student three passes (the backward one counts twice) and a global view the teacher one more. Heads
    and augmentation are left out; a method that encodes only some patches is faster.
    """
    was_training, is_bf16 = backbone.training, recipe.trainer.precision == "bf16"
    backbone.eval()

    def pass_seconds(size: int) -> float:
        images = torch.zeros(max(2, min(64, 2 * 224**2 // size**2)), 3, size, size)
        elapsed = []
        for _ in range(2):  # the first pass prepares
            start = time.perf_counter()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
                backbone(images)
            elapsed.append(time.perf_counter() - start)
        return min(elapsed) / len(images)

    views = recipe.views
    seconds = 4 * views.num_global * pass_seconds(views.global_size)
    if views.num_local:
        seconds += 3 * views.num_local * pass_seconds(views.local_size)
    backbone.train(was_training)
    return seconds * recipe.trainer.batch_size


def cpu_caution(recipe: PretrainRecipe, num_images: int, *, seconds_per_step: float, num_steps: int) -> str | None:
    """How long a run takes on a CPU, and what suits a CPU better; None if it is short enough."""
    seconds = seconds_per_step * num_steps
    if seconds < _LONG_SECONDS:
        return None
    long = f"on this CPU it takes roughly {duration_text(seconds)}, {duration_text(seconds_per_step)} a step"
    small, own = f"{recipe.method.name}-tiny", ["--data", recipe.data.source, "--output", "runs/small"]
    if recipe.views.global_size <= _SMALL_SIDE or small not in shipped_recipes():
        epochs = max(1, int(recipe.trainer.epochs * _LONG_SECONDS / seconds))
        return f"{long}. Fewer epochs take less time: --trainer.epochs {epochs}"
    if recipe.method.name == "massl":
        return f"{long}. Without a recipe massl chooses what suits a CPU: {shlex.join(['massl', 'pretrain', *own])}"
    command = ["massl", "pretrain", "--recipe", small, "--backbone.name", "vit_tiny_patch16_224", *own]
    smallest_batch = 2 ** max(1, int(math.log2(max(num_images, 2))) - 2)
    if num_images < 4 * 256:  # the batch of these recipes is 128 or 256
        command += ["--trainer.batch_size", str(smallest_batch)]
    return f"{long}. A small network at {_SMALL_SIDE} px suits a CPU: {shlex.join(command)}"


def summarise(result: FitResult, trainer: Trainer, probe: Probe | None, console: Console) -> None:
    """Print the last lines of a run: what it reached, what that means, and where it is kept."""
    folder = trainer.folder
    raw_pixels = None
    if probe is not None and probe.has_labels and result.finished:
        with working(console, "measuring what raw pixels reach"):
            raw_pixels = probe.raw_pixel_knn()  # all ranks take part
    if not distributed.is_main():
        return
    if not result.finished:
        print_line(console, f"{stopped_words(result, trainer)}, the same command continues")
        return
    num_steps = trainer.schedules.num_steps
    if result.ended_early:
        print_line(
            console,
            f"finished early, at step {result.step} of {num_steps}: {result.ended_early}. To train on all the same, "
            "give the same command with --trainer.stop_when_flat 0 --trainer.guard warn",
        )
    elif trainer.end_step < num_steps:
        print_line(
            console, f"finished: {result.step} of {num_steps} steps, as trainer.max_steps asks; raise it to continue"
        )
    else:
        print_line(console, f"finished: all {result.step} steps are done; for another run choose another --output")
    best = "" if probe is None else ", best.safetensors"
    files = f"backbone.safetensors{best}, metrics.jsonl, recipe.yaml, checkpoints/, tensorboard/"
    print_line(console, f"run folder: {folder.path} ({files})")
    if probe is not None:
        baseline = {} if raw_pixels is None else {"raw_pixel_knn": raw_pixels}
        folder.write_json("baseline.json", {**baseline, "num_queries": probe.num_queries})
        run = read_run(folder.path)
        found = verdict(run)
        if best := run.best_words:
            print_line(console, best)
        print_line(console, f"verdict: {found.headline}. {' '.join(found.reasons)}", style="bold")
        print_line(console, f"next: {found.next_step.purpose}: {found.next_step.command}\nmore: {found.page}")


def stopped_words(result: FitResult, trainer: Trainer) -> str:
    """Where a signal stopped the run, and whether a checkpoint exists."""
    kept = "a checkpoint is saved" if trainer.store.steps() else "there was nothing to save yet"
    return f"stopped at step {result.step} of {trainer.end_step}; {kept}"
