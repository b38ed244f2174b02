from pathlib import Path

import pytest

from massl.data.evaluation.subset_lists import read_name_list, read_path_list
from massl.data.sources import open_source
from massl.data.sources.base import DataError

NAMES = ("n01/n01_1.JPEG", "n01/n01_20.JPEG", "n02/n02_3.JPEG", "n02/n02_4.JPEG", "n03/n03_5.JPEG")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in NAMES:
        path = tmp_path / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path


def listed(root: Path, text: str) -> Path:
    path = root / "list.txt"
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(
    "text", ["n03_5.JPEG\nn01_20.JPEG\nn02_3.JPEG\n", "n03_5.JPEG\r\n\r\nn01_20.JPEG\r\n  n02_3.JPEG"]
)
def test_names_become_the_numbers_of_their_images(root: Path, text: str) -> None:
    source = open_source(root / "train")
    assert read_name_list(listed(root, text), source).tolist() == [1, 2, 4]


def test_names_that_the_source_lacks_are_counted_and_three_are_shown(root: Path) -> None:
    names = ["n01_1.JPEG", *(f"n09_{number}.JPEG" for number in range(5))]
    with pytest.raises(DataError, match=r"5 of 6 images .*\(n09_0.JPEG, n09_1.JPEG, n09_2.JPEG \.\.\.\).*complete set"):
        read_name_list(listed(root, "\n".join(names)), open_source(root / "train"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n01_1.JPEG\nn01/n01_20.JPEG\n", r"line 2: 'n01/n01_20\.JPEG' is not the name of a file"),
        ("n01_1.JPEG 0\n", "line 1: .* is not the name"),
        ("n01_1.JPEG\n\nn02_3.JPEG\nn01_1.JPEG\n", r"line 4: n01_1\.JPEG is listed a second time"),
        ("\n \n", "is empty"),
    ],
)
def test_lines_that_are_no_names_are_refused_with_their_number(root: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_name_list(listed(root, text), open_source(root / "train"))


def test_a_name_of_two_images_is_refused(root: Path) -> None:
    (root / "train/n02/n01_1.JPEG").touch()
    with pytest.raises(DataError, match=r"n01_1\.JPEG may be n01/n01_1\.JPEG or n02/n01_1\.JPEG"):
        read_name_list(listed(root, "n01_1.JPEG\n"), open_source(root / "train"))
    # no harm to others
    assert read_name_list(listed(root, "n01_20.JPEG\n"), open_source(root / "train")).tolist() == [1]


def test_a_list_that_is_missing_or_no_text_is_explained(root: Path) -> None:
    with pytest.raises(DataError, match=r"missing\.txt cannot be read: No such file"):
        read_name_list(root / "missing.txt", open_source(root / "train"))
    (root / "list.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="it is no text"):
        read_path_list(root / "list.txt", root, name="x", class_names=None)


def test_a_list_of_paths_and_labels_becomes_a_source_in_its_order(root: Path) -> None:
    (root / "train/n03/with space.JPEG").write_bytes(b"spaced")
    text = "train/n02/n02_4.JPEG 1\ntrain/n03/with space.JPEG 2\ntrain/n01/n01_1.JPEG\t0\n"
    source = read_path_list(listed(root, text), root, name="ImageNet-LT", class_names=("a", "b", "c"))
    assert [source.key_of(index) for index in range(len(source))] == [
        "train/n02/n02_4.JPEG",
        "train/n03/with space.JPEG",
        "train/n01/n01_1.JPEG",
    ]
    assert [source.label_of(index) for index in range(len(source))] == [1, 2, 0]
    assert (source.name, source.class_names) == ("ImageNet-LT", ("a", "b", "c"))
    assert source.read(1).data == b"spaced"
    assert not source.read(1).turn_upright


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train/n01/n01_1.JPEG 0\ntrain/n02/n02_3.JPEG\n", r"line 2: 'train/n02/n02_3\.JPEG' is not of the form"),
        ("train/n01/n01_1.JPEG -1\n", "line 1.* whole number"),
        ("train/n01/n01_1.JPEG one\n", "line 1"),
        ("7\n", "line 1: '7' is not of the form"),
        ("train/n01/n01_1.JPEG 3\n", "label 3 is not among the 3 classes"),
        ("train/n01/n01_1.JPEG 0\ntrain/n01/gone.JPEG 0\n", "1 of 2 listed images"),
    ],
)
def test_lines_without_path_and_label_are_refused_with_their_number(root: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_path_list(listed(root, text), root, name="ImageNet-LT", class_names=("a", "b", "c"))
