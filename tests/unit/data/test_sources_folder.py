from pathlib import Path

import pytest

from massl.data.sources import open_source
from massl.data.sources.base import DataError
from massl.data.sources.folder import FolderSource


def touch(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


def keys(source: FolderSource) -> list[str]:
    return [source.key_of(index) for index in range(len(source))]


def labels(source: FolderSource) -> list[int | None]:
    return [source.label_of(index) for index in range(len(source))]


def scan(root: Path) -> FolderSource:
    return FolderSource(root, name=str(root))


def test_class_folders_give_labels_even_to_images_nested_below_a_class(tmp_path: Path) -> None:
    touch(tmp_path, "dog/b.jpg", "dog/a.PNG", "cat/deep/er/c.jpeg", "cat/d.tiff")
    source = scan(tmp_path)
    assert keys(source) == ["cat/d.tiff", "cat/deep/er/c.jpeg", "dog/a.PNG", "dog/b.jpg"]
    assert labels(source) == [0, 0, 1, 1]
    assert source.class_names == ("cat", "dog")


def test_reading_gives_the_bytes_label_and_key_of_each_file(tmp_path: Path) -> None:
    touch(tmp_path, "b/ü ber.jpg", "a/2.jpg", "a/1.jpg")
    source = scan(tmp_path)
    images = [source.read(index) for index in range(len(source))]
    assert [image.key for image in images] == ["a/1.jpg", "a/2.jpg", "b/ü ber.jpg"]
    assert [image.data for image in images] == [b"a/1.jpg", b"a/2.jpg", "b/ü ber.jpg".encode()]
    assert [image.label for image in images] == [0, 0, 1]


@pytest.mark.parametrize("names", [("x.jpg", "y.jpg"), ("x.jpg", "a/y.jpg", "b/z.jpg"), ("only/x.jpg", "only/y.jpg")])
def test_images_beside_folders_or_in_a_single_folder_are_unlabelled(tmp_path: Path, names: tuple[str, ...]) -> None:
    touch(tmp_path, *names)
    source = scan(tmp_path)
    assert source.class_names is None
    assert labels(source) == [None] * len(names)


def test_folders_without_images_are_no_classes(tmp_path: Path) -> None:
    touch(tmp_path, "a/x.jpg", "b/y.jpg", "notes/readme.txt")
    assert scan(tmp_path).class_names == ("a", "b")


def test_hidden_and_foreign_files_are_ignored(tmp_path: Path) -> None:
    touch(tmp_path, "x.jpg", ".hidden.jpg", ".thumbs/y.jpg", "jpg", "x.jpg.txt", "list.csv")
    assert keys(scan(tmp_path)) == ["x.jpg"]


def test_the_uri_can_force_labels_off_and_on(tmp_path: Path) -> None:
    touch(tmp_path / "photos", "2021/x.jpg", "2022/y.jpg")
    touch(tmp_path / "one", "only/x.jpg")
    assert open_source(f"folder:{tmp_path}/photos").class_names == ("2021", "2022")
    assert open_source(f"folder:{tmp_path}/photos?labels=none").class_names is None
    assert open_source(f"folder:{tmp_path}/one?labels=folders").class_names == ("only",)


def test_forcing_folder_labels_names_the_image_that_has_no_class(tmp_path: Path) -> None:
    touch(tmp_path, "a/x.jpg", "stray.jpg")
    with pytest.raises(DataError, match=r"stray\.jpg"):
        open_source(f"folder:{tmp_path}?labels=folders")


@pytest.mark.parametrize(
    ("query", "message"), [("labels=maybe", "labels=none"), ("label=none", "Did you mean 'labels'"), ("labels", "key=value")]
)
def test_wrong_parameters_are_explained(tmp_path: Path, query: str, message: str) -> None:
    touch(tmp_path, "x.jpg")
    with pytest.raises(DataError, match=message):
        open_source(f"folder:{tmp_path}?{query}")


def test_a_link_back_to_a_parent_ends_but_a_link_elsewhere_is_followed(tmp_path: Path) -> None:
    touch(tmp_path, "root/a/x.jpg", "elsewhere/y.jpg")
    (tmp_path / "root/a/loop").symlink_to(tmp_path / "root")
    (tmp_path / "root/b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root/a/z.jpg").symlink_to(tmp_path / "elsewhere/y.jpg")
    (tmp_path / "root/a/broken.jpg").symlink_to(tmp_path / "nowhere.jpg")
    assert keys(scan(tmp_path / "root")) == ["a/x.jpg", "a/z.jpg", "b/y.jpg"]


def test_an_empty_missing_or_non_folder_says_what_was_expected(tmp_path: Path) -> None:
    touch(tmp_path, "empty/notes.txt", "file.jpg")
    with pytest.raises(DataError, match=r"holds no images; expected \.jpg .* or class folders"):
        scan(tmp_path / "empty")
    with pytest.raises(DataError, match="not there"):
        scan(tmp_path / "missing")
    with pytest.raises(DataError, match="a file, not a folder"):
        scan(tmp_path / "file.jpg")
