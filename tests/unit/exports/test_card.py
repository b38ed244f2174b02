import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from massl.commands.export import ExportSettings, run_export
from massl.exports.card import escaped, without_folders
from massl.weights.io import BEST_FILE


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("/home/jane/photos", "photos"),
        ("/home/jane doe/my photos/", "my photos"),
        ("../jane/photos", "photos"),
        ("~/photos", "photos"),
        ("C:\\Users\\jane\\photos", "C:photos"),
        ("demo:train", "demo:train"),
        ("torchvision:CIFAR10?root=/home/jane/sets&train=true", "torchvision:CIFAR10?root=sets&train=true"),
        ("/home/jane,doe+x?/photos", "photos"),
        ("joined:/home/jane/a|demo:train|/home/jane/b", "joined:a|demo:train|b"),
        ("npz:/home/jane/a.npz?/home/jane/b", "npz:a.npz?b"),
        ("file:///home/jane/a", "a"),
        ("vit_small_patch16_224", "vit_small_patch16_224"),
    ],
)
def test_folders_are_left_out(given: str, shown: str) -> None:
    assert without_folders(given) == shown


def test_names_are_no_markup() -> None:
    text = escaped("a|b <img src=x> [link](http://evil) `code` **bold**\n# heading\x1b[31m www.evil me@evil.org")
    assert "\n" not in text
    assert "\x1b" not in text
    assert not re.search(r"(?<![\\&])[|<>\[\]`*#]", text)
    assert "http://" not in text
    assert "www." not in text
    assert "@" not in text


def test_the_card_tells_recipe_data_and_scores_of_these_weights_only(tiny_run: Path, tmp_path: Path) -> None:
    folder = run_export(ExportSettings(run=str(tiny_run), to="timm", output=str(tmp_path / "out")))
    card = (folder / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["library_name"] == "timm"
    assert front["pipeline_tag"] == "image-feature-extraction"
    assert "71.25" in card  # of results.jsonl
    assert "3.00" not in card  # of other weights
    assert "50.00" in card  # the last probe
    assert "0123456789abcdef" in card
    assert "1,234" in card
    assert "trainer.epochs" in card
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_best_weights_have_their_own_probe(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run()
    (run / BEST_FILE).write_bytes((run / "backbone.safetensors").read_bytes())
    rows = [json.loads(line) | {"best_step": 5} for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"run": str(run), "to": "safetensors"}
    last = run_export(ExportSettings(**settings, output=str(tmp_path / "last")))
    best = run_export(ExportSettings(**settings, output=str(tmp_path / "best"), which="best"))
    assert "at step 10:" in (last / "README.md").read_text()
    assert "at step 5:" in (best / "README.md").read_text()


def test_nothing_in_the_folder_names_this_machine(tiny_run: Path, tmp_path: Path) -> None:
    for to in ("timm", "torchhub", "safetensors"):
        folder = run_export(ExportSettings(run=str(tiny_run), to=to, output=str(tmp_path / to)))
        for file in folder.iterdir():
            content = file.read_bytes()
            assert b"jane doe" not in content, file
            assert str(tmp_path).encode() not in content, file
        assert "<b>" not in (folder / "README.md").read_text().partition("```yaml")[0]


def test_a_file_that_stands_alone_has_a_card_without_a_recipe(tiny_run: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes((tiny_run / "backbone.safetensors").read_bytes())
    folder = run_export(ExportSettings(run=str(alone), to="safetensors", output=str(tmp_path / "out")))
    card = (folder / "README.md").read_text()
    assert "## Training" not in card
    assert "## Scores" not in card
    assert sorted(file.name for file in folder.iterdir()) == ["README.md", "backbone.safetensors", "preprocess.json"]


def test_a_damaged_run_still_gives_a_card(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run()
    (run / "metrics.jsonl").write_text("{not json\n")
    (run / "data.json").write_text("[1, 2")
    (run / "results.jsonl").write_text("nonsense\n")
    (run / "recipe.yaml").write_text("- 1\n")
    folder = run_export(ExportSettings(run=str(run), to="timm", output=str(tmp_path / "out")))
    assert "## Use it" in (folder / "README.md").read_text()
