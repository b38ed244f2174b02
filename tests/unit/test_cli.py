import subprocess
import sys
import time
import tomllib
from importlib import import_module, metadata
from pathlib import Path

import pytest

import massl
from massl import cli
from massl.config import MasslError

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


def test_every_command_but_demo_and_recipes_has_a_python_function_of_its_name() -> None:
    functions = {name.removesuffix("_weights") for name in massl.__all__}  # `import` is no name in Python
    assert {*cli.COMMANDS} - {"demo", "recipes"} == functions - {"load_backbone"}


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_shows_each_example_on_a_line_of_its_own_below_the_purpose(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = "massl.commands.pretrain_arguments" if command == "pretrain" else cli.COMMANDS[command][1]
    purpose, _, rest = import_module(module).DESCRIPTION.partition("\n\n")
    examples = [line for line in rest.splitlines() if line.startswith("massl ")]
    assert examples
    with pytest.raises(SystemExit) as exit_request:
        cli.main([command, "--help"])
    assert exit_request.value.code == 0
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    first = shown.index(purpose) + 1
    assert shown[first : first + len(examples)] == [f"  {example}" for example in examples]
    assert shown[first + len(examples)] == ""


def test_an_unknown_command_suggests_the_nearest_and_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pretrian"]) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert "'pretrian'" in first
    assert "Did you mean 'pretrain'?" in first
    assert all(any(line.split()[:1] == [command] for line in rest) for command in cli.COMMANDS)


def test_ctrl_c_that_a_module_turned_into_an_import_error_is_an_interruption(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def import_plots(arguments: object) -> int:
        raise ImportError("initialization failed") from KeyboardInterrupt()

    monkeypatch.setattr(import_module("massl.commands.recipes"), "main", import_plots)
    assert cli.main(["recipes"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_the_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert massl.__version__ == metadata.version("massl")
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"massl {massl.__version__}\n"
    assert "__version__" in dir(massl)


def test_a_checkout_that_is_not_installed_has_the_version_of_the_project_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_installed)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert massl.__version__ == f"{project['version']}+checkout"


def test_errors_of_public_functions_name_arguments_and_those_of_commands_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MasslError) as raised:
        massl.pretrain(recipe="massl-tiny", output=tmp_path / "run")
    assert "give data," in str(raised.value)
    assert "--" not in str(raised.value)
    assert cli.main(["pretrain", "--recipe", "massl-tiny", "--output", str(tmp_path / "run")]) != 0
    assert "give --data," in capsys.readouterr().err


def test_slow_imports_are_named_and_quick_ones_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with cli._said_if_slow("loading"):
        pass
    monkeypatch.setattr(cli, "_SLOW_SECONDS", 0.001)
    said, deadline = "", time.monotonic() + 120
    with cli._said_if_slow("loading"):
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert said == "loading\n"
