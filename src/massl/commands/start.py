"""`--init`: where a new run starts from, and the recipe that follows from those weights."""

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from massl import distributed
from massl.commands.console import print_line, progress_on, working
from massl.commands.recipe import PretrainRecipe
from massl.commands.recipes import method_of
from massl.config import RecipeError, read_yaml, validate
from massl.nn.backbone import BackboneSettings
from massl.nn.timm_models import OPTIONS
from massl.nn.token_readout import patch_size
from massl.training.checkpoint import CheckpointStore
from massl.training.init_settings import InitSettings
from massl.training.memory_fill import fill_memory
from massl.training.ranks import stop_together
from massl.training.run_folder import RunFolder, RunFolderError
from massl.training.start_weights import has_new_memory, load_backbone_weights, load_run, memory_of
from massl.training.trainer import Trainer
from massl.weights.io import own_image_size
from massl.weights.models import LoadedModel, open_model

_CHECKPOINTS = "checkpoints"
_HEADS = ("head", "projector", "predictor", "prototypes", "decoder")  # sections of the methods
_NO_OPTIONS = ("model_name", "num_classes", "img_size", "patch_size", "stem")


@dataclass(frozen=True, kw_only=True)
class Start:
    """The weights of a new run; `model` only in the process that writes the run."""

    recipe: PretrainRecipe  # with the model's architecture and colours
    model: LoadedModel | None = None


def decide_start(
    recipe: PretrainRecipe, init: str | Path | None, *, path: Path, given: Collection[str], console: Console
) -> Start:
    """The recipe of a run with the weights it starts from; all processes get the same.

    `given` are the settings that the user names: the model's own may not replace them.
    """
    recorded = _recorded(path)
    if init is None and recipe.init.weights is None:
        if recorded is None:  # older versions began such runs
            refuse_idle_init(recipe)
        return Start(recipe=recipe)
    if CheckpointStore(path / _CHECKPOINTS, keep_last=1).steps():
        with stop_together():
            return Start(recipe=_as_it_began(recipe, init, recorded, path))
    start: Start | None = None
    with stop_together():
        if distributed.is_main():
            weights = _named_weights(recipe, init, recorded)
            with working(console, f"opening {weights}"):
                start = _started(recipe, weights, given)
            assert start.model is not None
            name, views = start.model.kind, start.recipe.views
            print_line(console, f"backbone: from {weights}, {name} at {own_image_size(start.model.backbone.model)} px")
            if recipe.views.mean != views.mean or recipe.views.std != views.std:
                colours = f"{[round(value, 3) for value in views.mean]}, {[round(value, 3) for value in views.std]}"
                print_line(console, f"mean and deviation of the colours: from {weights}, {colours}")
    shared = distributed.gather_objects(start.recipe if start is not None else recipe)[0]
    return start if start is not None else Start(recipe=shared)


def refuse_idle_init(recipe: PretrainRecipe) -> None:
    """Settings of `--init` without weights do nothing."""
    if recipe.init.weights is None and (idle := [name for name, value in recipe.init if value is not None]):
        raise RecipeError(f"--init.{idle[0]} needs weights to start from: --init MODEL")


def _recorded(path: Path) -> PretrainRecipe | None:
    """The recipe that the folder holds; None if there is none that can be read."""
    file = path / "recipe.yaml"
    try:
        return validate(PretrainRecipe, read_yaml(file), origin=str(file)) if file.is_file() else None
    except RecipeError:
        return None  # RunFolder tells what is wrong with it


def _as_it_began(
    recipe: PretrainRecipe, init: str | Path | None, recorded: PretrainRecipe | None, path: Path
) -> PretrainRecipe:
    """A run that has begun needs no model any more: what followed from it is in its recipe."""
    if recorded is None:
        return recipe
    before = recorded.init.weights or str(RunFolder(path, recorded).start_from or "")  # older versions: start.json
    named = str(init if init is not None else recipe.init.weights)
    if before not in (named, _absolute(named)):
        began = f"from {before}" if before else "from random weights"
        raise RunFolderError(
            f"{path} holds a run that started {began}; choose another --output for one that starts from {named}"
        )
    decided = {key: value for key, value in recipe.init.model_dump().items() if value is not None}
    values = recipe.model_dump(mode="json") | {
        "backbone": recorded.backbone.model_dump(mode="json"),
        "init": recorded.init.model_dump() | decided | {"weights": recorded.init.weights},
    }
    values["views"] |= {"mean": recorded.views.mean, "std": recorded.views.std}
    values["backbone"]["drop_path_rate"] = recipe.backbone.drop_path_rate
    return _validated(values, recipe)


def _validated(values: Mapping[str, Any], recipe: PretrainRecipe) -> PretrainRecipe:
    accept = {"accept_changes": recipe.data.accept_changes}  # not part of the dump
    return validate(PretrainRecipe, {**values, "data": {**values["data"], **accept}}, origin="recipe")


def _named_weights(recipe: PretrainRecipe, init: str | Path | None, recorded: PretrainRecipe | None) -> str:
    """Weights are opened only if the user names them, or has named them for this folder before."""
    if init is not None:
        return str(init)
    weights = str(recipe.init.weights)
    if recorded is not None and recorded.init.weights == weights and Path(weights).exists():
        return weights
    raise RecipeError(
        f"this recipe starts from the weights {weights}, which are opened only if you name them: --init "
        f"{shlex.quote(weights)}"
    )


def _started(recipe: PretrainRecipe, weights: str, given: Collection[str]) -> Start:
    path = Path(weights).expanduser()
    run = _run_of(path)
    before = {} if run is None else read_yaml(run / "recipe.yaml")
    is_own = run is not None and method_of(before) == recipe.method.name
    has_head = is_own and run is not None and _has_same_heads(recipe, _recorded(run))
    if recipe.init.part == "all" and not is_own:
        raise RecipeError(
            f"--init.part all: {weights} is no run of {recipe.method.name}, so it has no head for it; leave it out"
        )
    model = _opened(weights)
    backbone = backbone_settings(model, drop_path_rate=recipe.backbone.drop_path_rate)
    _refuse_disagreement(recipe.backbone, backbone, given, weights)
    values = recipe.model_dump(mode="json") | {"backbone": backbone.model_dump(mode="json")}
    values["views"] |= {key: getattr(model, key) for key in ("mean", "std") if f"views.{key}" not in given}
    place = _absolute(weights) if path.exists() else weights
    wanted = recipe.init
    if wanted.weights not in (None, weights, place):  # a recipe of a run: its values were decided for other weights
        wanted = InitSettings(**{key: value for key, value in dict(wanted).items() if f"init.{key}" in given})
    init = wanted.resolved(
        weights=place,
        has_head=has_head or (is_own and recipe.init.part == "all"),
        is_transformer=model.backbone.is_transformer,
        keeps_statistics=not model.is_own or bool((before.get("init") or {}).get("keep_statistics")),
        epochs=recipe.trainer.epochs,
    )
    return Start(recipe=_validated({**values, "init": init.model_dump()}, recipe), model=model)


def _has_same_heads(recipe: PretrainRecipe, other: PretrainRecipe | None) -> bool:
    """Whether the heads of two recipes of one method have the same shapes; a new one must learn before the backbone."""
    heads = [getattr(recipe.method, name, None) for name in _HEADS]
    return other is None or heads == [getattr(other.method, name, None) for name in _HEADS]


def _opened(weights: str) -> LoadedModel:
    path = Path(weights).expanduser()
    run = _run_of(path)
    model = open_model(run if run is not None and path.is_file() else weights)
    if model.origin.startswith("random weights"):
        raise RecipeError(f"--init {weights} names no weights, only an architecture; add a tag, as in NAME.dino")
    return model


def network_of(weights: str | Path) -> BackboneSettings:
    """The architecture of `--init`, with the size of its patches, which a timm name does not say."""
    model = _opened(str(weights))
    found = backbone_settings(model, drop_path_rate=0.0)
    return found.model_copy(update={"patch_size": patch_size(model.backbone)})


def with_network_of(recipe: PretrainRecipe, weights: str | Path | None, given: Collection[str]) -> PretrainRecipe:
    """What a run with `--init` trains, for a trial of it."""
    return recipe if weights is None else _started(recipe, str(weights), given).recipe


def _run_of(path: Path) -> Path | None:
    """The run that a folder or one of its checkpoints belongs to."""
    folder = path.parent.parent if path.is_file() and path.parent.name == _CHECKPOINTS else path
    return folder if (folder / "recipe.yaml").is_file() and (folder / _CHECKPOINTS).is_dir() else None


def _absolute(weights: str) -> str:
    return str(Path(weights).expanduser().resolve())


def backbone_settings(model: LoadedModel, *, drop_path_rate: float) -> BackboneSettings:
    """The settings that build this model's architecture."""
    arguments, network = model.backbone.timm_arguments, model.backbone.model
    has_positions = getattr(network, "pos_embed", None) is not None
    options = {key: value for key, value in arguments.items() if key not in _NO_OPTIONS and value is not None}
    if unknown := [key for key in options if key not in OPTIONS]:
        raise RecipeError(f"{model.name} is built with {unknown[0]}, which no recipe can say; choose another model")
    return BackboneSettings(
        name=str(arguments["model_name"]).partition(".")[0],
        image_size=own_image_size(network) if has_positions else arguments.get("img_size"),
        patch_size=arguments.get("patch_size"),
        stem=arguments.get("stem") or "",
        drop_path_rate=drop_path_rate,
        timm_options=options,
    )


def _refuse_disagreement(
    wanted: BackboneSettings, found: BackboneSettings, given: Collection[str], weights: str
) -> None:
    for key in ("name", "image_size", "patch_size", "stem"):
        value, own = getattr(wanted, key), getattr(found, key)
        if f"backbone.{key}" in given and value not in (own, f"{own}.{weights.partition('.')[2]}"):
            raise RecipeError(
                f"--backbone.{key} {value} does not agree with --init {weights}, whose {key} is {own}; leave it out: "
                "the architecture comes from the weights, and views may have another size"
            )


def load_start(trainer: Trainer, start: Start, console: Console) -> None:
    """Put the weights into the networks, fill the memory, and keep all as step 0, which every process reads."""
    init = start.recipe.init
    anew, fill = "", bool(init.fill_memory)
    with stop_together():
        if distributed.is_main():
            assert init.weights is not None
            assert start.model is not None
            step: int | None = None
            if init.part == "all":
                step, unfit = load_run(trainer.method, Path(init.weights), warn=lambda text: print_line(console, text))
                anew = f"; of another shape, so anew: {', '.join(unfit)}" if unfit else ""
                fill |= init.fill_memory is None and has_new_memory(trainer.method, unfit)
                loaded = f"all weights of {init.weights}, step {step}"
            else:
                load_backbone_weights(
                    trainer.method, start.model.backbone, views=trainer.views, origin=str(init.weights)
                )
                loaded = f"the backbone: {start.model.origin}"
            trainer.folder.write_start(Path(init.weights), step=step)
            print_line(console, f"starting from {loaded}{anew}")
            print_line(console, _protocol(trainer, start.recipe))
    memory = memory_of(trainer.method)
    if distributed.gather_objects(fill)[0] and memory is not None:
        distributed.copy_from_main(trainer.method.state_dict().values())
        print_line(console, f"filling the memory of {memory.num_rows:,} rows")
        with progress_on(console) as progress:
            fill_memory(trainer, memory, progress=partial(progress, "rows of the memory"))
    trainer.save(0)


def _protocol(trainer: Trainer, recipe: PretrainRecipe) -> str:
    schedules, init = trainer.schedules, recipe.init
    steps = schedules.num_head_steps
    first = f"the head alone for {init.head_epochs:g} epochs ({steps:,} steps), then " if steps else ""
    scales = schedules.rate_scales(trainer.method)
    lowest = f", times {init.layer_decay:g} a layer, {min(scales.values()):.3g} at the lowest" if scales else ""
    return f"training: {first}all layers at a peak learning rate of {schedules.peak_learning_rate:.3g}{lowest}"
