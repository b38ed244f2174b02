import json
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from pydantic import ValidationError

from massl.commands.compare import command
from massl.commands.compare.command import CompareSettings, compare, run_comparison
from massl.commands.pretrain import PretrainResult, RunInterrupted
from massl.commands.recipe import PretrainRecipe, parse_set_options
from massl.config import MasslError, RecipeError, merge
from massl.reports import figures
from massl.reports.comparison import plots
from massl.reports.runs import RunError

FILES = ["comparison.json", "comparison.md", "comparison.png", "comparison.svg"]


def write_run(folder: Path, changes: dict[str, Any] | None = None, *, accuracy: float = 50.0) -> Path:
    """A run folder as massl pretrain leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = {
        "method": {"name": "massl"},
        "backbone": {"name": "vit_tiny_patch16_224"},
        "data": {"source": "photos"},
        "trainer": {"epochs": 1, "batch_size": 60},
    }
    rows = [
        {"step": 0, "epoch": 0, "images_per_second": 0.0, "knn_top1": 20.0},
        {"step": 10, "epoch": 1, "images_per_second": 10.0, "knn_top1": accuracy},
    ]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(merge(recipe, changes or {}, PretrainRecipe)))
    (folder / "environment.json").write_text(json.dumps({"device": "cpu", "world_size": 1}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@dataclass
class Trainer:
    """Stands in for pretrain: remembers what it was asked for; fails or is stopped where told to."""

    asked: list[dict[str, Any]] = field(default_factory=list)
    fails: dict[str, Exception] = field(default_factory=dict)  # folder's name -> error
    stopped_in: str = ""
    stopped_by: int = signal.SIGTERM

    def __call__(self, *, recipe: str, output: Path, data: str | None, overrides: dict[str, Any]) -> PretrainResult:
        self.asked.append({"recipe": recipe, "output": output, "data": data, "overrides": dict(overrides)})
        if output.name in self.fails:
            raise self.fails[output.name]
        write_run(
            output, {key: value for key, value in overrides.items() if key.startswith(("trainer.", "method.name"))}
        )
        signal_number = self.stopped_by if output.name == self.stopped_in else None
        result = PretrainResult(
            folder=output, step=10, finished=signal_number is None, signal_number=signal_number, metrics=[]
        )
        if signal_number == signal.SIGINT:
            raise RunInterrupted(result)
        return result


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """Nor is anything drawn: that takes a second, and other tests look at it."""
    stand_in = Trainer()
    monkeypatch.setattr(command, "pretrain", stand_in)
    monkeypatch.setattr(plots, "comparison_figure", lambda runs: None)
    monkeypatch.setattr(figures, "save_figure", lambda figure, stem: None)
    return stand_in


# ---- runs that are there ---------------------------------------------------------------------------------------------


def test_runs_are_compared_in_four_files(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", {"trainer.epochs": 2}, accuracy=60.0)]
    comparison = compare(folders, output=tmp_path / "new" / "out")
    assert comparison.folder == tmp_path / "new" / "out"
    assert sorted(path.name for path in comparison.folder.iterdir()) == FILES
    assert [run.last.knn_top1 for run in comparison.runs] == [50.0, 60.0]
    assert comparison.cautions[0] == "not after equal epochs: trainer.epochs is 1 (a), 2 (b)"
    assert comparison.failed == {}
    written = json.loads((comparison.folder / "comparison.json").read_text())
    assert [run["label"] for run in written["runs"]] == ["a", "b"]
    assert written["equal_cost"]["gpu_minutes"] == 1.0
    assert {label: point["knn_top1"] for label, point in written["equal_cost"]["knn"].items()} == {"a": 50.0, "b": 60.0}
    assert written["cautions"] == list(comparison.cautions)
    document = (comparison.folder / "comparison.md").read_text()
    assert "| b | massl | 1/2 | 20.0 | 60.0 |" in document
    assert "![The probes against cost and epochs](comparison.png)" in document


def test_the_papers_table_is_shown_where_it_is_asked_for(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    for data_set, has_paper in ((None, False), ("ImageNet", True)):
        compare([folder], output=tmp_path / "out", data_set=data_set)
        assert ("The paper's table" in (tmp_path / "out" / "comparison.md").read_text()) == has_paper
    with pytest.raises(MasslError, match="no public table is about 'photos'"):
        compare([folder], output=tmp_path / "out", data_set="photos")


def test_folders_of_one_name_are_labelled_apart(tmp_path: Path) -> None:
    comparison = compare(
        [write_run(tmp_path / "x" / "massl"), write_run(tmp_path / "y" / "massl")], output=tmp_path / "out"
    )
    assert [run.label for run in comparison.runs] == ["x/massl", "y/massl"]


def test_a_folder_named_twice_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    with pytest.raises(RunError, match="named twice"):
        compare([folder, folder], output=tmp_path / "out")


def test_a_folder_that_cannot_be_read_does_not_lose_the_others(tmp_path: Path) -> None:
    comparison = compare([tmp_path / "nowhere", write_run(tmp_path / "a")], output=tmp_path / "out")
    assert [run.label for run in comparison.runs] == ["a"]
    assert "nowhere is not a folder" in comparison.failed["nowhere"]
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["failed"] == comparison.failed
    assert "- nowhere: " in (tmp_path / "out" / "comparison.md").read_text()


def test_where_no_folder_can_be_read_all_reasons_are_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(MasslError, match=r"no run to compare\. nowhere: .*nowhere.* empty: .*recipe\.yaml"):
        compare([tmp_path / "nowhere", tmp_path / "empty"], output=tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_the_command_shows_the_table_its_doubts_and_what_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", {"trainer.batch_size": 30}), tmp_path / "gone"]
    comparison = run_comparison(CompareSettings(runs=tuple(map(str, runs)), output=str(tmp_path / "my out")))
    shown = " ".join(capsys.readouterr().out.split())
    assert "a massl 1/1 20.0 50.0 50.0 (1) – 1.00 1.00" in shown
    assert "not at equal cost: trainer.batch_size is 60 (a), 30 (b)" in shown
    assert "failed: gone." in shown
    assert f"comparison: {tmp_path}/my out/comparison.md, .json, .png, .svg" in shown
    repeated = f"massl compare --runs {runs[0]} {runs[1]} {runs[2]} --output '{tmp_path}/my out'"
    assert repeated in (comparison.folder / "comparison.md").read_text()


# ---- runs that are trained first -------------------------------------------------------------------------------------


def test_each_recipe_is_trained_into_a_folder_of_its_name(trainer: Trainer, tmp_path: Path) -> None:
    settings = CompareSettings(
        recipes=("dino-tiny,recipes/own.yaml", "massl-tiny"),
        set=("trainer.epochs=1", "trainer.batch_size=30"),
        data={"source": "photos"},
        output=str(tmp_path / "runs"),
    )
    comparison = run_comparison(settings)
    assert [(asked["recipe"], asked["output"]) for asked in trainer.asked] == [
        ("dino-tiny", tmp_path / "runs" / "dino-tiny"),
        ("recipes/own.yaml", tmp_path / "runs" / "own"),
        ("massl-tiny", tmp_path / "runs" / "massl-tiny"),
    ]
    assert all(asked["data"] == "photos" for asked in trainer.asked)
    assert all(asked["overrides"] == {"trainer.epochs": 1, "trainer.batch_size": 30} for asked in trainer.asked)
    assert [run.label for run in comparison.runs] == ["dino-tiny", "own", "massl-tiny"]
    assert comparison.folder == tmp_path / "runs"
    changes = "--set trainer.epochs=1 trainer.batch_size=30"
    options = f"--recipes dino-tiny,recipes/own.yaml massl-tiny --data photos {changes} --output"
    assert f"massl compare {options} {tmp_path}/runs\n" in (tmp_path / "runs" / "comparison.md").read_text()


def test_methods_are_trained_by_one_recipe_with_one_word_changed(trainer: Trainer, tmp_path: Path) -> None:
    settings = CompareSettings(methods=("massl,dino",), recipe="demo-vit", output=str(tmp_path / "runs"))
    comparison = run_comparison(settings)
    assert [(asked["recipe"], asked["output"].name, asked["overrides"]) for asked in trainer.asked] == [
        ("demo-vit", "massl", {"method.name": "massl"}),
        ("demo-vit", "dino", {"method.name": "dino"}),
    ]
    assert all(asked["data"] is None for asked in trainer.asked)  # those of the recipe
    assert [run.method for run in comparison.runs] == ["massl", "dino"]
    assert (tmp_path / "runs" / "comparison.md").exists()


@pytest.mark.parametrize("error", [RecipeError("no such key"), torch.OutOfMemoryError("tried to allocate 3 GiB")])
def test_a_recipe_that_fails_does_not_lose_the_others(trainer: Trainer, tmp_path: Path, error: Exception) -> None:
    trainer.fails["ibot"] = error
    comparison = run_comparison(CompareSettings(recipes=("dino,ibot,massl",), output=str(tmp_path)))
    assert [run.label for run in comparison.runs] == ["dino", "massl"]
    assert list(comparison.failed) == ["ibot"]
    assert str(error) in comparison.failed["ibot"]


def test_a_run_of_before_that_fails_now_is_not_compared(trainer: Trainer, tmp_path: Path) -> None:
    write_run(tmp_path / "ibot")
    trainer.fails["ibot"] = MasslError("holds a run of another recipe")
    assert [
        run.label for run in run_comparison(CompareSettings(recipes=("ibot,massl",), output=str(tmp_path))).runs
    ] == ["massl"]


def test_a_bug_is_not_taken_for_a_recipe_that_fails(trainer: Trainer, tmp_path: Path) -> None:
    trainer.fails["dino"] = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        run_comparison(CompareSettings(recipes=("dino,massl",), output=str(tmp_path)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_training_and_what_is_there_is_compared(
    number: int, trainer: Trainer, tmp_path: Path
) -> None:
    trainer.stopped_in, trainer.stopped_by = "b", number
    comparison = run_comparison(CompareSettings(recipes=("a,b,c",), output=str(tmp_path)))
    assert [asked["recipe"] for asked in trainer.asked] == ["a", "b"]
    assert [run.label for run in comparison.runs] == ["a", "b"]
    assert comparison.signal_number == number


def test_a_run_does_not_inherit_the_memory_of_the_one_before(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("emptied"))
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda: events.append(f"reset before {len(trainer.asked)}")
    )
    run_comparison(CompareSettings(recipes=("a,b",), output=str(tmp_path)))
    assert events == ["emptied", "reset before 0", "emptied", "reset before 1"]


def test_several_processes_are_sent_to_pretrain(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RecipeError, match="torchrun -m massl pretrain, then massl compare --runs"):
        run_comparison(CompareSettings(recipes=("a,b",), output=str(tmp_path)))
    assert trainer.asked == []


def test_that_nothing_can_be_written_is_said_before_training(trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MasslError, match="--output"):
        run_comparison(CompareSettings(recipes=("a",), output=str(tmp_path / "file" / "out")))
    assert trainer.asked == []


@pytest.mark.parametrize(
    "given",
    [{"recipes": ("a,a",)}, {"recipes": ("x/a.yaml", "y/a.yml")}, {"methods": ("dino", "dino"), "recipe": "demo-vit"}],
)
def test_two_runs_that_would_share_a_folder_are_refused(
    trainer: Trainer, tmp_path: Path, given: dict[str, Any]
) -> None:
    with pytest.raises(RecipeError, match="two runs would share the folder"):
        run_comparison(CompareSettings(**given, output=str(tmp_path)))
    assert trainer.asked == []


def test_the_method_is_not_set_twice(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"--set method.name"):
        run_comparison(
            CompareSettings(methods=("dino",), recipe="demo-vit", set=("method.name=ibot",), output=str(tmp_path))
        )


# ---- options ---------------------------------------------------------------------------------------------------------


def test_overrides_are_read_as_yaml() -> None:
    items = [
        "trainer.epochs=40",
        "views.global_scale=[0.4, 1.0]",
        "trainer.max_steps=null",
        "trainer.cuda_graph=false",
        "data.source=a=b",
    ]
    assert parse_set_options(items) == {
        "trainer.epochs": 40,
        "views.global_scale": [0.4, 1.0],
        "trainer.max_steps": None,
        "trainer.cuda_graph": False,
        "data.source": "a=b",
    }


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["trainer.epochs"], "--set trainer.epochs: expected KEY=VALUE"),
        (["=3"], "--set =3: expected KEY=VALUE"),
        (["a=1", "a=2"], "--set a is given twice"),
        (["a=[1"], "not valid YAML"),
    ],
)
def test_overrides_that_cannot_be_read_are_refused(items: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_set_options(items)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "nothing to compare"),
        ({"runs": ("a",), "recipes": ("b",)}, "--runs and --recipes do not go together"),
        ({"methods": ("dino",)}, "--methods and --recipe go together"),
        ({"recipes": ("a",), "recipe": "demo-vit"}, "--methods and --recipe go together"),
        ({"runs": ("a",), "set": ("trainer.epochs=1",)}, "--runs are compared as they are"),
        ({"runs": ("a",), "minutes": 1.0}, "--runs are compared as they are"),
        ({"runs": ("a",), "data": {"source": "x"}}, "--runs are compared as they are"),
    ],
)
def test_options_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CompareSettings(**given, output="o")


def test_an_output_is_required() -> None:
    with pytest.raises(ValidationError, match="output"):
        CompareSettings(runs=("a",))


# ---- all of it -------------------------------------------------------------------------------------------------------


def tiny_recipe(path: Path, learning_rate: float) -> Path:
    recipe = {
        "data": {"num_workers": 0},
        "views": {"num_local": 0, "global_size": 8},
        "backbone": {
            "name": "vit_tiny_patch16_224",
            "image_size": 8,
            "patch_size": 4,
            "timm_options": {"embed_dim": 8, "depth": 1, "num_heads": 1},
        },
        "method": {"head": {"hidden_dim": 8, "out_dim": 4}, "memory": {"num_rows": 8, "block_size": 4}},
        "optimizer": {"learning_rate": learning_rate},
        "trainer": {"epochs": 4, "batch_size": 8, "precision": "fp32", "device": "cpu", "log_every_steps": 1},
        "probes": {"every_epochs": 1, "num_neighbours": 3},
    }
    path.write_text(yaml.safe_dump(recipe))
    return path


def test_recipes_are_trained_compared_and_not_trained_again(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    np.savez(
        tmp_path / "images.npz",
        images=generator.integers(0, 256, (24, 8, 8, 3), dtype=np.uint8),
        labels=np.arange(24) % 2,
    )
    recipes = [
        str(tiny_recipe(tmp_path / "slow.yaml", 1e-4)),
        str(tiny_recipe(tmp_path / "quick.yaml", 1e-2)),
        "nowhere",
    ]
    settings = CompareSettings(
        recipes=(",".join(recipes),),
        set=("trainer.epochs=2",),
        data={"source": str(tmp_path / "images.npz")},
        output=str(tmp_path / "runs"),
    )
    comparison = run_comparison(settings)
    assert [run.label for run in comparison.runs] == ["slow", "quick"]
    assert "no recipe 'nowhere'" in comparison.failed["nowhere"]
    for run in comparison.runs:
        assert [point.epoch for point in run.probes] == [0, 1, 2]
        assert run.finished
        assert run.images_seen == 2 * 24
        assert 0 < run.gpu_minutes < 10
    # with times, equal only where nothing was trained again
    before = (tmp_path / "runs" / "quick" / "metrics.jsonl").read_text()
    assert run_comparison(settings).runs[1].probes == comparison.runs[1].probes
    assert (tmp_path / "runs" / "quick" / "metrics.jsonl").read_text() == before
