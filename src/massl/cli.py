"""`massl COMMAND`: parse, call, print."""

import sys
from collections.abc import Callable, Sequence

import tyro
from pydantic import Field, ValidationError

from massl.commands.pretrain import pretrain
from massl.commands.recipe import PretrainRecipe, load_recipe, recipe_header, shipped_recipes
from massl.config import MasslError, RecipeError, explain

_USAGE = """usage: massl COMMAND [options]

  pretrain   learn features from unlabelled images
  recipes    list the recipes that come with massl

massl COMMAND --help explains a command's options."""

_PRETRAIN_HELP = """Learn visual features from unlabelled images.

massl pretrain --recipe massl-vits16 --data.source photos/ --output runs/a [--any.key value]

The options below are the values of the recipe, grouped by part; the defaults shown are those of the recipe named by --recipe. The run is
kept in --output; the same command again continues it where it stopped. Under torchrun the same command trains on several processes:
torchrun --nproc-per-node 4 -m massl pretrain ..."""


class _PretrainArguments(PretrainRecipe):
    recipe: str = Field(description="name of a shipped recipe (see `massl recipes`) or a YAML file")
    output: str = Field(description="folder of the run; never overwritten, continued if it holds a run of the same recipe")


def parse_pretrain(arguments: Sequence[str]) -> tuple[PretrainRecipe, str]:
    """Recipe, with the values given on the command line, and output folder."""
    name = _value_of("--recipe", arguments)
    asks_help = "--help" in arguments or "-h" in arguments
    if name is None and not asks_help:
        raise RecipeError(f"which recipe? Give --recipe NAME_OR_FILE; shipped ones: {', '.join(shipped_recipes())}")
    recipe = load_recipe(name or "massl-vits16")
    defaults = _PretrainArguments.model_construct(recipe=name or "massl-vits16", output=tyro.MISSING, **dict(recipe))
    parsed = tyro.cli(
        _PretrainArguments,
        prog="massl pretrain",
        description=_PRETRAIN_HELP,
        default=defaults,
        args=list(arguments),
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff,),
    )
    return PretrainRecipe.model_validate({field: getattr(parsed, field) for field in PretrainRecipe.model_fields}), parsed.output


def _pretrain(arguments: Sequence[str]) -> int:
    recipe, output = parse_pretrain(arguments)
    result = pretrain(recipe=recipe, output=output)
    return 0 if result.signal_number is None else 128 + result.signal_number


def _value_of(option: str, arguments: Sequence[str]) -> str | None:
    for position, argument in enumerate(arguments):
        if argument == option and position + 1 < len(arguments):
            return arguments[position + 1]
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
    return None


def _recipes(arguments: Sequence[str]) -> int:
    if arguments:
        print("usage: massl recipes\n\nLists the recipes that come with massl: name, then command, hardware and expected result.")
        return 0 if arguments[0] in ("-h", "--help") else 2
    for name, path in shipped_recipes().items():
        print(name, *(f"    {line}" for line in recipe_header(path).splitlines()), sep="\n", end="\n\n")
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"pretrain": _pretrain, "recipes": _recipes}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `massl` command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if given else 2
    command = COMMANDS.get(given[0])
    if command is None:
        print(f"massl: no command {given[0]!r}\n\n{_USAGE}", file=sys.stderr)
        return 2
    try:
        return command(given[1:])
    except ValidationError as error:
        print(f"massl: error: {explain(error)}", file=sys.stderr)
        return 2
    except MasslError as error:
        print(f"massl: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"massl: error: {error}. What was saved so far is intact; the same command continues.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("massl: interrupted before a checkpoint was due", file=sys.stderr)
        return 130
