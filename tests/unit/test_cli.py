import subprocess
import sys
from importlib import import_module

import pytest

import massl
from massl import cli

LAZY = """
import sys
import massl
from massl import cli
cli.main(["--help"])
heavy = {"torch", "numpy", "pydantic", "rich", "tyro", "timm", "matplotlib"} & set(sys.modules)
sys.exit(f"imported: {heavy}" if heavy else 0)
"""


def test_importing_massl_and_asking_for_help_imports_nothing_heavy() -> None:
    finished = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert all(command in finished.stdout for command in cli.COMMANDS)


@pytest.mark.parametrize("name", massl.__all__)
def test_the_public_functions_are_found_when_they_are_used(name: str) -> None:
    assert callable(getattr(massl, name))
    assert name in dir(massl)


def test_an_unknown_attribute_of_massl_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="pretrian"):
        _ = massl.pretrian  # type: ignore[attr-defined]


def test_every_command_but_recipes_has_a_python_function_of_its_name() -> None:
    assert {*cli.COMMANDS} - {"recipes"} == {*massl.__all__} - {"load_backbone"}


@pytest.mark.parametrize("command", [command for command in cli.COMMANDS if command != "recipes"])
def test_help_shows_each_example_on_a_line_of_its_own_below_the_purpose(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    purpose, _, rest = import_module(cli.COMMANDS[command][1]).DESCRIPTION.partition("\n\n")
    examples = [line for line in rest.splitlines() if line.startswith("massl ")]
    assert examples
    with pytest.raises(SystemExit) as exit_request:
        cli.main([command, "--help"])
    assert exit_request.value.code == 0
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    first = shown.index(purpose) + 1
    assert shown[first : first + len(examples)] == [f"  {example}" for example in examples]
    assert shown[first + len(examples)] == ""


def test_an_unknown_command_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pretrian"]) == 2
    printed = capsys.readouterr().err
    assert "'pretrian'" in printed
    assert "pretrain" in printed
