from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field, ValidationError

from massl.commands.ablate.command import AblateSettings
from massl.commands.arguments import parse
from massl.commands.compare.command import CompareSettings
from massl.commands.evaluate.command import EvaluateSettings
from massl.commands.pretrain_arguments import parse_pretrain
from massl.commands.visualize import VisualizeSettings, visualize
from massl.config import MasslError, RecipeError, Settings, UsageError
from massl.methods import METHODS


class Part(Settings):
    depth: int = Field(3, description="how deep")


class Options(Settings):
    """Options whose defaults --help explains."""

    output: str = Field(description="where to")
    size: int | None = Field(None, description="side; default: the model's")
    names: tuple[str, ...] = Field((), description="some names")
    cache: str = Field("", description="a folder; default: OUTPUT/features")
    kind: Literal["a", "b"] = Field("a", description="which")
    part: Part = Part()


def help_of(settings_type: type[Settings], capsys: pytest.CaptureFixture[str], **keywords: Any) -> str:
    with pytest.raises(SystemExit):
        parse(settings_type, "try", "", ["--help"], **keywords)
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_help_tells_defaults_once_and_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(Options, capsys)
    assert "side; default: the model's --names" in text
    assert "some names (default: none)" in text
    assert "a folder; default: OUTPUT/features --kind {a,b}" in text
    assert "which (default: a)" in text
    assert "how deep (default: 3)" in text
    assert "where to (required)" in text
    assert "None)" not in text


def test_help_tells_what_a_recipe_sets_besides_the_derived_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the model's (here: 64)" in help_of(Options, capsys, default=Options(output="x", size=64))


def test_values_are_parsed_as_before(tmp_path: Path) -> None:
    given = ["--output", "x", "--size", "32", "--names", "a", "b", "--part.depth", "5", "--kind", "b"]
    expected = Options(output="x", size=32, names=("a", "b"), part=Part(depth=5), kind="b")
    assert parse(Options, "try", "", given) == expected


def test_help_of_pretrain_lists_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_pretrain(["--recipe", "demo-vit", "--help"])
    assert f"--method.name {{{','.join(METHODS)}}}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("given", [["--data", "photos/"], ["--data=photos/"], ["--data.source", "photos/"]])
def test_data_is_short_for_data_source(given: list[str]) -> None:
    call = parse_pretrain(["--recipe", "massl-tiny", "--output", "x", *given])
    assert call.recipe.data.source == "photos/"
    compared = parse(CompareSettings, "compare", "", ["--recipes", "massl-tiny", "--output", "x", *given])
    ablated = parse(AblateSettings, "ablate", "", ["block-size", "--recipe", "massl-tiny", "--output", "x", *given])
    assert compared.data.source == ablated.data.source == "photos/"


def test_neighbors_are_neighbours() -> None:
    given = ["runs/a", "neighbors", "--data", "demo:test", "--output", "figures"]
    assert parse(VisualizeSettings, "visualize", "", given).kind == "neighbours"


@pytest.mark.parametrize(
    ("kind", "option", "value", "own"),
    [
        ("attention", "threshold", "0.5", "pca"),
        ("pca", "crop_ratio", "0.5", "neighbours"),
        ("correspondence", "num_neighbours", "3", "neighbours"),
        ("neighbours", "cosine", "True", "correspondence"),
        ("pca", "points_model", "vit_tiny_patch16_224", "correspondence"),
    ],
)
def test_options_of_another_kind_of_picture_are_refused(kind: str, option: str, value: str, own: str) -> None:
    given = ["--data", "demo:test", "--output", "figures", f"--{option}", value]
    assert str(getattr(parse(VisualizeSettings, "visualize", "", ["runs/a", own, *given]), option)) == value
    with pytest.raises((MasslError, ValidationError), match=f"{option} has no effect on {kind}, only on {own}"):
        parse(VisualizeSettings, "visualize", "", ["runs/a", kind, *given])


def test_rules_of_reading_are_for_own_images() -> None:
    start = ["runs/a", "--protocol", "knn", "retrieval", "--output", "results", "--max_megapixels", "50"]
    folder = ["--folder", "roxford"]
    given = [*start, *folder, "--train", "a", "--test", "b"]
    assert parse(EvaluateSettings, "evaluate", "", given).max_megapixels == 50
    with pytest.raises((MasslError, ValidationError), match="max_megapixels is for images of train and test"):
        parse(EvaluateSettings, "evaluate", "", [*start, *folder])


def test_a_kind_of_picture_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="kind"):
        visualize("runs/a", "neighbor", data="demo:test", output=tmp_path)  # type: ignore[arg-type]


class Typed(Settings):
    epochs: int = 3
    rate: float = 0.1
    scale: tuple[float, float] = (0.1, 0.2)
    sizes: tuple[int, ...] = ()
    options: dict[str, int] = Field(default_factory=dict)
    most: int | None = None
    is_fast: bool = False
    kind: Literal["a", "b"] = "a"
    part: Part = Part()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--epochs", "two"], ["--epochs two", "expected a whole number"]),
        (["--epochs=1.5"], ["--epochs 1.5", "expected a whole number"]),
        (["--part.depth", "deep", "--epochs", "2"], ["--part.depth deep:", "expected a whole number"]),
        (["--rate", "fast"], ["--rate fast", "expected a number"]),
        (["--scale", "0.1", "x"], ["--scale 0.1 x", "expected a number, then a number"]),
        (["--sizes", "1", "big"], ["--sizes 1 big", "expected a whole number, any number of times"]),
        (["--options", "{depth: 6}"], ["--options '{depth: 6}'", "a word, then a whole number, any number of times"]),
        (["--most", "null"], ["--most null", "None or a whole number"]),
        (["--is_fast", "maybe"], ["--is_fast maybe", "expected True or False"]),
        (["--kind", "c"], ["--kind c", "expected a or b"]),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_its_option_and_what_is_expected(
    given: list[str], words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        parse(Typed, "try", "", given)
    assert [word for word in words if word not in str(caught.value)] == []
    assert str(caught.value).startswith(words[0])  # the option first, not in quotes
    assert "literal" not in str(caught.value)
    assert "massl try --help" in str(caught.value)


def test_an_unknown_option_is_shown_with_those_that_are_similar(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(Typed, "try", "", ["--epoch", "3"])
    assert "--epochs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ("--lr", "--optimizer.learning_rate"),
        ("--learning_rate", "--optimizer.learning_rate"),
        ("--image_size", "--views.global_size"),
        ("--batch-size", "--trainer.batch_size"),
        ("--workers", "--data.num_workers"),
        ("--arch", "--backbone.name"),
        ("--model", "--backbone.name"),
        ("--gpu", "--trainer.device"),
    ],
)
@pytest.mark.parametrize("command", ["pretrain", "plan"])
@pytest.mark.parametrize("form", ["{} 1", "{}=1"])
def test_an_option_by_the_name_of_other_programs_is_answered_with_its_name_here(
    command: str, given: str, option: str, form: str
) -> None:
    with pytest.raises(UsageError, match=rf"^{given}: here it is {option} \(.*; see massl {command} --help$"):
        parse_pretrain(["photos/", *form.format(given).split()], command=command)


def test_only_options_that_the_command_has_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    start = ["runs/a", "--protocol", "knn", "--train", "a", "--test", "b", "--output", "results"]
    assert parse(EvaluateSettings, "evaluate", "", [*start, "--image_size", "64"]).image_size == 64  # its own
    with pytest.raises(UsageError, match=r"^--workers: here it is --num_workers \("):
        parse(EvaluateSettings, "evaluate", "", [*start, "--workers", "2"])
    with pytest.raises(SystemExit):
        parse(EvaluateSettings, "evaluate", "", [*start, "--lr", "2"])
    assert "Unrecognized options" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exited:
        parse(EvaluateSettings, "evaluate", "", [*start, "--workers", "2", "--help"])
    assert exited.value.code == 0
