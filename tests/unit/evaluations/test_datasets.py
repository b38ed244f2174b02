from pathlib import Path

import pytest
from PIL import Image

from massl.data.sources.base import DataError
from massl.evaluations.datasets import DATASETS, PARTS, Folder, Split, look_up, missing_data, open_data

# Numbers of training images, test images and classes as the papers of the sets and torchvision's documentation give
# them.
PUBLISHED_SIZES = {
    "ImageNet": (1281167, 50000, 1000),
    "ImageNet-1%": (12811, 50000, 1000),
    "ImageNet-10%": (128116, 50000, 1000),
    "ImageNet-LT": (115846, 50000, 1000),
    "Pets": (3680, 3669, 37),
    "Flowers": (1020, 6149, 102),
    "Aircraft": (6667, 3333, 100),
    "Cars": (8144, 8041, 196),
    "Country211": (31650, 21100, 211),
    "Food101": (75750, 25250, 101),
    "STL-10": (5000, 8000, 10),
    "GTSRB": (26640, 12630, 43),
    "DTD": (1880, 1880, 47),
    "CIFAR-10": (50000, 10000, 10),
    "CIFAR-100": (50000, 10000, 100),
}


def write_images(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)


@pytest.fixture
def small_imagenet(tmp_path: Path) -> Path:
    write_images(tmp_path / "imagenet" / "train", "n01440764/a.JPEG", "n01440764/b.JPEG", "n01443537/c.JPEG")
    write_images(tmp_path / "imagenet" / "val", "n01440764/d.JPEG", "n01443537/e.JPEG")
    return tmp_path


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_sizes_are_the_published_ones(name: str) -> None:
    parts = DATASETS[name].parts
    sizes = [part.num_images for part in (parts["train"], parts["test"]) if isinstance(part, Split)]
    assert (*sizes, DATASETS[name].num_classes) == PUBLISHED_SIZES[name]


def test_every_set_is_either_two_splits_or_a_folder() -> None:
    folders = {name for name, row in DATASETS.items() if isinstance(row.parts.get("folder"), Folder)}
    assert folders == {"ROxford5k", "RParis6k", "Copydays", "ImageNet-9"}
    assert DATASETS.keys() - folders == PUBLISHED_SIZES.keys()


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Pets", "Pets"),
        ("pets", "Pets"),
        ("OxfordIIITPet", "Pets"),
        ("cifar10", "CIFAR-10"),
        ("CIFAR_100", "CIFAR-100"),
        ("stl10", "STL-10"),
        ("imagenet-1%", "ImageNet-1%"),
        ("ImageNet-1k", "ImageNet"),
        ("roxford5k", "ROxford5k"),
        ("rParis", "RParis6k"),
        ("in9", "ImageNet-9"),
    ],
)
def test_a_set_may_be_written_in_several_ways(written: str, name: str) -> None:
    assert look_up(written) == name


def test_no_two_sets_share_a_name() -> None:
    names = [alias for name, row in DATASETS.items() for alias in {name, *row.aliases}]
    assert len({name.lower() for name in names}) == len(names)
    assert all(look_up(name) == name for name in DATASETS)


def test_an_unknown_set_is_answered_with_the_nearest_and_all() -> None:
    with pytest.raises(DataError, match=r"no data set 'Petz'. Did you mean 'Pets'\? Known: ImageNet, .*ImageNet-9"):
        look_up("Petz")


@pytest.mark.parametrize("name", DATASETS)
def test_a_missing_set_is_described_by_its_files_and_the_way_to_get_them(name: str, tmp_path: Path) -> None:
    message = missing_data(name, tmp_path / "data")
    assert message is not None
    for part in DATASETS[name].parts.values():
        for pattern in part.expected:
            assert f"{tmp_path}/data/{pattern}" in message
    advice = message.partition("To get it: ")[2]
    assert len(advice) > 40
    assert "{" not in advice
    assert "http" not in advice
    with pytest.raises(DataError, match="To get it"):
        open_data(name, tmp_path / "data", output=tmp_path)


def test_what_torchvision_can_fetch_comes_with_the_command_and_what_it_cannot_without(tmp_path: Path) -> None:
    pets = missing_data("Pets", Path("/my data"))
    assert pets is not None
    assert (
        "from torchvision.datasets import OxfordIIITPet; OxfordIIITPet('/my data', split='trainval', download=True); "
        in pets
    )
    cifar = missing_data("CIFAR-10", Path("/d"))
    assert cifar is not None
    assert "CIFAR10('/d', train=True, download=True); CIFAR10('/d', train=False, download=True)" in cifar
    cars = missing_data("Cars", tmp_path)
    assert cars is not None
    assert "download=True" not in cars
    assert f"into {tmp_path}/stanford_cars" in cars


def test_only_the_parts_asked_for_must_be_there(small_imagenet: Path) -> None:
    (small_imagenet / "imagenet" / "train").rename(small_imagenet / "elsewhere")
    assert missing_data("ImageNet", small_imagenet, parts=("test",)) is None
    message = missing_data("ImageNet", small_imagenet)
    assert message is not None
    assert "imagenet/train/*/*" in message.partition("To get it")[0]
    assert "imagenet/val" not in message.partition("To get it")[0]
    data = open_data("ImageNet", small_imagenet, output=small_imagenet, parts=("test",), warn=lambda message: None)
    assert (data.train, data.validation, data.folder) == (None, None, None)
    assert data.test is not None


def test_validation_images_that_are_not_sorted_into_classes_count_as_missing(small_imagenet: Path) -> None:
    for path in (small_imagenet / "imagenet" / "val").glob("*/*"):
        path.rename(small_imagenet / "imagenet" / "val" / path.name)
    for folder in (small_imagenet / "imagenet" / "val").glob("*/"):
        folder.rmdir()
    message = missing_data("ImageNet", small_imagenet, parts=("test",))
    assert message is not None
    assert "one folder per class" in message


def test_sizes_other_than_the_published_ones_are_remarked_upon(small_imagenet: Path) -> None:
    remarks: list[str] = []
    data = open_data("imagenet", small_imagenet, output=small_imagenet / "out", warn=remarks.append)
    assert (data.name, data.output) == ("ImageNet", small_imagenet / "out")
    assert remarks == [
        "ImageNet (train) has 3 images, published protocol has 1,281,167",
        "ImageNet (train) has 2 classes, published protocol has 1,000",
        "ImageNet (test) has 2 images, published protocol has 50,000",
        "ImageNet (test) has 2 classes, published protocol has 1,000",
    ]


def test_remarks_are_python_warnings_unless_told_otherwise(small_imagenet: Path) -> None:
    with pytest.warns(UserWarning, match="published protocol has"):
        open_data("ImageNet", small_imagenet, output=small_imagenet)


def test_published_sizes_pass_without_remark_and_more_files_in_a_folder_do_too(tmp_path: Path) -> None:
    def remarks() -> list[str]:
        found: list[str] = []
        data = open_data("Copydays", tmp_path, output=tmp_path, warn=found.append)
        assert data.folder == tmp_path / "copydays"
        return found

    for folder, number in (("original", 157), ("strong", 228)):
        (tmp_path / "copydays" / folder).mkdir(parents=True)
        for image in range(number):
            (tmp_path / "copydays" / folder / f"{image}.jpg").touch()
    assert remarks() == ["copydays/strong/*.jpg has 228 images, published protocol has 229"]
    (tmp_path / "copydays" / "strong" / "228.jpg").touch()
    assert remarks() == []
    (tmp_path / "copydays" / "strong" / "229.jpg").touch()
    assert remarks() == []


def test_a_root_that_cannot_stand_in_a_uri_is_refused_with_advice(tmp_path: Path) -> None:
    root = tmp_path / "cats&dogs"
    write_images(root / "country211", "train/AD/a.jpg", "test/AD/a.jpg")
    with pytest.raises(DataError, match=r"has & or \? in its name"):
        open_data("Country211", root, output=tmp_path)


def test_images_of_imagenet_are_not_turned_upright(small_imagenet: Path) -> None:
    data = open_data("ImageNet", small_imagenet, output=small_imagenet, warn=lambda message: None)
    assert data.train is not None
    assert data.train.read(0).turn_upright is False


def test_the_parts_are_those_of_evaluation_data() -> None:
    assert PARTS == ("train", "validation", "test", "folder")
    assert all(set(row.parts) <= set(PARTS) for row in DATASETS.values())
