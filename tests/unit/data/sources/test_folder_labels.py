from pathlib import Path

import pytest

from massl.data.sources import label_doubt, open_source, remarks_of
from massl.data.sources.base import ImageSource


def folder_of(root: Path, num_images: dict[str, int]) -> Path:
    """Files named as images, so many in each folder."""
    for folder, num in num_images.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for number in range(num):
            (root / folder / f"{number}.jpg").write_bytes(b"never read")
    return root


def classes_of_images(source: ImageSource) -> list[str | None]:
    names, labels = source.class_names, map(source.label_of, range(len(source)))
    return [None if names is None or label is None else names[label] for label in labels]


def test_classes_found_are_named_with_the_way_to_ignore_them(tmp_path: Path) -> None:
    source = open_source(folder_of(tmp_path, {"cat": 3, "dog": 2}))
    (remark,) = remarks_of(source)
    assert "2 classes from folder names: cat, dog;" in remark
    assert f"folder:{tmp_path}?labels=none" in remark
    assert not label_doubt(source)
    ignored = open_source(f"folder:{tmp_path}?labels=none")
    assert ignored.class_names is None
    assert not remarks_of(ignored)


def test_only_the_first_of_many_classes_are_named(tmp_path: Path) -> None:
    source = open_source(folder_of(tmp_path, {f"kind {letter}": 2 for letter in "abcdefgh"}))
    (remark,) = remarks_of(source)
    assert "8 classes" in remark
    assert "kind e, ...;" in remark
    assert "kind f" not in remark


@pytest.mark.parametrize(
    ("num_images", "is_doubted"),
    [
        ({"2019": 30, "2020": 30}, True),
        ({"0": 30, "1": 30}, True),
        ({"2019-07": 30, "2019-08-01": 30}, True),
        ({"2019": 30, "holidays": 30}, False),
        ({"n01440764": 30, "n01443537": 30}, False),
        ({"anna": 1, "ben": 1, "cleo": 40}, True),  # half of the folders hold one image
        ({"anna": 2, "ben": 2}, False),
    ],
)
def test_classes_that_are_probably_none_are_doubted(
    tmp_path: Path, num_images: dict[str, int], is_doubted: bool
) -> None:
    source = open_source(folder_of(tmp_path, num_images))
    assert source.class_names == tuple(sorted(num_images))
    assert bool(label_doubt(source)) == is_doubted
    assert any("caution" in remark and "?labels=folders" in remark for remark in remarks_of(source)) == is_doubted
    chosen = open_source(f"folder:{tmp_path}?labels=folders")
    assert chosen.class_names == source.class_names
    assert not label_doubt(chosen)


def test_splits_with_images_only_are_no_classes(tmp_path: Path) -> None:
    source = open_source(folder_of(tmp_path, {"train": 5, "Val": 5}))
    assert source.class_names is None
    (remark,) = remarks_of(source)
    assert "Val, train are taken as splits" in remark
    assert f"folder:{tmp_path}?labels=folders" in remark
    assert open_source(f"folder:{tmp_path}?labels=folders").class_names == ("Val", "train")


def test_class_folders_inside_splits_are_the_classes(tmp_path: Path) -> None:
    source = open_source(folder_of(tmp_path, {"train/cat": 2, "train/eel": 1, "val/bee/x": 2, "val/cat": 1}))
    assert source.class_names == ("bee", "cat", "eel")
    assert classes_of_images(source) == ["cat", "cat", "eel", "bee", "bee", "cat"]
    (remark,) = remarks_of(source)
    assert "3 classes from folder names inside train, val: bee, cat, eel" in remark


def test_a_doubt_about_classes_inside_splits_names_a_split(tmp_path: Path) -> None:
    source = open_source(folder_of(tmp_path, {"train/2019": 9, "train/2020": 9, "val/2020": 9}))
    assert label_doubt(source)
    assert f"folder:{tmp_path}/train?labels=folders" in remarks_of(source)[-1]


def test_a_split_and_a_class_side_by_side_are_classes(tmp_path: Path) -> None:
    assert open_source(folder_of(tmp_path, {"train": 5, "tram": 5})).class_names == ("train", "tram")


def test_runs_that_began_before_keep_their_classes_and_files(tmp_path: Path) -> None:
    folder_of(tmp_path, {"train/cat": 2, "train/dog": 1, "val/cat": 2})
    (tmp_path / "val" / "cat" / "new.avif").write_bytes(b"")
    for uri in (str(tmp_path), f"folder:{tmp_path}"):
        source = open_source(uri, as_before=True)
        assert source.class_names == ("train", "val")
        assert classes_of_images(source) == ["train"] * 3 + ["val"] * 2
        assert not label_doubt(source)
        assert not any("classes" in remark for remark in remarks_of(source))


def test_parts_of_a_joined_source_have_their_remarks_and_doubts(tmp_path: Path) -> None:
    for part in ("one", "two"):
        folder_of(tmp_path / part, {"2019": 5, "2020": 5})
    joined = open_source(f"joined:{tmp_path}/one|folder:{tmp_path}/two?labels=folders")
    assert label_doubt(joined)
    assert len(remarks_of(joined)) == 2
    assert not label_doubt(open_source("demo:train"))
    assert remarks_of(open_source("demo:train")) == []
