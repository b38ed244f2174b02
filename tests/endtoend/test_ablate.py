"""`massl ablate` from a tiny recipe to table and figure: real runs on the bundled images, stopped and continued."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import massl
from massl.commands.ablate.command import AblationResult, ablate
from massl.training.trainer import Trainer

# 3 of 1,000 steps each on 8,000 images; the recipe has K=32 and N_b=8.
FEW_STEPS: dict[str, Any] = {
    "trainer.epochs": 1,
    "trainer.max_steps": 3,
    "probes.max_database": 100,
    "probes.max_queries": 50,
    "data.num_workers": 0,
}


def _ablate(
    recipe: Path, output: Path, *, kind: Any = "block-size", values: tuple[int, ...] = (8, 16), **changes: Any
) -> AblationResult:
    return ablate(
        kind, recipe=recipe, data="demo:train", output=output, values=values, **{"overrides": FEW_STEPS, **changes}
    )


def _states(result: AblationResult) -> list[tuple[int, str, str]]:
    return [(point.value, point.strategy, run.state) for point in result.report.points for run in point.runs]


@pytest.fixture(scope="module")
def stopped(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, AblationResult]:
    """A grid of two runs that a signal stops in the second step of the second run."""
    output, original, num_updates = tmp_path_factory.mktemp("ablation") / "out", Trainer._update, 0

    def update(self: Trainer, *inputs: Any) -> Any:
        nonlocal num_updates
        num_updates += 1
        if num_updates == 5:
            signal.raise_signal(signal.SIGTERM)
        return original(self, *inputs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Trainer, "_update", update)
        return output, _ablate(recipe, output)


@pytest.fixture(scope="module")
def continued(stopped: tuple[Path, AblationResult], recipe: Path) -> tuple[Path, AblationResult, dict[Path, int]]:
    """The same call again, and when the files of the finished run had last been written before it."""
    output, _ = stopped
    first = output / "block-size" / "N_b-8"
    kept = [first / "metrics.jsonl", first / "backbone.safetensors", *(first / "checkpoints").iterdir()]
    before = {path: path.stat().st_mtime_ns for path in kept}
    return output, _ablate(recipe, output), before


def test_a_signal_stops_the_grid_with_what_is_known(stopped: tuple[Path, AblationResult]) -> None:
    output, result = stopped
    assert result.signal_number == signal.SIGTERM
    assert _states(result) == [(8, "random", "finished"), (16, "random", "unfinished")]
    done = result.report.points[0]
    assert done.mean is not None
    assert 0 <= done.mean <= 100
    assert (output / "block-size" / "N_b-16" / "checkpoints" / "step_000000002.pt").exists()


def test_the_same_call_continues_and_ends_as_a_run_that_was_never_stopped(
    continued: tuple[Path, AblationResult, dict[Path, int]], runs: Any, tmp_path: Path
) -> None:
    output, result, before = continued
    assert result.signal_number is None
    assert _states(result) == [(8, "random", "finished"), (16, "random", "finished")]
    assert {path: path.stat().st_mtime_ns for path in before} == before  # what was finished is not trained again
    run = output / "block-size" / "N_b-16"
    alone = massl.pretrain(recipe=run / "recipe.yaml", output=tmp_path / "alone")
    runs.assert_bitwise_equal(run, alone.folder)
    assert result.report.points[1].mean == alone.metrics[-1]["knn_top1"]


def test_page_json_and_figure_tell_of_all_runs(continued: tuple[Path, AblationResult, dict[Path, int]]) -> None:
    output, result, _ = continued
    folder = output / "block-size"
    page = (folder / "ablation.md").read_text()
    assert f"--output {output}" in page
    assert all(f"| {point.value} | " in page for point in result.report.points)
    assert "N_b=16,384 (71.9 %)" in page
    plain = json.loads((folder / "ablation.json").read_text())
    assert [point["mean"] for point in plain["points"]] == [point.mean for point in result.report.points]
    assert [point["paper_value"] for point in plain["points"]] == [16384, 32768]  # once and twice the default
    with Image.open(folder / "ablation.png") as picture:
        assert picture.width > 1000


def test_blockwise_runs_stand_beside_the_random_ones_that_block_size_made(
    continued: tuple[Path, AblationResult, dict[Path, int]], recipe: Path
) -> None:
    output, random, before = continued
    result = _ablate(recipe, output, kind="block-sampling", values=(8,), train="demo:test", test="demo:test")
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert _states(result) == [(8, "random", "finished"), (8, "blockwise", "finished")]
    shared, blockwise = (point.runs[0] for point in result.report.points)
    assert shared.folder == random.report.points[0].runs[0].folder
    assert Path(blockwise.folder) == output / "block-sampling" / "blockwise-N_b-8"
    assert massl.load_backbone(blockwise.folder)
    measured = massl.evaluate(
        shared.folder, output=output / "again", protocol="knn", train="demo:test", test="demo:test"
    )
    top1 = {str(row.setting).partition(",")[0]: row.value for row in measured.rows if row.metric == "top1"}
    assert shared.evaluated == {k: top1[f"k={k}"] for k in (10, 20, 100, 200)}
    assert shared.accuracy == top1["k=20"]


def test_a_loss_that_is_no_number_is_a_line_of_the_table(recipe: Path, massl_here: Any, tmp_path: Path) -> None:
    values = [f"{key}={value}" for key, value in FEW_STEPS.items()]
    options = ["--values", "8", "--set", *values, "optimizer.learning_rate=1e30", "--output", tmp_path / "out"]
    answer = massl_here("ablate", "block-size", "--recipe", recipe, "--data.source", "demo:train", *options)
    assert answer.status == 1
    assert "8 1 -- failed 16,384 71.9" in answer.text
    assert "training stopped" in " ".join(answer.output.split())
    assert json.loads((tmp_path / "out" / "block-size" / "ablation.json").read_text())["points"][0]["mean"] is None


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--values", "64"], 1, "block_size"),
        (["--values", "0"], 2, "values"),
        (["--set", "trainer.epoch=3"], 1, "trainer.epoch"),
        (["--set", "method.name=dino"], 1, "dino"),
        (["--test", "demo:test"], 2, "train and test"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(
    options: list[str], status: int, message: str, recipe: Path, massl_here: Any, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    answer = massl_here(
        "ablate", "block-size", "--recipe", recipe, "--data.source", "demo:train", "--output", output, *options
    )
    assert answer.status == status, answer.text
    assert message in answer.text
    assert not output.exists()


def test_the_plan_is_printed_and_nothing_trained(recipe: Path, massl_here: Any, tmp_path: Path) -> None:
    output = tmp_path / "out"
    options = ["--data.source", "demo:train", "--values", "8", "16", "--output", output, "--plan", "True"]
    answer = massl_here("ablate", "block-size", "--recipe", recipe, *options)
    assert answer.status == 0
    folders = [output / "block-size" / f"N_b-{value}" for value in (8, 16)]
    assert answer.output.splitlines() == [
        f"massl pretrain --recipe {folder}/recipe.yaml --output {folder}" for folder in folders
    ]
    assert not list(output.rglob("metrics.jsonl"))
