"""The data sets of the published evaluations: their files below a data root, how to open and how to get them.

Splits and sizes are those of the protocols that the paper follows: CARP's for transfer, torchvision's elsewhere, the
lists of SimCLR for 1 % and 10 % of ImageNet, and those of Liu et al., 2019, for ImageNet-LT.
"""

import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from massl.config import closest
from massl.data.evaluation.subset_lists import read_name_list, read_path_list
from massl.data.sources import open_source
from massl.data.sources.base import DataError, ImageSource
from massl.data.sources.subset import SubsetSource
from massl.evaluations.base import EvaluationData

Part = Literal["train", "validation", "test", "folder"]  # fields of EvaluationData with images
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, kw_only=True)
class Split:
    """Images that are opened as one source."""

    open: Callable[[Path], ImageSource]  # below a data root
    expected: tuple[str, ...]  # patterns below the data root; each must match something
    num_images: int


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder that a protocol reads itself."""

    path: str
    expected: tuple[str, ...]
    num_images: Mapping[str, int]  # pattern of images -> published number; more files do no harm


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A row of the table."""

    parts: Mapping[Part, Split | Folder]
    advice: str  # how to get it; {root} is the data root
    num_classes: int | None = None
    aliases: tuple[str, ...] = ()


# ---- kinds of rows ---------------------------------------------------------------------------------------------------


def _torchvision(
    place: tuple[str, str, str],
    *,
    sizes: tuple[int, int, int],
    train: tuple[dict[str, Any], str] = ({"split": "train"}, ""),
    test: tuple[dict[str, Any], str] = ({"split": "test"}, ""),
    advice: str = "",
) -> Dataset:
    """A data set that torchvision opens.

    place: class, folder and files that both splits need; sizes: of train and test, number of classes; train, test:
    torchvision's arguments for the split, and files that only it needs.
    """
    class_name, folder, files = place

    def split(arguments: dict[str, Any], split_files: str, size: int) -> Split:
        options = "".join(f"&{key}={value}" for key, value in arguments.items())
        expected = tuple(f"{folder}/{file}" for file in f"{files} {split_files}".split())
        return Split(open=lambda root: _open_torchvision(class_name, root, options), expected=expected, num_images=size)

    def download(arguments: dict[str, Any]) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        return f"{class_name}({{root!r}}, {options}, download=True)"

    # both splits by name: GTSRB fetches only the requested one
    code = f"from torchvision.datasets import {class_name}; {download(train[0])}; {download(test[0])}"
    return Dataset(
        parts={"train": split(*train, sizes[0]), "test": split(*test, sizes[1])},
        num_classes=sizes[2],
        aliases=(class_name,),
        advice=advice or f"torchvision fetches it in Python: {code}",
    )


def _open_torchvision(class_name: str, root: Path, options: str) -> ImageSource:
    if {"&", "?"} & set(str(root)):
        raise DataError(f"the data root {root} has & or ? in its name, which separate parameters; use a link without")
    return open_source(f"torchvision:{class_name}?root={root}{options}")


def _imagenet(split: str, num_images: int) -> Split:
    """Class folders. orientation=stored: published scores ignore the EXIF orientation."""
    uri, expected = f"imagenet/{split}?labels=folders&orientation=stored", (f"imagenet/{split}/*/*",)
    return Split(open=lambda root: open_source(f"folder:{root}/{uri}"), expected=expected, num_images=num_images)


def _share_of_imagenet(list_name: str, num_images: int) -> Dataset:
    """The training images whose file names are listed, and all validation images."""

    def open_share(root: Path) -> ImageSource:
        images = IMAGENET_TRAIN.open(root)
        chosen = read_name_list(root / "imagenet_lists" / list_name, images)
        return SubsetSource(images, chosen, name=f"{images.name} in {list_name}")

    expected = (f"imagenet_lists/{list_name}", *IMAGENET_TRAIN.expected)
    train = Split(open=open_share, expected=expected, num_images=num_images)
    advice = f"the list {list_name} is in imagenet_subsets of Google Research's SimCLR repository; {_IMAGENET_ADVICE}"
    return Dataset(parts={"train": train, "test": IMAGENET_VAL}, num_classes=1000, advice=advice)


def _long_tail(split: str, num_images: int, *, images: Split) -> Split:
    """Listed as `train/n01440764/n01440764_762.JPEG 0`; the label is the index of the sorted class folders."""
    list_name = f"ImageNet_LT_{split}.txt"

    def open_listed(root: Path) -> ImageSource:
        class_names = tuple(sorted(entry.name for entry in (root / "imagenet" / "train").iterdir() if entry.is_dir()))
        file = root / "imagenet_lists" / list_name
        return read_path_list(file, root / "imagenet", name=list_name, class_names=class_names)

    expected = tuple(dict.fromkeys((f"imagenet_lists/{list_name}", *IMAGENET_TRAIN.expected, *images.expected)))
    return Split(open=open_listed, expected=expected, num_images=num_images)


def _retrieval(folder: str, *, city: str, num_images: int) -> Dataset:
    advice = (
        f"the images are the {city} Buildings of Oxford's Visual Geometry Group, all in {{root}}/{folder}/jpg; "
        f"the ground truth gnd_{folder}.pkl comes from the project Revisited Oxford and Paris (revisitop)"
    )
    return _folder(folder, {"jpg/*.jpg": num_images}, f"gnd_{folder}.pkl", aliases=(f"r{city}",), advice=advice)


def _folder(
    path: str, num_images: Mapping[str, int], *other_files: str, advice: str, aliases: tuple[str, ...] = ()
) -> Dataset:
    below_root = {f"{path}/{pattern}": number for pattern, number in num_images.items()}
    expected = (*(f"{path}/{file}" for file in other_files), *below_root)
    folder = Folder(path=path, expected=expected, num_images=below_root)
    return Dataset(parts={"folder": folder}, aliases=aliases, advice=advice)


# ---- the table -------------------------------------------------------------------------------------------------------

IMAGENET_TRAIN, IMAGENET_VAL = _imagenet("train", 1_281_167), _imagenet("val", 50_000)
_IMAGENET_ADVICE = (
    "register at the ImageNet project, fetch the training and validation images of ILSVRC-2012 and unpack them into "
    "one folder per class (n01440764 and so on) below {root}/imagenet/train and {root}/imagenet/val, or put links there"
)
BACKGROUNDS = ("original", "only_fg", "mixed_same", "mixed_rand", "mixed_next", "no_fg", "only_bg_b", "only_bg_t")

DATASETS: dict[str, Dataset] = {
    "ImageNet": Dataset(
        parts={"train": IMAGENET_TRAIN, "test": IMAGENET_VAL},
        num_classes=1000,
        aliases=("ImageNet-1k",),
        advice=_IMAGENET_ADVICE,
    ),
    "ImageNet-1%": _share_of_imagenet("1percent.txt", 12_811),
    "ImageNet-10%": _share_of_imagenet("10percent.txt", 128_116),
    "ImageNet-LT": Dataset(
        parts={
            "train": _long_tail("train", 115_846, images=IMAGENET_TRAIN),
            "validation": _long_tail("val", 20_000, images=IMAGENET_TRAIN),
            "test": _long_tail("test", 50_000, images=IMAGENET_VAL),
        },
        num_classes=1000,
        advice="the lists ImageNet_LT_train.txt, _val.txt and _test.txt are in data/ImageNet_LT of Facebook Research's "
        f"classifier-balancing repository; for images, {_IMAGENET_ADVICE}",
    ),
    "Pets": _torchvision(
        ("OxfordIIITPet", "oxford-iiit-pet", "images/*.jpg"),
        train=({"split": "trainval"}, "annotations/trainval.txt"),
        test=({"split": "test"}, "annotations/test.txt"),
        sizes=(3_680, 3_669, 37),
    ),
    "Flowers": _torchvision(  # ten training images of a class: CARP leaves `val` out
        ("Flowers102", "flowers-102", "jpg/*.jpg imagelabels.mat setid.mat"), sizes=(1_020, 6_149, 102)
    ),
    "Aircraft": _torchvision(
        ("FGVCAircraft", "fgvc-aircraft-2013b/data", "images/*.jpg variants.txt"),
        train=({"split": "trainval", "annotation_level": "variant"}, "images_variant_trainval.txt"),
        test=({"split": "test", "annotation_level": "variant"}, "images_variant_test.txt"),
        sizes=(6_667, 3_333, 100),
    ),
    "Cars": _torchvision(
        ("StanfordCars", "stanford_cars", "devkit/cars_meta.mat"),
        train=({"split": "train"}, "devkit/cars_train_annos.mat cars_train/*.jpg"),
        test=({"split": "test"}, "cars_test_annos_withlabels.mat cars_test/*.jpg"),
        sizes=(8_144, 8_041, 196),
        advice="its home page is gone, and torchvision cannot fetch it any more; put the folders cars_train, cars_test "
        "and devkit and the file cars_test_annos_withlabels.mat of a copy into {root}/stanford_cars",
    ),
    "Country211": _torchvision(  # CARP leaves `valid` out
        ("Country211", "country211", ""),
        train=({"split": "train"}, "train/*/*.jpg"),
        test=({"split": "test"}, "test/*/*.jpg"),
        sizes=(31_650, 21_100, 211),
    ),
    "Food101": _torchvision(
        ("Food101", "food-101", "images/*/*.jpg"),
        train=({"split": "train"}, "meta/train.json"),
        test=({"split": "test"}, "meta/test.json"),
        sizes=(75_750, 25_250, 101),
    ),
    "STL-10": _torchvision(  # torchvision wants all five files for either split
        ("STL10", "stl10_binary", "train_X.bin train_y.bin unlabeled_X.bin test_X.bin test_y.bin"),
        sizes=(5_000, 8_000, 10),
    ),
    "GTSRB": _torchvision(  # the archive of 26,640 training images, not that of 39,209
        ("GTSRB", "gtsrb", ""),
        train=({"split": "train"}, "GTSRB/Training/*/*.ppm"),
        test=({"split": "test"}, "GTSRB/Final_Test/Images/*.ppm GT-final_test.csv"),
        sizes=(26_640, 12_630, 43),
    ),
    "DTD": _torchvision(  # the paper does not say whether it added `val`; CARP does not
        ("DTD", "dtd/dtd", "images/*/*.jpg"),
        train=({"split": "train", "partition": 1}, "labels/train1.txt"),
        test=({"split": "test", "partition": 1}, "labels/test1.txt"),
        sizes=(1_880, 1_880, 47),
    ),
    "CIFAR-10": _torchvision(
        (
            "CIFAR10",
            "cifar-10-batches-py",
            f"batches.meta test_batch {' '.join(f'data_batch_{i}' for i in range(1, 6))}",
        ),
        train=({"train": True}, ""),
        test=({"train": False}, ""),
        sizes=(50_000, 10_000, 10),
    ),
    "CIFAR-100": _torchvision(
        ("CIFAR100", "cifar-100-python", "meta train test"),
        train=({"train": True}, ""),
        test=({"train": False}, ""),
        sizes=(50_000, 10_000, 100),
    ),
    "ROxford5k": _retrieval("roxford5k", city="Oxford", num_images=4_993 + 70),
    "RParis6k": _retrieval("rparis6k", city="Paris", num_images=6_322 + 70),  # and 20 damaged files
    "Copydays": _folder(
        "copydays",
        {"original/*.jpg": 157, "strong/*.jpg": 229},
        advice="unpack the archives of INRIA's Copydays into {root}/copydays/original and {root}/copydays/strong",
    ),
    "ImageNet-9": _folder(
        "imagenet9",
        {f"{variant}/val/*/*.JPEG": 4_050 for variant in BACKGROUNDS},
        aliases=("IN-9",),
        advice="unpack the folders original, only_fg ... of MadryLab's Backgrounds Challenge into {root}/imagenet9",
    ),
}


# ---- use -------------------------------------------------------------------------------------------------------------


def look_up(name: str) -> str:
    """The name in the table for any spelling or alias: `pets`, `cifar10`, `OxfordIIITPet`."""
    for row_name, row in DATASETS.items():
        if any(_plain(name) == _plain(alias) for alias in (row_name, *row.aliases)):
            return row_name
    raise DataError(f"there is no data set {name!r}.{closest(name, DATASETS)} Known: {', '.join(DATASETS)}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9%]", "", name.lower())


def missing_data(name: str, data_root: Path, *, parts: Collection[str] = PARTS) -> str | None:
    """None if the files of these parts exist; else which are expected, and how to get them. Opens no file."""
    row, root = DATASETS[look_up(name)], data_root.expanduser()
    expected = [pattern for part, images in row.parts.items() if part in parts for pattern in images.expected]
    missing = [pattern for pattern in dict.fromkeys(expected) if not any(root.glob(pattern))]
    if not missing:
        return None
    paths = ", ".join(str(root / pattern) for pattern in missing)
    return f"{look_up(name)} is missing or incomplete: expected {paths}. To get it: {row.advice.format(root=str(root))}"


def open_data(
    name: str,
    data_root: Path,
    *,
    output: Path,
    parts: Collection[str] = PARTS,
    warn: Callable[[str], None] = warnings.warn,
) -> EvaluationData:
    """Open the requested parts of a data set; call `warn` where their sizes differ from the published protocol."""
    missing = missing_data(name, data_root, parts=parts)
    if missing is not None:
        raise DataError(missing)
    row_name, root = look_up(name), data_root.expanduser()
    opened: dict[str, Any] = {
        part: images.open(root) if isinstance(images, Split) else root / images.path
        for part, images in DATASETS[row_name].parts.items()
        if part in parts
    }
    for remark in _unlike_published(row_name, root, opened):
        warn(remark)
    return EvaluationData(name=row_name, output=output, **opened)


def _unlike_published(row_name: str, root: Path, opened: Mapping[str, Any]) -> Iterator[str]:
    """Where the sizes of opened parts differ from the published ones."""
    row = DATASETS[row_name]
    found: list[tuple[str, str, int, int]] = []
    for part, images in row.parts.items():
        if part in opened and isinstance(images, Split):
            source: ImageSource = opened[part]
            found.append((f"{row_name} ({part})", "images", len(source), images.num_images))
            found.append((f"{row_name} ({part})", "classes", len(source.class_names or ()), row.num_classes or 0))
        elif part in opened and isinstance(images, Folder):
            for pattern, published in images.num_images.items():
                found.append((pattern, "images", min(sum(1 for _ in root.glob(pattern)), published), published))
    for where, what, number, published in found:
        if number != published:
            yield f"{where} has {number:,} {what}, published protocol has {published:,}"
