"""Tiny trees of all published layouts: the files that the owners of each data set publish, with a few small images in
them.

They are written from descriptions of the layouts, not from the table under test, and torchvision itself must be able to
open them.
"""

import io
import json
import pickle
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import scipy.io
from PIL import Image
from timm.data import ImageNetInfo

Labels = dict[str, list[int]]  # part -> labels in the order of the set


class Published(NamedTuple):
    """A data root with everything below it, and the labels that its sources must have."""

    root: Path
    labels: dict[str, Labels]


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    root = tmp_path_factory.mktemp("published")
    labels = {}
    for write in (_write_imagenet, *TORCHVISION_WRITERS):
        labels |= write(root)
    _write_retrieval(root, "roxford5k", "all_souls")
    _write_retrieval(root, "rparis6k", "paris_defense")
    _write_copydays(root)
    _write_imagenet9(root)
    return Published(root, labels)


@pytest.fixture(scope="session")
def published_root(published: Published) -> Path:
    """A data root where no data set of the paper is missing: about 2,400 images, most of 32 px.

    ImageNet has its 1000 classes, since heads for ImageNet-9 need them: one training and one validation image each, the
    first ten classes four training images more. Nothing may be written below it.
    """
    return published.root


@pytest.fixture(autouse=True, scope="module")
def digests_are_not_compared() -> Iterator[None]:
    """torchvision checks the MD5 sums of Flowers, STL-10 and CIFAR; here any sum will do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchvision.datasets.utils.check_md5", lambda *_, **__: True)
        yield


# ---- images ----------------------------------------------------------------------------------------------------------


@cache
def _noise() -> np.ndarray:
    return np.random.default_rng(0).integers(-40, 40, (256, 256, 3))


def picture(kind: int, number: int, *, height: int = 32, width: int = 32) -> np.ndarray:  # -> uint8 [height, width, 3]
    """Stripes whose colour and width tell the kind, in noise that tells the number."""
    colour = np.array([kind * 37 % 256, kind * 101 % 256, kind * 59 % 256])
    stripes = np.arange(width)[None, :, None] // (1 + kind % 7) % 2 * 60
    first_row, first_column = number * 5 % 128, (number * 11 + kind) % 128
    noise = _noise()[first_row : first_row + height, first_column : first_column + width]
    return (colour + stripes + noise).clip(0, 255).astype(np.uint8)


def _save(path: Path, kind: int, number: int, *, height: int = 40, width: int = 48) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture(kind, number, height=height, width=width)).save(path)


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


# ---- ImageNet and its lists ------------------------------------------------------------------------------------------


def _write_imagenet(root: Path) -> dict[str, Labels]:
    wnids: list[str] = sorted(ImageNetInfo("imagenet-1k").label_names())
    train = [(label, number) for label in range(len(wnids)) for number in range(5 if label < 10 else 1)]
    for wnid in wnids:
        (root / "imagenet" / "train" / wnid).mkdir(parents=True)
        (root / "imagenet" / "val" / wnid).mkdir(parents=True)
    for label, number in train:
        (root / "imagenet" / _train_path(wnids, label, number)).write_bytes(_jpeg(picture(label, number)))
    for label in range(len(wnids)):
        (root / "imagenet" / _val_path(wnids, label)).write_bytes(_jpeg(picture(label, 9)))
    lists = root / "imagenet_lists"
    shares = {"1percent": [image for image in train if image[1] == 0], "10percent": train}
    for name, share in shares.items():
        _write_lines(
            lists / f"{name}.txt", [_train_path(wnids, *image).rpartition("/")[2] for image in reversed(share)]
        )
    # Training and validation images of ImageNet-LT are different ones, both from the training images of ImageNet.
    long_tail = {
        "train": [image for image in train if image[1] < 3],
        "val": [image for image in train if image[1] >= 3],
    }
    for split, images in long_tail.items():
        _write_lines(
            lists / f"ImageNet_LT_{split}.txt", [f"{_train_path(wnids, *image)} {image[0]}" for image in images]
        )
    _write_lines(lists / "ImageNet_LT_test.txt", [f"{_val_path(wnids, label)} {label}" for label in range(len(wnids))])
    test = list(range(len(wnids)))
    return {
        "ImageNet": {"train": [label for label, _ in train], "test": test},
        "ImageNet-1%": {"train": [label for label, _ in shares["1percent"]], "test": test},
        "ImageNet-10%": {"train": [label for label, _ in shares["10percent"]], "test": test},
        "ImageNet-LT": {
            "train": [label for label, _ in long_tail["train"]],
            "validation": [label for label, _ in long_tail["val"]],
            "test": test,
        },
    }


def _train_path(wnids: list[str], label: int, number: int) -> str:
    return f"train/{wnids[label]}/{wnids[label]}_{number + 10}.JPEG"


def _val_path(wnids: list[str], label: int) -> str:
    return f"val/{wnids[label]}/ILSVRC2012_val_{label + 1:08d}.JPEG"


def _jpeg(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG")
    return stream.getvalue()


# ---- sets of torchvision ---------------------------------------------------------------------------------------------


def _write_pets(root: Path) -> dict[str, Labels]:
    folder = root / "oxford-iiit-pet"
    # name, species, number within the species
    breeds = [("Abyssinian", 1, 1), ("american_bulldog", 2, 1), ("Bengal", 1, 2)]
    numbers = {"trainval": (1, 2, 10), "test": (3, 20)}
    for split, of_split in numbers.items():
        lines = []
        for label, (breed, species, breed_id) in enumerate(breeds):
            for number in of_split:
                _save(folder / "images" / f"{breed}_{number}.jpg", label, number)
                lines.append(f"{breed}_{number} {label + 1} {species} {breed_id}")
        _write_lines(folder / "annotations" / f"{split}.txt", lines)
    return {"Pets": {"train": [0, 0, 0, 1, 1, 1, 2, 2, 2], "test": [0, 0, 1, 1, 2, 2]}}


def _write_flowers(root: Path) -> dict[str, Labels]:
    folder = root / "flowers-102"
    every_class = [37 * number % 102 + 1 for number in range(102)]  # counted from 1, in no order
    labels = [*every_class, 77, 77, 5, 102, 102]
    for number, label in enumerate(labels, start=1):
        _save(folder / "jpg" / f"image_{number:05d}.jpg", label, number)
    scipy.io.savemat(folder / "imagelabels.mat", {"labels": np.array([labels], dtype=np.uint8)})
    ids = {"trnid": [*range(102, 0, -1)], "valid": [103], "tstid": [107, 104, 105, 106]}
    scipy.io.savemat(
        folder / "setid.mat", {name: np.array([of_split], dtype=np.uint16) for name, of_split in ids.items()}
    )
    return {"Flowers": {"train": [label - 1 for label in reversed(every_class)], "test": [101, 76, 4, 101]}}


def _write_aircraft(root: Path) -> dict[str, Labels]:
    folder = root / "fgvc-aircraft-2013b" / "data"
    variants = ["707-320", "A330-200", "F/A-18"]
    _write_lines(folder / "variants.txt", variants)
    lines: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for number, split in enumerate(("train", "val", "test", "test")):
        for label, variant in enumerate(variants):
            name = f"{1_000_000 + 10 * number + label:07d}"
            _save(folder / "images" / f"{name}.jpg", label, number)
            lines[split].append(f"{name} {variant}")
    for split, of_split in (*lines.items(), ("trainval", lines["train"] + lines["val"])):
        _write_lines(folder / f"images_variant_{split}.txt", of_split)
    return {"Aircraft": {"train": [0, 1, 2, 0, 1, 2], "test": [0, 1, 2, 0, 1, 2]}}


def _write_cars(root: Path) -> dict[str, Labels]:
    folder = root / "stanford_cars"
    names = ["AM General Hummer SUV 2000", "Acura RL Sedan 2012", "Acura TL Sedan 2012"]
    (folder / "devkit").mkdir(parents=True)
    scipy.io.savemat(folder / "devkit" / "cars_meta.mat", {"class_names": np.array([names], dtype=object)})
    labels = {"train": [2, 0, 1, 2, 0, 1], "test": [1, 0, 2, 0]}
    files = {"train": folder / "devkit" / "cars_train_annos.mat", "test": folder / "cars_test_annos_withlabels.mat"}
    for split, of_split in labels.items():
        annotations = np.empty(
            (1, len(of_split)),
            dtype=[(key, object) for key in ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "fname")],
        )
        for number, label in enumerate(of_split):
            name = f"{number + 1:05d}.jpg"
            _save(folder / f"cars_{split}" / name, label, number)
            annotations[0, number] = (1, 2, 30, 40, np.uint8(label + 1), name)
        scipy.io.savemat(files[split], {"annotations": annotations})
    return {"Cars": labels}


def _write_country211(root: Path) -> dict[str, Labels]:
    for split, num_images in (("train", 3), ("valid", 1), ("test", 2)):
        for label, country in enumerate(("AD", "FR", "ZW")):
            for number in range(num_images):
                _save(root / "country211" / split / country / f"{split}_{number:04d}.jpg", label, number)
    return {"Country211": {"train": [0, 0, 0, 1, 1, 1, 2, 2, 2], "test": [0, 0, 1, 1, 2, 2]}}


def _write_food(root: Path) -> dict[str, Labels]:
    folder = root / "food-101"
    dishes = ["apple_pie", "baby_back_ribs", "waffles"]
    for split, numbers in (("train", (1_005_649, 1_011_328, 101_251)), ("test", (1_014_775, 103_801))):
        names = {dish: [f"{dish}/{number}" for number in numbers] for dish in dishes}
        for label, dish in enumerate(dishes):
            for name in names[dish]:
                _save(folder / "images" / f"{name}.jpg", label, len(name))
        (folder / "meta").mkdir(exist_ok=True)
        (folder / "meta" / f"{split}.json").write_text(json.dumps(names))
        _write_lines(folder / "meta" / f"{split}.txt", [name for of_dish in names.values() for name in of_dish])
    _write_lines(folder / "meta" / "classes.txt", dishes)
    return {"Food101": {"train": [0, 0, 0, 1, 1, 1, 2, 2, 2], "test": [0, 0, 1, 1, 2, 2]}}


def _write_stl10(root: Path) -> dict[str, Labels]:
    folder = root / "stl10_binary"
    folder.mkdir()
    names = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]
    labels = {"train": [9, 0, 4, 4, 0, 9, 1, 2, 3, 5, 6, 7, 8], "test": [0, 9, 4, 1]}
    for split, of_split in (*labels.items(), ("unlabeled", [3, 3])):
        images = np.stack([picture(label, number, height=96, width=96) for number, label in enumerate(of_split)])
        images.transpose(0, 3, 2, 1).tofile(folder / f"{split}_X.bin")  # column by column, one colour after the other
        if split in labels:
            (np.array(of_split, dtype=np.uint8) + 1).tofile(folder / f"{split}_y.bin")
    _write_lines(folder / "class_names.txt", names)
    return {"STL-10": labels}


def _write_gtsrb(root: Path) -> dict[str, Labels]:
    folder = root / "gtsrb"
    for label in range(3):
        for number in range(3):
            _save(
                folder / "GTSRB" / "Training" / f"{label:05d}" / f"00000_{number:05d}.ppm",
                label,
                number,
                height=30,
                width=29,
            )
    lines = ["Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId"]
    for number, label in enumerate((2, 0, 1, 2)):
        _save(folder / "GTSRB" / "Final_Test" / "Images" / f"{number:05d}.ppm", label, number + 5, height=30, width=29)
        lines.append(f"{number:05d}.ppm;29;30;5;5;24;25;{label}")
    _write_lines(folder / "GT-final_test.csv", lines)
    return {"GTSRB": {"train": [0, 0, 0, 1, 1, 1, 2, 2, 2], "test": [2, 0, 1, 2]}}


def _write_dtd(root: Path) -> dict[str, Labels]:
    folder = root / "dtd" / "dtd"
    for split, numbers in (("train", (4, 5, 6)), ("val", (10,)), ("test", (38, 50))):
        lines = []
        for label, texture in enumerate(("banded", "dotted", "zigzagged")):
            for number in numbers:
                _save(folder / "images" / texture / f"{texture}_{number:04d}.jpg", label, number)
                lines.append(f"{texture}/{texture}_{number:04d}.jpg")
        _write_lines(folder / "labels" / f"{split}1.txt", lines)
    return {"DTD": {"train": [0, 0, 0, 1, 1, 1, 2, 2, 2], "test": [0, 0, 1, 1, 2, 2]}}


def _write_cifar(root: Path) -> dict[str, Labels]:
    """CIFAR-10 has 50 training images: as many clusters as the paper's are made of them."""
    ten = list(range(10))
    batches = {**{f"data_batch_{batch}": ten for batch in range(1, 6)}, "test_batch": ten * 2}
    for number, (name, labels) in enumerate(batches.items()):
        _dump(
            root / "cifar-10-batches-py" / name, {"data": _flat(labels, number), "labels": labels, "batch_label": name}
        )
    _dump(
        root / "cifar-10-batches-py" / "batches.meta",
        {"label_names": [f"class {label}" for label in range(10)], "num_vis": 3072},
    )
    fine = {"train": [37 * number % 100 for number in range(100)], "test": [50, 0, 99]}
    for name, of_split in fine.items():
        content = {
            "data": _flat(of_split, len(name)),
            "fine_labels": of_split,
            "coarse_labels": [label // 5 for label in of_split],
        }
        _dump(root / "cifar-100-python" / name, content)
    names = {
        "fine_label_names": [f"fine {label}" for label in range(100)],
        "coarse_label_names": [f"coarse {label}" for label in range(20)],
    }
    _dump(root / "cifar-100-python" / "meta", names)
    return {"CIFAR-10": {"train": ten * 5, "test": ten * 2}, "CIFAR-100": fine}


def _flat(labels: list[int], batch: int) -> np.ndarray:  # -> uint8 [N, 3072], one colour after the other
    return np.stack(
        [picture(label, 10 * batch + number).transpose(2, 0, 1).reshape(-1) for number, label in enumerate(labels)]
    )


def _dump(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=2))


TORCHVISION_WRITERS = (
    _write_pets,
    _write_flowers,
    _write_aircraft,
    _write_cars,
    _write_country211,
    _write_food,
    _write_stl10,
    _write_gtsrb,
    _write_dtd,
    _write_cifar,
)

# ---- layouts of their own --------------------------------------------------------------------------------------------


def _write_retrieval(root: Path, name: str, landmark: str) -> None:
    """Two queries; of eight database images each has one easy and one hard positive and a junk image."""
    database = [f"{landmark}_{number:06d}" for number in range(8)]
    queries = [f"{landmark}_{number:06d}" for number in (100, 101)]
    for number, image in enumerate(database):
        _save(root / name / "jpg" / f"{image}.jpg", number % 2, number, height=48, width=64)
    for number, image in enumerate(queries):
        _save(root / name / "jpg" / f"{image}.jpg", number, 10 + number, height=64, width=48)
    truth = [
        {
            "bbx": [4.5, 3.0, 40.0, 60.5],
            "easy": np.array([query]),
            "hard": np.array([2 + query]),
            "junk": np.array([4 + query]),
        }
        for query in range(2)
    ]
    (root / name / f"gnd_{name}.pkl").write_bytes(
        pickle.dumps({"imlist": database, "qimlist": queries, "gnd": truth}, protocol=2)
    )


def _write_copydays(root: Path) -> None:
    """The first four digits name the scene, the last two the copy; 00 is the original."""
    for scene in range(4):
        _save(root / "copydays" / "original" / f"{2000 + scene}00.jpg", scene, scene, height=48, width=64)
        for copy in range(1, 2 + scene % 2):
            _save(
                root / "copydays" / "strong" / f"{2000 + scene}{copy:02d}.jpg", scene, scene + copy, height=40, width=40
            )


def _write_imagenet9(root: Path) -> None:
    classes = [
        "dog",
        "bird",
        "wheeled vehicle",
        "reptile",
        "carnivore",
        "insect",
        "musical instrument",
        "primate",
        "fish",
    ]
    for variant in ("original", "only_fg", "mixed_same", "mixed_rand", "mixed_next", "no_fg", "only_bg_b", "only_bg_t"):
        for label, name in enumerate(classes):
            path = root / "imagenet9" / variant / "val" / f"{label:02d}_{name}" / f"fg_n0208562{label}_10_bg.JPEG"
            _save(path, label, len(variant), height=32, width=32)
