"""Commands and code in the documents are the ones that work."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import torch

import massl
from massl.cli import COMMANDS, parse_embed, parse_evaluate, parse_pretrain, parse_visualize
from massl.commands.recipe import recipe_header, shipped_recipes

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def code_blocks(language: str) -> list[str]:
    return [block for path in DOCUMENTS for block in re.findall(rf"```{language}\n(.*?)```", path.read_text(), flags=re.DOTALL)]


def commands_in(text: str) -> list[list[str]]:
    lines = text.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    return [command for command in commands if command]


def massl_commands() -> list[list[str]]:
    documented = [command for block in code_blocks("bash") for command in commands_in(block)]
    in_recipes = [command for path in shipped_recipes().values() for command in commands_in(recipe_header(path).splitlines()[0])]
    return [command[1:] for command in documented + in_recipes if command[0] == "massl"]


def test_documents_and_recipes_show_massl_commands() -> None:
    assert len(massl_commands()) >= 6


@pytest.mark.parametrize("command", massl_commands(), ids=" ".join)
def test_every_massl_command_shown_is_understood(command: list[str]) -> None:
    assert command[0] in COMMANDS
    if command[0] == "pretrain" and "--help" not in command:
        recipe, output = parse_pretrain(command[1:])
        assert recipe.data.source
        assert output
    parsers = {"evaluate": parse_evaluate, "embed": parse_embed, "visualize": parse_visualize}
    if command[0] in parsers:
        model, *_ = parsers[command[0]](command[1:])
        assert model


@pytest.mark.parametrize("command", [command for block in code_blocks("bash") for command in commands_in(block)], ids=" ".join)
def test_every_make_target_shown_exists(command: list[str]) -> None:
    if command[0] == "make":
        assert re.search(rf"^{command[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


def test_the_memory_loss_example_of_the_readme_runs() -> None:
    (example,) = [block for block in code_blocks("python") if "memory_loss(" in block]
    world: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), world)
    student = world["student"]
    assert isinstance(student, torch.Tensor)
    assert student.grad is not None
    assert student.grad.abs().sum() > 0


def test_the_python_example_of_the_readme_calls_what_exists() -> None:
    (example,) = [block for block in code_blocks("python") if "massl.pretrain(" in block]
    called = {
        node.func.attr for node in ast.walk(ast.parse(example)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert called >= {"pretrain", "load_backbone"}
    assert called <= set(massl.__all__)
    (call,) = [node for node in ast.walk(ast.parse(example)) if isinstance(node, ast.Call) and ast.unparse(node.func) == "massl.pretrain"]
    assert {keyword.arg for keyword in call.keywords} <= set(massl.pretrain.__annotations__)


def test_links_between_documents_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} points to {target}"
