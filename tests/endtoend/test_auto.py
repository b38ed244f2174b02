"""`massl pretrain photos/` and `massl plan photos/` on a few tiny images."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import massl
from massl.commands import plan as plan_module
from massl.commands.plan import plan_lines
from massl.commands.pretrain_arguments import default_output, parse_pretrain
from massl.config import MasslError
from massl.planning import trial

# what makes a run of seconds; auto chooses the rest
SHORT = ["--trainer.device", "cpu", "--trainer.max_steps", "2", "--probes.every_epochs", "0"]
SMALL = ["--views.global_size", "8", "--backbone.patch_size", "4", "--method.head.hidden_dim", "16"]


@pytest.fixture
def photos(make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trial, "_SECONDS", {"cpu": 0.05})
    return make_folder("photos", 48, classes=4)


@pytest.mark.slow
def test_a_folder_is_enough_and_the_run_keeps_what_was_chosen(photos: Path, massl_here: Any, tmp_path: Path) -> None:
    first = massl_here("pretrain", "photos", *SHORT, *SMALL)
    assert first.status == 0, first.text
    run = tmp_path / "runs" / "photos"
    plan = (run / "plan.txt").read_text()
    assert "auto chooses for your 48 images" in plan
    assert "views.global_size 8: as you asked (auto: 16)" in plan
    assert all(line.strip() in first.text for line in plan.splitlines())
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    assert recipe["backbone"]["image_size"] == 8
    assert recipe["trainer"]["batch_size"] == 16

    again = massl_here("pretrain", "photos", *SHORT[:3], "3", *SHORT[4:])
    assert again.status == 0, again.text
    assert "continuing at step 2 of 3" in again.text
    assert "auto chooses" not in again.text
    for command in ("pretrain", "plan"):
        other = massl_here(command, "photos", *SHORT, "--trainer.batch_size", "8", "--output", "runs/photos")
        assert other.status == 1
        assert "trainer.batch_size was 16, now 8" in other.text
    planned = massl_here("plan", "photos", "--output", "runs/photos")
    assert "runs/photos holds a run: this is its recipe, and its length" in planned.output
    assert "auto chooses" not in planned.output


@pytest.mark.slow
def test_plan_says_what_a_run_costs_and_writes_nothing(photos: Path, massl_here: Any, tmp_path: Path) -> None:
    answer = massl_here("plan", "photos", *SHORT[:2], *SMALL, "--epochs", "3")
    assert answer.status == 0, answer.text
    for words in ("images: 48", "4 label folders", "trainer.epochs 3: as you asked", "memory: ", "speed: ", "disk: "):
        assert words in answer.output
    assert not (tmp_path / "runs").exists()
    (command,) = [line for line in answer.output.splitlines() if line.startswith("start it: massl pretrain ")]
    call = parse_pretrain(command.removeprefix("start it: massl pretrain ").split())
    assert (call.recipe, call.data, call.output) == ("auto", "photos", "runs/photos")
    assert call.overrides["trainer.epochs"] == 3


def test_a_plan_ends_at_the_last_step_and_its_command_gives_the_same_recipe(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"trainer.device": "cpu", "probes.every_epochs": 0.0, "trainer.max_steps": 4, "method.head.hidden_dim": 16}
    planned = massl.plan(photos, overrides={**values, "backbone.timm_options": {"stem_width": 16}}, epochs=3)
    assert planned.steps == 4
    whole = massl.plan(photos, overrides=values | {"trainer.max_steps": None}, epochs=3)
    assert whole.steps == 9
    assert "for 4 steps of 3 epochs" in "".join(plan_lines(planned))
    for share, is_told in ((0.5, True), (0.1, False)):
        monkeypatch.setattr(plan_module, "busy_share", lambda share=share: share)
        lines = plan_lines(massl.plan(photos, overrides=values, epochs=3))
        assert any("caution: other programs used 50%" in line for line in lines) == is_told
    call = parse_pretrain(shlex.split(planned.command)[2:])
    again = massl.plan(photos, overrides=call.overrides)
    assert again.recipe == planned.recipe
    with pytest.raises(MasslError, match=r"epochs and trainer\.epochs differ"):
        massl.plan(photos, overrides={"trainer.epochs": 2}, epochs=3)


def test_the_command_line_gives_auto_what_was_set_and_nothing_else(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    call = parse_pretrain(["photos/", "--method.memory.num_rows", "512", "--views.global_scale", "0.5", "1"])
    assert (call.recipe, call.data, call.output, call.minutes) == ("auto", "photos/", "runs/photos", None)
    assert call.overrides == {"method.memory.num_rows": 512, "views.global_scale": [0.5, 1.0]}
    call = parse_pretrain(["--output", "a", "--minutes", "3", "photos/"])
    assert (call.recipe, call.data, call.output, call.minutes) == ("auto", "photos/", "a", 3.0)
    call = parse_pretrain(["photos/", "--recipe", "massl-tiny", "--epochs", "7"])
    assert call.recipe.trainer.epochs == 7  # type: ignore[union-attr]
    call = parse_pretrain(["--minutes=3", "photos/"])
    assert (call.data, call.minutes) == ("photos/", 3.0)
    assert parse_pretrain(["photos/", "--backbone.patch_size", "None"]).overrides == {"backbone.patch_size": None}
    assert parse_pretrain(["--minutes", "3", "--", "photos/"]).data == "photos/"


def test_a_plan_names_a_folder_that_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for run in ("photos", "photos-2"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "metrics.jsonl").touch()
    assert parse_pretrain(["photos/"], command="plan").output == "runs/photos-3"
    assert parse_pretrain(["photos/"]).output == "runs/photos"  # goes on there
    assert parse_pretrain(["photos/", "--output", "a"], command="plan").output == "a"


def test_warm_ups_that_were_set_are_not_shortened_with_the_minutes(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["photos/", "--recipe", "massl-tiny", "--minutes", "3", "--optimizer.warmup_epochs", "2"]
    assert parse_pretrain(given).overrides == {"optimizer.warmup_epochs": 2.0}


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("photos/", "photos"),
        ("a/b.npz", "b"),
        ("torchvision:CIFAR10?root=data", "CIFAR10"),
        ("demo:train", "train"),
        ("joined:" + "a" * 999, "a" * 100),
    ],
)
def test_runs_are_named_after_their_images(data: str, name: str) -> None:
    assert default_output(data) == Path("runs") / name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pretrain"], "which images?"),
        (["pretrain", "photos", "--minutes", "3", "--epochs", "2"], "--minutes and --epochs"),
        (["pretrain", "photos", "--epochs", "3", "--trainer.epochs", "2"], "--epochs and --trainer.epochs differ"),
        (["plan", "photos", "--init.head_epochs", "2"], "--init.head_epochs needs weights to start from"),
        (["plan", "photos", "--output", "photos"], "photos is not empty and is not a massl run"),
        (["plan", "--data", "photos", "--data.source", "others"], "images are named twice, photos and others"),
        (["plan", "photos", "--data", "others"], "images are named twice, photos and others; name one"),
        (["pretrain", "photos", "--method.name", "dino"], "auto chooses for method massl; .* --recipe dino-tiny"),
        (["pretrain", "nowhere"], "nowhere does not exist"),
        (["plan", "photos", "--recipe", "auto", "--trainer.batch_size", "x"], "expected a whole number"),
        (["plan", "photos", "--views.num_global", "1"], "set views.num_global to 2 or more"),
        (["plan", "photos", "--recipe", "massl-tiny"], "48 images make no batch of 128"),
        (["pretrain", "few"], "12 images are too few to learn from"),
        (["pretrain", "run"], "run is a run of massl, not images; to continue it: massl pretrain --output run"),
    ],
)
def test_what_cannot_be_planned_is_said(
    photos: Path, make_folder: Callable[..., Path], massl_here: Any, arguments: list[str], message: str
) -> None:
    make_folder("few", 12, classes=2)
    run = make_folder("run", 2, classes=1)
    for name in ("recipe.yaml", "backbone.safetensors"):
        (run / name).touch()
    answer = massl_here(*arguments)
    assert answer.status in (1, 2)
    assert re.search(message, answer.text), answer.text


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("trainer.epochs", "a whole number"),
        ("trainer.batch_size", "a whole number"),
        ("method.memory.num_rows", "a whole number"),
        ("optimizer.learning_rate", "a number"),
        ("method.head.batch_norm", "True or False"),
    ],
)
def test_in_python_a_value_of_the_wrong_type_is_named(photos: Path, tmp_path: Path, key: str, expected: str) -> None:
    with pytest.raises(MasslError, match=rf"{key}: expected {expected} \(got 'two'\)"):
        massl.pretrain(photos, output=tmp_path / "run", overrides={key: "two"})
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_auto_is_compared_for_equal_minutes_and_continues(photos: Path, massl_here: Any, tmp_path: Path) -> None:
    options = ["trainer.device=cpu", "probes.every_epochs=0", "views.global_size=8", "backbone.patch_size=4"]
    command = [
        "compare",
        "--recipes",
        "auto",
        "--data",
        "photos",
        "--minutes",
        "0.05",  # an epoch must take less than twice that, also on busy cores
        "--output",
        "out",
        "--set",
        *options,
    ]
    answer = massl_here(*command)
    run = tmp_path / "out" / "auto"
    (why,) = [line for line in (run / "plan.txt").read_text().splitlines() if "trainer.epochs" in line]
    assert "they fill 0.05 minutes at " in why, answer.text
    assert "patch_size 4: as you asked" in (run / "plan.txt").read_text()
    planned = json.loads((tmp_path / "out" / "minutes.json").read_text())["runs"]["auto"]
    assert f"trainer.epochs {planned['trainer.epochs']}: " in why
    assert planned["images_per_second"] > 0
    again = massl_here(*command)
    assert "auto: the run exists and keeps its length" in again.text
    assert "failed" not in again.text
