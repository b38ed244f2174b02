"""--init: runs that start from existing weights."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import massl
from massl.commands import console, timing
from massl.commands.plan import plan
from massl.commands.recipe import PretrainRecipe
from massl.config import MasslError, read_yaml
from massl.methods import METHODS
from massl.nn.backbone import BackboneSettings, build_backbone
from massl.planning import trial
from massl.planning.costs import Speed
from massl.planning.rules import NETWORKS
from massl.planning.trial import measure_speed
from massl.training.checkpoint import load_checkpoint
from massl.weights.io import backbone_bytes
from massl.weights.models import open_model

QUIET = {"probes.every_epochs": 0, "trainer.log_every_steps": 1, "trainer.checkpoint_every_steps": 1}
QUIET |= {"trainer.keep_checkpoints": 50}
HEAD = {"hidden_dim": 32, "out_dim": 16}
SMALL: dict[str, dict[str, Any]] = {
    "massl": {},
    "dino": {"head": HEAD, "prototypes": {"num_prototypes": 32}},
    "ibot": {"head": HEAD, "prototypes": {"num_prototypes": 32}},
    "mae": {"decoder": {"dim": 16, "depth": 1, "num_heads": 2}},
    "mocov3": {"projector": HEAD, "predictor": {"hidden_dim": 32}},
    "nnclr": {"projector": HEAD, "predictor": {"hidden_dim": 32}, "memory": {"num_rows": 32}},
    "carp": {"head": HEAD, "prototypes": {"num_prototypes": 32, "block_size": 8}},
    "supervised": {"num_classes": 4},
}


@pytest.fixture(scope="module")
def old(recipe: Path, archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of massl, three steps long."""
    path = tmp_path_factory.mktemp("old") / "run"
    overrides = QUIET | {"trainer.max_steps": 3, "views.mean": [0.5, 0.5, 0.5]}
    massl.pretrain(archive, recipe=recipe, output=path, overrides=overrides)
    return path


@pytest.fixture
def start(recipe: Path, archive: Path, tmp_path: Path) -> Callable[..., Path]:
    def run(name: str, init: str | Path, *, steps: int = 3, **overrides: Any) -> Path:
        given = QUIET | {"trainer.max_steps": steps, "init.head_epochs": 0.5} | overrides
        massl.pretrain(archive, recipe=recipe, output=tmp_path / name, init=init, overrides=given)
        return tmp_path / name

    return run


def backbones(run: Path, step: int) -> dict[str, dict[str, torch.Tensor]]:
    """The weights and running averages of each backbone of a checkpoint."""
    method = load_checkpoint(run / "checkpoints" / f"step_{step:09d}.pt")["method"]
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in method.items():
        owner, mark, rest = name.partition("backbone.model.")
        if mark:
            found.setdefault(owner, {})[rest] = value
    return found


@pytest.mark.parametrize("name", METHODS)
def test_every_method_starts_from_a_backbone_and_keeps_it_while_the_head_learns(
    name: str, old: Path, start: Callable[..., Path], archive: Path, recipe: Path, tmp_path: Path
) -> None:
    values = read_yaml(recipe) | {"method": {"name": name, **SMALL[name]}}
    if name != "massl":
        own = tmp_path / "recipe.yaml"
        own.write_text(PretrainRecipe.model_validate(values).model_dump_json())
    else:
        own = recipe
    overrides = QUIET | {"trainer.max_steps": 5, "init.head_epochs": 0.5, "init.part": "backbone"}
    run = massl.pretrain(archive, recipe=own, output=tmp_path / "run", init=old, overrides=overrides).folder
    expected = open_model(old).backbone.model.state_dict()
    for step in (0, 3):  # three of the six steps of an epoch
        for found in backbones(run, step).values():
            assert found.keys() == expected.keys()
            assert all(value.equal(expected[key]) for key, value in found.items())
    (first, *_) = backbones(run, 5).values()
    assert not all(value.equal(expected[key]) for key, value in first.items())
    before, after = (load_checkpoint(run / "checkpoints" / f"step_{step:09d}.pt") for step in (0, 3))
    assert any(not after["method"][key].equal(value) for key, value in before["method"].items())  # the head has learnt
    assert len(after["optimizer"]["state"]) < len(
        load_checkpoint(run / "checkpoints/step_000000005.pt")["optimizer"]["state"]
    )


def test_a_run_of_the_same_method_goes_on_without_a_jump_of_the_loss(
    recipe: Path, archive: Path, runs: Any, tmp_path: Path
) -> None:
    old, short = tmp_path / "old", QUIET | {"trainer.max_steps": 1}
    massl.pretrain(archive, recipe=recipe, output=old, overrides=QUIET)
    losses = [row["loss"] for row in runs.rows(old)]
    new = massl.pretrain(archive, recipe=recipe, output=tmp_path / "new", init=old, overrides=short).metrics[0]
    random = massl.pretrain(archive, recipe=recipe, output=tmp_path / "random", overrides=short).metrics[0]
    assert new["teacher_temperature"] == 0.07 != random["teacher_temperature"]  # its warm-up is over
    last = losses[-6:]  # the last epoch
    assert min(last) - 0.1 < new["loss"] < max(last) + 0.1
    assert not min(last) - 0.1 < random["loss"] < max(last) + 0.1
    kept = load_checkpoint(tmp_path / "new" / "checkpoints" / "step_000000000.pt")["method"]
    assert all(value.equal(kept[key]) for key, value in runs.state(old)["method"].items())


def test_the_memory_is_filled_with_embeddings_of_the_new_images(old: Path, start: Any) -> None:
    filled = start("filled", old, steps=1, **{"init.part": "backbone"})
    empty = start("empty", old, steps=1, **{"init.part": "backbone", "init.fill_memory": False})
    one, other = (
        load_checkpoint(run / "checkpoints/step_000000000.pt")["method"]["memory.rows"] for run in (filled, empty)
    )
    assert not (one == other).all(dim=1).any()
    torch.testing.assert_close(one.norm(dim=1), torch.ones(len(one)))
    spread = [(rows @ rows.T).abs().mean() for rows in (one, other)]
    assert spread[0] > spread[1] + 0.1  # embeddings are alike, random rows are not


def test_a_memory_of_another_size_is_filled_although_the_head_is_taken(old: Path, start: Any) -> None:
    half = {"method.memory.num_rows": 16, "method.memory.block_size": 8}
    runs = [start("filled", old, steps=1, **half), start("same size", old, steps=1)]
    runs.append(start("not wanted", old, steps=1, **half, **{"init.fill_memory": False}))
    filled, same, empty = (
        load_checkpoint(run / "checkpoints/step_000000000.pt")["method"]["memory.rows"] for run in runs
    )
    assert len(filled) == 16 != len(same)
    spread = [(rows @ rows.T).abs().mean() for rows in (filled, empty)]
    assert spread[0] > spread[1] + 0.1  # embeddings are alike, random rows are not


def test_filling_the_memory_shows_its_rows_and_is_named_only_where_there_is_one(
    old: Path, archive: Path, recipe: Path, tmp_path: Path, massl_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_SECONDS_BETWEEN_LINES", -1.0)
    options = ["--data", archive, "--init", old / "backbone.safetensors", "--trainer.max_steps", "1"]
    answer = massl_here("pretrain", "--recipe", recipe, "--output", tmp_path / "run", *options)
    assert answer.status == 0, answer.text
    assert "filling the memory of 32 rows" in answer.text
    assert "rows of the memory: 24 of 32" in answer.text
    values = read_yaml(recipe) | {"method": {"name": "mocov3", **SMALL["mocov3"]}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(values))
    answer = massl_here("pretrain", "--recipe", tmp_path / "recipe.yaml", "--output", tmp_path / "other", *options)
    assert answer.status == 0, answer.text
    assert "filling the memory" not in answer.text


@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_run_stopped_in_either_phase_continues_bit_for_bit_without_the_model(
    at: int, old: Path, start: Any, runs: Any, archive: Path, recipe: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model.safetensors"
    model.write_bytes((old / "backbone.safetensors").read_bytes())
    whole = start("whole", model, steps=6)
    if at:
        start("run", model, steps=at)
    else:
        start("run", model, steps=1)
        for file in (tmp_path / "run" / "checkpoints").glob("step_000000001.pt"):
            file.unlink()
    model.unlink()
    run = start("run", model, steps=6)  # the same command
    assert read_yaml(run / "recipe.yaml")["init"]["part"] == "backbone"
    runs.assert_bitwise_equal(run, whole)


@pytest.mark.slow
def test_a_batch_in_parts_trains_the_same_and_bf16_runs(old: Path, start: Any) -> None:
    options = {"init.part": "backbone", "trainer.accumulation_steps": 2}
    runs = [start("parts", old, steps=5, **options), start("whole", old, steps=5, **{"init.part": "backbone"})]
    one, other = (backbones(run, 5)["teacher."] for run in runs)
    for key, value in one.items():
        torch.testing.assert_close(value, other[key], rtol=1e-3, atol=1e-4)
    start("bf16", old, steps=5, **{"init.part": "backbone", "trainer.precision": "bf16"})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_resnet", "test_convnext"])
def test_convolutional_networks_keep_weights_and_running_averages_while_frozen(
    name: str, start: Any, recipe: Path, archive: Path, tmp_path: Path
) -> None:
    backbone = {"backbone": {"name": name, "image_size": None, "patch_size": None, "timm_options": {}}}
    given: dict[str, Any] = {"views.global_size": 32, "views.num_local": 0, "method.head.batch_norm": True}
    first = massl.pretrain(
        archive, recipe=recipe, output=tmp_path / "old", overrides=QUIET | backbone | given | {"trainer.max_steps": 2}
    )
    expected = open_model(first.folder).backbone.model.state_dict()
    trained = {"init.part": "backbone", "init.keep_statistics": False}
    run = start("run", first.folder, steps=5, **given, **trained)
    for found in backbones(run, 3).values():
        assert all(value.equal(expected[key]) for key, value in found.items())
    moved = [key for key, value in backbones(run, 5)["student."].items() if not value.equal(expected[key])]
    assert any("weight" in key for key in moved)
    assert name == "test_convnext" or any("running_mean" in key for key in moved)


@pytest.mark.slow
def test_batch_norms_of_other_peoples_weights_keep_their_running_averages_and_use_them(
    start: Any, recipe: Path, archive: Path, tmp_path: Path
) -> None:
    backbone = {"backbone": {"name": "test_resnet", "image_size": None, "patch_size": None, "timm_options": {}}}
    given: dict[str, Any] = {"views.global_size": 32, "views.num_local": 0, "method.head.batch_norm": True}
    overrides = QUIET | backbone | given | {"trainer.max_steps": 2}
    first = massl.pretrain(archive, recipe=recipe, output=tmp_path / "old", overrides=overrides).folder
    expected = open_model(first / "backbone.safetensors").backbone.model.state_dict()
    own = start("own", first / "backbone.safetensors", steps=1, **given)
    assert read_yaml(own / "recipe.yaml")["init"]["keep_statistics"] is False
    given["init.keep_statistics"] = True  # the default for weights of others
    run = start("run", first / "backbone.safetensors", steps=5, **given)
    for found in backbones(run, 5).values():
        assert all(value.equal(expected[key]) for key, value in found.items() if "running" in key)
        assert any(not value.equal(expected[key]) for key, value in found.items() if "weight" in key)
    stopped = start("stopped", first / "backbone.safetensors", steps=4, **given)
    start("stopped", first / "backbone.safetensors", steps=5, **given)
    for owner, found in backbones(stopped, 5).items():  # used in training too: otherwise a resume would differ
        assert all(value.equal(backbones(run, 5)[owner][key]) for key, value in found.items())
    del given["init.keep_statistics"]
    again = start("again", run, steps=1, **given)  # a run of the same method goes on as it was trained
    assert read_yaml(again / "recipe.yaml")["init"]["keep_statistics"] is True


def test_architecture_and_colours_come_from_the_model_and_what_is_named_must_agree(old: Path, start: Any) -> None:
    run = start("run", old / "backbone.safetensors", steps=1, **{"views.global_size": 20})
    values = read_yaml(run / "recipe.yaml")
    assert values["views"]["mean"] == [0.5, 0.5, 0.5]
    assert (values["backbone"]["image_size"], values["views"]["global_size"]) == (16, 20)
    named = start("named", old / "backbone.safetensors", steps=1, **{"views.mean": [0.4, 0.4, 0.4]})
    assert read_yaml(named / "recipe.yaml")["views"]["mean"] == [0.4, 0.4, 0.4]
    with pytest.raises(MasslError, match=r"backbone\.image_size 32 does not agree with init"):
        start("other", old, **{"backbone.image_size": 32})
    with pytest.raises(MasslError, match=r"names no weights"):
        start("other", "vit_tiny_patch16_224")
    with pytest.raises(MasslError, match=r"init\.part all: .* is no run of massl"):
        start("other", old / "backbone.safetensors", **{"init.part": "all"})


def test_weights_without_patches_are_refused_for_ibot_before_anything_is_kept(
    archive: Path, recipe: Path, tmp_path: Path
) -> None:
    own = BackboneSettings(name="test_resnet")
    facts: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2), "image_size": 32}
    content = backbone_bytes(build_backbone(own, seed=0).model, timm_arguments=own.timm_arguments(), **facts)
    (tmp_path / "resnet.safetensors").write_bytes(content)
    values = read_yaml(recipe) | {"method": {"name": "ibot", **SMALL["ibot"]}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(values))
    overrides = {"views.global_size": 32, "views.local_size": 32}
    given: dict[str, Any] = {"init": tmp_path / "resnet.safetensors", "overrides": QUIET | overrides}
    with pytest.raises(MasslError, match="ibot hides patches, which test_resnet does not have"):
        massl.pretrain(archive, recipe=tmp_path / "recipe.yaml", output=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_a_run_from_a_run_that_had_weights_itself_takes_all_of_it(
    old: Path, start: Any, archive: Path, massl_here: Any, tmp_path: Path
) -> None:
    first = start("first", old / "backbone.safetensors", steps=1)
    assert read_yaml(first / "recipe.yaml")["init"]["part"] == "backbone"
    options = ["--trainer.max_steps", "1", "--data.source", str(archive)]
    answer = massl_here("pretrain", "--init", str(first), "--output", str(tmp_path / "second"), *options)
    assert answer.status == 0, answer.text
    assert "starting from all weights of" in answer.text
    init = read_yaml(tmp_path / "second" / "recipe.yaml")["init"]
    assert (init["part"], init["head_epochs"], init["learning_rate_factor"]) == ("all", 0.0, 1.0)


def test_a_head_of_another_shape_learns_before_the_backbone(old: Path, start: Any) -> None:
    run = start("run", old, steps=1, **{"method.head.out_dim": 24})
    init = read_yaml(run / "recipe.yaml")["init"]
    assert (init["part"], init["fill_memory"], init["learning_rate_factor"]) == ("backbone", True, 0.2)


def test_a_recipe_alone_opens_no_weights(old: Path, start: Any, archive: Path, tmp_path: Path) -> None:
    run = start("run", old, steps=1)
    with pytest.raises(MasslError, match="only if you name them: init"):
        massl.pretrain(archive, recipe=run / "recipe.yaml", output=tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_the_command_of_a_plan_names_the_weights_of_the_recipe(
    old: Path, start: Any, archive: Path, tmp_path: Path, massl_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_SECONDS", {"cpu": 0.05})
    file = start("run", old, steps=1) / "recipe.yaml"
    planned = massl_here("plan", archive, "--recipe", file, "--output", tmp_path / "copy")
    command = planned.output.partition("start it: massl ")[2]
    assert command.count("--init ") == 1
    answer = massl_here(*shlex.split(command))
    assert answer.status == 0, answer.text
    assert f"starting from all weights of {old}" in answer.text
    named = plan(archive, recipe=file, overrides={"init": {"weights": str(old)}})
    assert shlex.split(named.command).count("--init.weights") == 1
    assert "--init " not in named.command


def test_auto_and_plans_reckon_with_the_network_of_the_weights(
    old: Path, recipe: Path, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_SECONDS", {"cpu": 0.05})
    weights, backbone = old / "backbone.safetensors", open_model(old).backbone
    planned = plan(archive, init=weights, overrides={"method.head.hidden_dim": 16})
    assert f"from --init {weights}" in planned.explanation
    assert planned.recipe.backbone.patch_size == backbone.patch_size
    assert planned.recipe.views.global_size % backbone.patch_size == 0
    assert shlex.split(planned.command).count("--init") == 1
    run = massl.pretrain(
        archive,
        init=weights,
        output=tmp_path / "run",
        overrides=QUIET | {"trainer.max_steps": 1, "method.head.hidden_dim": 16},
    )
    assert read_yaml(run.folder / "recipe.yaml")["views"]["global_size"] == planned.recipe.views.global_size
    own = BackboneSettings(name="resnet10t", timm_options={"stem_width": 8})
    facts: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2), "image_size": 16}
    content = backbone_bytes(build_backbone(own, seed=0).model, timm_arguments=own.timm_arguments(), **facts)
    (tmp_path / "resnet.safetensors").write_bytes(content)
    planned = plan(archive, init=tmp_path / "resnet.safetensors", overrides={"method.head.hidden_dim": 16})
    assert planned.recipe.backbone.timm_options == {"stem_width": 8}  # of the weights, not of auto's own ResNet
    assert planned.recipe.optimizer.learning_rate == NETWORKS["slim"].options["optimizer.learning_rate"]
    other = read_yaml(recipe)
    other["backbone"]["timm_options"] = {"embed_dim": 64, "depth": 1, "num_heads": 2}
    (tmp_path / "other.yaml").write_text(json.dumps(other))
    timed = list[PretrainRecipe]()

    def speed(given: PretrainRecipe, *rest: Any, **more: Any) -> Speed:
        timed.append(given)
        return measure_speed(given, *rest, **more)

    monkeypatch.setattr(timing, "measure_speed", speed)
    plan(archive, recipe=tmp_path / "other.yaml", init=weights, minutes=0.05)
    assert [given.backbone.timm_options["depth"] for given in timed] == [2]


def test_a_checkpoint_of_a_run_can_be_named(old: Path, start: Any) -> None:
    run = start("run", old / "checkpoints" / "step_000000002.pt", steps=1)
    first = load_checkpoint(old / "checkpoints" / "step_000000002.pt")["method"]
    kept = load_checkpoint(run / "checkpoints" / "step_000000000.pt")["method"]
    assert all(value.equal(kept[key]) for key, value in first.items())


@pytest.mark.slow
def test_a_run_starts_from_what_was_exported_to_transformers(old: Path, start: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = massl.export(old, to="transformers", output=tmp_path / "hf")
    run = start("run", folder, steps=1)
    expected = open_model(old)
    recipe = PretrainRecipe.model_validate(read_yaml(run / "recipe.yaml"))
    assert (recipe.views.mean, recipe.views.std) == (expected.mean, expected.std)
    wanted = expected.backbone.model.state_dict()
    for found in backbones(run, 0).values():  # student and teacher
        assert found.keys() == wanted.keys()
        assert all(value.equal(wanted[key]) for key, value in found.items())


@pytest.mark.parametrize("name", ["test_vit.r160_in1k", "test_convnext.r160_in1k"])
def test_a_timm_name_with_a_tag_gives_architecture_colours_and_weights(
    name: str, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a download: the weights are timm's random ones."""
    monkeypatch.setattr("massl.weights.models._load_published", lambda backbone: None)
    given = {"views.global_size": 56, "views.num_local": 0}
    run = start("run", name, steps=1, **given)
    values = read_yaml(run / "recipe.yaml")
    assert (values["backbone"]["name"], values["init"]["weights"]) == (name.partition(".")[0], name)
    assert values["init"]["keep_statistics"] is True
    assert values["init"]["layer_decay"] == (0.75 if "vit" in name else 1.0)
    expected = open_model(name).backbone.model.state_dict()
    for found in backbones(run, 1).values():
        assert all(value.equal(expected[key]) for key, value in found.items())


def test_a_run_of_an_older_version_continues_from_where_it_started(
    old: Path, start: Any, recipe: Path, archive: Path, tmp_path: Path
) -> None:
    run = massl.pretrain(
        archive, recipe=recipe, output=tmp_path / "run", overrides=QUIET | {"trainer.max_steps": 1}
    ).folder
    (run / "start.json").write_text(json.dumps({"from": str(old), "step": 3}))  # and no section init
    lines = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(lines[: lines.index("init:")] + lines[lines.index("optimizer:") :])
    for given in (None, old):
        steps = QUIET | {"trainer.max_steps": 3 if given else 2}
        result = massl.pretrain(archive, recipe=recipe, output=run, init=given, overrides=steps)
        assert result.step == steps["trainer.max_steps"]
    with pytest.raises(MasslError, match=f"started from {old}"):
        massl.pretrain(archive, recipe=recipe, output=run, init=tmp_path, overrides=QUIET)
