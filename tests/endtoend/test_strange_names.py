"""Names that are not UTF-8, or hold line breaks and control characters, through every command."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import safetensors.numpy
import yaml
from PIL import Image

import massl
from massl.commands.recipe import load_recipe
from massl.config import to_yaml
from massl.data.keys import original_key
from tests.reliability.world import TINY_RECIPE, tiny_images

CLASSES = (b"cl\nass", b"\xff\xfe", b"tab\t, 'quote' \"two\"", b"\x1b[2J plain")
BROKEN = b"bro\nken\xff.png"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 images in folders of strange names inside one of another; one is not readable."""
    root = os.fsencode(tmp_path_factory.mktemp("names")) + b"/ph\xffo\ntos"
    for number, pixels in enumerate(tiny_images(40)):
        folder = root + b"/" + CLASSES[number % 4]
        Path(os.fsdecode(folder)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(os.fsdecode(folder + b"/i\xe9 %d\n.png" % number))
    Path(os.fsdecode(root + b"/" + CLASSES[0] + b"/" + BROKEN)).write_bytes(b"no image")
    return Path(os.fsdecode(root))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY_RECIPE))
    path.write_text(to_yaml(load_recipe(path)))
    return path


@pytest.mark.slow
def test_strange_names_go_through_every_command(photos: Path, recipe: Path, tmp_path: Path, massl_here: Any) -> None:
    run, figures, page = tmp_path / "run", tmp_path / "figures", tmp_path / "page.html"
    trained = massl_here("pretrain", "--recipe", recipe, "--data", photos, "--output", run, "--trainer.epochs", "2")
    assert trained.status == 0, trained.text
    assert "bro%0Aken%FF.png" in trained.text
    assert "\x1b[2J" not in trained.text
    again = massl_here("pretrain", "--output", run)  # finished: recipe.yaml and data.json are read back
    assert again.status == 0, again.text
    assert json.loads((run / "data.json").read_text())["source"] == str(photos)
    options = ("--protocol", "knn", "--train", photos, "--test", photos, "--output", tmp_path / "results")
    for answer in (
        massl_here("evaluate", run, *options, "--device", "cpu"),
        massl_here("visualize", run, "neighbours", "--data", photos, "--output", figures, "--num_images", "2"),
        massl_here("report", run, "--output", page),
    ):
        assert answer.status == 0, answer.text
        assert "Traceback" not in answer.text
    assert page.read_text(encoding="utf-8")
    assert "percent:" in (tmp_path / "results" / "results.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_embed_keeps_every_name_in_every_format(photos: Path, recipe: Path, tmp_path: Path, massl_here: Any) -> None:
    run = tmp_path / "run"
    massl.pretrain(recipe=recipe, data=photos, output=run, overrides={"trainer.max_steps": 1})
    for ending in (".parquet", ".npz", ".safetensors"):
        answer = massl_here("embed", run, "--data", photos, "--output", tmp_path / f"rows{ending}")
        assert answer.status == 0, answer.text
    parquet = pyarrow.parquet.read_table(tmp_path / "rows.parquet").column("key").to_pylist()
    lines = safetensors.numpy.load_file(tmp_path / "rows.safetensors")["keys_utf8_lines"].tobytes().decode()
    with np.load(tmp_path / "rows.npz", allow_pickle=False) as archive:
        assert parquet == lines.split("\n") == lines.splitlines() == archive["keys"].tolist()
    assert len(set(parquet)) == 40
    assert all((photos / original_key(key)).is_file() for key in parquet)
    assert massl.embed(run, data=photos).keys == [original_key(key) for key in parquet]
    paths = [photos / original_key(key) for key in parquet[:3]]
    assert massl.embed(run, data=paths).keys == [str(path) for path in paths]
