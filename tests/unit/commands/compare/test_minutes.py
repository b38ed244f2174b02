import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from massl.commands.compare import command
from massl.commands.compare import minutes as minutes_module
from massl.commands.compare.command import CompareSettings, run_comparison
from massl.commands.compare.minutes import refuse_other_minutes, timed_overrides
from massl.commands.pretrain import PretrainResult
from massl.commands.recipe import PretrainRecipe, load_recipe
from massl.config import MasslError, RecipeError, to_yaml
from massl.planning.costs import Speed
from massl.reports import figures
from massl.reports.comparison import plots

RECIPE: dict[str, Any] = {
    "method": {"name": "massl", "teacher": {"temperature_warmup_epochs": 30}},
    "optimizer": {"warmup_epochs": 10},
    "trainer": {"epochs": 100, "batch_size": 10, "device": "cpu"},
}


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., PretrainRecipe]:
    """load({"trainer.epochs": 3}): the recipe above on 25 images, which are two steps an epoch."""
    np.savez(tmp_path / "images.npz", images=np.zeros((25, 8, 8, 3), dtype=np.uint8), labels=np.arange(25) % 2)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({**RECIPE, "data": {"source": str(tmp_path / "images.npz")}}))
    (tmp_path / "trials").mkdir()
    return lambda overrides=None: load_recipe(tmp_path / "own.yaml", overrides)


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the next trials measure; a trial beyond them is an error."""
    left: list[float] = []
    monkeypatch.setattr(minutes_module, "steady_speed", lambda recipe, source: steady(left.pop(0)))
    return left


def steady(images_per_second: float) -> Speed:
    return Speed(first_pass=1 / images_per_second, later=1 / images_per_second)


# ---- how long --------------------------------------------------------------------------------------------------------


@pytest.fixture
def overrides_of(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What a run of 1.5 minutes is given."""

    def overrides_of(
        recipe: PretrainRecipe,
        *,
        name: str = "own",
        minutes: float = 1.5,
        given: Collection[str] = (),
        told: list[str] | None = None,
    ) -> dict[str, Any]:
        tell = (told if told is not None else []).append
        return timed_overrides(minutes, recipe, run=tmp_path / "out" / name, given=given, tell=tell)

    return overrides_of


@pytest.mark.parametrize(
    ("minutes", "images_per_second", "epochs"),
    [(1.0, 20.0, 60), (1.5, 20.0, 90), (1.0, 20.1, 60), (1.0, 20.3, 61), (0.01, 20.0, 1), (0.5, 0.35, 1)],
)
def test_the_minutes_are_filled_with_whole_epochs_but_at_least_one(
    load: Callable[..., PretrainRecipe],
    speeds: list[float],
    overrides_of: Callable[..., dict[str, Any]],
    minutes: float,
    images_per_second: float,
    epochs: int,
) -> None:
    speeds.append(images_per_second)
    assert overrides_of(load(), minutes=minutes)["trainer.epochs"] == epochs


def test_less_than_half_an_epoch_is_refused_and_leaves_no_note(
    load: Callable[..., PretrainRecipe],
    speeds: list[float],
    overrides_of: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    speeds += [1.0, 1.0, 1.0]  # an epoch of 20 images takes a third of a minute
    with pytest.raises(
        RecipeError,
        match=r"an epoch takes 0.33 minutes, and --minutes 0.16",
    ):
        overrides_of(load(), minutes=0.16)
    assert not (tmp_path / "out" / "minutes.json").exists()
    for minutes in (1 / 6, 0.17):  # half an epoch, which Python would round to none, and more
        assert overrides_of(load(), minutes=minutes)["trainer.epochs"] == 1


@pytest.mark.parametrize(
    ("images_per_second", "minutes_trained"), [(0.38, 1.75), (0.44, 1.52), (0.56, 1.19), (0.46, None), (0.54, None)]
)
def test_rounding_that_changes_the_time_by_more_than_a_tenth_is_warned_of(
    load: Callable[..., PretrainRecipe],
    speeds: list[float],
    overrides_of: Callable[..., dict[str, Any]],
    images_per_second: float,
    minutes_trained: float | None,
) -> None:
    told: list[str] = []
    speeds.append(images_per_second)
    overrides_of(load(), minutes=4 / 3, told=told)  # at half an image a second two epochs of 20 images
    warnings = [what for what in told if what.startswith("warning: ")]
    if minutes_trained is None:
        assert warnings == []
    else:
        assert len(warnings) == 1
        assert f"about {minutes_trained} minutes instead of 1.33333" in warnings[0]


def test_warm_ups_shrink_with_the_epochs_and_all_of_it_is_told_and_noted(
    load: Callable[..., PretrainRecipe],
    speeds: list[float],
    overrides_of: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    speeds.append(10.1)  # 1.5 minutes are 909 images, 45.45 epochs of two steps of 10 images
    told: list[str] = []
    overrides = overrides_of(load(), told=told)
    assert overrides == {
        "trainer.epochs": 45,
        "optimizer.warmup_epochs": 4.5,
        "method.teacher.temperature_warmup_epochs": 13.5,
    }
    trial, plan = told
    assert "trial" in trial
    assert plan == (
        "10 images a second, 2 steps an epoch: 1.5 minutes are 45.45 epochs; trainer.epochs 45 instead of 100; "
        "optimizer.warmup_epochs 4.5 instead of 10; method.teacher.temperature_warmup_epochs 13.5 instead of 30"
    )
    noted = json.loads((tmp_path / "out" / "minutes.json").read_text())
    assert noted == {"minutes": 1.5, "runs": {"own": {"images_per_second": 10.1, **overrides}}}


def test_the_notes_of_several_runs_stand_together(
    load: Callable[..., PretrainRecipe],
    speeds: list[float],
    overrides_of: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    speeds += [10.0, 20.0]
    for name in ("a", "b"):
        overrides_of(load(), name=name)
    noted = json.loads((tmp_path / "out" / "minutes.json").read_text())
    assert {name: run["trainer.epochs"] for name, run in noted["runs"].items()} == {"a": 45, "b": 90}


def test_a_run_longer_than_the_recipe_keeps_its_warm_ups(
    load: Callable[..., PretrainRecipe], speeds: list[float], overrides_of: Callable[..., dict[str, Any]]
) -> None:
    speeds.append(100.0)
    assert overrides_of(load()) == {"trainer.epochs": 450}


def test_a_warm_up_that_was_set_stays_as_it_was_set(
    load: Callable[..., PretrainRecipe], speeds: list[float], overrides_of: Callable[..., dict[str, Any]]
) -> None:
    speeds.append(10.0)
    overrides = overrides_of(load({"optimizer.warmup_epochs": 3}), given={"optimizer.warmup_epochs"})
    assert overrides == {"trainer.epochs": 45, "method.teacher.temperature_warmup_epochs": 13.5}


def test_a_warm_up_that_is_not_there_is_not_invented(
    load: Callable[..., PretrainRecipe], speeds: list[float], overrides_of: Callable[..., dict[str, Any]]
) -> None:
    speeds.append(10.0)
    assert overrides_of(load({"method.name": "mae", "optimizer.warmup_epochs": 0})) == {"trainer.epochs": 45}


def test_a_run_that_is_there_keeps_its_epochs_and_is_not_measured_again(
    load: Callable[..., PretrainRecipe],
    speeds: list[float],
    overrides_of: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    speeds.append(10.0)
    first = overrides_of(load())
    (tmp_path / "out" / "own").mkdir()
    (tmp_path / "out" / "own" / "recipe.yaml").write_text(to_yaml(load(first)))
    told: list[str] = []
    assert overrides_of(load(), told=told) == first
    assert len(told) == 1
    assert "trainer.epochs 45" in told[0]


@pytest.mark.parametrize("also_noted", [{}, {"other": {"trainer.epochs": 100}}, {"own": {"trainer.epochs": 45}}])
def test_a_run_that_was_not_trained_by_minutes_is_refused(
    load: Callable[..., PretrainRecipe],
    overrides_of: Callable[..., dict[str, Any]],
    tmp_path: Path,
    also_noted: dict[str, Any],
) -> None:
    """Whether there is no note, one of other runs, or one of a plan that was not carried out."""
    (tmp_path / "out" / "own").mkdir(parents=True)
    (tmp_path / "out" / "own" / "recipe.yaml").write_text(to_yaml(load()))
    if also_noted:
        (tmp_path / "out" / "minutes.json").write_text(json.dumps({"minutes": 1.5, "runs": also_noted}))
    with pytest.raises(RecipeError, match="own was not trained with --minutes"):
        overrides_of(load())


def test_a_recipe_that_ends_early_is_refused(
    load: Callable[..., PretrainRecipe], speeds: list[float], overrides_of: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(RecipeError, match=r"trainer.max_steps would end .* --set trainer.max_steps=null"):
        overrides_of(load({"trainer.max_steps": 5}))


def test_runs_of_other_minutes_are_not_continued(
    load: Callable[..., PretrainRecipe],
    speeds: list[float],
    overrides_of: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    refuse_other_minutes(tmp_path / "out", 1.5)  # nothing is there yet
    speeds.append(10.0)
    overrides_of(load())
    refuse_other_minutes(tmp_path / "out", 1.5)
    with pytest.raises(RecipeError, match=r"--minutes 1.5, not 3.0; .* --output"):
        refuse_other_minutes(tmp_path / "out", 3.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"minutes": "long", "runs": {}}',
        "[" * 100_000,
        '{"minutes": 1.5, "runs": []}',
        '{"minutes": 1.5, "runs": {"own": 5}}',
        '{"minutes": 1' + "0" * 400 + ', "runs": {}}',
    ],
    ids=lambda text: text[:40],
)
def test_a_note_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "minutes.json").write_text(text)
    with pytest.raises(MasslError, match=r"minutes.json"):
        refuse_other_minutes(tmp_path, 1.5)


def test_a_first_pass_that_decodes_counts_once(
    load: Callable[..., PretrainRecipe], overrides_of: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 images an epoch: the first takes 20 s, the others 2 s each."""
    monkeypatch.setattr(minutes_module, "steady_speed", lambda recipe, source: Speed(first_pass=1.0, later=0.1))
    assert overrides_of(load(), minutes=1.0)["trainer.epochs"] == 1 + 40 / 2
    assert overrides_of(load(), name="short", minutes=0.25)["trainer.epochs"] == 1


# ---- massl compare ---------------------------------------------------------------------------------------------------


class Pretrainer:
    """Stands in for pretrain where runs are trained: writes a run folder and remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, *, recipe: str, output: Path, data: str | None, overrides: dict[str, Any]) -> PretrainResult:
        self.asked.append(overrides)
        output.mkdir(parents=True, exist_ok=True)
        (output / "recipe.yaml").write_text(to_yaml(load_recipe(recipe, overrides)))
        (output / "environment.json").write_text(json.dumps({"device": "cpu", "world_size": 1}))
        (output / "metrics.jsonl").write_text(
            json.dumps({"step": 0, "epoch": 0, "images_per_second": 0.0, "knn_top1": 20.0}) + "\n"
        )
        return PretrainResult(folder=output, step=10, finished=True, signal_number=None, metrics=[])


@pytest.fixture
def pretrainer(monkeypatch: pytest.MonkeyPatch) -> Pretrainer:
    stand_in = Pretrainer()
    monkeypatch.setattr(command, "pretrain", stand_in)
    monkeypatch.setattr(plots, "comparison_figure", lambda curves: None)
    monkeypatch.setattr(figures, "save_figure", lambda figure, stem: None)
    return stand_in


@pytest.fixture
def settings(load: Callable[..., PretrainRecipe], tmp_path: Path) -> CompareSettings:
    return CompareSettings(
        methods=("massl,mae",),
        recipe=str(tmp_path / "own.yaml"),
        minutes=1.5,
        set=("optimizer.learning_rate=0.1",),
        output=str(tmp_path / "out"),
    )


def test_each_method_is_trained_for_the_epochs_that_its_own_speed_allows(
    pretrainer: Pretrainer,
    speeds: list[float],
    settings: CompareSettings,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    speeds += [10.0, 20.0]
    run_comparison(settings)
    massl, mae = pretrainer.asked
    assert (massl["method.name"], massl["trainer.epochs"], massl["method.teacher.temperature_warmup_epochs"]) == (
        "massl",
        45,
        13.5,
    )
    assert (mae["method.name"], mae["trainer.epochs"], mae["optimizer.warmup_epochs"]) == ("mae", 90, 9.0)
    assert all(asked["optimizer.learning_rate"] == 0.1 for asked in pretrainer.asked)
    assert (
        "mae: 20 images a second, 2 steps an epoch: 1.5 minutes are 90.00 epochs; trainer.epochs 90 instead of 100"
        in capsys.readouterr().err
    )
    assert (
        " --set optimizer.learning_rate=0.1 --minutes 1.5 --output" in (tmp_path / "out" / "comparison.md").read_text()
    )


def test_the_same_command_again_measures_nothing_and_other_minutes_are_refused(
    pretrainer: Pretrainer, speeds: list[float], settings: CompareSettings
) -> None:
    speeds += [10.0, 20.0]
    run_comparison(settings)
    run_comparison(settings)
    assert pretrainer.asked[2:] == pretrainer.asked[:2]
    with pytest.raises(RecipeError, match=r"--minutes 1.5, not 2"):
        run_comparison(settings.model_copy(update={"minutes": 2.0}))
    assert len(pretrainer.asked) == 4


def test_runs_of_their_own_epochs_are_not_shown_as_runs_of_minutes(
    pretrainer: Pretrainer, settings: CompareSettings
) -> None:
    run_comparison(settings.model_copy(update={"minutes": None}))
    with pytest.raises(
        MasslError, match=r"there is no run to compare. massl: .*massl was not trained with --minutes; .* mae: "
    ):
        run_comparison(settings)
    assert len(pretrainer.asked) == 2


def test_the_command_to_make_it_again_gives_the_same_minutes(
    pretrainer: Pretrainer, speeds: list[float], settings: CompareSettings, tmp_path: Path
) -> None:
    speeds += [10.0, 20.0]
    run_comparison(settings.model_copy(update={"minutes": 12.3456789}))
    assert " --minutes 12.3456789 " in (tmp_path / "out" / "comparison.md").read_text()
    with pytest.raises(RecipeError, match=r"--minutes 12.3456789, not 12.3457; "):
        run_comparison(settings.model_copy(update={"minutes": 12.3457}))


def test_a_trial_that_fails_does_not_lose_the_others(
    pretrainer: Pretrainer, settings: CompareSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(recipe: PretrainRecipe, source: object) -> Speed:
        if recipe.method.name == "massl":
            raise MasslError("the trial of its speed failed")
        return steady(20.0)

    monkeypatch.setattr(minutes_module, "steady_speed", measured)
    comparison = run_comparison(settings)
    assert [run.label for run in comparison.runs] == ["mae"]
    assert comparison.failed == {"massl": "the trial of its speed failed"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"recipes": ("a",), "set": ("trainer.epochs=3",)},
            "--minutes and --set trainer.epochs",
        ),
        ({"runs": ("a", "b")}, "--runs are compared as they are"),
    ],
)
def test_minutes_do_not_go_with_another_length(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CompareSettings(**given, output="o", minutes=1.5)


@pytest.mark.parametrize("minutes", [0.0, -1.0])
def test_minutes_are_more_than_none(minutes: float) -> None:
    with pytest.raises(ValidationError, match="minutes"):
        CompareSettings(recipes=("a",), output="o", minutes=minutes)
