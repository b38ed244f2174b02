import io
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from massl.commands import images
from massl.commands.images import SkippedImages, UnreadableLeftOut, open_images
from massl.data.sources import open_source
from massl.data.sources.array import ArraySource
from massl.data.sources.base import DataError, ImageSource
from massl.data.sources.subset import SubsetSource, UnreadableImages


def photos(num: int) -> ArraySource:
    pixels = np.zeros((num, 4, 4, 3), dtype=np.uint8)
    return ArraySource(name="photos", pixels=pixels, labels=None, class_names=None, key_prefix="photo")


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def keys(source: ImageSource) -> list[str]:
    return [source.key_of(index) for index in range(len(source))]


def test_opening_images_says_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("2019/a.jpg", "2020/b.jpg", "2020/c.CR2"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    open_images(tmp_path)
    said = capsys.readouterr().err
    assert "2 classes from folder names: 2019, 2020" in said
    assert "caution" in said
    assert "ignored 1 .CR2" in said


def test_only_the_first_of_several_processes_speaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.CR2").touch()
    (tmp_path / "c.jpg").touch()
    monkeypatch.setenv("RANK", "1")
    open_images(tmp_path)
    assert capsys.readouterr().err == ""


SHOWN = ((1000, 0.5), (3000, 2.0), (12_000, 11.0), (12_500, 11.5), (30_000, 22.0))  # files, seconds since the start


def listing(monkeypatch: pytest.MonkeyPatch, console: Console) -> str:
    now = 0.0
    monkeypatch.setattr(images.time, "monotonic", lambda: now)
    with images._listing_on(console) as show:
        for num_files, seconds in SHOWN:
            now = seconds
            show(num_files)
    return printed(console)


def test_long_listings_print_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    said = listing(monkeypatch, quiet())
    assert said.splitlines() == ["reading folder: 12,000 files", "reading folder: 30,000 files"]


def test_long_listings_show_a_line_that_moves_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    said = listing(monkeypatch, Console(file=io.StringIO(), force_terminal=True, width=80))
    assert "reading folder: 30,000 files" in said
    assert said.endswith("\x1b[2K")  # erased at the end


def test_a_quick_listing_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    with images._listing_on(console) as show:
        show(1000)
    assert printed(console) == ""


def test_work_is_repeated_without_the_unreadable_images_each_named_once() -> None:
    source, console = photos(100), quiet()
    broken = {7: "truncated", 90: "empty"}

    def work(left: ImageSource) -> list[str]:
        found = {
            keys(left).index(f"photo/{index}"): reason
            for index, reason in broken.items()
            if f"photo/{index}" in keys(left)
        }
        if found:
            first = min(found)
            raise UnreadableImages(left, {first: found[first]})
        return keys(left)

    leaving_out = UnreadableLeftOut(console)
    for _ in range(2):
        assert leaving_out.run(work, source) == [f"photo/{index}" for index in range(100) if index not in broken]
    assert printed(console).count("skipped an unreadable image: photo/7: truncated") == 1
    assert printed(console).count("skipped an unreadable image: photo/90: empty") == 1
    assert "skipped 2 unreadable images in all" in printed(console)


def test_a_file_of_two_nested_folders_is_named_once(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / "photos" / "val").mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / "val" / f"{number}.jpg").touch()
    whole, part = open_source(tmp_path / "photos"), open_source(tmp_path / "photos" / "val")

    def work(train: ImageSource, test: ImageSource) -> None:
        for source in (train, test):
            if len(source) == 40:
                raise UnreadableImages(source, {0: "empty"})

    console = quiet()
    UnreadableLeftOut(console).run(work, whole, part)
    assert printed(console).count("skipped an unreadable image") == 1
    assert "skipped 1 unreadable image in all" in printed(console)


def test_all_sources_of_the_same_images_lose_the_unreadable_ones() -> None:
    whole = photos(100)
    queries = SubsetSource(whole, torch.arange(40, 80), name="queries")
    other = photos(50)

    def work(train: ImageSource, test: ImageSource, unrelated: ImageSource, nothing: None) -> tuple[int, int, int]:
        if len(train) == 100:
            raise UnreadableImages(test, {3: "empty"})
        return len(train), len(test), len(unrelated)

    assert UnreadableLeftOut(quiet()).run(work, whole, queries, other, None) == (99, 39, 50)


def test_too_many_unreadable_images_stop_the_work() -> None:
    def work(left: ImageSource) -> None:
        raise UnreadableImages(left, dict.fromkeys(range(6), "empty"))

    with pytest.raises(DataError, match=r"6 of 100 images of photos cannot be read, more than 5%.*photo/0: empty"):
        UnreadableLeftOut(quiet()).run(work, photos(100))


def test_images_of_a_published_layout_cannot_be_left_out() -> None:
    def work(train: None) -> None:
        raise UnreadableImages(photos(100), {0: "empty"})

    with pytest.raises(UnreadableImages, match=r"photo/0: empty; repair or remove it"):
        UnreadableLeftOut(quiet()).run(work, None)


def test_a_file_that_training_and_probe_meet_under_two_names_is_one_image() -> None:
    console = quiet()
    skipped = SkippedImages(console)
    skipped.add("train/cats/a.jpg: empty", "photos/")
    skipped.add("cats/a.jpg: empty", "photos/train")
    skipped.add("cats/a.jpg: empty", "photos/val")
    skipped.print_total()
    assert printed(console).count("skipped an unreadable image") == 2
    assert "skipped 2 unreadable images in all" in printed(console)
