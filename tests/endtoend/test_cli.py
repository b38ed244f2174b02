from typing import Any

import pytest

from massl.commands.recipe import load_recipe
from massl.commands.recipes import shipped_recipes


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_the_commands(flag: str, massl_here: Any) -> None:
    answer = massl_here(flag)
    assert answer.status == 0
    assert "pretrain" in answer.output
    assert "recipes" in answer.output
    assert not answer.error


def test_no_command_shows_the_usage_and_fails(massl_here: Any) -> None:
    answer = massl_here()
    assert answer.status == 2
    assert "usage: massl COMMAND" in answer.text


def test_unknown_command_is_named(massl_here: Any) -> None:
    answer = massl_here("pretrian")
    assert answer.status == 2
    assert "'pretrian'" in answer.error
    assert "usage: massl COMMAND" in answer.error


def test_recipes_are_listed_with_what_their_headers_say(massl_here: Any) -> None:
    answer = massl_here("recipes")
    assert answer.status == 0
    listed = {line.split()[0] for line in answer.output.splitlines() if line.split()}
    assert shipped_recipes().keys() <= listed
    assert {
        "demo",
        "massl-cifar",
        "massl-tiny",
        "massl-vitb16",
        "massl-vits16",
        "dino-vits16",
        "ibot-vitb16",
    } <= shipped_recipes().keys()
    assert "k-NN 65.5 -> 77.5" in answer.output


def test_recipes_prints_one_in_full(massl_here: Any) -> None:
    assert massl_here("recipes", "--help").status == 0
    answer = massl_here("recipes", "demo")
    assert answer.status == 0
    assert answer.output.strip() == shipped_recipes()["demo"].read_text().strip()


@pytest.mark.parametrize("arguments", [["--help"], ["--recipe", "demo", "--help"]])
def test_pretrain_help_explains_every_option(arguments: list[str], massl_here: Any) -> None:
    answer = massl_here("pretrain", *arguments)
    assert answer.status == 0
    for section, part in load_recipe("demo"):
        assert f"{section} options" in answer.text
        for name in type(part).model_fields:
            assert f"--{section}.{name}" in answer.text
    assert "torchrun --nproc-per-node 4 -m massl pretrain" in answer.text
    assert "massl pretrain photos/" in answer.text


def test_pretrain_help_shows_the_values_of_the_recipe_it_is_given(massl_here: Any) -> None:
    assert "(default: 64)" in massl_here("pretrain", "--recipe", "demo", "--help").text
    assert "(default: 512)" in massl_here("pretrain", "--recipe=massl-cifar", "-h").text
