import pytest

from massl import cli

HELP_TEXTS = {
    "pretrain": cli._PRETRAIN_HELP,
    "evaluate": cli._EVALUATE_HELP,
    "embed": cli._EMBED_HELP,
    "visualize": cli._VISUALIZE_HELP,
    "compare": cli._COMPARE_HELP,
    "ablate": cli._ABLATE_HELP,
    "report": cli._REPORT_HELP,
}


@pytest.mark.parametrize("command", [command for command in cli.COMMANDS if command != "recipes"])
def test_help_shows_each_example_on_a_line_of_its_own_below_the_purpose(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    purpose, _, rest = HELP_TEXTS[command].partition("\n\n")
    examples = [line for line in rest.splitlines() if line.startswith("massl ")]
    assert examples
    with pytest.raises(SystemExit) as exit_request:
        cli.main([command, "--help"])
    assert exit_request.value.code == 0
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    first = shown.index(purpose) + 1
    assert shown[first : first + len(examples)] == [f"  {example}" for example in examples]
    assert shown[first + len(examples)] == ""
