import io
import os
import time
from pathlib import Path

import pytest
from PIL import Image

from massl.data.loading.decode import decode
from massl.data.sources.base import DataError
from massl.data.sources.files import FileListSource

NAMES = ("b/2.jpg", "a/1.jpg", "a/3.jpg")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def test_files_come_in_the_order_given_with_their_labels(root: Path) -> None:
    source = FileListSource(root, [*NAMES, NAMES[0]], labels=[1, 0, -1, 1], name="some")
    images = [source.read(index) for index in range(len(source))]
    assert [image.data for image in images] == [name.encode() for name in (*NAMES, NAMES[0])]
    assert [image.key for image in images] == [*NAMES, NAMES[0]]
    assert [image.label for image in images] == [1, 0, None, 1]
    assert (source.name, source.class_names, source.pixels) == ("some", ("0", "1"), None)


def test_without_labels_there_are_no_classes(root: Path) -> None:
    source = FileListSource(root, NAMES, name="some")
    assert source.class_names is None
    assert source.label_of(0) is None


def test_missing_files_are_counted_and_three_are_named(root: Path) -> None:
    with pytest.raises(DataError, match=r"queries: 1 of 2 .*a/gone\.jpg"):
        FileListSource(root, ["a/1.jpg", "a/gone.jpg"], name="queries")
    gone = [f"c/{number}.jpg" for number in range(5000)]  # more than one thread's share
    with pytest.raises(DataError, match=r"5000 of 5001 .*c/0\.jpg, .*c/1\.jpg, .*c/2\.jpg \.\.\.\)"):
        FileListSource(root, ["a/1.jpg", *gone], name="queries")
    with pytest.raises(DataError, match="1 of 1"):
        FileListSource(root, ["a"], name="a folder is no file")


@pytest.mark.parametrize(
    ("labels", "class_names", "message"),
    [
        ([0, 1], None, "2 labels for 3 images"),
        ([0, 1, 2], ("x", "y"), "label 2 is not among the 2 classes"),
        (None, ("x", "y"), "no labels"),
    ],
)
def test_labels_that_do_not_fit_are_refused(
    root: Path, labels: list[int] | None, class_names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        FileListSource(root, NAMES, labels=labels, class_names=class_names, name="some")


def test_an_empty_list_and_an_unknown_orientation_are_refused(root: Path) -> None:
    with pytest.raises(DataError, match="lists no images"):
        FileListSource(root, [], name="none")
    with pytest.raises(DataError, match=r"orientation=sideways.*orientation=exif"):
        FileListSource(root, NAMES, name="some", orientation="sideways")  # type: ignore[arg-type]


def test_images_are_turned_only_where_that_is_asked_for(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.new("RGB", (10, 4)).save(buffer, "JPEG", exif=exif)
    (tmp_path / "x.jpg").write_bytes(buffer.getvalue())
    stored = FileListSource(tmp_path, ["x.jpg"], name="x")
    upright = FileListSource(tmp_path, ["x.jpg"], name="x", orientation="exif")
    assert [tuple(decode(source.read(0), max_side=99).shape) for source in (stored, upright)] == [
        (3, 4, 10),
        (3, 10, 4),
    ]
    assert stored.fingerprint() != upright.fingerprint()


def test_the_fingerprint_changes_with_a_file_a_label_or_the_order(root: Path) -> None:
    def fingerprint(files: tuple[str, ...] = NAMES, labels: tuple[int, ...] = (0, 1, 2)) -> str:
        return FileListSource(root, files, labels=labels, name="some").fingerprint()

    first = fingerprint()
    assert fingerprint() == first
    assert (
        len(
            {
                first,
                fingerprint(files=NAMES[::-1]),
                fingerprint(labels=(0, 1, 1)),
                FileListSource(root, NAMES, name="x").fingerprint(),
            }
        )
        == 4
    )
    path = root / NAMES[1]
    status = path.stat()
    time.sleep(0.02)  # the system's clock for files ticks every 4 ms
    path.write_bytes(b"x/1.jpg")  # as many bytes
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # and, as a tool may pretend, as old
    assert fingerprint() != first


def test_a_file_that_vanished_since_is_named_by_the_fingerprint(root: Path) -> None:
    source = FileListSource(root, NAMES, name="some")
    (root / NAMES[2]).unlink()
    with pytest.raises(DataError, match=r"a/3\.jpg cannot be read: No such file"):
        source.fingerprint()
