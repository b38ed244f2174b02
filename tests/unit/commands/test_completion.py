"""The completion script, in a real bash."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from massl import cli
from massl.commands.completion import SETTINGS, completion_script
from massl.commands.recipes import shipped_recipes
from massl.methods import METHODS

_ASK = """
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_massl
printf "%s\\n" "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "massl.sh"
    file.write_text(completion_script())
    return file


def completed(script: Path, line: str) -> set[str]:
    """What bash offers for the last word of a line; a line that ends in a space asks for the next word."""
    words = shlex.split(line) + ([""] if line.endswith(" ") else [])
    asked = f"source {script}\n" + _ASK.format(words=shlex.join(words))
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    answer = subprocess.run([bash, "--norc", "-c", asked], capture_output=True, text=True, check=True)
    assert not answer.stderr
    return set(answer.stdout.split())


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("massl pre", {"pretrain"}),
        ("massl --ver", {"--version"}),
        ("massl pretrain --trainer.ep", {"--trainer.epochs"}),
        ("massl pretrain --recipe massl-t", {"massl-tiny"}),
        ("massl pretrain --method.name ", set(METHODS)),
        ("massl pretrain --method.pred", {"--method.predictor.num_layers", "--method.predictor.hidden_dim"}),
        ("massl compare --dat", {"--data", "--data.source", "--data_set"}),
        ("massl pretrain --init.we", {"--init.weights"}),
        ("massl evaluate runs/a --protocol knn lo", {"logreg", "low-shot", "long-tail"}),
        ("massl visualize runs/a att", {"attention"}),
        ("massl report runs/a --no", {"--no-figures"}),
        ("massl recipes --fo", {"--for"}),
        ("massl recipes ", {"auto", *shipped_recipes()}),
        ("massl embed --output fea", set()),  # left to bash: file names
    ],
)
def test_bash_completes_commands_options_and_values(script: Path, line: str, offered: set[str]) -> None:
    assert completed(script, line) == offered


def test_bash_completes_the_short_names_of_options(script: Path) -> None:
    assert {"--init", "--init.weights"} <= completed(script, "massl pretrain --ini")


def test_every_command_is_completed(script: Path) -> None:
    assert set(SETTINGS) == set(cli.COMMANDS)
    assert completed(script, "massl ") >= set(cli.COMMANDS)


def test_the_script_is_printed_for_known_shells_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--completion", "bash"]) == 0
    bash = capsys.readouterr().out
    assert cli.main(["--completion", "zsh"]) == 0
    assert capsys.readouterr().out.endswith(bash)
    assert cli.main(["--completion", "cmd"]) == 2
    assert "bash" in capsys.readouterr().err
