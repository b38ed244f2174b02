"""A timm model through every evaluation of the paper, from files in the published layouts."""

import json
from pathlib import Path

import pytest

from massl.commands.evaluate.command import EvaluateResult, evaluate
from massl.evaluations.suite import PAPER_SUITE

pytestmark = pytest.mark.slow
# As few passes as show that everything runs: 16 px are one patch of the model, and its tokens two.
QUICK = {
    "image_size": 16,
    "device": "cpu",
    "num_workers": 0,
    "linear.epochs": 1,
    "linear.held_out": 0.0,
    "linear.base_rates": [0.1, 1.0],
    "low_shot.draws": 2,
    "low_shot.per_class": [1],
    "low_shot.linear.epochs": 1,
    "low_shot.linear.crops": "centre",
    "low_shot.linear.base_rates": [0.1],
    "low_shot.logreg.max_iterations": 3,
    "knn.ks": [1],
    "logreg.max_iterations": 3,
    "long_tail.linear.epochs": 1,
    "long_tail.linear.base_rates": [0.1],
    "retrieval.max_side": 80,
    "attention.num_images": 4,
    "attention.num_figures": 1,
    "correspondence.num_images": 4,
    "correspondence.num_figures": 1,
    "clustering.num_iterations": 2,
    "clustering.num_restarts": 1,
}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("suite")


@pytest.fixture(scope="module")
def result(published_root: Path, output: Path) -> EvaluateResult:
    return evaluate("vit_small_patch16_224", suite="paper", data_root=published_root, output=output, overrides=QUICK)


def test_every_evaluation_of_the_paper_gives_numbers(result: EvaluateResult) -> None:
    assert result.failed == {}
    assert result.missing == {}
    assert {(row.protocol, row.data) for row in result.rows} == {(entry.protocol, entry.data) for entry in PAPER_SUITE}
    assert {row.architecture for row in result.rows} == {"ViT-S/16"}
    for row in result.rows:
        assert 0 <= row.value <= 100 or row.metric in ("AMI", "ARI", "top1 gap") or "gap" in str(row.setting).lower(), (
            row
        )


def test_results_are_kept_with_all_that_made_them(result: EvaluateResult, output: Path) -> None:
    rows = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    wanted = {"protocol", "data", "setting", "metric", "value", "num_samples", "seconds", "weights", "model", "run"}
    assert all(wanted <= row.keys() for row in rows)
    assert len(rows) == len(result.rows)
    table = (output / "results.md").read_text()
    assert "average of 8" in table
    assert (output / "ImageNet" / "linear_head.safetensors").is_file()
    assert list((output / "ImageNet" / "attention").glob("*.png"))
    assert list((output / "ImageNet" / "correspondence").glob("*.png"))


def test_settings_that_are_not_the_published_ones_say_so_and_stand_beside_no_figure_of_the_paper(
    result: EvaluateResult, output: Path
) -> None:
    assert all(", 16 px" in str(row.setting) for row in result.rows)
    assert "75.1" not in (output / "results.md").read_text()


def test_the_same_command_again_measures_nothing_twice(
    result: EvaluateResult, output: Path, published_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = (output / "results.jsonl").read_bytes()
    again = evaluate("vit_small_patch16_224", suite="paper", data_root=published_root, output=output, overrides=QUICK)
    assert (output / "results.jsonl").read_bytes() == before
    assert [row.value for row in again.rows] == [row.value for row in result.rows]
    assert "measured before" in capfd.readouterr().err


def test_what_is_missing_is_named_with_the_files_it_needs(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    answer = evaluate(
        "vit_small_patch16_224", suite="paper", data_root=tmp_path / "data", output=tmp_path / "out", overrides=QUICK
    )
    assert answer.rows == []
    assert len(answer.missing) == len(PAPER_SUITE)
    assert "oxford-iiit-pet" in answer.missing["knn on Pets"]
    assert "gnd_roxford5k.pkl" in answer.missing["retrieval on ROxford5k"]
