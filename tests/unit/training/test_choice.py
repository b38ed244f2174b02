"""The best weights, the early end and the guard in whole runs: exact when a run is stopped and continued."""

import itertools
import json
import shutil
from pathlib import Path

import pytest

from massl.training import best
from massl.training.metrics_log import read_metrics
from massl.training.trainer import FitResult
from massl.weights.facts import WeightsError
from massl.weights.io import load_backbone, read_safetensors
from massl.weights.models import open_model
from tests.unit.training.test_trainer import assert_equal, checkpoint, fit, rows_without_timing

EACH_STEP = {"probes__every_epochs": 1 / 3}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A probe at each of six steps."""
    output = tmp_path_factory.mktemp("straight")
    assert fit(output, **EACH_STEP) == FitResult(step=6, finished=True, signal_number=None)
    return output


def scores(monkeypatch: pytest.MonkeyPatch, *values: float) -> None:
    """The probes of a run find these scores, one after another; later ones the last."""
    found = itertools.chain(values, itertools.repeat(values[-1]))
    monkeypatch.setattr("massl.training.probes.own_image_found", lambda *features: next(found))


def test_the_best_weights_are_those_of_the_best_probe_and_open_like_the_last(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores(monkeypatch, 50, 10, 20, 30, 5, 5, 5)
    fit(tmp_path, **EACH_STEP)
    assert [row.get("best_step") for row in read_metrics(tmp_path / "metrics.jsonl")] == [None, 1, 2, 3, 3, 3, 3]
    fit(tmp_path / "short", **EACH_STEP, trainer__max_steps=3)
    assert (tmp_path / "best.safetensors").read_bytes() == (tmp_path / "short/backbone.safetensors").read_bytes()
    assert (tmp_path / "backbone.safetensors").read_bytes() == (straight / "backbone.safetensors").read_bytes()
    for which, name in (("best", "best"), ("last", "backbone")):
        opened = load_backbone(tmp_path, which=which).model.state_dict()
        assert_equal(dict(opened), {**opened, **read_safetensors(tmp_path / f"{name}.safetensors")[0]})


def test_a_best_file_of_a_later_step_is_written_again_when_a_killed_run_comes_to_it(
    straight: Path, tmp_path: Path
) -> None:
    fit(tmp_path, **EACH_STEP, trainer__max_steps=3)
    shutil.copy(straight / "best.safetensors", tmp_path)  # as if the run was killed after its last probe
    fit(tmp_path, **EACH_STEP)
    assert rows_without_timing(tmp_path) == rows_without_timing(straight)
    assert (tmp_path / "best.safetensors").read_bytes() == (straight / "best.safetensors").read_bytes()


def test_without_its_best_file_a_run_chooses_among_later_probes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scores(monkeypatch, 9, 90, 90, 90, 10, 10, 10)
    fit(tmp_path, **EACH_STEP, trainer__max_steps=3)
    (tmp_path / "best.safetensors").unlink()
    fit(tmp_path, **EACH_STEP)
    assert "best.safetensors is missing or damaged" in "".join(capsys.readouterr())
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["best_step"] == 4
    assert (tmp_path / "best.safetensors").is_file()


def test_a_flat_run_ends_early_stays_ended_and_goes_on_bit_for_bit_when_told_to(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [row["other_view_top1"] for row in read_metrics(straight / "metrics.jsonl")]
    scores(monkeypatch, 0, 5, 4, 3, *found[4:])
    early = fit(tmp_path, **EACH_STEP, trainer__stop_when_flat=2)
    assert (early.step, early.finished, early.signal_number) == (3, True, None)
    assert "has not risen for 2 probes" in early.ended_early
    assert checkpoint(tmp_path, 3)["step"] == 3
    assert fit(tmp_path, **EACH_STEP, trainer__stop_when_flat=2) == early  # at once, without a probe
    assert fit(tmp_path, **EACH_STEP) == FitResult(step=6, finished=True, signal_number=None)
    assert_equal(checkpoint(tmp_path, 6), checkpoint(straight, 6))


@pytest.mark.parametrize("guard", ["auto", "stop", "off"])
def test_the_guard_speaks_or_stops_when_features_fall_below_the_start(
    guard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "start.json").write_text(json.dumps({"from": "runs/other", "step": 9}))
    monkeypatch.setattr(best, "fall_below", lambda row, start, num_queries: "lower" if row["step"] in (2, 3, 5) else "")
    scores(monkeypatch, 50, 40, 1, 1, 1, 1, 1)
    result = fit(tmp_path, **EACH_STEP, trainer__guard=guard)
    warned = [
        row["step"] for row in read_metrics(tmp_path / "warnings.jsonl") if "than those it started" in row["warning"]
    ]
    assert warned == {"auto": [2, 5], "stop": [2], "off": []}[guard]
    assert (result.step, bool(result.ended_early)) == ((2, True) if guard == "stop" else (6, False))
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["best_step"] == 1


def test_best_weights_open_by_run_and_a_run_without_them_says_so(straight: Path, tmp_path: Path) -> None:
    best_model, file = open_model(straight, which="best"), straight / "best.safetensors"
    assert best_model.fingerprint == open_model(file).fingerprint
    assert best_model.name == str(file)  # results tell it from the last weights of the same run
    for name in (tmp_path, "vit_tiny_patch16_224", file):
        with pytest.raises(WeightsError, match=r"best\.safetensors does not exist"):
            open_model(name, which="best")
    with pytest.raises(WeightsError, match="'last' or 'best'"):
        load_backbone(straight, which="first")  # type: ignore[arg-type]
