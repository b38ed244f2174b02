import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from massl.data.identity import DataIdentity, describe_change, identify
from massl.data.sources import open_source
from massl.data.sources.subset import SubsetSource


def write_image(path: Path, *, side: int = 4) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), (side, 0, 0)).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("a/1.png", "a/2.png", "b/3.png", "b/ünï cödé.png"):
        write_image(tmp_path / "photos" / name)
    return tmp_path / "photos"


def identity(uri: str | Path) -> DataIdentity:
    return identify(open_source(uri))


def test_the_same_files_elsewhere_and_of_another_time_are_the_same_images(photos: Path, tmp_path: Path) -> None:
    before = identity(photos)
    shutil.copytree(photos, tmp_path / "moved", copy_function=shutil.copyfile)
    for file in (tmp_path / "moved").rglob("*.png"):
        os.utime(file, (1, 1))
    after = identity(tmp_path / "moved")
    assert (after.digest, after.num_images) == (before.digest, 4)
    assert identity(f"folder:{photos}").digest == before.digest


CHANGES: dict[str, Callable[[Path], object]] = {
    "added": lambda root: write_image(root / "a" / "0.png"),
    "removed": lambda root: (root / "a" / "1.png").unlink(),
    "of another size": lambda root: write_image(root / "a" / "1.png", side=64),
    "renamed": lambda root: (root / "a" / "1.png").rename(root / "a" / "9.png"),
    "moved to another class": lambda root: (root / "a" / "1.png").rename(root / "b" / "1.png"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_names_or_sizes_is_another_set_of_images(photos: Path, change: str) -> None:
    before = identity(photos)
    CHANGES[change](photos)
    assert identity(photos).digest != before.digest


def test_how_the_images_are_read_counts(photos: Path) -> None:
    uris = (str(photos), f"folder:{photos}?labels=none", f"folder:{photos}?orientation=stored")
    assert len({identity(uri).digest for uri in uris}) == 3


def test_no_image_is_read(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(photos)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read"))
    monkeypatch.setattr(Path, "open", lambda path, *_: pytest.fail(f"{path} was opened"))
    assert identify(source).num_images == 4


def test_an_archive_is_known_by_its_arrays_whatever_its_name(tmp_path: Path) -> None:
    images = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    for name, content in (("a", images), ("b", images), ("c", images + 1)):
        np.savez(tmp_path / f"{name}.npz", images=content)
    first, copy, other = (identity(tmp_path / f"{name}.npz") for name in "abc")
    assert first.digest == copy.digest != other.digest


def test_joined_sources_are_known_by_their_parts_in_order(photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos, tmp_path / "more")
    write_image(tmp_path / "more" / "a" / "0.png")
    there, back = identity(f"joined:{photos}|{tmp_path / 'more'}"), identity(f"joined:{tmp_path / 'more'}|{photos}")
    assert there.num_images == 9
    assert there.digest != back.digest
    assert there.digest != identity(photos).digest


def test_a_torchvision_set_on_disk_may_move_but_not_change(photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos, tmp_path / "first" / "country211" / "train")
    before = identity(f"torchvision:Country211?root={tmp_path / 'first'}")
    shutil.move(tmp_path / "first", tmp_path / "moved")
    assert identity(f"torchvision:Country211?root={tmp_path / 'moved'}").digest == before.digest
    write_image(tmp_path / "moved" / "country211" / "train" / "a" / "1.png", side=64)
    assert identity(f"torchvision:Country211?root={tmp_path / 'moved'}").digest != before.digest


def test_a_subset_is_known_by_its_choice(photos: Path) -> None:
    source = open_source(photos)
    digests = {
        identify(SubsetSource(source, torch.tensor(choice), name="some")).digest for choice in ([0, 1], [1, 0], [0, 2])
    }
    assert len(digests) == 3


def test_changes_are_counted_and_named(photos: Path) -> None:
    before = identity(photos).files
    assert describe_change(before, before) == ""
    for number in range(4):
        write_image(photos / "a" / f"new{number}.png")
    (photos / "b" / "ünï cödé.png").unlink()
    write_image(photos / "b" / "3.png", side=64)
    change = describe_change(before, identity(photos).files)
    assert change == (
        "4 added (a/new0.png, a/new1.png, a/new2.png, ...), 1 removed (b/ünï cödé.png), 1 of another size (b/3.png)"
    )


def test_names_that_are_no_text_are_kept_apart(tmp_path: Path) -> None:
    write_image(tmp_path / "line\nbreak.png")
    os.rename(tmp_path / "line\nbreak.png", os.fsencode(tmp_path) + b"/\xff 12.png")  # noqa: PTH104
    write_image(tmp_path / "line\nbreak.png")
    before = identity(tmp_path).files
    assert before.count(b"\0") == 2
    (tmp_path / "line\nbreak.png").unlink()
    assert describe_change(before, identity(tmp_path).files) == "1 removed (line\nbreak.png)"
