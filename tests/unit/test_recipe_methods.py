"""One word changes the method: what a recipe file says for each."""

from pathlib import Path

import pytest

from massl.commands.pretrain import pretrain
from massl.commands.pretrain_arguments import parse_pretrain
from massl.commands.recipe import load_recipe
from massl.commands.recipes import shipped_recipes
from massl.config import RecipeError, overlay
from massl.methods import METHODS
from massl.methods.base import TeacherSettings
from massl.methods.massl import MaSSLSettings

FILE = """
method: {name: massl, student_temperature: 0.2}
optimizer: {warmup_epochs: 3, learning_rate: 0.001}
with_method:
  dino: {method: {student_temperature: 0.3}, optimizer: {learning_rate: 0.002}}
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> str:
    (tmp_path / "own.yaml").write_text(FILE)
    return str(tmp_path / "own.yaml")


def test_overlay_merges_section_by_section_and_leaves_its_arguments_alone() -> None:
    values = {"a": {"x": 1, "y": 2}, "b": 3}
    assert overlay(values, {"a": {"x": 4}, "c": 5}) == {"a": {"x": 4, "y": 2}, "b": 3, "c": 5}
    assert overlay(values, {"a": 7, "b": {"z": 1}}) == {"a": 7, "b": {"z": 1}}
    assert values == {"a": {"x": 1, "y": 2}, "b": 3}


def test_a_recipes_own_method_is_untouched_by_what_it_says_for_others(recipe_file: str) -> None:
    recipe = load_recipe(recipe_file)
    assert (recipe.method.name, recipe.method.student_temperature, recipe.optimizer.learning_rate) == (
        "massl",
        0.2,
        0.001,
    )
    assert load_recipe(recipe_file, {"method.name": "massl"}) == recipe


def test_another_method_brings_its_own_section_and_keeps_the_rest(recipe_file: str) -> None:
    recipe = load_recipe(recipe_file, {"method.name": "dino"})
    assert isinstance(recipe.method, METHODS["dino"].settings)
    assert recipe.method.student_temperature == 0.3
    assert (recipe.optimizer.learning_rate, recipe.optimizer.warmup_epochs) == (0.002, 3)


def test_a_method_that_the_recipe_does_not_mention_has_its_defaults(recipe_file: str) -> None:
    recipe = load_recipe(recipe_file, {"method.name": "mae"})
    assert recipe.method == METHODS["mae"].settings()
    assert recipe.optimizer.learning_rate == 0.001


def test_overrides_win_over_what_the_recipe_says_for_the_method(recipe_file: str) -> None:
    changes = {"method.name": "dino", "method.student_temperature": 0.4, "optimizer.learning_rate": 0.5}
    recipe = load_recipe(recipe_file, changes)
    assert (recipe.method.student_temperature, recipe.optimizer.learning_rate) == (0.4, 0.5)


def test_the_command_line_changes_the_method_by_one_word(recipe_file: str) -> None:
    arguments = ["--recipe", recipe_file, "--output", "x", "--method.name", "dino", "--optimizer.learning_rate", "0.25"]
    recipe = parse_pretrain(arguments).recipe
    assert recipe == load_recipe(recipe_file, {"method.name": "dino", "optimizer.learning_rate": 0.25})
    assert parse_pretrain([*arguments[:4], "--method.name=dino"])[0] == load_recipe(
        recipe_file, {"method.name": "dino"}
    )


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        (FILE, {"method.name": "dinno"}, "no method 'dinno'.*Did you mean 'dino'"),
        (FILE, {"method.name": "dino", "method.memory.num_rows": 8}, "unknown key method.memory"),
        (FILE.replace("dino:", "dyno:"), {}, "with_method names 'dyno'.*Did you mean 'dino'"),
        ("with_method: 3", {}, "with_method holds one section for each method"),
        ("method: {name: dino, memory: {}}", {}, "unknown key method.memory"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, text: str, changes: dict[str, object], message: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_recipe(tmp_path / "bad.yaml", changes)


def test_a_resolved_recipe_keeps_its_method(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="keeps its method"):
        pretrain(recipe=load_recipe("demo-vit"), output=tmp_path / "run", overrides={"method.name": "dino"})


def test_a_method_that_compares_views_needs_two(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"views\.num_global"):
        pretrain(recipe="demo", output=tmp_path / "run", overrides={"views.num_global": 1})


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_recipes_of_each_size_and_a_place_in_the_demo(name: str) -> None:
    for size in ("vits16", "vitb16", "cifar", "tiny"):
        assert load_recipe(f"{name}-{size}").method.name == name
    assert load_recipe("demo-vit", {"method.name": name}).method.name == name


SMALL = [(name, size) for size in ("cifar", "tiny") for name in METHODS]
SMALL += [(name, "imagenette") for name in ("massl", "dino", "ibot", "mocov3")]


@pytest.mark.parametrize(("name", "size"), SMALL)
def test_small_recipes_of_all_methods_differ_in_nothing_that_costs(name: str, size: str) -> None:
    """So that a comparison is one of methods: same network, images, epochs and, but for massl-tiny, batch."""
    ours, other = load_recipe(f"massl-{size}"), load_recipe(f"{name}-{size}")
    if size == "tiny" and name != "massl":  # massl-tiny: 128, chosen on held-out images
        steps = {"batch_size": 256, "log_every_steps": 136, "checkpoint_every_steps": 1360}
        assert other.trainer == ours.trainer.model_copy(update=steps)
    else:
        assert other.trainer == ours.trainer
    assert other.probes == ours.probes
    assert (other.backbone.name, other.backbone.image_size, other.backbone.patch_size) == (
        ours.backbone.name,
        ours.backbone.image_size,
        ours.backbone.patch_size,
    )
    assert (other.views.global_size, other.views.local_size) == (ours.views.global_size, ours.views.local_size)


@pytest.mark.parametrize("name", [f"{name}-imagenette" for name in ("massl", "dino", "ibot", "mocov3")])
def test_the_imagenette_recipes_are_vits8_at_112_px_with_all_that_follows_from_it(name: str) -> None:
    recipe = load_recipe(name)
    assert (recipe.backbone.name, recipe.backbone.image_size, recipe.backbone.patch_size) == (
        "vit_small_patch16_224",
        112,
        8,
    )
    assert (recipe.views.num_global, recipe.views.num_local) == (2, 6 if name.startswith(("dino", "ibot")) else 0)
    assert (recipe.views.global_size, recipe.views.local_size) == (112, 48)
    assert recipe.views.blur_sigma == (0.1, 2.0 * 112 / 224)
    assert (recipe.trainer.epochs, recipe.trainer.batch_size) == (100, 256)
    assert "docs/results/imagenette.md" in shipped_recipes()[name].read_text()


@pytest.mark.parametrize(
    ("name", "batch_size", "momentum", "instance_weight"),
    [("massl-tiny", 128, 0.95, 0.5), ("massl-imagenette", 256, 0.9, 0.0)],
)
def test_massl_for_few_images_is_as_it_was_measured(
    name: str, batch_size: int, momentum: float, instance_weight: float
) -> None:
    """Quick and sharp teacher, batch norm, small memory, two views: together eight points
    (docs/results/tiny-imagenet-100.md).
    """
    recipe = load_recipe(name)
    assert isinstance(recipe.method, MaSSLSettings)
    assert recipe.views.num_local == 0
    assert recipe.method.head.batch_norm
    assert recipe.method.teacher == TeacherSettings(
        momentum=momentum, temperature_start=0.04, temperature=0.04, temperature_warmup_epochs=0
    )
    assert (recipe.trainer.batch_size, recipe.method.instance_weight) == (batch_size, instance_weight)
    assert (recipe.method.memory.num_rows, recipe.method.memory.block_size) == (4096, 1024)


def test_every_recipe_file_names_its_method() -> None:
    for name, path in shipped_recipes().items():
        assert name.startswith("demo") or "name: " + name.partition("-")[0] in path.read_text()


def test_other_images_than_the_demos_are_probed_on_themselves() -> None:
    own, other = load_recipe("demo").probes, load_recipe("demo", {"data.source": "photos"}).probes
    assert (own.database, own.queries) == ("demo:train", "demo:test")
    assert not other.database
    assert not other.queries
    assert other.every_epochs == own.every_epochs
    parsed = parse_pretrain(["--recipe", "demo", "--data", "photos", "--output", "run"]).recipe
    assert parsed.probes == other
    named = load_recipe("demo", {"data.source": "photos", "probes.database": "demo:train"}).probes
    assert named.database == "demo:train"
