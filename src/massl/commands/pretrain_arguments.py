"""The arguments of `massl pretrain`, and the recipe they ask for."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tyro
from pydantic import Field, create_model

from massl.commands.arguments import parse
from massl.commands.recipe import PretrainRecipe, load_recipe
from massl.config import RecipeError, dotted, merge, validate
from massl.methods import METHODS

DESCRIPTION = f"""Learn visual features from unlabelled images.

massl pretrain --recipe massl-vits16 --data photos/ --output runs/a [--any.key value]

The options below are the values of a recipe. The defaults shown are those of --recipe, or of massl-vits16 if none is
given. --method.name trains another method ({", ".join(METHODS)}) with the values the recipe has for it. The run is kept
in the folder --output; the same command again, or --output alone, continues it. The same command on several GPUs:

torchrun --nproc-per-node 4 -m massl pretrain ..."""
_SHOWN_RECIPE = "massl-vits16"  # whose values --help shows when no recipe is given


class PretrainArguments(PretrainRecipe):
    recipe: str | None = Field(
        None,
        description="name of a shipped recipe (see `massl recipes`) or a YAML file; default: the recipe of the run in "
        "--output, or in --start_from",
    )
    output: str = Field(
        description="folder of the run; never overwritten, continued if it holds a run of the same recipe"
    )
    start_from: str | None = Field(
        None, description="folder of another run: start a new run from its weights; optimizer and schedules start anew"
    )


class PretrainCall(NamedTuple):
    """What a command line asks for."""

    recipe: PretrainRecipe
    output: str
    start_from: str | None
    # given on the command line, not by a recipe: only these images may be downloaded
    data: str | None
    overrides: dict[str, str]


def parse_pretrain(arguments: Sequence[str]) -> PretrainCall:
    """The recipe with the values given on the command line, and where the run is kept."""
    name = _value_of("--recipe", arguments)
    runs = [_value_of(option, arguments) for option in ("--output", "--start_from")]
    is_help = bool({"--help", "-h"} & set(arguments))
    data = _value_of("--data", arguments) or _value_of("--data.source", arguments)
    given = {"method.name": _value_of("--method.name", arguments), "data.source": data}
    recipe = load_recipe(
        name or (_SHOWN_RECIPE if is_help else recipe_of_run(*runs, data=data)),
        {key: value for key, value in given.items() if value is not None},  # they change what other values mean
    )
    # Only the chosen method's options; the rest would clutter --help.
    arguments_type = create_model(
        "PretrainArguments", __base__=PretrainArguments, method=(type(recipe.method), recipe.method)
    )
    defaults = arguments_type.model_construct(recipe=name, output=tyro.MISSING, start_from=None, **dict(recipe))
    parsed = parse(arguments_type, "pretrain", DESCRIPTION, arguments, default=defaults)
    values = {field: getattr(parsed, field) for field in PretrainRecipe.model_fields}
    given_data = None if data is None else parsed.data.source
    probed = {key: _value_of(f"--{key}", arguments) for key in ("probes.database", "probes.queries")}
    return PretrainCall(
        PretrainRecipe.model_validate(values),
        parsed.output,
        parsed.start_from,
        given_data,
        {key: value for key, value in probed.items() if value is not None},
    )


def recipe_of_run(*runs: str | Path | None, data: str | Path | None = None) -> Path:
    """The recipe that the first of the folders keeps, so that --output alone continues a run."""
    for run in runs:
        if run is not None and (file := Path(run).expanduser() / "recipe.yaml").is_file():
            return file
    named = [str(run) for run in runs if run is not None]
    none = f"{' and '.join(named)}: no run is there to take the recipe from. " if named else "which recipe? "
    start = ["massl", "pretrain", "--recipe", "massl-tiny", "--data", str(data or "photos/")]
    start += ["--output", *(named[:1] or ["runs/a"])]
    raise RecipeError(f"{none}Start one with: {shlex.join(start)} (massl recipes lists all recipes)")


def _value_of(option: str, arguments: Sequence[str]) -> str | None:
    for position, argument in enumerate(arguments):
        if argument == option and position + 1 < len(arguments):
            return arguments[position + 1]
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
    return None


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
