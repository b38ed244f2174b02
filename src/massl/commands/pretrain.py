"""Pre-training, assembled: recipe -> data, method, trainer -> run folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from pydantic import Field, create_model
from rich.console import Console

from massl import distributed
from massl.commands.arguments import exit_status, parse
from massl.commands.console import message_console, print_line
from massl.commands.device import choose_device, host_threads_for
from massl.commands.recipe import PretrainRecipe, load_recipe, shipped_recipes
from massl.config import RecipeError, merge, validate
from massl.data.loading.cache import ImageCache
from massl.data.loading.gpu_decode import jpeg_decoder
from massl.data.loading.image_reader import label_number
from massl.data.loading.loader import Loader
from massl.data.order import EpochOrder
from massl.data.sources import ImageSource, open_source
from massl.methods import METHODS, build_method
from massl.methods.base import Method, TrainingPlan
from massl.training.environment import describe_environment
from massl.training.execution import Execution
from massl.training.metrics_log import read_metrics
from massl.training.probes import Probe
from massl.training.run_folder import RunFolder
from massl.training.schedules import Schedules
from massl.training.trainer import FitResult, Trainer

DESCRIPTION = f"""Learn visual features from unlabelled images.

massl pretrain --recipe massl-vits16 --data.source photos/ --output runs/a [--any.key value]

The options below are the values of the recipe named by --recipe, which are also the defaults shown. --method.name
trains another method ({", ".join(METHODS)}) with the values the recipe has
for it. The run is kept in the folder --output; the same command again continues it. Under torchrun the same command
trains on several processes: torchrun --nproc-per-node 4 -m massl pretrain ..."""
_SHOWN_RECIPE = "massl-vits16"  # whose values --help shows when no recipe is given


class _PretrainArguments(PretrainRecipe):
    recipe: str = Field(description="name of a shipped recipe (see `massl recipes`) or a YAML file")
    output: str = Field(
        description="folder of the run; never overwritten, continued if it holds a run of the same recipe"
    )


@dataclass(frozen=True, kw_only=True)
class PretrainResult:
    folder: Path
    step: int  # updates done
    finished: bool  # False: a signal ended it early; the same call continues
    signal_number: int | None
    metrics: list[dict[str, float]]  # the rows of metrics.jsonl


def pretrain(
    *,
    recipe: str | Path | PretrainRecipe,
    output: str | Path,
    data: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> PretrainResult:
    """Learn visual features from unlabelled images.

    `recipe` is a shipped recipe's name, a YAML file or a PretrainRecipe; `data` names the images (a folder,
    `demo:train`, `torchvision:CIFAR10?root=DIR`); `overrides` changes single values, e.g. {"trainer.epochs": 20}. The
    run is kept in the folder `output`; the same call again continues it where it stopped.
    """
    resolved = _resolve(recipe, data, overrides or {})
    device = choose_device(resolved.trainer.device, option="trainer.device")
    distributed.start(device.type)
    console = message_console(quiet=not distributed.is_main())
    folder = RunFolder(Path(output).expanduser(), resolved)
    try:
        with folder.claimed(is_writer=distributed.is_main()), host_threads_for(device):
            result = _train(resolved, folder, device, console)
    finally:
        distributed.stop()
    rows = read_metrics(folder.path / "metrics.jsonl")
    return PretrainResult(
        folder=folder.path, step=result.step, finished=result.finished, signal_number=result.signal_number, metrics=rows
    )


def main(arguments: Sequence[str]) -> int:
    recipe, output = parse_pretrain(arguments)
    return exit_status(pretrain(recipe=recipe, output=output).signal_number)


def parse_pretrain(arguments: Sequence[str]) -> tuple[PretrainRecipe, str]:
    """The recipe with the values given on the command line, and the output folder."""
    name = _value_of("--recipe", arguments)
    if name is None and not {"--help", "-h"} & set(arguments):
        raise RecipeError(f"which recipe? Give --recipe NAME_OR_FILE; shipped ones: {', '.join(shipped_recipes())}")
    method = _value_of("--method.name", arguments)
    recipe = load_recipe(name or _SHOWN_RECIPE, {} if method is None else {"method.name": method})
    # Only the chosen method's options; the rest would clutter --help.
    arguments_type = create_model(
        "PretrainArguments", __base__=_PretrainArguments, method=(type(recipe.method), recipe.method)
    )
    defaults = arguments_type.model_construct(recipe=name or _SHOWN_RECIPE, output=tyro.MISSING, **dict(recipe))
    parsed = parse(arguments_type, "pretrain", DESCRIPTION, arguments, default=defaults)
    values = {field: getattr(parsed, field) for field in PretrainRecipe.model_fields}
    return PretrainRecipe.model_validate(values), parsed.output


def _value_of(option: str, arguments: Sequence[str]) -> str | None:
    for position, argument in enumerate(arguments):
        if argument == option and position + 1 < len(arguments):
            return arguments[position + 1]
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
    return None


def _resolve(
    recipe: str | Path | PretrainRecipe, data: str | Path | None, overrides: Mapping[str, Any]
) -> PretrainRecipe:
    changes = dict(overrides) | ({} if data is None else {"data.source": str(data)})
    if isinstance(recipe, PretrainRecipe):
        if changes.get("method.name", recipe.method.name) != recipe.method.name:
            raise RecipeError(
                "a resolved recipe keeps its method: give the recipe's name or file, and method.name with it"
            )
        resolved = validate(PretrainRecipe, merge(recipe.model_dump(mode="json"), changes), origin="recipe")
    else:
        resolved = load_recipe(recipe, changes)
    if not resolved.data.source:
        raise RecipeError("no images named: give --data.source, e.g. a folder of photos (in Python: data=...)")
    return resolved


def _train(recipe: PretrainRecipe, folder: RunFolder, device: torch.device, console: Console) -> FitResult:
    warned: set[str] = set()

    def warn(message: str) -> None:
        if message not in warned:
            warned.add(message)
            print_line(console, f"warning: {message}", style="yellow")

    def on_skip(message: str) -> None:
        warn(f"skipped an unreadable image: {message}")

    source = open_source(recipe.data.source)
    seed, batch_size = recipe.trainer.seed, recipe.trainer.batch_size
    order = EpochOrder(num_images=len(source), batch_size=batch_size, seed=seed)
    schedules = Schedules(
        optimizer=recipe.optimizer,
        ramps=recipe.method.ramps(),
        batch_size=batch_size,
        epochs=recipe.trainer.epochs,
        steps_per_epoch=order.steps_per_epoch,
    )
    method = build_method(recipe.method, recipe.backbone, seed=seed)
    _check_views(recipe, method)
    cache = ImageCache(max_gib=recipe.data.cache_gib) if recipe.data.cache_gib > 0 else None
    loader = _open_loader(recipe, source, order, cache, device, on_skip=on_skip, on_note=warn)
    probe = None
    if recipe.probes.every_epochs > 0:
        probe = Probe(
            recipe.probes,
            data=recipe.data,
            views=recipe.views,
            training_source=source,
            seed=seed,
            device=device,
            cache=cache,
            on_skip=on_skip,
        )
    trainer = Trainer(
        recipe.trainer,
        method=method,
        loader=loader,
        views=recipe.views,
        schedules=schedules,
        probe=probe,
        crop_ratio=recipe.probes.crop_ratio,
        folder=folder,
        device=device,
    )
    _announce(recipe, schedules, len(source), device, trainer.execution, console)
    for caution in method.cautions(_training_plan(recipe, source)):
        warn(caution)
    is_finished = max(trainer.store.steps(), default=0) >= trainer.end_step
    if distributed.is_main() and not is_finished:  # a finished run keeps the name of the machine that made it
        folder.write_json("environment.json", describe_environment(device))
    result = trainer.fit()
    _summarise(recipe, result, trainer, probe, folder, console)
    return result


def _training_plan(recipe: PretrainRecipe, source: ImageSource) -> TrainingPlan:
    return TrainingPlan(
        num_images=len(source),
        batch_size=recipe.trainer.batch_size,
        num_parts=recipe.trainer.accumulation_steps,
        views=recipe.views,
        labels=lambda: torch.tensor([label_number(source.label_of(index)) for index in range(len(source))]),
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


@torch.no_grad()
def _check_views(recipe: PretrainRecipe, method: Method) -> None:
    """Try an empty image of each view size: some networks accept only their own, and none less than a patch."""
    if recipe.views.num_global < method.min_global_views:
        least = method.min_global_views
        raise RecipeError(f"{recipe.method.name} compares views of an image: set views.num_global to {least} or more")
    backbone = method.backbone_to_evaluate().eval()
    for key in ("global_size", "local_size") if recipe.views.num_local else ("global_size",):
        size = getattr(recipe.views, key)
        try:
            backbone(torch.zeros(1, 3, size, size))
        except (AssertionError, RuntimeError, ValueError) as error:
            raise RecipeError(f"{recipe.backbone.name} cannot take views.{key} {size}: {error}") from None


def _announce(
    recipe: PretrainRecipe,
    schedules: Schedules,
    num_images: int,
    device: torch.device,
    execution: Execution,
    console: Console,
) -> None:
    """Print the derived values once, so that no default is hidden."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    views, trainer = recipe.views, recipe.trainer
    local_views = f" + {views.num_local} x {views.local_size} px" if views.num_local else ""
    rate = recipe.optimizer.peak_learning_rate(trainer.batch_size)
    print_line(
        console,
        f"{recipe.method.name} on {recipe.data.source}: {num_images:,} images, {schedules.steps_per_epoch} steps an "
        f"epoch, {schedules.num_steps:,} steps\n"
        f"{recipe.backbone.name}, {views.num_global} x {views.global_size} px{local_views} views, "
        f"batch {trainer.batch_size}, peak learning rate {rate:.3g}, {trainer.precision}, "
        f"{distributed.world_size()} x {name}\n"
        f"kernels: {execution.networks}; CUDA graph: {'yes' if execution.cuda_graph else 'no'}",
    )


def _summarise(
    recipe: PretrainRecipe,
    result: FitResult,
    trainer: Trainer,
    probe: Probe | None,
    folder: RunFolder,
    console: Console,
) -> None:
    """Print the last lines of a run: what it reached, and where it is kept."""
    raw_pixels = probe.raw_pixel_knn() if probe is not None and result.finished else None  # all ranks take part
    if not distributed.is_main():
        return
    if not result.finished:
        stopped = f"stopped at step {result.step} of {trainer.end_step}"
        print_line(console, f"{stopped}; a checkpoint is saved, the same command continues")
        return
    num_steps = trainer.schedules.num_steps
    if trainer.end_step < num_steps:
        print_line(
            console, f"finished: {result.step} of {num_steps} steps, as trainer.max_steps asks; raise it to continue"
        )
    else:
        print_line(console, f"finished: all {result.step} steps are done; for another run choose another --output")
    if raw_pixels is not None:
        folder.write_json("baseline.json", {"raw_pixel_knn": raw_pixels})
    probed = [row for row in read_metrics(folder.path / "metrics.jsonl") if "knn_top1" in row]
    if probed and raw_pixels is not None:
        first, last = (f"{row['knn_top1']:.1f} % at step {int(row['step'])}" for row in (probed[0], probed[-1]))
        gain = probed[-1]["knn_top1"] - probed[0]["knn_top1"]
        print_line(
            console,
            f"k-NN accuracy (k = {recipe.probes.num_neighbours}): {first}, {last} ({gain:+.1f} points); "
            f"raw pixels: {raw_pixels:.1f} %",
        )
    files = "backbone.safetensors, metrics.jsonl, recipe.yaml, checkpoints/, tensorboard/"
    print_line(console, f"run folder: {folder.path} ({files})")
