"""A folder as people have it, through every command that reads images, without a stop."""

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from massl.data.sources import open_source, remarks_of

UNREADABLE = ("Sommer an der See/empty.jpg", "写真/ü/cut off.jpg")
SKIPPED = re.compile(r"skipped an unreadable image: (.+?\.jpg): ")
NUM_IMAGES = 48  # with two unreadable ones: fewer than 5 %


def picture(number: int, *, size: tuple[int, int] = (40, 30)) -> Image.Image:
    """Noise, bright in the second half of the numbers."""
    noise = np.random.default_rng(number).integers(0, 120, (size[1], size[0], 3))
    return Image.fromarray((noise + (120 if number >= NUM_IMAGES // 2 else 0)).astype(np.uint8))


def special_files(sea: Path, photos: Path) -> None:
    """One of each kind: print colours, 16 bits, a palette, animations, turned, wide, a copy; and two unreadable."""
    picture(0).convert("CMYK").save(sea / "cmyk.jpg")
    Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50).save(sea / "deep.png")
    picture(1).convert("P").save(sea / "palette.png", transparency=0)
    frames = [picture(number) for number in (2, 3, 4)]
    frames[0].save(sea / "moving.gif", save_all=True, append_images=frames[1:])
    frames[0].save(sea / "moving.webp", save_all=True, append_images=frames[1:])
    turned = Image.Exif()
    turned[0x0112] = 6
    picture(5, size=(60, 20)).save(sea / "turned.jpg", exif=turned)
    Image.new("RGB", (12_000, 100), (90, 140, 200)).save(sea / "panorama.jpg")
    (sea / "empty.jpg").touch()
    picture(6).convert("RGBA").save(photos / "alpha.png")
    picture(7).convert("L").save(photos / "GREY.JPEG")
    shutil.copy(photos / "alpha.png", photos / "alpha (1).png")
    whole = io.BytesIO()
    picture(8, size=(200, 200)).save(whole, "JPEG")
    (photos / "ü").mkdir()
    (photos / "ü" / "cut off.jpg").write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])


@pytest.fixture(scope="module")
def messy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("my photos")
    sea, photos = root / "Sommer an der See", root / "写真"
    for folder in (sea, photos):
        folder.mkdir()
    special_files(sea, photos)
    num_special = sum(path.is_file() for path in root.rglob("*"))
    for number in range(NUM_IMAGES - num_special):
        folder = sea if number % 2 else photos / "a" / "b c"
        folder.mkdir(parents=True, exist_ok=True)
        picture(number if number % 2 else NUM_IMAGES + number).save(folder / f"IMG {number:03d}.jpg")
    # none of these is an image to read
    (sea / "IMG_1.HEIC").write_bytes(b"heic")
    (sea / "IMG_2.heic").write_bytes(b"heic")
    (photos / "raw.CR2").write_bytes(b"raw")
    (sea / ".hidden.jpg").write_bytes(b"hidden")
    (root / ".thumbnails").mkdir()
    (root / ".thumbnails" / "1.jpg").write_bytes(b"hidden")
    (root / ".DS_Store").touch()
    (sea / "Thumbs.db").touch()
    (photos / "up").symlink_to(root, target_is_directory=True)
    (photos / "own.jpg").symlink_to(photos / "own.jpg")
    (photos / "gone.jpg").symlink_to(root / "nowhere.jpg")
    return root


def skipped(answer: Any) -> list[str]:
    """The unreadable images that a command named."""
    assert answer.status == 0, answer.text
    return sorted(SKIPPED.findall(answer.error))


def test_the_listing_of_a_messy_folder(messy: Path) -> None:
    source = open_source(messy)
    assert len(source) == NUM_IMAGES
    assert source.class_names == ("Sommer an der See", "写真")
    said = " ".join(remarks_of(source))
    assert "2 classes from folder names: Sommer an der See, 写真" in said
    assert "ignored 1 .CR2" in said
    assert re.search(r"ignored 2 \.heic", said, re.IGNORECASE)


def test_pretrain_and_embed_skip_and_name_the_same_images(
    messy: Path, recipe: Path, tmp_path: Path, massl_here: Callable[..., Any]
) -> None:
    run, features = tmp_path / "run", tmp_path / "features.npz"
    options = ("--trainer.epochs", "1", "--probes.every_epochs", "0")
    trained = massl_here("pretrain", "--recipe", recipe, "--data.source", messy, "--output", run, *options)
    assert skipped(trained) == sorted(UNREADABLE)
    assert "2 classes from folder names" in trained.text
    embedded = massl_here("embed", run, "--data", messy, "--output", features)
    assert skipped(embedded) == sorted(UNREADABLE)
    assert "2 unreadable images" in embedded.text
    with np.load(features) as archive:
        keys = archive["keys"].tolist()
        assert len(archive["features"]) == len(archive["labels"]) == NUM_IMAGES - len(UNREADABLE)
    source = open_source(messy)
    assert keys == [key for key in map(source.key_of, range(NUM_IMAGES)) if key not in UNREADABLE]


@pytest.mark.slow
def test_every_command_goes_through_a_messy_folder_and_skips_the_same_images(
    messy: Path, recipe: Path, tmp_path: Path, massl_here: Callable[..., Any]
) -> None:
    run, results, page = tmp_path / "run", tmp_path / "results", tmp_path / "page.html"
    found = {
        "pretrain": massl_here(
            "pretrain", "--recipe", recipe, "--data.source", messy, "--output", run, "--trainer.epochs", "2"
        ),
        "evaluate": massl_here(
            *("evaluate", run, "--protocol", "knn", "linear", "low-shot", "correspondence"),
            *("--train", messy, "--test", messy, "--output", results, "--feature", "cls", "--linear.epochs", "2"),
            *("--low-shot.per_class", "2", "--low-shot.draws", "1", "--low-shot.linear.epochs", "2"),
        ),
        "report": massl_here("report", run, "--output", page),
    }
    for kind in ("attention", "neighbours", "correspondence"):
        arguments = ("visualize", run, kind, "--data", messy, "--output", tmp_path / kind, "--num_images", NUM_IMAGES)
        found[kind] = massl_here(*map(str, arguments))
    assert {command: skipped(answer) for command, answer in found.items()} == dict.fromkeys(found, sorted(UNREADABLE))
    rows = [json.loads(line) for line in (results / "results.jsonl").read_text().splitlines()]
    assert {row["protocol"] for row in rows} == {"knn", "linear", "low-shot", "correspondence"}
    assert all("2 unreadable images left out" in json.dumps(row) for row in rows)
    assert "cannot be read" not in page.read_text()
    assert "46 images of" in page.read_text()
    assert len(list((tmp_path / "attention" / "attention").glob("*.png"))) == NUM_IMAGES - len(UNREADABLE)
