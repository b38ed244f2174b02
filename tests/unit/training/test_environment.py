import json
import sys
from pathlib import Path

import pytest
import torch

from massl.training.environment import describe_environment

CPU = torch.device("cpu")


def test_the_command_that_began_a_run_is_kept_when_it_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "environment.json"
    for command in (["massl", "pretrain", "--recipe", "demo"], ["massl", "again"], ["massl", "third"]):
        monkeypatch.setattr(sys, "argv", command)
        file.write_text(json.dumps(describe_environment(CPU, before=file)))
    known = json.loads(file.read_text())
    assert known["first_command"] == ["massl", "pretrain", "--recipe", "demo"]
    assert known["command"] == ["massl", "third"]


@pytest.mark.parametrize("content", ["", "[]", '{"python": 3}', "[" * 9999])
def test_a_damaged_file_does_not_stop_a_run(tmp_path: Path, content: str) -> None:
    file = tmp_path / "environment.json"
    file.write_text(content)
    assert describe_environment(CPU, before=file)["first_command"] == sys.argv
