"""`massl compare --minutes` from a tiny recipe to the table, with real trials and runs; neither is repeated."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

# More epochs than the minutes have room for, so that warm-ups are shortened.
VARIANT: dict[str, Any] = {
    "mocov3": {
        "views": {"num_local": 0},
        "method": {
            "teacher": {"momentum": 0.9},
            "projector": {"hidden_dim": 16, "out_dim": 8},
            "predictor": {"hidden_dim": 16},
        },
    }
}
LENGTH: dict[str, Any] = {
    "optimizer": {"warmup_epochs": 100_000},
    "trainer": {"epochs": 1_000_000},
    "probes": {"every_epochs": 10},
}


@pytest.fixture
def command(recipe: Path, archive: Path, tmp_path: Path) -> list[str]:
    values = yaml.safe_load(recipe.read_text())
    for section, changes in LENGTH.items():
        values.setdefault(section, {}).update(changes)
    (tmp_path / "long.yaml").write_text(yaml.safe_dump({**values, "with_method": VARIANT}))
    command = ["compare", "--methods", "massl,mocov3", "--recipe", tmp_path / "long.yaml", "--data.source", archive]
    return [*map(str, command), "--minutes", "0.01", "--output", str(tmp_path / "runs")]


def test_two_methods_train_for_the_same_minutes_and_the_same_command_only_shows_them_again(
    command: list[str], massl_here: Any, tmp_path: Path
) -> None:
    answer = massl_here(*command)
    assert answer.status == 0, answer.text
    runs = tmp_path / "runs"
    assert {path.name for path in runs.iterdir() if path.is_dir()} == {"massl", "mocov3"}  # trials are gone
    noted = json.loads((runs / "minutes.json").read_text())["runs"]
    for method in ("massl", "mocov3"):
        trained = yaml.safe_load((runs / method / "recipe.yaml").read_text())
        images = 0.01 * 60 * noted[method]["images_per_second"]
        assert trained["trainer"]["epochs"] == noted[method]["trainer.epochs"] == max(1, round(images / 48))
        assert trained["optimizer"]["warmup_epochs"] == round(trained["trainer"]["epochs"] / 10, 3)
        assert f"{method}: {noted[method]['images_per_second']:,.0f} images a second" in answer.text
    rows = (runs / "massl" / "metrics.jsonl").read_text()
    assert json.loads(rows.splitlines()[-1])["epoch"] == noted["massl"]["trainer.epochs"]
    assert re.search(r"k-NN at [\d.]+ CPU min \(probe at\)", (runs / "comparison.md").read_text())

    again = massl_here(*command)
    assert again.status == 0
    assert (
        f"massl: the run exists and keeps its length, trainer.epochs {noted['massl']['trainer.epochs']}" in again.text
    )
    # with times, equal only where nothing was trained again
    assert (runs / "massl" / "metrics.jsonl").read_text() == rows


def test_epochs_beside_minutes_are_refused_on_the_command_line(
    command: list[str], massl_here: Any, tmp_path: Path
) -> None:
    answer = massl_here(*command, "--set", "trainer.epochs=3")
    assert answer.status == 2
    assert "--minutes" in answer.text
    assert "trainer.epochs" in answer.text
    assert not (tmp_path / "runs").exists()
