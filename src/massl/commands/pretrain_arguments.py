"""The arguments of `massl pretrain`, and the recipe they ask for."""

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tyro
from pydantic import Field, create_model

from massl.commands.arguments import parse
from massl.commands.recipe import PretrainRecipe, load_recipe
from massl.commands.recipes import AUTO
from massl.commands.timing import WARM_UPS
from massl.config import RecipeError, UsageError, dotted, flatten, merge, validate
from massl.methods import METHODS
from massl.planning.choice import choose
from massl.planning.facts import DeviceFacts, ImageFacts
from massl.training.init_settings import InitSettings

DESCRIPTION = f"""Learn visual features from unlabelled images.

massl pretrain photos/
massl pretrain photos/ --minutes 30 --output runs/a
massl pretrain photos/ --recipe massl-tiny --trainer.epochs 40

Without --recipe, auto chooses every value from your images and this machine, and says why; massl plan photos/ shows it
beforehand. The options below are the values of a recipe. The defaults shown are those of --recipe or, without one, what
auto chooses for {{example}}; give an option and what follows from it changes too.
--method.name trains another method ({", ".join(METHODS)}) with the values the recipe has for it. The run is kept in the
folder --output; the same command again, or --output alone, continues it. The same command on several GPUs:

torchrun --nproc-per-node 4 -m massl pretrain ..."""
_EXAMPLE = "10,000 photographs on a GPU of 24 GiB"  # whose values --help shows when no recipe is given
_EXAMPLE_IMAGES = ImageFacts(num_images=10_000, sizes=((375, 500),), num_sampled=1)
_EXAMPLE_DEVICE = DeviceFacts(kind="cuda", name="GPU", memory_gib=24, num_cores=8, host_gib=64)
# a given number of rows or block size is checked against what auto derives from it, not against the example's
_NO_VALUE = object()  # None is a value
_ANY_MEMORY = {"method.memory.num_rows": 2**62, "method.memory.block_size": 1}


class PretrainArguments(PretrainRecipe):
    images: tyro.conf.Positional[str] = Field("", description="your images, short for --data: a folder, .npz or URI")
    recipe: str | None = Field(
        None,
        description="auto, a shipped recipe (see `massl recipes`) or a YAML file; default: the recipe of the run in "
        "--output or --init, else auto",
    )
    minutes: float | None = Field(
        None, gt=0, description="train for about this long, probes not counted: a short trial finds the epochs"
    )
    epochs: int | None = Field(None, gt=0, description="short for --trainer.epochs")
    output: str = Field(
        "",
        description="folder of the run; never overwritten, continued if it holds a run of the same recipe; default: "
        "runs/ and the name of the images",
    )


class PretrainCall(NamedTuple):
    """What a command line asks for."""

    recipe: PretrainRecipe | str  # "auto", or a recipe with the values given on the command line
    output: str
    init: str | None  # weights to start from
    # given on the command line, not by a recipe: only these images may be downloaded
    data: str | None
    overrides: dict[str, Any]
    minutes: float | None


def parse_pretrain(arguments: Sequence[str], *, command: str = "pretrain", description: str = "") -> PretrainCall:
    """The recipe with the values given on the command line, and where the run is kept."""
    arguments = [word for word in arguments if word != "--"]  # ends the options for argparse; the images may follow
    is_help = bool({"--help", "-h"} & set(arguments))
    name, data = _value_of("--recipe", arguments), _images_of(arguments)
    output = _value_of("--output", arguments)
    start = _only_one("weights are", _value_of("--init", arguments), _value_of("--init.weights", arguments))
    run = output or (str(new_output(data) if command == "plan" else default_output(data)) if data else None)
    is_auto = name == AUTO or (name is None and not _has_recipe(run) and not _has_recipe(start))
    recipe = _base_recipe(arguments, name, run, start, data, is_auto=is_auto, is_help=is_help)
    if start and recipe.init.weights not in (None, start, str(Path(start).expanduser().resolve())):
        recipe = recipe.model_copy(update={"init": InitSettings()})  # it was decided for other weights
    # Only the chosen method's options; the rest would clutter --help.
    arguments_type = create_model(
        "PretrainArguments", __base__=PretrainArguments, method=(type(recipe.method), recipe.method)
    )
    own: dict[str, Any] = {
        "images": "",
        "recipe": name,
        "minutes": None,
        "epochs": None,
        "output": "",
    }
    defaults = arguments_type.model_construct(**own | dict(recipe))
    text = (description or DESCRIPTION).format(example=_EXAMPLE)
    parsed = parse(arguments_type, command, text, arguments, default=defaults)
    if parsed.images and parsed.images != data:  # named after the options
        place = next(
            place
            for place, word in enumerate(arguments)
            if word == parsed.images and not ((before := arguments[place - 1]).startswith("--") and "=" not in before)
        )
        rest = [*arguments[:place], *arguments[place + 1 :]]
        return parse_pretrain([parsed.images, *rest], command=command, description=description)
    if data is None and is_auto:
        recipe_of_run(run, start, data=data)  # raises: nothing tells what to train on
    given = _given(parsed, arguments)
    if parsed.epochs is not None and given.setdefault("trainer.epochs", parsed.epochs) != parsed.epochs:
        raise UsageError("--epochs and --trainer.epochs differ; give one of them")
    if parsed.minutes is not None and "trainer.epochs" in given:
        raise UsageError("--minutes and --epochs both set the length of training; give one of them")
    kept = PretrainRecipe.model_validate({field: getattr(parsed, field) for field in PretrainRecipe.model_fields})
    if is_auto:
        return PretrainCall(AUTO, run or "", start, data, given, parsed.minutes)
    if parsed.epochs is not None:
        kept = resolve_recipe(kept, data, {"trainer.epochs": parsed.epochs})
    # what a download needs to be named by the user, and what weights to start from or --minutes may not replace
    named = ("probes.database", "probes.queries", "backbone.", "views.mean", "views.std", "init.", *WARM_UPS)
    kept_as_named: dict[str, Any] = {key: value for key, value in given.items() if key.startswith(named)}
    given_data = None if data is None else kept.data.source
    return PretrainCall(kept, run or "", start, given_data, kept_as_named, parsed.minutes)


def _base_recipe(
    arguments: Sequence[str],
    name: str | None,
    run: str | None,
    start: str | None,
    data: str | None,
    *,
    is_auto: bool,
    is_help: bool,
) -> PretrainRecipe:
    """The recipe whose values are the defaults of the options."""
    given = {"method.name": _value_of("--method.name", arguments), "data.source": data}
    given = {key: value for key, value in given.items() if value is not None}  # they change what other values mean
    if not is_auto:
        return load_recipe(name or recipe_of_run(run, start, data=data), given)
    if given.get("method.name", "massl") != "massl":
        return validate(PretrainRecipe, {"method": {"name": given["method.name"]}}, origin="auto")
    return _example_recipe(given if is_help else {**_ANY_MEMORY, **given})


def _example_recipe(given: Mapping[str, Any]) -> PretrainRecipe:
    values = merge({}, choose(_EXAMPLE_IMAGES, _EXAMPLE_DEVICE, {}).values, PretrainRecipe)
    return validate(PretrainRecipe, merge(values, given, PretrainRecipe), origin="auto")


def checked_for_auto(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values given to auto for massl, of the right types; raises for a wrong one, before auto reckons with it."""
    checked = flatten(_example_recipe({**_ANY_MEMORY, **given}))
    return {key: checked.get(key, value) for key, value in given.items()}


def _images_of(arguments: Sequence[str]) -> str | None:
    """The images named first, or by --data."""
    first = None if not arguments or arguments[0].startswith("-") else arguments[0]
    return _only_one("images are", first, _value_of("--data", arguments), _value_of("--data.source", arguments))


def _only_one(what: str, *values: str | None) -> str | None:
    """The value of an option that has several spellings."""
    given = list(dict.fromkeys(value for value in values if value is not None))
    if len(given) > 1:
        raise UsageError(f"{what} named twice, {' and '.join(given)}; name one")
    return given[0] if given else None


def _given(parsed: PretrainArguments, arguments: Sequence[str]) -> dict[str, Any]:
    """The recipe's values that the command line sets, by dotted key."""
    words = (word.partition("=")[0] for word in arguments if word.startswith("--"))
    names = {word[2:].replace("-", "_") for word in words}
    dumped, given = parsed.model_dump(mode="json"), {}
    for name in names - {"data.source"}:
        section: Any = dumped
        for part in name.split("."):
            section = section.get(part, _NO_VALUE) if isinstance(section, dict) else _NO_VALUE
        if "." in name and section is not _NO_VALUE:
            given[name] = section
    return given | ({"data.accept_changes": True} if parsed.data.accept_changes else {})


def _has_recipe(run: str | None) -> bool:
    return run is not None and (Path(run).expanduser() / "recipe.yaml").is_file()


def default_output(data: str | Path | None) -> Path:
    """runs/photos for photos/, runs/CIFAR10 for torchvision:CIFAR10?root=data."""
    if not data:
        raise RecipeError("which images? massl pretrain photos/ trains on them, --output of a run continues it")
    scheme, _, location = str(data).partition(":")
    place = str(data) if not location or "/" in scheme else location.partition("?")[0]
    name = Path(place).expanduser().resolve().name if place == str(data) or scheme == "folder" else place
    return Path("runs") / (re.sub(r"[^\w.-]+", "-", name.removesuffix(".npz")).strip("-.")[:100] or "images")


def new_output(data: str | Path | None) -> Path:
    """The default, numbered if it is taken: runs/photos-2."""
    first = default_output(data)
    numbered = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([first], numbered) if _is_free(folder))


def recipe_of_run(output: str | Path | None, init: str | Path | None, *, data: str | Path | None = None) -> Path:
    """The recipe that the first of the folders keeps, so that --output alone continues a run."""
    runs = (output, init)
    for run in runs:
        if run is not None and (file := Path(run).expanduser() / "recipe.yaml").is_file():
            return file
    named = [str(run) for run in runs if run is not None]
    none = f"{' and '.join(named)}: no run is there to take the recipe from. " if named else "which images? "
    start = ["massl", "pretrain", str(data or "photos/")]
    if output is not None and _is_free(Path(output).expanduser()):  # a new run is refused in any other folder
        start += ["--output", str(output)]
    start += [] if init is None else ["--init", str(init)]
    give = "Give images, or a recipe that names them (massl recipes lists all recipes)."
    raise RecipeError(f"{none}{give} Start one with: {shlex.join(start)}")


def _is_free(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def _value_of(option: str, arguments: Sequence[str]) -> str | None:
    """The last one given counts, as for all options."""
    value = None
    for position, argument in enumerate(arguments):
        if argument == option and position + 1 < len(arguments):
            value = arguments[position + 1]
        elif argument.startswith(f"{option}="):
            value = argument.partition("=")[2]
    return value


def resolve_recipe(
    recipe: str | Path | PretrainRecipe, data: str | Path | None, overrides: Mapping[str, Any]
) -> PretrainRecipe:
    changes = dotted(overrides, PretrainRecipe) | ({} if data is None else {"data.source": str(data)})
    if isinstance(recipe, PretrainRecipe):
        if changes.get("method.name", recipe.method.name) != recipe.method.name:
            raise RecipeError(
                "a resolved recipe keeps its method: give the recipe's name or file, and method.name with it"
            )
        changes = {"data.accept_changes": recipe.data.accept_changes} | changes  # not part of the dump
        values = merge(recipe.model_dump(mode="json"), changes, PretrainRecipe)
        resolved = validate(PretrainRecipe, values, origin="recipe")
    else:
        resolved = load_recipe(recipe, changes)
    if not resolved.data.source:
        raise RecipeError("no images named: give --data, e.g. a folder of photos")
    return resolved
