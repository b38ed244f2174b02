import gc
import json
import os
import shlex
from pathlib import Path

import pytest
import yaml

from massl.commands.recipe import PretrainRecipe, load_recipe
from massl.config import flatten
from massl.data.identity import DataIdentity
from massl.training.data_record import ChangedData
from massl.training.run_folder import MAY_CHANGE, RunFolder, RunFolderError


def recipe(**changes: object) -> PretrainRecipe:
    return load_recipe("demo-vit", {key.replace("__", "."): value for key, value in changes.items()})


def claim(path: Path, **changes: object) -> None:
    """A run that has begun: with nothing but a recipe in it, a folder may still be given to a corrected command."""
    with RunFolder(path, recipe(**changes)).claimed(is_writer=True):
        (path / "metrics.jsonl").touch()


def test_a_new_folder_is_made_and_holds_the_whole_recipe(tmp_path: Path) -> None:
    claim(tmp_path / "runs" / "a")
    assert (
        PretrainRecipe.model_validate(yaml.safe_load((tmp_path / "runs" / "a" / "recipe.yaml").read_text())) == recipe()
    )


def test_an_empty_folder_and_a_run_of_the_same_recipe_may_be_used(tmp_path: Path) -> None:
    claim(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{}")
    claim(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "{}"


def test_a_folder_with_other_things_in_it_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RunFolderError, match=r"not empty.*--output"):
        claim(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_users_own_data_json_is_not_taken_for_a_run_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text("precious")
    with pytest.raises(RunFolderError, match=r"not empty.*--output"):
        claim(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"data.json": "precious"}


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(RunFolderError, match="is a file; --output"):
        claim(tmp_path / "file")


def test_a_folder_that_cannot_be_made_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(RunFolderError, match="cannot write to"):
        claim(tmp_path / "file" / "below")


def test_a_run_of_another_recipe_is_refused_and_every_difference_named(tmp_path: Path) -> None:
    claim(tmp_path)
    before = (tmp_path / "recipe.yaml").read_text()
    with pytest.raises(RunFolderError) as caught:
        claim(tmp_path, trainer__seed=1, method__memory__num_rows=4096)
    assert "method.memory.num_rows was 2048, now 4096; trainer.seed was 0, now 1. Give the same values" in str(
        caught.value
    )
    assert (tmp_path / "recipe.yaml").read_text() == before


def test_a_backbone_of_other_options_is_another_recipe(tmp_path: Path) -> None:
    claim(tmp_path)
    with pytest.raises(RunFolderError, match=r"backbone\.timm_options\.depth was 3, now None"):
        claim(tmp_path, backbone__timm_options={"embed_dim": 128, "num_heads": 4})


def test_what_decides_no_result_may_change(tmp_path: Path) -> None:
    claim(tmp_path)
    claim(tmp_path, trainer__max_steps=7, data__num_workers=0, trainer__accumulation_steps=2, trainer__device="cpu")
    claim(
        tmp_path,
        trainer__max_steps=7,
        trainer__log_every_steps=3,
        trainer__checkpoint_every_minutes=3,
        data__cache_gib=1.0,
    )
    # the file says what was run last
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text())["trainer"]["max_steps"] == 7
    kept = RunFolder(tmp_path, recipe()).binding_text()
    assert RunFolder(tmp_path, recipe(trainer__keep_checkpoints=9)).differences_from(kept) == []


def test_a_checkpoint_of_other_values_differs_but_not_for_settings_that_it_did_not_know(tmp_path: Path) -> None:
    kept = RunFolder(tmp_path, recipe()).binding_text()
    (difference,) = RunFolder(tmp_path, recipe(optimizer__learning_rate=1.0)).differences_from(kept)
    assert difference.startswith("optimizer.learning_rate was ")
    assert difference.endswith(", now 1.0")
    older = {key: value for key, value in json.loads(kept).items() if key != "optimizer.learning_rate"}
    assert RunFolder(tmp_path, recipe(optimizer__learning_rate=1.0)).differences_from(json.dumps(older)) == []
    newer = {**json.loads(kept), "optimizer.nesterov": True}
    assert RunFolder(tmp_path, recipe()).differences_from(json.dumps(newer)) == [
        "optimizer.nesterov was True, now None"
    ]


def test_values_that_became_free_do_not_bind_older_checkpoints(tmp_path: Path) -> None:
    kept = json.loads(RunFolder(tmp_path, recipe()).binding_text())
    older = json.dumps({**kept, "data.source": "elsewhere", "trainer.log_every_steps": 7})
    assert RunFolder(tmp_path, recipe()).differences_from(older) == []


def test_more_epochs_are_refused_with_the_way_to_train_for_longer(tmp_path: Path) -> None:
    claim(tmp_path)
    with pytest.raises(RunFolderError, match=rf"trainer\.epochs was 14, now 20.*--init {tmp_path} --output"):
        claim(tmp_path, trainer__epochs=20)
    with pytest.raises(RunFolderError, match=r"trainer\.epochs was 14, now 5") as caught:
        claim(tmp_path, trainer__epochs=5)
    assert "--init" not in str(caught.value)


def images(digest: str, source: str = "photos") -> DataIdentity:
    return DataIdentity(digest=digest, num_images=3, source=source, files=b"1 %s\0" % digest.encode(), as_before=False)


def claim_with(path: Path, data: DataIdentity, *, accept_changes: bool = False, source: str = "photos") -> RunFolder:
    folder = RunFolder(path, recipe(data__source=source), data)
    with folder.claimed(is_writer=True, accept_changes=accept_changes):
        (path / "metrics.jsonl").touch()
    return folder


def test_the_same_images_elsewhere_continue_and_others_are_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    claim_with(tmp_path, images("a"))
    claim_with(tmp_path, images("a", "elsewhere"), source="elsewhere")
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text())["data"]["source"] == "elsewhere"
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ChangedData, match="1 added"):
        claim_with(tmp_path, images("b"), source="third")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_changed_images_are_taken_if_accepted_and_their_checkpoints_stay_known(tmp_path: Path) -> None:
    before = claim_with(tmp_path, images("a"))
    after = claim_with(tmp_path, images("b"), accept_changes=True)
    assert claim_with(tmp_path, images("b")).data_digest == "b"
    text = after.binding_text()
    assert after.differences_from(text, data_digest=before.data_digest) == []
    assert after.differences_from(text, data_digest="") == []
    assert after.differences_from(text, data_digest="c") == ["it was trained on other images"]


def test_a_run_without_a_record_of_its_images_keeps_its_source_and_gets_a_record(tmp_path: Path) -> None:
    claim(tmp_path, data__source="photos")
    assert RunFolder(tmp_path, recipe(data__source="photos")).lists_as_before
    with pytest.raises(RunFolderError, match=r"data\.source was 'photos', now 'elsewhere'"):
        claim_with(tmp_path, images("a"), source="elsewhere")
    claim_with(tmp_path, images("a"))
    assert not RunFolder(tmp_path, recipe(data__source="photos")).lists_as_before
    with pytest.raises(ChangedData):
        claim_with(tmp_path, images("b"))


def test_a_new_run_lists_its_images_by_the_present_rules(tmp_path: Path) -> None:
    assert not RunFolder(tmp_path / "run", recipe()).lists_as_before


def test_images_may_still_be_corrected_until_training_begins(tmp_path: Path) -> None:
    for digest in "ab":
        with RunFolder(tmp_path, recipe(), images(digest)).claimed(is_writer=True):
            pass
    assert json.loads((tmp_path / "data.json").read_text())["changes"] == []


def test_a_run_keeps_where_it_started(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new", recipe())
    with folder.claimed(is_writer=True):
        assert folder.start_from is None
        folder.write_start(tmp_path / "old", step=3)
        (folder.path / "metrics.jsonl").touch()
    with folder.claimed(is_writer=True):
        assert folder.start_from == tmp_path / "old"


def test_a_folder_left_before_its_recipe_was_written_may_be_used_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new", recipe(), images("a"))
    with folder.claimed(is_writer=True):
        folder.recipe_file.unlink()
    claim(folder.path)


def test_everything_that_may_change_exists() -> None:
    assert flatten(recipe()).keys() >= MAY_CHANGE


@pytest.mark.parametrize("text", ["a: [", "trainer: {sead: 1}\n"])
def test_a_recipe_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(RunFolderError, match=r"(?s)recipe\.yaml.*--output"):
        claim(tmp_path)


def test_a_second_process_is_locked_out_until_the_first_leaves(tmp_path: Path) -> None:
    """flock is held by an open file, so a second open file of this process stands for a second process."""
    with RunFolder(tmp_path, recipe()).claimed(is_writer=True):
        with pytest.raises(RunFolderError, match="another process"):
            claim(tmp_path)
        gc.collect()  # a lock file left open would warn here, and warnings are errors
    claim(tmp_path)


def test_a_process_that_is_locked_out_changes_nothing(tmp_path: Path) -> None:
    with RunFolder(tmp_path, recipe()).claimed(is_writer=True):
        before = (tmp_path / "recipe.yaml").read_text()
        with pytest.raises(RunFolderError, match="another process"):
            claim(tmp_path, trainer__max_steps=7)
        assert (tmp_path / "recipe.yaml").read_text() == before


def test_a_process_that_only_reads_claims_nothing(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", recipe()).claimed(is_writer=False):
        assert not (tmp_path / "run").exists()


def test_files_are_written_whole_into_the_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, recipe())
    assert folder.write_json("a.json", {"b": 1}).read_text() == '{\n  "b": 1\n}\n'
    assert folder.write_bytes("c", b"\x00\x01").read_bytes() == b"\x00\x01"
    assert folder.write_text("empty", "").read_text() == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "c", "empty"]


WRITTEN = [
    ".lock",
    "recipe.yaml",
    "start.json",
    "data.json",
    "data_files.gz",
    "environment.json",
    "backbone.safetensors",
    "metrics.jsonl",
    "metrics.rejected.jsonl",
    "warnings.jsonl",
    "warnings.rejected.jsonl",
    "checkpoints",
    "tensorboard",
]


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_link_in_the_folder_is_refused_by_name_and_nothing_behind_it_changes(
    tmp_path: Path, name: str, is_dangling: bool
) -> None:
    run, mine = tmp_path / "run", tmp_path / "mine"
    claim(run)
    if not is_dangling and name in ("checkpoints", "tensorboard"):
        mine.mkdir()
        (mine / "step_000000001.pt").write_bytes(b"precious")
        (mine / ".mine.partial").write_bytes(b"precious")
    elif not is_dangling:
        mine.write_bytes((run / name).read_bytes() if name == "recipe.yaml" else b"precious")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.parent != run}
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(mine)
    with pytest.raises(RunFolderError, match=rf"{name} is a link|not a massl run"):
        claim(run)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.parent != run} == before
    assert (run / name).is_symlink()


def test_a_link_to_the_run_folder_itself_is_fine(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    claim(tmp_path / "run")
    claim(tmp_path / "run")
    assert (tmp_path / "disk" / "recipe.yaml").is_file()


@pytest.mark.parametrize("name", [".lock", "data.json", "metrics.jsonl"])
def test_a_fifo_in_the_place_of_a_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    claim(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(RunFolderError, match=f"{name} is not a file"):
        claim(tmp_path)


def test_a_file_in_the_place_of_the_checkpoints_is_refused_by_name(tmp_path: Path) -> None:
    claim(tmp_path)
    (tmp_path / "checkpoints").touch()
    with pytest.raises(RunFolderError, match="checkpoints is not a folder"):
        claim(tmp_path)


@pytest.mark.parametrize("has_folder", [False, True])
@pytest.mark.parametrize("has_metrics", [False, True])
def test_a_backbone_whose_checkpoints_are_gone_is_not_overwritten(
    tmp_path: Path, has_folder: bool, has_metrics: bool
) -> None:
    claim(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 5}')
    if not has_metrics:
        (tmp_path / "metrics.jsonl").unlink()
    if has_folder:
        (tmp_path / "checkpoints").mkdir()
    (tmp_path / "backbone.safetensors").write_bytes(b"trained")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RunFolderError, match=r"no checkpoint.*checkpoints.*--output"):
        claim(tmp_path, trainer__max_steps=7)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    claim(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 5}')
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".step_000000006.pt.host-1-1.partial").write_bytes(b"half")
    claim(tmp_path)
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "7", '{"from": 5}', '{"from": ""}', '{"from": "a\\u0000"}', "[" * 9999]
)
def test_a_start_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "start.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"start\.json cannot be read"):
        _ = RunFolder(tmp_path, recipe()).start_from


@pytest.mark.parametrize("kept", ["nonsense", "[1, 2]", "7", "[" * 9999])
def test_a_checkpoint_whose_recipe_cannot_be_read_differs(tmp_path: Path, kept: str) -> None:
    assert RunFolder(tmp_path, recipe()).differences_from(kept) == ["its recipe cannot be read"]


def test_the_command_of_an_advice_can_be_pasted_whatever_the_folder_is_called(tmp_path: Path) -> None:
    run = tmp_path / "a; touch b #"
    claim(run)
    with pytest.raises(RunFolderError) as caught:
        claim(run, trainer__epochs=20)
    command = str(caught.value).partition("from its weights: ")[2]
    assert shlex.split(command)[:4] == ["massl", "pretrain", "--init", str(run)]
