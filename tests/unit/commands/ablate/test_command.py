"""Which runs an ablation consists of and what becomes of them; training is a stand-in that writes a run's files."""

import json
import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from massl.commands.ablate import command as ablate_module
from massl.commands.ablate.command import AblateSettings, AblationResult, ablate, run_ablation
from massl.commands.ablate.grids import Grid, massl_settings, plan_grid
from massl.commands.ablate.outcomes import choose_yardstick
from massl.commands.pretrain import PretrainResult, RunInterrupted
from massl.commands.pretrain_arguments import parse_pretrain
from massl.commands.recipe import PretrainRecipe, load_recipe
from massl.config import MasslError, RecipeError, to_yaml
from massl.methods.base import MethodSettings
from massl.reports.ablation.records import AblationName, paper_points
from massl.training.bad_steps import TrainingStopped
from massl.training.run_folder import RunFolderError

SOURCE = "demo:train"


def grid(
    kind: AblationName,
    *,
    recipe: str = "massl-cifar",
    num_images: int = 50_000,
    overrides: dict[str, Any] | None = None,
    **changes: Any,
) -> Grid:
    base = load_recipe(recipe, {"data.source": SOURCE, **(overrides or {})})
    return plan_grid(
        kind, base, output=Path("out"), overridden=(overrides or {}).keys(), num_images=num_images, **changes
    )


def sizes(planned: Grid) -> list[tuple[int, int]]:
    return [(run.memory.num_rows, run.memory.block_size) for run in planned.runs]


# ---- which runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory-size", "block-size", "block-sampling"])
def test_with_the_papers_recipe_the_grid_is_the_papers(kind: AblationName) -> None:
    planned = grid(kind, recipe="massl-vits16", num_images=1_281_167)
    assert [(run.value, run.strategy) for run in planned.runs] == [
        (point.value, point.strategy) for point in paper_points(kind)
    ]
    expected = {
        "memory-size": [(size, 4096) for size in (8192, 16384, 32768, 65536, 131072)],
        "block-size": [(65536, size) for size in (512, 1024, 2048, 4096, 8192, 16384, 32768)],
        "block-sampling": [(65536, size) for size in (512, 1024, 2048, 4096)] * 2,
    }
    assert sizes(planned) == expected[kind]


def test_a_smaller_recipe_keeps_the_papers_ratios() -> None:
    assert sizes(grid("memory-size")) == [(size, 1024) for size in (2048, 4096, 8192, 16384, 32768)]
    assert sizes(grid("block-size")) == [(16384, size) for size in (128, 256, 512, 1024, 2048, 4096, 8192)]
    assert sizes(grid("block-sampling")) == [(16384, size) for size in (128, 256, 512, 1024)] * 2
    assert (grid("memory-size").default, grid("block-size").default) == (16384, 4096)


def test_only_block_sampling_deals_rows_in_the_order_of_storage() -> None:
    assert [run.memory.random_blocks for run in grid("block-sampling").runs] == [True] * 4 + [False] * 4
    assert all(run.memory.random_blocks for kind in ("memory-size", "block-size") for run in grid(kind).runs)


def test_recipes_of_runs_differ_in_nothing_but_what_is_varied() -> None:
    base = load_recipe("massl-cifar", {"data.source": SOURCE, "trainer.epochs": 7})
    for run in grid("block-size", overrides={"trainer.epochs": 7}).runs:
        memory = massl_settings(base).memory.model_copy(update={"block_size": run.value})
        assert run.recipe == base.model_copy(update={"method": base.method.model_copy(update={"memory": memory})})


def test_the_quarter_of_a_block_is_said_and_may_be_chosen() -> None:
    (caution,) = grid("memory-size").cautions
    assert "N_b=1,024 rows, a quarter of the recipe's 4,096" in caution
    chosen = grid("memory-size", overrides={"method.memory.block_size": 2048})
    assert sizes(chosen) == [(size, 2048) for size in (2048, 4096, 8192, 16384, 32768)]
    assert chosen.cautions == ()
    assert sizes(grid("block-size", overrides={"method.memory.num_rows": 8192}, values=[64])) == [(8192, 64)]


def test_recipes_of_runs_can_be_written_and_read_again(tmp_path: Path) -> None:
    for run in grid("block-sampling", seeds=[0, 3]).runs:
        (tmp_path / "recipe.yaml").write_text(to_yaml(run.recipe))
        assert load_recipe(tmp_path / "recipe.yaml") == run.recipe


def test_explicit_values_replace_the_grid_each_once_in_order() -> None:
    planned = grid("memory-size", values=[4096, 1024, 4096])
    assert [run.value for run in planned.runs] == [1024, 4096]


def test_each_run_has_a_folder_of_its_own_and_random_blocks_share_that_of_block_size() -> None:
    assert [str(run.folder) for run in grid("memory-size", values=[1024, 2048]).runs] == [
        "out/memory-size/K-1024",
        "out/memory-size/K-2048",
    ]
    assert [str(run.folder) for run in grid("block-sampling", values=[128]).runs] == [
        "out/block-size/N_b-128",
        "out/block-sampling/blockwise-N_b-128",
    ]
    shared, again = grid("block-size", values=[128]).runs[0], grid("block-sampling", values=[128]).runs[0]
    assert (shared.folder, shared.recipe) == (again.folder, again.recipe)


def test_further_seeds_join_the_runs_that_are_there() -> None:
    planned = grid("block-size", values=[128, 256], seeds=[2, 0])
    assert [(run.recipe.trainer.seed, run.seed, run.value, run.folder.name) for run in planned.runs] == [
        (0, 0, 128, "N_b-128"),
        (0, 0, 256, "N_b-256"),
        (2, 2, 128, "N_b-128-seed-2"),
        (2, 2, 256, "N_b-256-seed-2"),
    ]
    assert grid("block-size", values=[128]).runs[0].folder.name == "N_b-128"


# ---- what cannot be run, and what is doubtful ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("block-size", [4096, 32768], "--values: .*32768.* 16384"),
        ("memory-size", [512], "--values: .*1024.* 512"),
        ("block-size", [1], "a block of 1 row is too small"),
    ],
)
def test_values_that_do_not_fit_are_refused(kind: AblationName, values: list[int], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        grid(kind, values=values)


@pytest.mark.parametrize(
    ("kind", "key", "instead"),
    [
        ("memory-size", "method.memory.num_rows", "--values"),
        ("block-size", "method.memory.block_size", "--values"),
        ("block-sampling", "method.memory.random_blocks", "leave it out"),
        ("block-size", "trainer.seed", "--seeds"),
    ],
)
def test_what_the_grid_varies_cannot_be_set_for_all_runs(kind: AblationName, key: str, instead: str) -> None:
    with pytest.raises(RecipeError, match=instead):
        grid(kind, overrides={key: 4096 if key != "method.memory.random_blocks" else True})


def test_values_of_the_papers_grid_without_room_are_left_out_and_said() -> None:
    planned = grid("block-size", overrides={"method.memory.num_rows": 4096})
    assert [run.value for run in planned.runs] == [128, 256, 512, 1024, 2048, 4096]
    assert planned.cautions == ("left out of the paper's grid: N_b=8,192 (the paper's 32,768); 2 to 4,096 rows fit",)
    large_blocks = grid("memory-size", overrides={"method.memory.block_size": 4096})
    assert [run.value for run in large_blocks.runs] == [4096, 8192, 16384, 32768]
    tiny = {"method.memory.num_rows": 8}
    with pytest.raises(RecipeError, match="block"):
        grid("block-sampling", overrides=tiny)  # the recipe itself does not fit
    with pytest.raises(RecipeError, match="give --values"):
        plan_grid(
            "block-sampling",
            load_recipe(
                "massl-cifar", {"data.source": SOURCE, "method.memory.num_rows": 4, "method.memory.block_size": 4}
            ),
            output=Path("out"),
            num_images=100,
        )


def test_a_memory_larger_than_the_data_set_is_cautioned() -> None:
    cautions = grid("memory-size", num_images=10_000).cautions
    assert any("larger than the data set (10,000 images) at K=16,384, 32,768" in caution for caution in cautions)
    assert not any("data set" in caution for caution in grid("memory-size", num_images=32_768).cautions)


def test_rows_that_fill_no_block_are_cautioned() -> None:
    (caution,) = grid("block-size", values=[3000, 4096]).cautions
    assert caution.endswith("K=16,384 N_b=3,000 (1,384)")


class _OtherSettings(MethodSettings):
    name: Literal["other"] = "other"


def test_recipes_of_other_methods_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = load_recipe("massl-cifar").model_copy(update={"method": _OtherSettings()})
    monkeypatch.setattr(ablate_module, "load_recipe", lambda *_: other)
    with pytest.raises(RecipeError, match="memory of massl, but this recipe trains other"):
        ablate("memory-size", recipe="massl-cifar", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- how runs are judged ---------------------------------------------------------------------------------------------


@pytest.fixture
def unlabelled(tmp_path: Path) -> str:
    path = tmp_path / "unlabelled.npz"
    np.savez(path, images=np.zeros((8, 8, 8, 3), dtype=np.uint8))
    return str(path)


def test_images_named_for_the_protocol_are_the_yardstick() -> None:
    recipe = load_recipe("demo-vit", {"probes.every_epochs": 0})
    yardstick = choose_yardstick(recipe, train=SOURCE, test="demo:test")
    assert (yardstick.num_classes, yardstick.measured) == (
        10,
        "protocol knn, k=20, the 2,000 images of demo:test among demo:train",
    )


@pytest.mark.parametrize(
    ("overrides", "num_queries"),
    [
        ({}, 2_000),
        ({"probes.max_queries": 300}, 300),
        ({"probes.max_queries": 9_000}, 2_000),  # all of demo:test
        ({"probes.max_queries": 9_000, "probes.queries": ""}, 4_000),  # half of demo:train is held out
    ],
)
def test_the_probe_is_named_with_the_number_of_its_queries(overrides: dict[str, Any], num_queries: int) -> None:
    yardstick = choose_yardstick(load_recipe("demo-vit", overrides), train=None, test=None)
    assert yardstick.measured == f"last probe, k=20, {num_queries:,} images"


def test_doubtful_classes_are_no_yardstick_unless_they_are_chosen(tmp_path: Path) -> None:
    for name in ("2019/a.jpg", "2019/b.jpg", "2020/c.jpg", "2020/d.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    own_images = {"probes.database": "", "probes.queries": ""}
    with pytest.raises(MasslError, match="labels=folders"):
        choose_yardstick(load_recipe("demo-vit", {**own_images, "data.source": str(tmp_path)}), train=None, test=None)
    chosen = load_recipe("demo-vit", {**own_images, "data.source": f"folder:{tmp_path}?labels=folders"})
    assert choose_yardstick(chosen, train=None, test=None).num_classes == 2


# ---- running ---------------------------------------------------------------------------------------------------------


def metrics_of(recipe: PretrainRecipe, *, knn: float, epoch: int = 14, **changes: float) -> list[dict[str, float]]:
    """Of a run that is well, unless told otherwise."""
    health = {"effective_rank": 30.0, "embedding_spread": 0.7, "teacher_entropy": 2.0, "memory_winner_share": 0.5}
    first = {"step": 0, "epoch": 0, "loss": 5.0, "images_per_second": 0.0, "knn_top1": 60.0, **health}
    rows = [{"step": number, "epoch": 1, "loss": 4.0, "images_per_second": 100.0 * number} for number in (1, 2)]
    return [
        first,
        *rows,
        {"step": 868, "epoch": epoch, "loss": 0.5, "images_per_second": 300.0, "knn_top1": knn, **health, **changes},
    ]


class Stage:
    """Stands in for `pretrain`: block size and random_blocks decide what happens to a run."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.signal_number = signal.SIGTERM  # what ends a run that does not finish
        self.act: dict[tuple[int, bool], Callable[[PretrainRecipe], list[dict[str, float]]]] = {}

    def __call__(self, *, recipe: PretrainRecipe, output: Path) -> PretrainResult:
        self.order.append(output.name)
        memory = massl_settings(recipe).memory
        act = self.act.get(
            (memory.block_size, memory.random_blocks), lambda recipe: metrics_of(recipe, knn=70.0 + recipe.trainer.seed)
        )
        rows = act(recipe)
        (output / "environment.json").write_text(json.dumps({"device": "cpu", "world_size": 1}))
        (output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        finished = rows[-1]["step"] == 868
        number = None if finished else int(self.signal_number)
        result = PretrainResult(
            folder=output, step=int(rows[-1]["step"]), finished=finished, signal_number=number, metrics=rows
        )
        if number == signal.SIGINT:
            raise RunInterrupted(result)
        return result


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Without figures too, which take longer than all else."""
    stage = Stage()
    monkeypatch.setattr(ablate_module, "pretrain", stage)
    monkeypatch.setattr("massl.reports.figures.save_figure", lambda *_: None)
    return stage


@pytest.fixture
def run(stage: Stage, tmp_path: Path) -> Callable[..., AblationResult]:
    def run(kind: AblationName = "block-size", **changes: Any) -> AblationResult:
        given = {"recipe": "demo-vit", "output": tmp_path / "out", "values": (64, 128), **changes}
        return ablate(kind, **given)

    return run


def states(result: AblationResult) -> dict[int, str]:
    return {point.value: run.state for point in result.report.points for run in point.runs}


def fail(_: PretrainRecipe) -> list[dict[str, float]]:
    raise TrainingStopped("the loss of step 3 is nan: training stopped")


def test_runs_are_read_into_table_page_and_json(run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = run(values=(512, 1024), seeds=(0, 1, 2), overrides={"trainer.epochs": 14})
    assert [(point.value, point.mean, point.deviation) for point in result.report.points] == [
        (512, 71.0, 1.0),
        (1024, 71.0, 1.0),
    ]
    first = result.report.points[0].runs[0]
    assert (first.knn_start, first.knn_last, first.effective_rank, first.images_per_second) == (60.0, 70.0, 30.0, 250.0)
    assert first.collapse_signs == ()
    folder = tmp_path / "out" / "block-size"
    assert result.folder == folder
    plain = json.loads((folder / "ablation.json").read_text())
    assert plain["ours"] == "demo-vit (vit_tiny_patch16_224) on demo:train (8,000 images), 14 epochs, batch 128"
    changes = "--values 512 1024 --seeds 0 1 2 --set trainer.epochs=14"
    command = f"massl ablate block-size --recipe demo-vit --output {tmp_path / 'out'} {changes}"
    assert plain["command"] == command
    assert command in (folder / "ablation.md").read_text()
    shown = capsys.readouterr()
    assert "71.00 ± 1.00" in shown.out
    assert "70.6" in shown.out  # the paper's, of twice its default
    assert "run 6 of 6: K=2,048, N_b=1,024, random blocks, seed 2" in shown.err


def test_without_labels_or_probes_nothing_is_trained(unlabelled: str, stage: Stage, tmp_path: Path) -> None:
    def attempt(**changes: Any) -> None:
        ablate("block-size", recipe="demo-vit", output=tmp_path / "out", **changes)

    with pytest.raises(MasslError, match="has no labels"):
        attempt(data=unlabelled, overrides={"probes.database": "", "probes.queries": ""})
    with pytest.raises(MasslError, match="has no labels"):
        attempt(train=SOURCE, test=unlabelled)
    with pytest.raises(RecipeError, match="every_epochs is 0"):
        attempt(overrides={"probes.every_epochs": 0})
    with pytest.raises(RecipeError, match="train and test go together"):
        attempt(train=SOURCE)
    assert stage.order == []
    assert not (tmp_path / "out").exists()


def test_a_run_that_cannot_go_on_is_recorded_and_the_others_go_on(run: Any, stage: Stage, tmp_path: Path) -> None:
    def out_of_memory(_: PretrainRecipe) -> list[dict[str, float]]:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    stage.act = {(64, True): fail, (128, True): out_of_memory}
    result = run(values=(64, 128, 256))
    assert stage.order == ["N_b-64", "N_b-128", "N_b-256"]
    assert states(result) == {64: "failed", 128: "failed", 256: "finished"}
    folder = tmp_path / "out" / "block-size"
    assert result.failed == {
        str(folder / "N_b-64"): "the loss of step 3 is nan: training stopped",
        str(folder / "N_b-128"): "tried to allocate 2 GiB",
    }
    assert "the loss of step 3 is nan" in (folder / "ablation.md").read_text()


def test_mistakes_of_the_user_are_not_taken_for_results(run: Any, stage: Stage) -> None:
    def refuse(_: PretrainRecipe) -> list[dict[str, float]]:
        raise RecipeError("views.local_size is no multiple of the patch")

    stage.act = {(64, True): refuse}
    with pytest.raises(RecipeError, match="multiple of the patch"):
        run()


def test_several_processes_are_sent_to_the_plan(
    run: Any, stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with pytest.raises(RecipeError, match=r"--plan True .* torchrun"):
        run()
    assert not (tmp_path / "out").exists()


def test_the_plan_is_a_command_for_every_run_that_makes_exactly_it(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {"values": (64,), "seeds": (0, 1), "set": ("trainer.epochs=3",), "plan": True}
    result = run_ablation(
        AblateSettings(kind="block-sampling", recipe="demo-vit", output=str(tmp_path / "out"), **changes)
    )
    assert stage.order == []
    assert {run.state for point in result.report.points for run in point.runs} == {"waiting"}
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [command[:2] for command in commands] == [["massl", "pretrain"]] * 4
    planned = grid("block-sampling", recipe="demo-vit", overrides={"trainer.epochs": 3}, values=[64], seeds=[0, 1]).runs
    for command, run in zip(commands, planned, strict=True):
        call = parse_pretrain(command[2:])
        assert call.recipe == run.recipe
        assert Path(call.output) == tmp_path / run.folder
    assert not list(tmp_path.rglob("ablation.*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_grid_and_what_is_known_is_written(
    number: signal.Signals, run: Any, stage: Stage, tmp_path: Path
) -> None:
    stage.signal_number = number
    stage.act = {(128, True): lambda recipe: metrics_of(recipe, knn=65.0)[:3]}
    result = run(values=(64, 128, 256))
    assert result.signal_number == number
    assert stage.order == ["N_b-64", "N_b-128"]
    assert states(result) == {64: "finished", 128: "unfinished", 256: "waiting"}
    plain = json.loads((tmp_path / "out" / "block-size" / "ablation.json").read_text())
    assert [point["mean"] for point in plain["points"]] == [70.0, None, None]


def test_the_report_grows_with_every_run(run: Any, stage: Stage, tmp_path: Path) -> None:
    def look(recipe: PretrainRecipe) -> list[dict[str, float]]:
        plain = json.loads((tmp_path / "out" / "block-size" / "ablation.json").read_text())
        assert [point["mean"] for point in plain["points"]] == [70.0, None]
        return metrics_of(recipe, knn=65.0)

    stage.act = {(128, True): look}
    assert [point.mean for point in run().report.points] == [70.0, 65.0]


def test_a_folder_of_another_recipe_is_told_of_before_anything_is_trained(run: Any, stage: Stage) -> None:
    run(values=(128,))
    stage.order.clear()
    with pytest.raises(RunFolderError, match=r"N_b-128 holds a run of another recipe: trainer.epochs was 14, now 3"):
        run(values=(64, 128), overrides={"trainer.epochs": 3})
    assert stage.order == []


def test_a_collapsed_run_is_a_result(run: Any, stage: Stage) -> None:
    stage.act = {(64, False): lambda recipe: metrics_of(recipe, knn=11.0, effective_rank=1.01, embedding_spread=0.001)}
    result = run("block-sampling", values=(64,))
    random, blockwise = (point.runs[0] for point in result.report.points)
    assert (random.state, random.collapse_signs) == ("finished", ())
    assert blockwise.state == "finished"
    assert blockwise.accuracy == 11.0
    signs = "; ".join(blockwise.collapse_signs)
    assert "span a single direction (effective rank 1.01)" in signs
    assert "nearly the same vector" in signs
    assert "k-NN accuracy 11.0 % is near that of guessing (10.0 %)" in signs


@pytest.mark.parametrize(("knn", "is_near"), [(9.0, True), (14.4, True), (14.6, False), (70.0, False)])
def test_near_chance_is_a_twentieth_of_the_way_to_perfection(knn: float, is_near: bool, run: Any, stage: Stage) -> None:
    stage.act = {(64, True): lambda recipe: metrics_of(recipe, knn=knn)}
    (point,) = run(values=(64,)).report.points
    assert bool(point.num_collapsed) == is_near


def test_the_first_epochs_are_too_early_for_signs_of_collapse(run: Any, stage: Stage) -> None:
    stage.act = {(64, True): lambda recipe: metrics_of(recipe, knn=10.0, epoch=1, effective_rank=1.0)}
    (point,) = run(values=(64,)).report.points
    assert point.runs[0].collapse_signs == ()


def test_an_unknown_ablation_is_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"kind: .*'memory-size', 'block-size' or 'block-sampling'.*'memory-siz'"):
        ablate("memory-siz", recipe="demo-vit", output=tmp_path)  # type: ignore[arg-type]
