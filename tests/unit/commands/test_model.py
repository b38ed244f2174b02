from pathlib import Path

import pytest

from massl.commands.model import ranges_of_run


def test_a_foreign_data_json_beside_no_run_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.json").write_text('{"my": "project data"}')
    Path("weights.pth").write_bytes(b"weights")
    assert ranges_of_run("vit_tiny_patch16_224") is None
    assert ranges_of_run("weights.pth") is None
    assert ranges_of_run(str(tmp_path)) is None
