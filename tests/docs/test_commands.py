"""Every command that the documents show is one that works, as far as can be told without data and hours."""

import argparse
import importlib
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed.run

from massl import cli
from massl.commands.ablate.command import AblateSettings
from massl.commands.ablate.grids import plan_grid
from massl.commands.arguments import parse
from massl.commands.compare.command import CompareSettings, _trainings
from massl.commands.demo import DemoSettings
from massl.commands.embed import EmbedSettings
from massl.commands.evaluate.settings import EvaluateSettings
from massl.commands.export import ExportSettings
from massl.commands.import_weights import ImportSettings
from massl.commands.pretrain_arguments import parse_pretrain
from massl.commands.recipe import load_recipe, parse_set_options
from massl.commands.recipes import AUTO, RecipesSettings, recipe_header, recipe_text, recipes_table, shipped_recipes
from massl.commands.report.command import ReportSettings
from massl.commands.visualize import VisualizeSettings
from tests.reliability.frame import all_classes
from tests.reliability.program import parse_arguments

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = {"bash", "python", "yaml", "text", "bibtex"}  # text: what a program prints, or a drawing
WITHOUT_CODE = {"CHANGELOG.md", "benchmarks/README.md", "docs/api.md", "docs/architecture.md", "docs/cite.md"}
OTHER_PACKAGES = {"pillow-heif"}  # reads HEIC
PARTS = {"torchrun -m massl pretrain", "torchrun --nproc-per-node 8 -m"}
_INLINE = re.compile(r"`((?:massl|torchrun|make|pip|python) [^`]+)`")
_PLACEHOLDER = re.compile(r"\.\.\.|\bCOMMAND\b|\bNAME\b|\bPATH\b|\bDIR\b|\bFOLDER_OR_TAR\b")
_FOR_LOOP = re.compile(
    r"^for (?P<name>\w+) in (?P<words>[^\n]*?); do\n(?P<body>.*?)^done$", flags=re.MULTILINE | re.DOTALL
)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that commands name as the reader's own."""
    shutil.copy(shipped_recipes()["demo"], tmp_path / "my-recipe.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- reading a block -------------------------------------------------------------------------------------------------


def commands_in(script: str) -> list[list[str]]:
    """The commands of a shell script of plain lines and `for` loops, as words."""

    def unrolled(loop: re.Match[str]) -> str:
        return "".join(re.sub(rf"\${loop['name']}\b", word, loop["body"]) for word in shlex.split(loop["words"]))

    lines = _FOR_LOOP.sub(unrolled, script.replace("\\\n", " ")).splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def test_loops_are_unrolled_and_comments_left_out() -> None:
    script = 'for kind in "a --b 1" c; do\n    massl ablate $kind \\\n        --plan True  # all\ndone\nmake demo\n'
    assert commands_in(script) == [
        ["massl", "ablate", *kind, "--plan", "True"] for kind in (["a", "--b", "1"], ["c"])
    ] + [["make", "demo"]]


# ---- one check a program ---------------------------------------------------------------------------------------------


def check(words: list[str]) -> None:
    """Fails where a command cannot be right, or is none that this file knows how to check."""
    if words[0] not in CHECKS:
        pytest.fail(f"nothing here can check a command that starts with {words[0]!r}: {shlex.join(words)}")
    CHECKS[words[0]](words[1:])


def check_massl(arguments: list[str]) -> None:
    command, *options = arguments[: arguments.index(">")] if ">" in arguments else arguments
    if "--help" in options or command in ("--version", "--completion"):
        assert status_of([command, *options]) == 0
    else:
        MASSL_CHECKS[command](options)


def status_of(arguments: list[str]) -> int | str | None:
    try:
        return cli.main(arguments)
    except SystemExit as ended:
        return ended.code


def check_pretrain(options: list[str]) -> None:
    if "--recipe" not in options and options[0].startswith("--"):
        # --output alone continues a run, --init takes the recipe of one; there is none here
        options = ["--recipe", "massl-vits16", "--data.source", "photos/", *options]
    call = parse_pretrain(options)
    assert call.data or call.recipe.data.source, "which images?"
    assert call.output


def check_compare(options: list[str]) -> None:
    settings = parse(CompareSettings, "compare", "", options)
    for training in [] if settings.runs else _trainings(settings):
        images = {"data.source": settings.data.source} if settings.data.source else {}
        if training.recipe == AUTO:
            assert images, "which images?"
            continue
        assert load_recipe(training.recipe, {**training.overrides, **images}).data.source, "which images?"


def check_ablate(options: list[str]) -> None:
    settings = parse(AblateSettings, "ablate", "", options)
    overrides = parse_set_options(settings.set)
    base = load_recipe(settings.recipe, overrides)
    grid = plan_grid(
        settings.kind,
        base,
        output=Path(settings.output),
        values=settings.values,
        seeds=settings.seeds,
        overridden=overrides.keys(),
        num_images=50_000,
    )
    assert grid.runs
    assert settings.data.source or base.data.source, "which images?"


def check_recipes(options: list[str]) -> None:
    settings = parse(RecipesSettings, "recipes", "", options)
    if settings.name:
        assert recipe_text(settings.name)
    assert recipes_table(method=settings.method, purpose=settings.purpose).lines


def check_torchrun(arguments: list[str]) -> None:
    parsed = torch.distributed.run.get_args_parser().parse_args(arguments)
    assert parsed.module
    assert parsed.training_script == "massl"
    check_massl(parsed.training_script_args)


def check_make(arguments: list[str]) -> None:
    for target in arguments:
        assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), (
            f"no target {target}"
        )


def check_pip(arguments: list[str]) -> None:
    """`pip install .`, with extras that pyproject.toml has, or a package that massl uses where it is there."""
    assert arguments[0] == "install"
    (requirement,) = [word for word in arguments[1:] if word != "--editable"]
    if requirement in OTHER_PACKAGES:
        return
    found = re.fullmatch(r"\.(?:\[(?P<extras>[\w,]+)\])?", requirement)
    assert found, f"pip install {requirement} is not this repository"
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set((found["extras"] or "").split(",")) - {""} <= set(known)


def check_tensorboard(arguments: list[str]) -> None:
    assert metadata.entry_points(group="console_scripts", name="tensorboard")
    assert arguments[0] == "--logdir"
    assert len(arguments) == 2


class _Parsed(Exception):
    """The arguments of a program were understood; it need not run."""


def check_python(arguments: list[str]) -> None:
    """A program of benchmarks/ or scripts/: up to where its own parser has taken the arguments."""
    if arguments[:2] == ["-m", "massl"]:
        return check_massl(arguments[2:])
    if arguments[:2] == ["-m", "tests.reliability"]:
        assert set(parse_arguments(arguments[2:]).only or ()) <= {found.name for found in all_classes()}
        return None
    program = ROOT / arguments[0]
    assert program.parent.name in ("benchmarks", "scripts")
    assert program.is_file()
    real_parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> NoReturn:
        real_parse(self, args, namespace)
        raise _Parsed

    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(program.parent))
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        try:
            with pytest.raises(_Parsed):
                importlib.import_module(program.stem).main(arguments[1:])
        finally:  # programs find each other by short names, which leave with their folder
            for name in set(sys.modules) - before:
                if str(getattr(sys.modules[name], "__file__", "")).startswith(str(program.parent)):
                    del sys.modules[name]
    return None


MASSL_CHECKS: dict[str, Callable[[list[str]], Any]] = {
    "demo": lambda options: parse(DemoSettings, "demo", "", options),
    "pretrain": check_pretrain,
    "plan": check_pretrain,
    "evaluate": lambda options: parse(EvaluateSettings, "evaluate", "", options),
    "embed": lambda options: parse(EmbedSettings, "embed", "", options),
    "visualize": lambda options: parse(VisualizeSettings, "visualize", "", options),
    "export": lambda options: parse(ExportSettings, "export", "", options),
    "compare": check_compare,
    "ablate": check_ablate,
    "report": lambda options: parse(ReportSettings, "report", "", options, has_flags=True),
    "import": lambda options: parse(ImportSettings, "import", "", options),
    "recipes": check_recipes,
}
CHECKS: dict[str, Callable[[list[str]], None]] = {
    "massl": check_massl,
    "torchrun": check_torchrun,
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    "tensorboard": check_tensorboard,
}


# ---- the documents ---------------------------------------------------------------------------------------------------


def test_every_command_of_massl_is_checked_and_shown_somewhere(documents: list[Any]) -> None:
    assert set(MASSL_CHECKS) == set(cli.COMMANDS)
    shown = [
        words
        for document in documents
        for block in document.blocks
        if block.language == "bash"
        for words in commands_in(block.text)
    ]
    assert {words[1] for words in shown if words[0] == "massl"} - {"--completion"} == set(cli.COMMANDS)


def test_every_block_says_its_language_and_none_is_overlooked(document: Any) -> None:
    assert {block.language for block in document.blocks} <= LANGUAGES
    fences = re.findall(r"^ *(?:```|~~~)", document.text, flags=re.MULTILINE)
    assert len(fences) == 2 * len(document.blocks)


def test_a_document_has_checked_blocks_or_is_known_to_have_none(document: Any) -> None:
    num_checked = sum(block.language in ("bash", "python", "yaml") for block in document.blocks)
    assert (num_checked > 0) == (document.name not in WITHOUT_CODE)


def test_every_line_of_a_bash_block_is_understood(bash_block: Any, workplace: Path) -> None:
    commands = commands_in(bash_block.text)
    assert commands
    for words in commands:
        check(words)


def test_every_command_in_running_text_is_understood(document: Any, workplace: Path) -> None:
    for command in _INLINE.findall(document.prose):
        words = shlex.split(command.replace("\\|", "|"))
        if _PLACEHOLDER.search(command) or command in PARTS or words in [["massl", name] for name in cli.COMMANDS]:
            assert words[0] in CHECKS
            assert words[0] != "massl" or words[1] in {*cli.COMMANDS, "COMMAND"}
        else:  # running text may leave out where to
            check(
                words if "--output" in words or words[:2] != ["massl", "ablate"] else [*words, "--output", "runs/any"]
            )


@pytest.mark.parametrize("name", shipped_recipes())
def test_the_command_in_the_header_of_a_recipe_is_understood(name: str) -> None:
    (words,) = commands_in(recipe_header(shipped_recipes()[name]).splitlines()[0])
    assert words[:4] == ["massl", "pretrain", "--recipe", name]
    check(words)


def test_every_yaml_block_is_a_recipe(yaml_block: Any, tmp_path: Path) -> None:
    recipe = tmp_path / "shown.yaml"
    recipe.write_text(yaml_block.text)
    load_recipe(recipe)
    for method in re.findall(r"^  (\w+):", yaml_block.text.partition("with_method:")[2], flags=re.MULTILINE):
        load_recipe(recipe, {"method.name": method})


@pytest.mark.parametrize(
    "wrong",
    [
        "massl pretrain --recipe no-such-recipe --data.source photos/ --output runs/a",
        "massl pretrain --recipe demo --trainer.epoch 3 --output runs/a",
        "massl pretrain --recipe massl-vits16 --output runs/a",
        "massl evaluate runs/a --protocol nearest --train a --test b --output results",
        "massl compare --methods massl,dyno --recipe demo --output runs/a",
        "massl ablate block-size --recipe demo --values 4096 --output runs/a",
        "massl teach runs/a",
        "massl --completion cmd",
        "massl recipes --for cats",
        "torchrun --nproc-per-nodes 4 -m massl pretrain --recipe demo --output runs/a",
        "make coffee",
        "pip install '.[gpu]'",
        "python benchmarks/step.py --batches 3",
        "mv a b",
    ],
)
def test_a_wrong_command_is_noticed(wrong: str, workplace: Path) -> None:
    (words,) = commands_in(wrong)
    with pytest.raises((Exception, SystemExit, pytest.fail.Exception)):
        check(words)


def test_the_page_on_training_offers_every_recipe_of_the_paper_s_method() -> None:
    table = (ROOT / "docs" / "pretrain.md").read_text(encoding="utf-8").partition("## 2.")[2].partition("## 3.")[0]
    recipes = [name for name in shipped_recipes() if name.startswith("massl-")]
    assert [name for name in recipes if f"| [{name}](" not in table] == []
