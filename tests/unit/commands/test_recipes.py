"""Recipe files: their headers, the table of them, and recipes that extend another."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from massl import cli
from massl.commands.console import print_table
from massl.commands.recipe import load_recipe
from massl.commands.recipes import recipe_facts, recipe_header, recipes_table, shipped_recipes
from massl.config import RecipeError, flatten

LIGHT = """
import sys
from massl import cli
status = cli.main(["recipes"])
heavy = {"torch", "numpy", "timm"} & set(sys.modules)
sys.exit(f"imported: {heavy}" if heavy else status)
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# ---- extending -------------------------------------------------------------------------------------------------------


def test_a_recipe_has_the_values_of_its_base_but_for_its_own(tmp_path: Path) -> None:
    own = write(tmp_path / "own.yaml", "base: massl-tiny\nmethod: {teacher: {momentum: 0.5}}\ntrainer: {epochs: 7}\n")
    changes = {"method.teacher.momentum": 0.5, "trainer.epochs": 7}
    assert load_recipe(own) == load_recipe("massl-tiny", changes)


def test_a_base_is_found_beside_the_recipe_and_may_have_a_base_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    write(tmp_path / "recipes" / "first.yaml", "base: demo\ntrainer: {epochs: 3}\noptimizer: {warmup_epochs: 2}\n")
    second = write(tmp_path / "recipes" / "second.yaml", "base: first.yaml\ntrainer: {epochs: 4}\n")
    monkeypatch.chdir(tmp_path)
    assert load_recipe(second) == load_recipe("demo", {"trainer.epochs": 4, "optimizer.warmup_epochs": 2})


def test_with_another_method_the_section_of_the_base_is_left_out(tmp_path: Path) -> None:
    own = write(tmp_path / "own.yaml", "base: massl-tiny\nmethod: {name: mocov3, temperature: 0.3}\n")
    recipe = load_recipe(own)
    assert recipe == load_recipe("massl-tiny", {"method.name": "mocov3", "method.temperature": 0.3})
    assert recipe.backbone == load_recipe("massl-tiny").backbone


def test_with_another_method_what_the_base_says_for_it_counts(tmp_path: Path) -> None:
    own = write(tmp_path / "own.yaml", "base: demo-vit\nmethod: {name: dino}\n")
    assert load_recipe(own) == load_recipe("demo-vit", {"method.name": "dino"})
    same = write(
        tmp_path / "same.yaml", "base: demo-vit\nmethod: {name: massl}\n"
    )  # as demo-vit does without saying so
    assert load_recipe(same) == load_recipe("demo-vit")


def test_with_method_is_inherited_and_extended(tmp_path: Path) -> None:
    own = write(tmp_path / "own.yaml", "base: demo-vit\nwith_method: {dino: {trainer: {epochs: 3}}}\n")
    assert load_recipe(own) == load_recipe("demo-vit")
    expected = load_recipe("demo-vit", {"method.name": "dino", "trainer.epochs": 3})
    assert load_recipe(own, {"method.name": "dino"}) == expected


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"a": "base: a.yaml"}, "a.yaml -> a.yaml"),
        ({"a": "base: b.yaml", "b": "base: c.yaml", "c": "base: a.yaml"}, "a.yaml -> b.yaml -> c.yaml -> a.yaml"),
        ({"a": "base: massl-tny"}, "Did you mean 'massl-tiny'"),
        ({"a": "base: [massl-tiny, dino-tiny]"}, "base names one recipe"),
        ({"a": "base: massl-tiny\nmethod: {memory: {num_row: 3}}"}, r"method\.memory\.num_row"),
        ({"a": "base: massl-tiny\nmethod: {name: dinno}"}, "Did you mean 'dino'"),
    ],
)
def test_a_base_that_cannot_be_is_refused(tmp_path: Path, files: dict[str, str], named: str) -> None:
    for name, text in files.items():
        write(tmp_path / f"{name}.yaml", text + "\n")
    with pytest.raises(RecipeError, match=named):
        load_recipe(tmp_path / "a.yaml")


def test_a_resolved_recipe_has_no_base() -> None:
    assert not [key for key in flatten(load_recipe("dino-tiny")) if key.partition(".")[0] == "base"]


# ---- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_says_for_what_on_what_and_how_well(name: str) -> None:
    path = shipped_recipes()[name]
    assert all(recipe_facts(path).values())
    command, *prose = recipe_header(path).splitlines()
    assert command.startswith(f"massl pretrain --recipe {name} ")
    assert prose
    assert not [line for line in prose if line.startswith(("for: ", "needs: ", "expect: "))]


def test_the_table_has_the_values_of_every_recipe() -> None:
    table = recipes_table()
    assert {line[0] for line in table.lines} == {"auto", *shipped_recipes()}
    assert table.lines[0][0] == "auto"
    for name, method, network, pixels, epochs, *_ in table.lines[1:]:
        recipe = load_recipe(name)
        assert (method, int(pixels)) == (recipe.method.name, recipe.views.global_size)
        assert int(epochs) == recipe.trainer.epochs
        if "vit" in recipe.backbone.name:
            assert network.endswith(f"/{recipe.backbone.patch_size or 16}")
    assert table.lines[1][0] == "demo"


def test_the_table_fits_100_columns_with_a_line_for_each_recipe() -> None:
    screen = io.StringIO()
    print_table(Console(file=screen, width=100, color_system=None), recipes_table())
    lines = [line for line in screen.getvalue().splitlines() if line.strip()]
    assert len(lines) == 3 + len(shipped_recipes())
    assert max(map(len, lines)) <= 100


def test_recipes_are_chosen_by_method_and_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [line[0] for line in recipes_table(method="massl", purpose="Photos").lines]
    assert chosen == ["massl-imagenette", "massl-tiny", "massl-vitb16", "massl-vits16"]
    assert cli.main(["recipes", "--method", "massl", "--for", "photos"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in chosen)
    assert "dino" not in printed
    assert cli.main(["recipes", "--method", "massel"]) == 1
    assert "Did you mean 'massl'" in capsys.readouterr().err
    assert cli.main(["recipes", "--for", "cats"]) == 1
    assert "thumbnails" in capsys.readouterr().err


def test_a_recipe_is_printed_with_what_it_extends(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", "dino-tiny"]) == 0
    printed = capsys.readouterr().out
    for name in ("dino-tiny", "massl-tiny"):
        assert shipped_recipes()[name].read_text().strip() in printed
    assert cli.main(["recipes", "dino-tny"]) == 1
    assert "Did you mean 'dino-tiny'" in capsys.readouterr().err


def test_the_table_needs_no_torch() -> None:
    finished = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
