import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import Field, ValidationError, model_validator

from massl.commands.embed import EmbedSettings
from massl.commands.evaluate.command import EvaluateSettings
from massl.commands.recipe import PretrainRecipe, load_recipe
from massl.commands.recipes import recipe_header, shipped_recipes
from massl.commands.visualize import VisualizeSettings
from massl.config import (
    RecipeError,
    Settings,
    changed,
    closest,
    dotted,
    fingerprint,
    flatten,
    merge,
    read_yaml,
    to_yaml,
    validate,
)


class Engine(Settings):
    cylinders: int = Field(default=4, gt=0)
    fuel: str = "petrol"


class Spare(Settings):
    size: int = 16


class Car(Settings):
    engine: Engine = Engine()
    spare: Spare | None = None
    wheels: tuple[int, int] = (2, 2)
    price: float = 1.0

    @model_validator(mode="after")
    def _is_affordable(self) -> "Car":
        if self.price > 1e6:
            raise ValueError("price is more than anyone pays: lower it")
        return self


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(RecipeError, match=r"prise.*'price'"):
        validate(Car, {"prise": 2}, origin="recipe x")


def test_an_unknown_nested_key_is_named_with_its_section() -> None:
    with pytest.raises(RecipeError, match=r"engine\.cylinder\b.*'cylinders'"):
        validate(Car, {"engine": {"cylinder": 6}}, origin="recipe")
    with pytest.raises(RecipeError, match=r"spare\.sise.*'size'"):
        validate(Car, {"spare": {"sise": 6}}, origin="recipe")


def test_all_unknown_keys_are_named_at_once_and_nothing_is_guessed_for_a_word_unlike_any() -> None:
    with pytest.raises(RecipeError) as caught:
        validate(Car, {"engine": {"cylinder": 6}, "zzz": 1}, origin="recipe")
    assert "engine.cylinder" in str(caught.value)
    assert str(caught.value).endswith("unknown key zzz.")
    assert closest("zzz", ["price"]) == ""


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("vit_tinny", "vit_tiny_patch16_224"),
        ("vit_small", "vit_small_patch16_224"),
        ("resnet-50", "resnet50"),
        ("gcvit_tinny", "gcvit_tiny"),
        ("vit_small_patch16_244", "vit_small_patch16_224"),
    ],
)
def test_the_beginning_of_a_long_name_is_nearer_than_a_short_name_with_other_letters(word: str, expected: str) -> None:
    names = ["vit_small_patch16_224", "gcvit_tiny", "resnet50", "resnet50_clip", "vit_small_patch14", "vit_tiny_r_s16"]
    assert closest(word, ["vit_tiny_patch16_224", *names]) == f" Did you mean {expected!r}?"


def test_a_value_of_a_wrong_kind_is_told_in_the_words_of_the_command_line() -> None:
    with pytest.raises(RecipeError, match=r"price: expected a number \(got 'cheap'\)"):
        validate(Car, {"price": "cheap"}, origin="recipe")
    with pytest.raises(RecipeError, match=r"engine\.cylinders: expected a whole number \(got 'three'\)"):
        validate(Car, {"engine": {"cylinders": "three"}}, origin="recipe")


def test_a_bad_value_is_named_with_its_dotted_key_and_what_was_given() -> None:
    with pytest.raises(RecipeError, match=r"engine\.cylinders.*got 0"):
        validate(Car, {"engine": {"cylinders": 0}}, origin="recipe")
    with pytest.raises(RecipeError, match="more than anyone pays"):
        validate(Car, {"price": 2e6}, origin="recipe")
    with pytest.raises(RecipeError, match="price"):
        validate(Car, {"price": float("nan")}, origin="recipe")


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Car().price = 3.0
    with pytest.raises(ValidationError, match="frozen"):
        Car().engine.cylinders = 3


def test_dotted_overrides_change_single_values_and_leave_the_rest_and_the_original_alone() -> None:
    values = {"engine": {"cylinders": 6, "fuel": "diesel"}, "price": 2.0}
    merged = merge(values, {"engine.cylinders": 8, "spare.size": 17}, Car)
    assert merged == {"engine": {"cylinders": 8, "fuel": "diesel"}, "price": 2.0, "spare": {"size": 17}}
    assert values == {"engine": {"cylinders": 6, "fuel": "diesel"}, "price": 2.0}


@pytest.mark.parametrize(
    "overrides",
    [{"engine": {"cylinders": 8}, "spare": {"size": 17}}, {"engine.cylinders": 8, "spare": {"size": 17}}],
    ids=["nested", "mixed"],
)
def test_nested_overrides_change_single_values_as_dotted_ones_do(overrides: dict[str, object]) -> None:
    values = {"engine": {"cylinders": 6, "fuel": "diesel"}, "spare": None}
    assert merge(values, overrides, Car) == {"engine": {"cylinders": 8, "fuel": "diesel"}, "spare": {"size": 17}}


def test_a_value_that_is_a_mapping_is_replaced_and_its_entries_can_be_changed() -> None:
    values = {"backbone": {"name": "vit", "timm_options": {"depth": 3, "embed_dim": 96}}}
    for overrides in ({"backbone": {"timm_options": {"depth": 6}}}, {"backbone.timm_options": {"depth": 6}}):
        assert merge(values, overrides, PretrainRecipe)["backbone"] == {"name": "vit", "timm_options": {"depth": 6}}
    merged = merge(values, {"backbone.timm_options.depth": 6}, PretrainRecipe)
    assert merged["backbone"]["timm_options"] == {"depth": 6, "embed_dim": 96}


def test_overrides_are_named_by_dotted_keys_in_the_sections_of_every_method() -> None:
    overrides = {"method": {"name": "dino", "prototypes": {"num_prototypes": 8}}, "trainer.epochs": 2}
    assert dotted(overrides, PretrainRecipe) == {
        "method.name": "dino",
        "method.prototypes.num_prototypes": 8,
        "trainer.epochs": 2,
    }


def test_an_override_below_a_value_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"price\.tax"):
        merge({"price": 2.0}, {"price.tax": 0.2}, Car)


def test_flatten_names_every_value_by_its_dotted_key() -> None:
    assert flatten(Car()) == {
        "engine.cylinders": 4,
        "engine.fuel": "petrol",
        "spare": None,
        "wheels": [2, 2],
        "price": 1.0,
    }
    assert flatten(Car(spare=Spare()))["spare.size"] == 16


def test_the_fingerprint_depends_on_values_and_not_on_their_order() -> None:
    assert fingerprint({"a": 1, "b": 2.5}) == fingerprint({"b": 2.5, "a": 1})
    assert len({fingerprint(flatten(Car(price=price))) for price in (1.0, 1.0 + 1e-15, 2.0)}) == 3


def test_a_recipe_written_as_yaml_reads_back_as_the_same_recipe(tmp_path: Path) -> None:
    car = Car(price=1e-4, spare=Spare(size=3), wheels=(1, 2))
    (tmp_path / "car.yaml").write_text(to_yaml(car))
    assert validate(Car, read_yaml(tmp_path / "car.yaml"), origin="car.yaml") == car


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "is not valid YAML"), ("- 1\n", "holds no recipe"), ("", "holds no recipe")]
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(RecipeError, match=message):
        read_yaml(tmp_path / "bad.yaml")


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_loads_and_says_how_to_run_it(name: str) -> None:
    assert isinstance(load_recipe(name), PretrainRecipe)
    assert recipe_header(shipped_recipes()[name]).startswith(f"massl pretrain --recipe {name} ")


def test_the_recipes_of_the_paper_are_shipped() -> None:
    assert {"demo", "massl-vits16", "massl-vitb16"} <= shipped_recipes().keys()


@pytest.mark.parametrize(
    ("name", "backbone", "epochs", "peak", "smallest", "warmup", "momentum", "temperature_warmup"),
    [
        ("massl-vits16", "vit_small_patch16_224", 800, 2e-3, 1e-6, 0, 0.992, 30),
        ("massl-vitb16", "vit_base_patch16_224", 400, 3e-3, 2e-6, 10, 0.996, 50),
    ],
)
def test_the_recipes_of_the_paper_hold_the_values_of_its_protocol(
    name: str,
    backbone: str,
    epochs: int,
    peak: float,
    smallest: float,
    warmup: int,
    momentum: float,
    temperature_warmup: int,
) -> None:
    """The values of the paper and, where it is silent, of the authors' commands."""
    recipe = load_recipe(name)
    assert (recipe.backbone.name, recipe.backbone.drop_path_rate) == (backbone, 0.1)
    assert (recipe.trainer.epochs, recipe.trainer.batch_size) == (epochs, 1024)
    assert recipe.optimizer.peak_learning_rate(recipe.trainer.batch_size) == pytest.approx(peak, rel=1e-12)
    assert (recipe.optimizer.min_learning_rate, recipe.optimizer.warmup_epochs) == (smallest, warmup)
    assert (recipe.optimizer.weight_decay, recipe.optimizer.weight_decay_end, recipe.optimizer.clip_norm) == (
        0.04,
        0.4,
        3.0,
    )
    assert recipe.optimizer.betas == (0.9, 0.999)
    method = recipe.method
    assert (method.memory.num_rows, method.memory.block_size, method.memory.random_blocks) == (65_536, 16_384, True)
    assert (method.head.num_layers, method.head.hidden_dim, method.head.out_dim) == (3, 2048, 256)
    assert (method.student_temperature, method.teacher.momentum) == (0.1, momentum)
    assert (method.teacher.temperature_start, method.teacher.temperature) == (0.04, 0.07)
    assert method.teacher.temperature_warmup_epochs == temperature_warmup
    views = recipe.views
    assert (views.num_global, views.global_size, views.global_scale) == (2, 224, (0.32, 1.0))
    assert (views.num_local, views.local_size, views.local_scale) == (10, 96, (0.05, 0.32))
    assert (
        views.first_global_blur_probability,
        views.second_global_blur_probability,
        views.local_blur_probability,
    ) == (1.0, 0.1, 0.5)
    assert (views.solarise_probability, views.grey_probability, views.flip_probability, views.jitter_probability) == (
        0.2,
        0.2,
        0.5,
        0.8,
    )
    assert (views.brightness, views.contrast, views.saturation, views.hue) == (0.4, 0.4, 0.2, 0.1)


def test_a_recipe_takes_overrides_by_dotted_key() -> None:
    assert load_recipe("demo", {"trainer.epochs": 3, "method.memory.num_rows": 4096}).method.memory.num_rows == 4096
    with pytest.raises(RecipeError, match=r"trainer\.epoch\b.*'epochs'"):
        load_recipe("demo", {"trainer.epoch": 3})
    with pytest.raises(RecipeError, match=r"method\.memory"):
        load_recipe("demo", {"method.memory.num_rows": 256})


# One value of every section that differs from the demo's, beside others that differ from the defaults.
IN_EACH_SECTION = [
    ("data", {"max_side": 99}),
    ("views", {"flip_probability": 0.125}),
    ("backbone", {"drop_path_rate": 0.25}),
    ("method", {"student_temperature": 0.3}),
    ("method", {"teacher": {"momentum": 0.75}}),
    ("method", {"memory": {"block_size": 256}}),
    ("method", {"name": "dino", "prototypes": {"num_prototypes": 64}}),
    ("init", {"head_epochs": 2.0}),
    ("optimizer", {"weight_decay": 0.01}),
    ("trainer", {"batch_size": 64}),
    ("probes", {"num_neighbours": 3}),
]


@pytest.mark.parametrize(("section", "values"), IN_EACH_SECTION)
def test_a_nested_override_keeps_the_other_values_of_its_section(section: str, values: dict[str, object]) -> None:
    by_dots = {f"{section}.{key}": value for key, value in flatten(values).items()}
    recipe = load_recipe("demo-vit", {section: values})
    assert recipe == load_recipe("demo-vit", by_dots)
    before = flatten(load_recipe("demo-vit", {key: by_dots[key] for key in by_dots if key == "method.name"}))
    after = flatten(recipe)
    assert {key for key in after if after[key] != before[key]} == by_dots.keys() - {"method.name"}


def test_every_section_of_the_recipe_is_tried_with_a_nested_override() -> None:
    assert {section for section, _ in IN_EACH_SECTION} == PretrainRecipe.model_fields.keys()


@pytest.mark.parametrize(
    ("settings_type", "values", "overrides", "key", "expected"),
    [
        (
            EvaluateSettings,
            {"model": "m", "output": "o", "knn": {"temperature": 0.5}},
            {"knn": {"ks": [7]}},
            "knn",
            0.5,
        ),
        (EmbedSettings, {"model": "m", "data": "d", "output": "o.npz"}, {"image_size": 96}, "image_size", 96),
        (VisualizeSettings, {"model": "m", "kind": "attention"}, {"cosine": True}, "cosine", True),
    ],
)
def test_overrides_of_the_other_commands_merge_alike(
    settings_type: type[Settings], values: dict[str, object], overrides: dict[str, object], key: str, expected: object
) -> None:
    merged = merge(values, overrides, settings_type)
    assert merged == {**values, **overrides, key: merged[key]}
    assert (merged[key]["temperature"] if key == "knn" else merged[key]) == expected


def test_a_recipe_is_read_from_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("trainer: {epochs: 7}\n")
    assert load_recipe(tmp_path / "mine.yaml").trainer.epochs == 7


def test_an_unknown_recipe_is_refused_with_the_names_of_those_there_are() -> None:
    with pytest.raises(
        RecipeError,
        match=r"'massl-vits6'.*'massl-vits16'",
    ):
        load_recipe("massl-vits6")


def test_values_that_are_not_the_default_ones_are_named_in_words() -> None:
    class Inner(Settings):
        rates: tuple[float, ...] = (0.1,)
        seed: int = 0

    class Outer(Settings):
        temperature: float = 0.07
        inner: Inner = Inner()

    assert changed(Outer()) == []
    other = Outer(temperature=0.5, inner=Inner(rates=(1.0, 2.5), seed=3))
    assert changed(other) == ["temperature 0.5", "rates 1 2.5", "seed 3"]
    assert changed(other, besides=("seed",)) == ["temperature 0.5", "rates 1 2.5"]


ALIAS_BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 8)}]\n" for before, after in pairwise("abcdefgh")
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ALIAS_BOMB, "values"),
        ("a: &a [*a]", "alias"),
        ("a: " + "[" * 100_000, "nested"),
        ("- " * 5_000 + "a", "nested"),
        ("a: " + "9" * 5_000, "digits"),
        ("a: 2021-01-01", "date.*quotes"),
        ("a: 2021-99-99", "month"),
        ("a: !!binary YWJj", "bytes"),
        ("a: !!set {b}", "set"),
        ("a: !!timestamp x", "YAML"),
        ("a: !!python/object/apply:os.system [echo]", "python"),
        ('a: "\\ud800"', "surrogates"),
        ("a: " + "x" * 2**20, "longer"),
        ("a: " + "b, " * 30_000, None),
        ("a: [" + "b, " * 30_000 + "]", "values"),
    ],
)
def test_a_hostile_recipe_is_refused_with_its_name(tmp_path: Path, text: str, message: str | None) -> None:
    (tmp_path / "r.yaml").write_text(text)
    if message is None:
        assert list(read_yaml(tmp_path / "r.yaml")) == ["a"]
        return
    with pytest.raises(RecipeError, match=rf"(?s)r\.yaml.*{message}"):
        read_yaml(tmp_path / "r.yaml")


def test_aliases_and_names_that_are_not_utf8_are_read(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text('a: &a {b: [1, 2]}\nc: {<<: *a, d: *a}\ne: "x\\uDCFF"')
    values = read_yaml(tmp_path / "r.yaml")
    assert values["c"] == {"b": [1, 2], "d": {"b": [1, 2]}}
    assert os.fsencode(values["e"]) == b"x\xff"


def test_a_recipe_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"folder cannot be read"):
        read_yaml(tmp_path / "folder")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RecipeError, match=r"folder cannot be read"):
        read_yaml(tmp_path / "folder")


def test_a_chain_of_recipes_is_limited(tmp_path: Path) -> None:
    for number in range(2_000):
        (tmp_path / f"{number}.yaml").write_text(f"base: {number + 1}.yaml")
    with pytest.raises(RecipeError, match=r"\.yaml: more than \d+ recipes"):
        load_recipe(tmp_path / "0.yaml")


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b"])
def test_a_base_that_cannot_be_a_file_is_an_unknown_recipe(tmp_path: Path, name: str) -> None:
    (tmp_path / "r.yaml").write_text(json.dumps({"base": name}))
    with pytest.raises(RecipeError, match=r"r\.yaml: base"):
        load_recipe(tmp_path / "r.yaml")
