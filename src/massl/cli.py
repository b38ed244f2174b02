"""`massl COMMAND`: parse, call, print."""

import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import tyro
from pydantic import Field, ValidationError, create_model
from safetensors import SafetensorError

from massl.commands.ablate.command import AblateSettings, run_ablation
from massl.commands.compare.command import CompareSettings, run_comparison
from massl.commands.embed import EmbedSettings, run_embedding
from massl.commands.evaluate.command import run_evaluation
from massl.commands.evaluate.settings import EvaluateSettings
from massl.commands.pretrain import pretrain
from massl.commands.recipe import PretrainRecipe, load_recipe, recipe_header, shipped_recipes
from massl.commands.report.command import ReportSettings, run_report
from massl.commands.visualize import VisualizeSettings, run_visualization
from massl.config import MasslError, RecipeError, Settings, explain

_USAGE = """usage: massl COMMAND [options]

  pretrain    learn features from unlabelled images
  evaluate    judge a model by the paper's protocols
  embed       write a model's features of your images to a file
  visualize   draw attention maps, correspondences or nearest neighbours
  compare     put runs or methods side by side: accuracy, time, memory
  ablate      repeat the paper's ablations: memory size, block size, block sampling
  report      put runs and their results on one HTML page
  recipes     list the recipes that come with massl

massl COMMAND --help explains a command's options."""

_PRETRAIN_HELP = """Learn visual features from unlabelled images.

massl pretrain --recipe massl-vits16 --data.source photos/ --output runs/a [--any.key value]

The options below are the values of the recipe, grouped by part; the defaults shown are those of the recipe named by --recipe. With
--method.name dino (ibot, mocov3, mae, nnclr, carp, supervised) another method is trained, with what the recipe says for it. The run is
kept in --output; the same command again continues it where it stopped. Under torchrun the same command trains on several processes:
torchrun --nproc-per-node 4 -m massl pretrain ..."""


class _PretrainArguments(PretrainRecipe):
    recipe: str = Field(description="name of a shipped recipe (see `massl recipes`) or a YAML file")
    output: str = Field(
        description="folder of the run; never overwritten, continued if it holds a run of the same recipe"
    )


def _arguments_of(settings: Settings) -> type[_PretrainArguments]:
    """The arguments with the options of one method: those of others would stand beside them, to no use."""
    return create_model("PretrainArguments", __base__=_PretrainArguments, method=(type(settings), settings))


def parse_pretrain(arguments: Sequence[str]) -> tuple[PretrainRecipe, str]:
    """Recipe, with the values given on the command line, and output folder."""
    name = _value_of("--recipe", arguments)
    asks_help = "--help" in arguments or "-h" in arguments
    if name is None and not asks_help:
        raise RecipeError(f"which recipe? Give --recipe NAME_OR_FILE; shipped ones: {', '.join(shipped_recipes())}")
    method = _value_of("--method.name", arguments)
    recipe = load_recipe(name or "massl-vits16", {} if method is None else {"method.name": method})
    arguments_type = _arguments_of(recipe.method)
    defaults = arguments_type.model_construct(recipe=name or "massl-vits16", output=tyro.MISSING, **dict(recipe))
    parsed = _parse(arguments_type, "pretrain", _PRETRAIN_HELP, arguments, default=defaults)
    return PretrainRecipe.model_validate(
        {field: getattr(parsed, field) for field in PretrainRecipe.model_fields}
    ), parsed.output


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


_MODEL = "a run of massl (its folder), a weights file (massl, DINO, iBOT, MaSSL, MoCo-v3, MAE, DeiT, timm) or a timm model name"

_EVALUATE_HELP = """Judge a model by the paper's protocols.

massl evaluate runs/a --protocol knn logreg --train demo:train --test demo:test --output results
massl evaluate runs/a --protocol knn --data CIFAR-10 Pets --data_root DATA --output results
massl evaluate runs/a --suite paper --data_root DATA --output results

Features are computed once and kept; the same command again measures only what is not there yet. Numbers go to OUTPUT/results.jsonl, a
table with the paper's figures beside them to the screen and OUTPUT/results.md. Several GPUs: torchrun --nproc-per-node 4 -m massl ..."""

_EMBED_HELP = """Write a model's features of your images to a file.

massl embed runs/a --data photos/ --out features.parquet"""

_VISUALIZE_HELP = """Draw what a model sees, as the paper shows it.

massl visualize runs/a attention --data photos/ --out figures"""


_COMPARE_HELP = """Put runs side by side: k-NN accuracy, time and memory.

massl compare --runs runs/a runs/b --out comparison
massl compare --methods massl,dino,ibot --recipe demo --output runs/compare
massl compare --recipes massl-tiny,dino-tiny --data.source photos/ --set trainer.epochs=20 --output runs/compare
massl compare --recipes massl-tiny,dino-tiny --data.source photos/ --minutes 10 --output runs/compare

The last three train first, each into a folder of its own below --output; the same command again continues. Table, commands and figure go to
comparison.md, .json, .png and .svg."""

_ABLATE_HELP = """Repeat one of the paper's ablations on your images.

massl ablate memory-size --recipe massl-cifar --data.source photos/ --output runs/ablation
massl ablate block-size --recipe massl-cifar --data.source photos/ --values 512 2048 8192 --seeds 0 1 2 --output runs/ablation
massl ablate block-sampling --recipe demo --set trainer.epochs=6 --output runs/ablation

Each value is a run in a folder of its own; the same command again continues. Table, trend and figure, with the paper's values beside, go
to OUTPUT/KIND/ablation.md, .json, .png and .svg."""


_REPORT_HELP = """Put runs, their results and pictures on one HTML page that needs nothing but a browser.

massl report runs/a --output report.html
massl report runs/a runs/b runs/ablation --results results --output report.html --no-figures"""


class _EvaluateArguments(EvaluateSettings):
    model: tyro.conf.Positional[str] = Field(description=_MODEL)


class _EmbedArguments(EmbedSettings):
    model: tyro.conf.Positional[str] = Field(description=_MODEL)


class _AblateArguments(AblateSettings):
    kind: tyro.conf.Positional[Literal["memory-size", "block-size", "block-sampling"]] = Field(
        description="what is varied"
    )


class _ReportArguments(ReportSettings):
    runs: tyro.conf.Positional[tuple[str, ...]] = Field(
        description="folders of runs (massl pretrain), finished or under way, and of ablations (massl ablate)"
    )


class _VisualizeArguments(VisualizeSettings):
    model: tyro.conf.Positional[str] = Field(description=_MODEL)
    kind: tyro.conf.Positional[Literal["attention", "correspondence", "neighbours"]] = Field(
        description="what is drawn"
    )


Arguments = TypeVar("Arguments", bound=Settings)


class _WrongOption(MasslError):
    """A value on the command line that cannot be; the message names the option."""


def _parse(
    arguments_type: type[Arguments],
    command: str,
    description: str,
    arguments: Sequence[str],
    *,
    default: Arguments | None = None,
    has_flags: bool = False,  # --figures and --no-figures instead of --figures True
) -> Arguments:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                arguments_type,
                prog=f"massl {command}",
                description=_with_examples_apart(description),
                default=tyro.MISSING_NONPROP if default is None else default,
                args=list(arguments),
                use_underscores=True,
                config=() if has_flags else (tyro.conf.FlagConversionOff,),
            )
    except SystemExit as exit_request:
        problem = _refused_value(exit_request, arguments_type)
        if problem is None:  # help, or an option that is not there
            sys.stderr.write(said.getvalue())
            raise
        raise _WrongOption(f"{problem}; see massl {command} --help") from None


def _with_examples_apart(description: str) -> str:
    """Examples indented: tyro joins all other lines of a paragraph, and leaves one blank line too many before what is
    indented.
    """
    return description.replace("\nmassl ", "\n  massl ").replace("\n\n  massl ", "\n  massl ")


def _refused_value(exit_request: SystemExit, arguments_type: type[Settings]) -> str | None:
    """What pydantic refused, in a line; tyro would show all that pydantic has to say about it."""
    section, link = "", exit_request.__context__
    while link is not None and not isinstance(link, ValidationError):
        part = str(getattr(link, "arg", ""))  # of tyro's own error: where it arose, "knn" or "method.teacher"
        section = f"{part}: " if part.partition(".")[0] in arguments_type.model_fields else section
        link = link.__context__
    return None if link is None else section + explain(link)


def parse_evaluate(arguments: Sequence[str]) -> tuple[str, EvaluateSettings]:
    parsed = _parse(_EvaluateArguments, "evaluate", _EVALUATE_HELP, arguments)
    return parsed.model, parsed


def parse_embed(arguments: Sequence[str]) -> tuple[str, EmbedSettings]:
    parsed = _parse(_EmbedArguments, "embed", _EMBED_HELP, arguments)
    return parsed.model, parsed


def parse_visualize(arguments: Sequence[str]) -> tuple[str, str, VisualizeSettings]:
    parsed = _parse(_VisualizeArguments, "visualize", _VISUALIZE_HELP, arguments)
    return parsed.model, parsed.kind, parsed


def parse_compare(arguments: Sequence[str]) -> CompareSettings:
    return _parse(CompareSettings, "compare", _COMPARE_HELP, arguments)


def parse_ablate(arguments: Sequence[str]) -> tuple[str, AblateSettings]:
    parsed = _parse(_AblateArguments, "ablate", _ABLATE_HELP, arguments)
    return parsed.kind, parsed


def parse_report(arguments: Sequence[str]) -> tuple[tuple[str, ...], ReportSettings]:
    parsed = _parse(_ReportArguments, "report", _REPORT_HELP, arguments, has_flags=True)
    return parsed.runs, parsed


def _evaluate(arguments: Sequence[str]) -> int:
    result = run_evaluation(*parse_evaluate(arguments))
    return 1 if result.failed or not result.rows else 0


def _embed(arguments: Sequence[str]) -> int:
    run_embedding(*parse_embed(arguments))
    return 0


def _visualize(arguments: Sequence[str]) -> int:
    for path in run_visualization(*parse_visualize(arguments)):
        print(path)
    return 0


def _compare(arguments: Sequence[str]) -> int:
    result = run_comparison(parse_compare(arguments))
    return _status(result.signal_number, failed=bool(result.failed))


def _ablate(arguments: Sequence[str]) -> int:
    result = run_ablation(*parse_ablate(arguments))
    return _status(result.signal_number, failed=bool(result.failed))


def _report(arguments: Sequence[str]) -> int:
    print(run_report(*parse_report(arguments)).file.absolute().as_uri())
    return 0


def _status(signal_number: int | None, *, failed: bool) -> int:
    return int(failed) if signal_number is None else 128 + signal_number


def _recipes(arguments: Sequence[str]) -> int:
    if arguments:
        print(
            "usage: massl recipes\n\nLists the recipes that come with massl: name, then command, hardware and expected result."
        )
        return 0 if arguments[0] in ("-h", "--help") else 2
    for name, path in shipped_recipes().items():
        print(name, *(f"    {line}" for line in recipe_header(path).splitlines()), sep="\n", end="\n\n")
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "pretrain": _pretrain,
    "evaluate": _evaluate,
    "embed": _embed,
    "visualize": _visualize,
    "compare": _compare,
    "ablate": _ablate,
    "report": _report,
    "recipes": _recipes,
}


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
    except _WrongOption as error:
        print(f"massl: error: {error}", file=sys.stderr)
        return 2
    except ValidationError as error:
        print(f"massl: error: {explain(error)}", file=sys.stderr)
        return 2
    except MasslError as error:
        print(f"massl: error: {error}", file=sys.stderr)
        return 1
    except (OSError, SafetensorError) as error:  # the latter where a disk is full while safetensors writes
        print(f"massl: error: {error}. What was saved so far is intact; the same command continues.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("massl: interrupted; what was saved so far is intact", file=sys.stderr)
        return 130
