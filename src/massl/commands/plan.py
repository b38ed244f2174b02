"""`massl plan`: what a run would be and cost, without training."""

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from massl.commands.auto import Resolved, resolve
from massl.commands.console import as_words, message_console, print_line, result_console, working
from massl.commands.device import choose_device, host_threads_for
from massl.commands.images import open_images
from massl.commands.memory_check import counted_gib, measured_memory, too_large
from massl.commands.pretrain_arguments import new_output, parse_pretrain
from massl.commands.recipe import PretrainRecipe
from massl.commands.run_messages import cautions_of
from massl.commands.start import refuse_idle_init, with_network_of
from massl.commands.timing import WARM_UPS, images_per_epoch, steady_speed
from massl.config import RecipeError, dotted, flatten
from massl.data.sources import ImageSource, held_out
from massl.methods import build_method
from massl.planning.costs import Speed
from massl.planning.facts import (
    DeviceFacts,
    ImageFacts,
    busy_share,
    find_unreadable,
    free_memory_gib,
    look_at_device,
    look_at_images,
)
from massl.planning.memory import checkpoint_gib
from massl.training.progress import duration_text
from massl.training.run_folder import RunFolder

DESCRIPTION = """Say what a run would be and what it would cost, without training.

massl plan photos/
massl plan photos/ --minutes 30
massl plan photos/ --recipe massl-tiny --epochs 40

It takes the arguments of massl pretrain and prints the recipe with its reasons, the memory, images per second, hours
and disk that it needs, and the command that starts it. Speed and memory are measured in some seconds on this machine.
Defaults shown are those of --recipe or, without one, what auto chooses for {example}."""
_UNREADABLE_SECONDS = 2.0
_BUSY = 0.3
# Before the first step, and files: on an H200 eleven runs took 1 to 8 seconds more than their steps and probes,
# docs/results/auto.md.
_START_SECONDS = {"cuda": 4.0, "cpu": 1.0}


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What `plan` found."""

    recipe: PretrainRecipe
    explanation: str  # what auto chose and why; "" for another recipe
    images: ImageFacts
    device: DeviceFacts
    num_tried: int  # images that were decoded
    unreadable: tuple[str, ...]  # of those and of the sampled headers
    memory_gib: float | None  # at the peak; None: on a CPU, of a network whose memory cannot be counted
    free_gib: float  # of the device
    problem: str  # why it cannot fit, and what to lower; "" if it fits
    cautions: tuple[str, ...]  # of what the run would warn
    speed: Speed
    busy_share: float  # of the cores, by other programs before the trial
    training_seconds: float
    probe_seconds: float
    steps: int
    disk_gib: float | None
    output: Path
    command: str  # that starts it; "" for a recipe that is no file

    @property
    def holds_run(self) -> bool:
        return (self.output / "recipe.yaml").is_file()

    @property
    def seconds(self) -> float:
        return _START_SECONDS[self.device.kind] + self.training_seconds + self.probe_seconds


def plan(
    data: str | Path,
    *,
    recipe: str | Path | PretrainRecipe | None = None,
    output: str | Path | None = None,
    minutes: float | None = None,
    epochs: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    init: str | Path | None = None,
) -> RunPlan:
    """What `pretrain` with the same arguments would train, and the memory, time and disk it would need."""
    changes = dotted(overrides or {}, PretrainRecipe)
    if epochs is not None and changes.setdefault("trainer.epochs", epochs) != epochs:
        raise RecipeError("epochs and trainer.epochs differ; give one of them")
    words = [str(data)]
    words += [] if recipe is None else ["--recipe", str(recipe)]
    words += [] if init is None else ["--init", str(init)]
    words += [word for key, value in changes.items() for word in (f"--{key}", *as_words(value))]
    folder = Path(output or new_output(data)).expanduser()
    found = resolve(recipe, data=data, overrides=changes, run=folder, init=init, minutes=minutes, quiet=True)
    planned = _cost(found, folder, words, init=init, given=changes, may_download=True)
    return replace(planned, command="") if isinstance(recipe, PretrainRecipe) else planned


def main(arguments: Sequence[str]) -> int:
    call = parse_pretrain(arguments, command="plan", description=DESCRIPTION)
    if call.data is None and not isinstance(call.recipe, PretrainRecipe):
        raise RecipeError("which images? massl plan photos/")
    run = Path(call.output).expanduser() if call.output else None
    found = resolve(
        call.recipe, data=call.data, overrides=call.overrides, run=run, init=call.init, minutes=call.minutes, quiet=True
    )
    words = _without([word for word in arguments if word != "--"], "--minutes", "--output")
    output = run or new_output(found.recipe.data.source)
    is_named = call.data is not None
    planned = _cost(found, output, words, init=call.init, given=call.overrides, may_download=is_named)
    screen = result_console()
    for line in plan_lines(planned):
        print_line(screen, line)
    return 1 if planned.problem else 0


def _cost(
    found: Resolved,
    output: Path,
    words: Sequence[str],
    *,
    init: str | Path | None,
    given: Mapping[str, Any],
    may_download: bool,
) -> RunPlan:
    """`may_download`: the user named the images, not a recipe."""
    recipe, console, busy = found.recipe, message_console(), busy_share()
    device = choose_device(recipe.trainer.device, option="trainer.device")
    source = open_images(recipe.data.source, rules=recipe.data.rules(), may_download=may_download)
    recipe = _usable(recipe, output, init, given)
    if recipe.data.hold_out > 0:
        source = held_out(source, recipe.data.hold_out)[0]
    num_images = images_per_epoch(recipe, len(source))
    facts = found.images or look_at_images(source)
    with working(console, "decoding a sample of the images"):
        num_tried, broken = find_unreadable(source, max_side=recipe.data.max_side, seconds=_UNREADABLE_SECONDS)
    speed, problem, free = found.speed, "", free_memory_gib(device)
    gib = None if device.type == "cuda" else counted_gib(recipe, device)
    if device.type == "cuda" and speed is None:  # a whole step might not fit
        gib, problem = _tried_in_parts(recipe, source, device, free)
    elif gib is not None and gib > free:
        problem = too_large(recipe, gib, free, "this machine")
    if speed is None:
        timed = recipe if not problem else _quarter(recipe)
        with working(console, "a short trial of its speed"):
            speed = steady_speed(timed, source, facts=facts)
    if speed.memory is not None and not problem:
        gib = speed.memory.peak
    steps_per_epoch = num_images // recipe.trainer.batch_size
    steps = min(recipe.trainer.epochs * steps_per_epoch, recipe.trainer.max_steps or sys.maxsize)
    epochs = steps / steps_per_epoch
    return RunPlan(
        recipe=recipe,
        explanation=found.explanation,
        images=facts,
        device=look_at_device(device),
        num_tried=num_tried,
        unreadable=tuple(dict.fromkeys([*facts.unreadable, *broken])),
        memory_gib=gib,
        free_gib=free,
        problem=problem,
        cautions=tuple(cautions_of(recipe, build_method(recipe.method, recipe.backbone, seed=0), source)),
        speed=speed,
        busy_share=busy,
        training_seconds=speed.training_seconds(images_per_epoch=num_images, epochs=epochs),
        probe_seconds=speed.probe_seconds(epochs=epochs, every_epochs=recipe.probes.every_epochs),
        steps=steps,
        disk_gib=_disk_gib(recipe),
        output=output,
        command=_command(found, recipe, words, output),
    )


def _usable(recipe: PretrainRecipe, output: Path, init: str | Path | None, given: Mapping[str, Any]) -> PretrainRecipe:
    """With the network of `--init`; what pretrain would refuse is refused."""
    recipe = with_network_of(recipe, init, given)
    run = RunFolder(output, recipe)
    if not run.recipe_file.exists():
        refuse_idle_init(recipe)
    run.refuse_unusable()
    return recipe


def _disk_gib(recipe: PretrainRecipe) -> float | None:
    """Of all checkpoints that are kept."""
    settings = recipe.trainer
    checkpoint = checkpoint_gib({**flatten(recipe), "backbone.timm_options": recipe.backbone.timm_options})
    kept = settings.keep_checkpoints + 1  # the new one is written before an old one is removed
    if settings.milestone_every_epochs:
        kept += settings.epochs // settings.milestone_every_epochs
    return None if checkpoint is None else checkpoint * kept


def _command(found: Resolved, recipe: PretrainRecipe, words: Sequence[str], output: Path) -> str:
    values = flatten(recipe)
    length = [] if found.speed is None else ["--trainer.epochs", str(recipe.trainer.epochs)]
    if found.speed is not None and found.plan is None:  # auto derives its warm-ups from the epochs
        length += [word for key in WARM_UPS if values.get(key) for word in (f"--{key}", f"{values[key]:g}")]
    weights = _named_init(recipe, words)
    return shlex.join(["massl", "pretrain", *words, *weights, *length, "--output", str(output)])


def _named_init(recipe: PretrainRecipe, words: Sequence[str]) -> list[str]:
    """The option that names the weights of the recipe: pretrain opens only weights that the command names."""
    is_named = any(word.partition("=")[0] in ("--init", "--init.weights") for word in words)
    return [] if is_named or recipe.init.weights is None else ["--init", recipe.init.weights]


def _tried_in_parts(
    recipe: PretrainRecipe, source: ImageSource, device: torch.device, free: float
) -> tuple[float, str]:
    """GiB of a step and a probe, extrapolated from an eighth and a quarter of the batch, and why they cannot fit."""
    with host_threads_for(device):
        memory = measured_memory(recipe, source, device)
    return memory.peak, too_large(recipe, memory.needed, free, "the GPU") if memory.needed > free else ""


def _quarter(recipe: PretrainRecipe) -> PretrainRecipe:
    """A recipe that does not fit, with a batch that does: its images are timed in smaller steps."""
    size = max(1, recipe.trainer.batch_size // recipe.trainer.accumulation_steps // 4)
    smaller = recipe.trainer.model_copy(update={"batch_size": size, "accumulation_steps": 1})
    return recipe.model_copy(update={"trainer": smaller})


def _without(arguments: Sequence[str], *options: str) -> list[str]:
    """The arguments without some options and their values."""
    left, skip = [], False
    for word in arguments:
        name, has_value, _ = word.partition("=")
        if not skip and name not in options:
            left.append(word)
        skip = name in options and not has_value
    return left


def plan_lines(planned: RunPlan) -> list[str]:
    """The plan in words."""
    images, device, recipe = planned.images, planned.device, planned.recipe
    kind = "classes" if images.is_array else "label folders"
    labels = f"{images.num_classes} {kind}, used by probes only" if images.num_classes else "no labels found"
    broken = f"{len(planned.unreadable)} unreadable" if planned.unreadable else "none unreadable"
    lines = [f"{planned.output} holds a run: this is its recipe, and its length"] if planned.holds_run else []
    lines += [
        f"images: {images.num_images:,}, typically {images.typical_size}; {labels}; {broken} "
        f"among {images.num_sampled} sampled headers and {planned.num_tried} decoded images",
        *(f"  unreadable: {reason}" for reason in planned.unreadable[:3]),
    ]
    cores = "1 core" if device.num_cores == 1 else f"{device.num_cores} cores"
    lines.append(f"device: {device.name}, {device.memory_gib:.1f} GiB, {cores}")
    if planned.explanation:
        lines += planned.explanation.rstrip().splitlines()
    how = "measured by short trials" if device.kind == "cuda" else "counted"
    needs = "not known for this network" if planned.memory_gib is None else f"{planned.memory_gib:.1f} GiB"
    lines.append(f"memory: {needs} of {planned.free_gib:.1f} GiB free ({how})")
    speed, cache = planned.speed, ""
    if abs(speed.first_pass / speed.later - 1) > 0.02:
        cache = f" ({_rate(1 / speed.first_pass)} in the first pass, which decodes and keeps the images)"
    lines.append(f"speed: {_rate(speed.images_per_second)} images a second{cache}")
    if device.kind == "cpu" and planned.busy_share > _BUSY:
        busy = f"other programs used {planned.busy_share:.0%} of this CPU; without them it is faster"
        lines.append(f"caution: {busy}. Beside them OMP_WAIT_POLICY=PASSIVE massl ... often helps")
    parts = f"{duration_text(planned.training_seconds)} training, {duration_text(planned.probe_seconds)} probes"
    lines.append(
        f"time: {duration_text(planned.seconds)} ({planned.seconds / 3600:.2f} hours: {parts}) for "
        f"{planned.steps:,} steps{' of' if recipe.trainer.max_steps else ','} {recipe.trainer.epochs:,} epochs"
    )
    disk = "not known for this network" if planned.disk_gib is None else f"{planned.disk_gib:.2f} GiB"
    free = shutil.disk_usage(next(folder for folder in planned.output.absolute().parents if folder.exists())).free
    lines.append(f"disk: {disk} for checkpoints in {planned.output}, {free / 2**30:.0f} GiB are free")
    lines += [f"caution: {caution}" for caution in planned.cautions]
    if planned.problem:
        lines.append(f"it does not fit: {planned.problem}")
    elif planned.command:
        lines.append(f"start it: {planned.command}")
    return lines


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
