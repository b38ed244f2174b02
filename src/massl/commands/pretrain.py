"""Pre-training, assembled: recipe -> data, method, trainer -> run folder."""

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from massl import distributed
from massl.commands.arguments import exit_status
from massl.commands.auto import PLAN_FILE, Resolved, resolve
from massl.commands.console import message_console, print_line, working
from massl.commands.device import choose_device, host_threads_for
from massl.commands.images import SkippedImages, download_named, open_images
from massl.commands.memory_check import require_memory
from massl.commands.pretrain_arguments import default_output, parse_pretrain
from massl.commands.recipe import PretrainRecipe
from massl.commands.run_messages import (
    Cautions,
    announce_execution,
    announce_plan,
    announce_run,
    caution_on_duration,
    cautions_of,
    idle_options,
    summarise,
)
from massl.commands.start import Start, decide_start, load_start
from massl.config import dotted
from massl.data.identity import identify
from massl.data.loading.cache import ImageCache
from massl.data.loading.gpu_decode import jpeg_decoder
from massl.data.loading.loader import Loader
from massl.data.order import EpochOrder
from massl.data.sources import ImageSource, held_out, home_of, remarks_of
from massl.methods import build_method
from massl.nn.backbone import refuse_published_weights
from massl.training.checkpoint import CheckpointStore
from massl.training.environment import ENVIRONMENT_FILE, describe_environment
from massl.training.metrics_log import read_metrics
from massl.training.probes import Probe
from massl.training.ranks import require_equal_ranks, stop_together
from massl.training.run_folder import RunFolder
from massl.training.schedules import Schedules
from massl.training.trainer import FitResult, Trainer


@dataclass(frozen=True, kw_only=True)
class PretrainResult:
    folder: Path
    step: int  # updates done
    finished: bool  # False: a signal ended it early; the same call continues
    signal_number: int | None
    metrics: list[dict[str, float]]  # the rows of metrics.jsonl


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C ended a run, after its checkpoint was saved; `result` says how far it came."""

    def __init__(self, result: PretrainResult) -> None:
        super().__init__(f"stopped at step {result.step}, kept in {result.folder}; the same call continues")
        self.result = result


def pretrain(
    data: str | Path | None = None,
    *,
    output: str | Path | None = None,
    recipe: str | Path | PretrainRecipe | None = None,
    overrides: Mapping[str, Any] | None = None,
    minutes: float | None = None,
    init: str | Path | None = None,
) -> PretrainResult:
    """Learn visual features from unlabelled images.

    `data` names the images (a folder, `demo:train`, `torchvision:CIFAR10?root=DIR`). `recipe` is a shipped recipe's
    name, a YAML file or a PretrainRecipe; without one, `auto` chooses every value and says why. `overrides` changes
    single values, e.g. {"trainer.epochs": 20} or {"trainer": {"epochs": 20}}; `minutes` sets the length instead of
    epochs. The run is kept in the folder `output` (default: runs/ and the name of the images); the same call again, or
    `output` alone, continues it where it stopped. `init` names existing weights that a new run starts
    from: another run, a weights file, or a timm name with a tag such as `vit_small_patch16_224.dino`.

    Ctrl-C saves a checkpoint, then raises KeyboardInterrupt. SIGTERM, SIGHUP and SIGUSR1 save one too and return a
    result that is not `finished` and names the signal.
    """
    path = Path(output or default_output(data)).expanduser()
    found = resolve(recipe, data=data, overrides=overrides or {}, run=path, init=init, minutes=minutes)
    return pretrain_as_resolved(found, path, data=data, overrides=overrides or {}, init=init)


def pretrain_as_resolved(
    found: Resolved,
    path: Path,
    *,
    data: str | Path | None,
    overrides: Mapping[str, Any],
    init: str | Path | None = None,
) -> PretrainResult:
    """`pretrain` by a recipe that `resolve` found for the same arguments."""
    named = dotted(overrides, PretrainRecipe)
    device = choose_device(found.recipe.trainer.device, option="trainer.device")
    distributed.start(device.type)
    console = message_console(quiet=not distributed.is_main())
    try:
        start = decide_start(found.recipe, init, path=path, given=named, console=console)
        resolved = start.recipe
        folder = RunFolder(path, resolved)
        if not folder.has_begun:  # a run of an older version goes on with the weights it has
            refuse_published_weights(resolved.backbone)
        announce_run(resolved, folder, console)
        with stop_together():
            as_before = folder.lists_as_before
            rules = resolved.data.rules(folder.known_ranges)
            is_named = data is not None or "data.source" in named
            download_named(named, "probes.database", "probes.queries")
            source = open_images(resolved.data.source, as_before=as_before, rules=rules, may_download=is_named)
            identity = identify(source, as_before=as_before)
        require_equal_ranks(resolved, identity)
        folder = replace(folder, data=identity)
        accept_changes = resolved.data.accept_changes
        claimed = folder.claimed(is_writer=distributed.is_main(), accept_changes=accept_changes)
        with claimed, host_threads_for(device):
            if found.plan is not None and distributed.is_main():
                folder.write_text(PLAN_FILE, found.explanation)
            result = _train(start, source, folder, device, console)
    finally:
        distributed.stop()
    rows = read_metrics(folder.path / "metrics.jsonl")
    ended = PretrainResult(
        folder=folder.path, step=result.step, finished=result.finished, signal_number=result.signal_number, metrics=rows
    )
    if ended.signal_number == signal.SIGINT:
        raise RunInterrupted(ended)
    return ended


def main(arguments: Sequence[str]) -> int:
    call = parse_pretrain(arguments)
    try:
        return exit_status(pretrain(**call._asdict()).signal_number)
    except RunInterrupted as interrupted:
        return exit_status(interrupted.result.signal_number)


def _train(start: Start, source: ImageSource, folder: RunFolder, device: torch.device, console: Console) -> FitResult:
    recipe = start.recipe
    cautions = Cautions(console, printed=[remark for remark in remarks_of(source) if "caution: " in remark])
    steps = CheckpointStore(folder.checkpoints, recipe.trainer.keep_checkpoints).steps()
    if warning := require_memory(recipe, source, device, console):
        cautions.add(warning, keep=not steps)  # other numbers whenever the run is continued, as for the duration
    skipped = SkippedImages(console)
    source, held = held_out(source, recipe.data.hold_out) if recipe.data.hold_out > 0 else (source, None)
    trainer = _build(recipe, source, held, folder, device, console, skipped=skipped, cautions=cautions)
    skipped.say = trainer.display.say
    announce_execution(trainer, console)
    idle = idle_options(recipe, has_start=folder.has_start, networks=trainer.execution.networks)
    for caution in (*idle, *cautions_of(recipe, trainer.method, source)):
        cautions.add(caution)
    if (duration := caution_on_duration(recipe, trainer, len(source), console)) is not None:
        cautions.add(duration, keep=not steps)
    if recipe.init.weights is not None and not steps:
        load_start(trainer, start, console)
    if max(steps, default=0) < trainer.end_step:
        if distributed.is_main():  # a finished run keeps the name of the machine that made it
            environment = describe_environment(device, before=folder.path / ENVIRONMENT_FILE)
            folder.write_json(ENVIRONMENT_FILE, environment)
        if steps:
            print_line(console, f"reading the checkpoint of step {steps[-1]}")
    result = trainer.fit(cautions=cautions.kept)
    skipped.print_total()
    summarise(result, trainer, trainer.probe, console)
    return result


def _build(
    recipe: PretrainRecipe,
    source: ImageSource,
    held: ImageSource | None,
    folder: RunFolder,
    device: torch.device,
    console: Console,
    *,
    skipped: SkippedImages,
    cautions: Cautions,
) -> Trainer:
    """All parts of a run. What is wrong with the recipe is found here, before anything is trained."""
    seed, batch_size = recipe.trainer.seed, recipe.trainer.batch_size
    order = EpochOrder(num_images=len(source), batch_size=batch_size, seed=seed)
    schedules = Schedules(
        optimizer=recipe.optimizer,
        ramps=recipe.method.ramps(),
        batch_size=batch_size,
        epochs=recipe.trainer.epochs,
        steps_per_epoch=order.steps_per_epoch,
        init=recipe.init,
    )
    announce_plan(recipe, schedules, len(source), device, console)
    with working(console, "building the networks"):
        method = build_method(recipe.method, recipe.backbone, seed=seed)
        method.check_views(recipe.views, name=recipe.method.name)
    if recipe.init.keep_statistics:
        method.keep_statistics()
    cache = ImageCache(max_gib=recipe.data.cache_gib) if recipe.data.cache_gib > 0 else None
    loader = _open_loader(
        recipe,
        source,
        order,
        cache,
        device,
        on_skip=lambda message: skipped.add(message, home_of(source)),
        on_note=cautions.add,
    )
    as_before = folder.data is not None and folder.data.as_before
    return Trainer(
        recipe.trainer,
        method=method,
        loader=loader,
        views=recipe.views,
        schedules=schedules,
        probe=_open_probe(recipe, source, held, cache, device, console, on_skip=skipped.add, as_before=as_before),
        crop_ratio=recipe.probes.crop_ratio,
        folder=folder,
        device=device,
    )


def _open_probe(
    recipe: PretrainRecipe,
    source: ImageSource,
    held: ImageSource | None,
    cache: ImageCache | None,
    device: torch.device,
    console: Console,
    *,
    on_skip: Callable[[str, str], None],
    as_before: bool,
) -> Probe | None:
    if recipe.probes.every_epochs == 0:
        return None
    for uri in filter(None, (recipe.probes.database, recipe.probes.queries)):
        print_line(console, f"reading {uri}, for the probes")
    return Probe(
        recipe.probes,
        data=recipe.data,
        views=recipe.views,
        training_source=source,
        held_out=held,
        seed=recipe.trainer.seed,
        device=device,
        cache=cache,
        on_skip=on_skip,
        as_before=as_before,
    )


def _open_loader(
    recipe: PretrainRecipe,
    source: ImageSource,
    order: EpochOrder,
    cache: ImageCache | None,
    device: torch.device,
    *,
    on_skip: Callable[[str], None],
    on_note: Callable[[str], None],
) -> Loader:
    """This process's share of every batch."""
    local_size = recipe.trainer.batch_size // distributed.world_size()
    first = distributed.rank() * local_size
    return Loader(
        source,
        order_at=lambda step: order.at(step)[first : first + local_size],
        seed=recipe.trainer.seed,
        num_workers=recipe.data.num_workers,
        worker_kind=recipe.data.worker_kind,
        max_side=recipe.data.max_side,
        device=device,
        batch_decoder=jpeg_decoder(recipe.data.decoder, device),
        cache=cache,
        on_skip=on_skip,
        on_note=on_note,
    )
