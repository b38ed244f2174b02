"""The table of data sets against trees in the published layouts, and those trees against torchvision itself."""

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from PIL import Image
from torchvision import datasets

from massl.data.sources.base import DataError, ImageSource
from massl.evaluations.datasets import DATASETS, missing_data, open_data
from massl.evaluations.suite import plan_suite


class Published(Protocol):
    root: Path
    labels: dict[str, dict[str, list[int]]]


# How torchvision's documentation says each set is opened; splits as in CARP's evaluations.
TRAIN_AND_TEST: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Pets": ("OxfordIIITPet", {"split": "trainval"}, {"split": "test"}),
    "Flowers": ("Flowers102", {"split": "train"}, {"split": "test"}),
    "Aircraft": ("FGVCAircraft", {"split": "trainval"}, {"split": "test"}),
    "Cars": ("StanfordCars", {"split": "train"}, {"split": "test"}),
    "Country211": ("Country211", {"split": "train"}, {"split": "test"}),
    "Food101": ("Food101", {"split": "train"}, {"split": "test"}),
    "STL-10": ("STL10", {"split": "train"}, {"split": "test"}),
    "GTSRB": ("GTSRB", {"split": "train"}, {"split": "test"}),
    "DTD": ("DTD", {"split": "train", "partition": 1}, {"split": "test", "partition": 1}),
    "CIFAR-10": ("CIFAR10", {"train": True}, {"train": False}),
    "CIFAR-100": ("CIFAR100", {"train": True}, {"train": False}),
}
FOLDERS = {
    "Pets": "oxford-iiit-pet",
    "Flowers": "flowers-102",
    "Aircraft": "fgvc-aircraft-2013b",
    "Cars": "stanford_cars",
}
FOLDERS |= {"Country211": "country211", "Food101": "food-101", "STL-10": "stl10_binary", "GTSRB": "gtsrb", "DTD": "dtd"}
FOLDERS |= {"CIFAR-10": "cifar-10-batches-py", "CIFAR-100": "cifar-100-python"}


def torchvision_sets(name: str, root: Path) -> dict[str, Any]:
    class_name, *arguments = TRAIN_AND_TEST[name]
    return {
        part: getattr(datasets, class_name)(root, **of_part)
        for part, of_part in zip(("train", "test"), arguments, strict=True)
    }


def labels_of(source: ImageSource) -> list[int | None]:
    return [source.label_of(index) for index in range(len(source))]


def pixels_of(source: ImageSource, index: int) -> np.ndarray:
    data = source.read(index).data
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) if isinstance(data, bytes) else data


@pytest.mark.parametrize("name", TRAIN_AND_TEST)
def test_torchvision_opens_the_tree(name: str, published: Published) -> None:
    for part, dataset in torchvision_sets(name, published.root).items():
        items = [dataset[index] for index in range(len(dataset))]
        assert [int(label) for _, label in items] == published.labels[name][part]
        assert all(image.mode == "RGB" for image, _ in items)


@pytest.mark.parametrize("name", TRAIN_AND_TEST)
def test_the_table_opens_the_same_images_as_torchvision(name: str, published: Published, tmp_path: Path) -> None:
    data = open_data(name, published.root, output=tmp_path, warn=lambda message: None)
    for part, dataset in torchvision_sets(name, published.root).items():
        source = getattr(data, part)
        assert len(source) == len(dataset)
        for index in range(len(dataset)):
            assert np.array_equal(pixels_of(source, index), np.asarray(dataset[index][0]))


def test_every_labelled_set_has_a_tree(published: Published) -> None:
    assert published.labels.keys() == {name for name, row in DATASETS.items() if "train" in row.parts}


@pytest.mark.parametrize("name", [name for name, row in DATASETS.items() if "train" in row.parts])
def test_every_labelled_set_opens_with_its_splits_and_labels(name: str, published: Published, tmp_path: Path) -> None:
    remarks: list[str] = []
    data = open_data(name, published.root, output=tmp_path, warn=remarks.append)
    assert (data.name, data.output, data.folder) == (name, tmp_path, None)
    opened = {part: getattr(data, part) for part in ("train", "validation", "test")}
    assert {part: labels_of(source) for part, source in opened.items() if source is not None} == published.labels[name]
    assert data.train is not None
    assert data.test is not None
    assert data.train.class_names == data.test.class_names  # or no scorer would take them
    assert data.train.fingerprint() != data.test.fingerprint()
    assert any(f"{name} (test) has {len(data.test):,} images, published protocol has" in remark for remark in remarks)


@pytest.mark.parametrize("name", [name for name, row in DATASETS.items() if "folder" in row.parts])
def test_every_set_with_a_layout_of_its_own_is_found(name: str, published: Published, tmp_path: Path) -> None:
    remarks: list[str] = []
    data = open_data(name, published.root, output=tmp_path, warn=remarks.append)
    assert (data.train, data.validation, data.test) == (None, None, None)
    assert data.folder is not None
    assert data.folder.parent == published.root
    assert data.folder.is_dir()
    assert remarks
    assert all("published protocol has" in remark for remark in remarks)


def test_lists_choose_the_images_they_name(published: Published, tmp_path: Path) -> None:
    for name, file in (("ImageNet-1%", "1percent.txt"), ("ImageNet-10%", "10percent.txt")):
        train = open_data(name, published.root, output=tmp_path, warn=lambda message: None).train
        assert train is not None
        chosen = {train.key_of(index).rpartition("/")[2] for index in range(len(train))}
        assert chosen == set((published.root / "imagenet_lists" / file).read_text().split())


def test_images_and_class_names_of_the_long_tail_are_those_of_imagenet(published: Published, tmp_path: Path) -> None:
    data = open_data("ImageNet-LT", published.root, output=tmp_path, warn=lambda message: None)
    for source in (data.train, data.validation, data.test):
        assert source is not None
        assert source.class_names is not None
        assert len(source.class_names) == 1000
        for index in (0, len(source) - 1):
            label = source.label_of(index)
            assert label is not None
            assert source.key_of(index).split("/")[1] == source.class_names[label]


def test_a_copy_with_a_file_missing_is_told_by_the_name_of_the_file(published: Published, tmp_path: Path) -> None:
    shutil.copytree(published.root / "oxford-iiit-pet", tmp_path / "oxford-iiit-pet")
    assert missing_data("Pets", tmp_path) is None
    (tmp_path / "oxford-iiit-pet" / "annotations" / "test.txt").unlink()
    with pytest.raises(DataError, match=f"{tmp_path}/oxford-iiit-pet/annotations/test.txt"):
        open_data("Pets", tmp_path, output=tmp_path)
    assert missing_data("Pets", tmp_path, parts=("train",)) is None


def hidden_one_by_one(folder: Path) -> Iterator[Path]:
    """Each file of the folder that is no image, while it is away."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".jpg", ".ppm")):
        away = path.with_name(path.name + ".away")
        path.rename(away)
        yield path
        away.rename(path)


@pytest.mark.parametrize("name", TRAIN_AND_TEST)
def test_whatever_torchvision_cannot_do_without_is_looked_for_beforehand(
    name: str, published: Published, tmp_path: Path
) -> None:
    shutil.copytree(published.root / FOLDERS[name], tmp_path / FOLDERS[name])
    for path in hidden_one_by_one(tmp_path / FOLDERS[name]):
        try:
            torchvision_sets(name, tmp_path)
            torchvision_needs_it = False
        except (OSError, RuntimeError):
            torchvision_needs_it = True
        message = missing_data(name, tmp_path)
        assert (message is not None) == torchvision_needs_it, path
        assert message is None or str(path) in message
    assert missing_data(name, tmp_path) is None


def test_nothing_of_the_suite_is_missing_below_the_published_root(published_root: Path, tmp_path: Path) -> None:
    for entry, missing in plan_suite(published_root):
        assert missing is None
        data = open_data(entry.data, published_root, output=tmp_path, parts=entry.parts, warn=lambda message: None)
        assert data.name == entry.data


def test_one_missing_folder_takes_only_its_own_items_from_the_suite(published_root: Path, tmp_path: Path) -> None:
    for folder in published_root.iterdir():
        if folder.name not in ("gtsrb", "imagenet_lists"):
            (tmp_path / folder.name).symlink_to(folder)
    planned = plan_suite(tmp_path)
    missing = {(entry.protocol, entry.data) for entry, message in planned if message is not None}
    lists = {("clustering", "ImageNet-1%"), ("low-shot", "ImageNet"), ("long-tail", "ImageNet-LT")}
    assert missing == {("knn", "GTSRB"), ("logreg", "GTSRB")} | lists
