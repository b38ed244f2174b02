import os
import time
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


def test_class_folders_without_an_image_are_listed_apart(tmp_path: Path) -> None:
    touch(tmp_path, "b/x.jpg", "d/deep/y.jpg", "c/readme.txt", "a/deep/z.txt", ".hidden/x.jpg", "list.csv")
    (tmp_path / "e").mkdir()
    source = scan(tmp_path)
    assert source.class_names == ("b", "d")
    assert source.empty_class_folders == ("a", "c", "e")
    assert FolderSource(tmp_path, name="x", labels="none").empty_class_folders == ()


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
    ("query", "message"),
    [
        ("labels=maybe", "labels=none"),
        ("label=none", "Did you mean 'labels'"),
        ("labels", "key=value"),
        ("orientation=left", "orientation=left.*orientation=exif"),
        ("orientaton=stored", "Did you mean 'orientation'"),
    ],
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


def test_images_that_lie_outside_of_the_folder_are_counted_and_named(tmp_path: Path) -> None:
    touch(tmp_path / "root", "a/x.jpg", "a/y.jpg")
    touch(tmp_path / "elsewhere", "1.jpg", "2.jpg", "deeper/3.jpg", "note.txt")
    (tmp_path / "root/a/inside.jpg").symlink_to("x.jpg")
    assert not any("links" in remark for remark in scan(tmp_path / "root").remarks)
    (tmp_path / "root/a/z.jpg").symlink_to("../../elsewhere/1.jpg")
    (tmp_path / "root/b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "shortcut").symlink_to(tmp_path / "root")  # the folder itself may be given by a link
    for root in (tmp_path / "root", tmp_path / "shortcut"):
        (said,) = [remark for remark in scan(root).remarks if "links" in remark]
        assert said == f"4 images are links to outside {root} (a/z.jpg, b/1.jpg, b/2.jpg, ...)"


def test_an_empty_missing_or_non_folder_says_what_was_expected(tmp_path: Path) -> None:
    touch(tmp_path, "empty/notes.txt", "file.jpg")
    with pytest.raises(DataError, match=r"no images.* \.jpg "):
        scan(tmp_path / "empty")
    with pytest.raises(DataError, match="does not exist"):
        scan(tmp_path / "missing")
    with pytest.raises(DataError, match="a file, not a folder"):
        scan(tmp_path / "file.jpg")


@pytest.mark.parametrize(
    ("query", "expected"), [("", True), ("?orientation=exif", True), ("?labels=none&orientation=stored", False)]
)
def test_images_are_turned_upright_unless_the_uri_wants_them_as_stored(
    tmp_path: Path, query: str, expected: bool
) -> None:
    touch(tmp_path, "x.jpg")
    assert open_source(f"folder:{tmp_path}{query}").read(0).turn_upright is expected


def test_the_fingerprint_stays_while_nothing_changes(tmp_path: Path) -> None:
    touch(tmp_path, "a/x.jpg", "b/y.jpg")
    first = scan(tmp_path)
    assert first.fingerprint() == first.fingerprint() == FolderSource(tmp_path, name="another name").fingerprint()
    (tmp_path / "a/x.jpg").read_bytes()
    touch(tmp_path, "a/readme.txt", "c/notes.txt")
    assert scan(tmp_path).fingerprint() == first.fingerprint()


def test_whatever_changes_an_image_its_place_or_its_label_changes_the_fingerprint(tmp_path: Path) -> None:
    touch(tmp_path, "a/x.jpg", "b/y.jpg")
    source = scan(tmp_path)
    seen = [source.fingerprint()]

    def changed() -> bool:
        seen.append(scan(tmp_path).fingerprint())
        return len(set(seen)) == len(seen)

    status = (tmp_path / "a/x.jpg").stat()
    time.sleep(0.02)  # the system's clock for files ticks every 4 ms
    (tmp_path / "a/x.jpg").write_bytes(b"a/z.jpg")  # as many bytes
    os.utime(tmp_path / "a/x.jpg", ns=(status.st_atime_ns, status.st_mtime_ns))  # and, as a tool may pretend, as old
    assert changed()
    touch(tmp_path, "b/z.jpg")
    assert changed()
    (tmp_path / "b/z.jpg").rename(tmp_path / "b/w.jpg")
    assert changed()
    (tmp_path / "b/w.jpg").rename(tmp_path / "a/w.jpg")
    assert changed()
    seen.append(FolderSource(tmp_path, name="x", labels="none").fingerprint())
    seen.append(FolderSource(tmp_path, name="x", orientation="stored").fingerprint())
    assert len(set(seen)) == len(seen) == 7


def test_a_file_that_vanished_since_is_named_by_the_fingerprint(tmp_path: Path) -> None:
    touch(tmp_path, "a/x.jpg", "b/y.jpg")
    source = scan(tmp_path)
    (tmp_path / "b/y.jpg").unlink()
    with pytest.raises(DataError, match=r"b/y\.jpg cannot be read: No such file"):
        source.fingerprint()
