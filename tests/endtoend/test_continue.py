"""Continuing a run: its folder alone, images that moved or changed, a longer run from its weights."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import massl
from massl.commands.pretrain_arguments import parse_pretrain
from massl.config import MasslError
from massl.training.data_record import ChangedData
from massl.training.run_folder import RunFolderError

NO_PROBES = ["--probes.every_epochs", "0"]


@pytest.fixture
def train(recipe: Path, massl_here: Any, tmp_path: Path) -> Callable[..., Any]:
    """train("run", source, "--some.option", "value", steps=3): a few steps into tmp_path/run."""

    def run(name: str, source: str | Path, *options: str | Path, steps: int = 3) -> Any:
        given = ["--recipe", recipe, "--data.source", source, "--output", tmp_path / name]
        return massl_here("pretrain", *given, *NO_PROBES, "--trainer.max_steps", str(steps), *options)

    return run


def contents(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_the_folder_alone_continues_a_run_bit_for_bit(
    train: Any, massl_here: Any, archive: Path, runs: Any, tmp_path: Path
) -> None:
    assert train("whole", archive, steps=6).status == 0
    assert train("run", archive, steps=2).status == 0
    answer = massl_here("pretrain", "--output", tmp_path / "run", "--trainer.max_steps", "4")
    assert answer.status == 0, answer.text
    assert "continuing at step 2 of 4" in answer.text
    result = massl.pretrain(output=tmp_path / "run", overrides={"trainer": {"max_steps": 6}})
    assert (result.step, result.finished) == (6, True)
    runs.assert_bitwise_equal(tmp_path / "run", tmp_path / "whole")


def test_a_new_run_is_not_suggested_in_a_folder_of_other_things(massl_here: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for options in (["--output", tmp_path], ["--init", tmp_path / "notes.txt"]):
        answer = massl_here("pretrain", *options)
        assert answer.status == 1
        assert "no run is there" in answer.text
        assert "--output" not in answer.text.partition("Start one with: ")[2]
    assert f"photos/ --init {tmp_path / 'notes.txt'}" in answer.text


def test_a_new_folder_without_images_is_refused(massl_here: Any, tmp_path: Path) -> None:
    answer = massl_here("pretrain", "--output", tmp_path / "new")
    assert answer.status == 1
    assert "no run is there" in answer.text
    assert "carp-" not in answer.text  # not a list of all recipes
    assert "Give images, or a recipe that names them" in answer.text
    call = parse_pretrain(shlex.split(answer.text.partition("Start one with: massl pretrain ")[2]))
    assert (call.recipe, call.data, call.output) == ("auto", "photos/", str(tmp_path / "new"))
    with pytest.raises(MasslError, match="no run is there"):
        massl.pretrain(output=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_same_images_elsewhere_continue_bit_for_bit(
    train: Any, make_folder: Any, runs: Any, tmp_path: Path
) -> None:
    photos = make_folder("photos", 16)
    assert train("whole", photos, steps=4).status == 0
    assert train("run", photos, steps=2).status == 0
    shutil.copytree(photos, tmp_path / "moved", copy_function=shutil.copyfile)
    shutil.rmtree(photos)
    answer = train("run", tmp_path / "moved", "--trainer.log_every_steps", "1", "--data.num_workers", "0", steps=4)
    assert answer.status == 0, answer.text
    runs.assert_bitwise_equal(tmp_path / "run", tmp_path / "whole")
    assert runs.state(tmp_path / "run")["data"] == json.loads((tmp_path / "run" / "data.json").read_text())["digest"]


def test_changed_images_are_refused_then_accepted_knowingly_and_recorded(
    train: Any, massl_here: Any, make_folder: Any, runs: Any, tmp_path: Path
) -> None:
    photos, run = make_folder("photos", 16), tmp_path / "run"
    assert train("run", photos, steps=2).status == 0
    first_digest = runs.state(run)["data"]
    shutil.copy(photos / "001.png", photos / "new.png")
    (photos / "000.png").unlink()
    before = contents(run)
    answer = train("run", photos, steps=4)
    assert answer.status == 1
    for expected in ("1 added (new.png)", "1 removed (000.png)", "--data.accept_changes True"):
        assert expected in answer.text
    with pytest.raises(ChangedData):
        massl.pretrain(output=run, overrides={"trainer.max_steps": 4})
    assert contents(run) == before
    answer = train("run", photos, "--data.accept_changes", "True", steps=4)
    assert answer.status == 0, answer.text
    assert runs.state(run)["step"] == 4
    record = json.loads((run / "data.json").read_text())
    assert runs.state(run)["data"] == record["digest"] != first_digest
    (change,) = record["changes"]
    assert (change["digest"], change["after_step"]) == (first_digest, 2)
    # the permission was for that command alone
    assert "accept_changes" not in (run / "recipe.yaml").read_text()
    (photos / "new.png").unlink()
    assert massl_here("pretrain", "--output", run, "--trainer.max_steps", "5").status == 1


def test_a_killed_run_that_accepted_changes_continues_without_accepting_them_again(
    train: Any, make_folder: Any, server: Any, recipe: Path, tmp_path: Path
) -> None:
    photos, run = make_folder("photos", 16), tmp_path / "run"
    assert train("run", photos, steps=2).status == 0
    (photos / "000.png").unlink()
    command = ["pretrain", "--output", run, "--trainer.max_steps", "4"]
    killed = server.run(
        *command, "--data.accept_changes", "True", kill_at_call=["massl.nn.memory:MemoryBank.enqueue", 1, "before"]
    )
    assert killed.status == -9
    answer = server.run(*command)
    assert answer.status == 0, answer.text
    assert "continuing at step 2" in answer.text


def test_a_run_without_a_record_of_its_images_continues_and_gets_one(
    train: Any, archive: Path, runs: Any, tmp_path: Path
) -> None:
    assert train("run", archive, steps=2).status == 0
    (tmp_path / "run" / "data.json").unlink()
    assert train("run", archive, steps=3).status == 0
    assert (tmp_path / "run" / "data.json").exists()


def test_more_epochs_are_a_new_run_from_the_old_weights(
    train: Any, massl_here: Any, archive: Path, runs: Any, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    assert train("old", archive).status == 0
    before = contents(old)
    answer = train("old", archive, "--trainer.epochs", "9")
    assert answer.status == 1
    assert f"massl pretrain --init {old} --output" in answer.text
    start = ["--init", old, "--output", new, "--trainer.epochs", "9", "--trainer.max_steps", "5"]
    answer = massl_here("pretrain", *start)
    assert answer.status == 0, answer.text
    assert f"starting from all weights of {old}, step 3" in answer.text
    assert contents(old) == before
    assert json.loads((new / "start.json").read_text()) == {"from": str(old), "step": 3}
    assert [row["step"] for row in runs.rows(new)] == [0, 1, 2, 3, 4, 5]
    # step 0 is logged with the weights of the old run, not with random ones
    assert runs.rows(new)[0]["loss"] != pytest.approx(runs.rows(old)[0]["loss"], abs=1e-4)
    shutil.rmtree(old)
    assert massl_here("pretrain", *start).status == 0  # finished; the old run is not needed any more
    assert massl_here("pretrain", "--output", new, "--trainer.max_steps", "6").status == 0


@pytest.mark.parametrize(
    "hooks",
    [
        pytest.param(
            {"kill_at_call": ["massl.training.checkpoint:CheckpointStore.load_latest", 1, "before"]},
            id="before the weights",
        ),
        pytest.param({"kill_in_half_a_checkpoint": [1]}, id="while they are kept"),
        pytest.param({"kill_at_call": ["massl.nn.memory:MemoryBank.enqueue", 2, "before"]}, id="in the second step"),
    ],
)
def test_a_run_from_other_weights_killed_anywhere_ends_bit_for_bit_alike(
    hooks: dict[str, list[Any]], train: Any, server: Any, archive: Path, runs: Any, tmp_path: Path
) -> None:
    assert train("old", archive).status == 0

    def start(name: str) -> list[str | Path]:
        return ["pretrain", "--init", tmp_path / "old", "--output", tmp_path / name, "--trainer.epochs", "9"]

    whole = massl.pretrain(
        init=tmp_path / "old", output=tmp_path / "whole", overrides={"trainer": {"epochs": 9, "max_steps": 5}}
    )
    assert whole.step == 5
    assert server.run(*start("run"), "--trainer.max_steps", "5", **hooks).status == -9
    answer = server.run("pretrain", "--output", tmp_path / "run", "--trainer.max_steps", "5", "--trainer.epochs", "9")
    assert answer.status == 0, answer.text
    runs.assert_bitwise_equal(tmp_path / "run", tmp_path / "whole")


def test_a_run_cannot_change_where_it_started(train: Any, archive: Path, tmp_path: Path) -> None:
    assert train("old", archive).status == 0
    assert train("run", archive).status == 0
    answer = train("run", archive, "--init", tmp_path / "old")
    assert answer.status == 1
    assert "random weights" in answer.text
    with pytest.raises(RunFolderError, match="another output"):
        massl.pretrain(output=tmp_path / "run", init=tmp_path / "old")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"backbone": {"name": "vit_small_patch16_224.dino"}}, r"backbone\.name"),
        ({"backbone.timm_options.pretrained": True}, r"backbone\.timm_options\.pretrained"),
    ],
)
def test_published_weights_are_refused_before_anything_is_written(
    overrides: dict[str, Any], key: str, recipe: Path, archive: Path, tmp_path: Path
) -> None:
    with pytest.raises(MasslError, match=key):
        massl.pretrain(recipe=recipe, data=archive, output=tmp_path / "run", overrides=overrides)
    assert not (tmp_path / "run").exists()


def test_a_run_whose_checkpoints_are_gone_is_not_trained_anew_over_its_backbone(
    train: Any, massl_here: Any, archive: Path, tmp_path: Path
) -> None:
    assert train("run", archive).status == 0
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")
    before = contents(tmp_path / "run")
    answer = massl_here("pretrain", "--output", tmp_path / "run")
    assert answer.status == 1
    assert "no checkpoint" in answer.text
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "elsewhere")
    answer = massl_here("pretrain", "--output", tmp_path / "run")
    assert answer.status == 1
    assert "is a link" in answer.text
    (tmp_path / "run" / "checkpoints").unlink()
    assert contents(tmp_path / "run") == before
    (tmp_path / "elsewhere").rename(tmp_path / "run" / "checkpoints")
    answer = massl_here("pretrain", "--output", tmp_path / "run", "--trainer.max_steps", "4")
    assert answer.status == 0, answer.text
    assert "continuing at step 3 of 4" in answer.text
