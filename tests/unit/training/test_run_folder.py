import gc
import json
from pathlib import Path

import pytest
import yaml

from massl.commands.recipe import PretrainRecipe, load_recipe
from massl.config import flatten
from massl.training.run_folder import MAY_CHANGE, RunFolder, RunFolderError


def recipe(**changes: object) -> PretrainRecipe:
    return load_recipe("demo", {key.replace("__", "."): value for key, value in changes.items()})


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
