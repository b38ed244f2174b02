"""`torchvision:NAME?key=value&...`: an image set of torchvision; the parameters are its constructor's arguments."""

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import EpsImagePlugin, Image

from massl.config import MasslError, closest, parse_yaml
from massl.data.sources.array import digest_of_arrays
from massl.data.sources.base import Contents, DataError, EncodedImage, Pixels, numbered_classes, split_query
from massl.data.sources.file_stamps import digest_of_files, sizes_of_files
from massl.data.sources.listing import files_below

# attributes with labels (CIFAR, DTD and Pets, SVHN and STL10, Caltech101) or (path, label) pairs (ImageNet, Cars)
_LABEL_ATTRIBUTES = ("targets", "_labels", "labels", "y", "samples", "_samples")
# attributes with the set's own folder (ImageNet, Pets and most others, Aircraft, SUN397); CIFAR: root / base_folder
_FOLDER_ATTRIBUTES = ("split_folder", "_base_folder", "_data_path", "_data_dir")
# Sets of single images whose files run no code: images, text, arrays, or pickles with a published check sum (CIFAR).
# Not LSUN, which unpickles a file in the working folder. Not ImageFolder, which follows links without end,
# nor USPS, which unpacks without a limit.
_SETS = (
    *(
        "CIFAR10",
        "CIFAR100",
        "CLEVRClassification",
        "Caltech101",
        "Caltech256",
        "CelebA",
        "Country211",
        "DTD",
        "EMNIST",
    ),
    *("EuroSAT", "FER2013", "FGVCAircraft", "FashionMNIST", "Flowers102", "Food101", "GTSRB", "INaturalist"),
    *("ImageNet", "Imagenette", "KMNIST", "LFWPeople", "MNIST", "Omniglot", "OxfordIIITPet", "PCAM"),
    *("Places365", "QMNIST", "RenderedSST2", "SEMEION", "STL10", "SUN397", "SVHN", "StanfordCars"),
)
_TAKE_FUNCTIONS = ("transform", "target_transform", "transforms", "loader", "is_valid_file")


class _Dataset(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[Any, Any]: ...


class TorchvisionSource:
    """Images and labels as the set delivers them; not turned by EXIF, as in published evaluations."""

    def __init__(self, dataset: _Dataset, *, name: str, arguments: Mapping[str, Any] | None = None) -> None:
        """`arguments` of the set's constructor: they may affect its images."""
        self.name = name
        self._dataset = dataset
        self._arguments = dict(arguments or {})
        first = dataset[0] if len(dataset) > 0 else None
        if not isinstance(first, tuple) or not first or not isinstance(first[0], Image.Image):
            raise DataError(f"{name} delivers no single images; choose an image classification set")
        self.pixels = _pixels_in_memory(dataset, first_image=_raw_pixels(first[0]))

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int) -> EncodedImage:
        return EncodedImage(data=self._pixels_of(index), label=self.label_of(index), key=self.key_of(index))

    def _pixels_of(self, index: int) -> Pixels:
        try:
            return _raw_pixels(self._dataset[index][0])
        except (OSError, MemoryError):
            raise
        except Exception as error:  # torchvision's code and Pillow's: for a damaged file, errors of many kinds
            raise OSError(f"{type(error).__name__}: {error}") from None

    def label_of(self, index: int) -> int | None:
        return None if self._labels is None or self._labels[index] < 0 else int(self._labels[index])

    def key_of(self, index: int) -> str:
        return f"{type(self._dataset).__name__}/{index}"

    def fingerprint(self) -> str:
        """Of the pixels if they are in memory, else of the files and the set's lists; computed once."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        if self.pixels is not None:
            return digest_of_arrays(self.pixels, self._labels)
        digest = hashlib.sha256(repr((type(self._dataset).__name__, sorted(self._arguments.items()))).encode())
        digest.update(b"" if self._labels is None else self._labels.data)
        for name, values in sorted(_lists_of_files(self._dataset)):
            digest.update(f"{name} {values}".encode())
        folder = _own_folder(self._dataset)
        if folder is not None:
            digest.update(digest_of_files(folder, files_below(folder)).encode())
        else:  # generated or streamed: only the images themselves show whether they have changed
            for index in range(len(self)):
                digest.update(digest_of_arrays(self._pixels_of(index)[None], None).encode())
        return digest.hexdigest()

    def contents(self) -> Contents:
        """The set's own files by name and size; its pixels where it has no files, or has them in memory."""
        folder = _own_folder(self._dataset)
        if self.pixels is not None or folder is None:
            return Contents(self._fingerprint)
        chosen = sorted((key, value) for key, value in self._arguments.items() if key != "root")
        reading = hashlib.sha256(repr((type(self._dataset).__name__, chosen)).encode())
        reading.update(b"" if self._labels is None else self._labels.data)
        for name, values in sorted(_lists_of_files(self._dataset)):
            reading.update(f"{name} {values}".replace(str(folder), "").encode(errors="surrogateescape"))
        return Contents(reading.hexdigest(), sizes_of_files(folder, files_below(folder)))

    @cached_property
    def class_names(self) -> tuple[str, ...] | None:
        if self._labels is None or self._labels.max() < 0:
            return None
        names: Sequence[Any] | None = getattr(self._dataset, "classes", None)
        names = names or numbered_classes(int(self._labels.max()) + 1, name=self.name) or ()
        # ImageNet: a tuple of synonyms
        return tuple(", ".join(name) if isinstance(name, tuple) else str(name) for name in names)

    @cached_property
    def _labels(self) -> NDArray[np.int64] | None:
        for attribute in _LABEL_ATTRIBUTES:
            labels = _as_labels(getattr(self._dataset, attribute, None), num_images=len(self))
            if labels is not None:
                return labels
        if _as_labels([self._dataset[0][1]], num_images=1) is None:  # boxes, captions, masks
            return None
        # the set has no list (PCAM): one pass over its items
        return _as_labels([self._dataset[index][1] for index in range(len(self))], num_images=len(self))


def _as_labels(values: Any, *, num_images: int) -> NDArray[np.int64] | None:
    if not isinstance(values, list | tuple | np.ndarray | torch.Tensor) or len(values) != num_images:
        return None
    if isinstance(values[0], tuple):
        values = [pair[-1] for pair in values]
    is_tensor = isinstance(values[0], torch.Tensor) and values[0].ndim == 0
    if not is_tensor and not isinstance(values[0], int | np.integer):
        return None
    labels = np.asarray(values)
    return labels.astype(np.int64) if labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer) else None


def _raw_pixels(image: Image.Image) -> Pixels:
    return np.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB"))


def _pixels_in_memory(dataset: _Dataset, *, first_image: Pixels) -> Pixels | None:
    """The set's own array (CIFAR, MNIST ...), if its first image equals the one the set delivers."""
    data = getattr(dataset, "data", None)
    pixels = data.numpy() if isinstance(data, torch.Tensor) else data
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or len(pixels) != len(dataset):
        return None
    # STL10 and SVHN keep [N, 3, H, W]
    layouts = [pixels, pixels.transpose(0, 2, 3, 1)] if pixels.ndim == 4 else [pixels]
    return next((layout for layout in layouts if np.array_equal(layout[0], first_image)), None)


def _own_folder(dataset: _Dataset) -> Path | None:
    """The smallest known folder with the set's files."""
    root = getattr(dataset, "root", None)
    candidates = [getattr(dataset, attribute, None) for attribute in _FOLDER_ATTRIBUTES]
    below_root = getattr(dataset, "base_folder", None)
    if isinstance(root, str | PurePath) and isinstance(below_root, str):
        candidates.append(Path(root, below_root))
    named = [path for path in (*candidates, root) if isinstance(path, str | PurePath) and str(path)]
    return next((Path(path) for path in named if Path(path).is_dir()), None)


def _lists_of_files(dataset: _Dataset) -> Iterator[tuple[str, list[Any]]]:
    """The set's lists of paths or (path, ...) tuples: which file is which image (SUN397: in file-system order)."""
    for name, values in vars(dataset).items():
        if isinstance(values, list) and len(values) == len(dataset) and isinstance(values[0], str | PurePath | tuple):
            yield name, values


def open_torchvision(location: str, *, name: str, may_download: bool = False) -> TorchvisionSource:
    """`may_download`: whether download=true is followed."""
    try:
        from torchvision import datasets  # takes a second to import, only for this scheme
    except ImportError:
        raise DataError(f"{name} needs torchvision; install it with: pip install torchvision") from None
    set_name, parameters = split_query(location)
    known = [candidate for candidate in _SETS if hasattr(datasets, candidate)]
    if set_name == "ImageFolder":
        raise DataError(f"{name}: give the folder itself instead, such as --data {parameters.get('root', 'DIR')}")
    if set_name not in known:
        raise DataError(
            f"{name}: massl opens no set {set_name!r} of torchvision.{closest(set_name, known)} It opens "
            f"{', '.join(known)}; of other sets, save the images to a folder and give that"
        )
    EpsImagePlugin.gs_binary = False  # Pillow would start Ghostscript on a stranger's PostScript named .jpg
    dataset_type = getattr(datasets, set_name)
    arguments = _constructor_arguments(dataset_type, parameters, name=name)
    decisive = {key: value for key, value in arguments.items() if key != "download"}
    is_refused = arguments.get("download") is True and not may_download
    if is_refused:
        arguments["download"] = False
    try:
        return TorchvisionSource(dataset_type(**arguments), name=name, arguments=decisive)
    except MasslError:
        raise
    except ImportError as error:
        raise DataError(f"{name} needs a package that is not installed: {error}; install it with pip") from None
    except Exception as error:  # code and files of others: sets raise RuntimeError, KeyError, UnpicklingError ...
        advice = ""
        if "root" in arguments:
            advice = f". Its files are expected below {arguments['root']!r}; root=DIR chooses another folder"
        if is_refused:
            advice += ". download=true in a recipe is not followed; to fetch the files, give this URI as an option"
        elif arguments.get("download") is False:
            advice += ", download=true after the '?' fetches them"
        reason = str(error) if isinstance(error, RuntimeError | OSError) else f"{type(error).__name__}: {error}"
        raise DataError(f"{name} cannot be opened: {reason}{advice}") from None


def _constructor_arguments(dataset_type: type, parameters: dict[str, str], *, name: str) -> dict[str, Any]:
    """The values after '?'. Arguments that take functions are not accepted."""
    accepted = [key for key in inspect.signature(dataset_type).parameters if key not in _TAKE_FUNCTIONS]
    arguments: dict[str, Any] = {
        key: default for key, default in (("root", "data"), ("download", False)) if key in accepted
    }
    for key, text in parameters.items():
        if key not in accepted:
            raise DataError(f"{name}: {dataset_type.__name__} has no parameter {key!r}.{closest(key, accepted)}")
        # a root named 2021 stays a name
        arguments[key] = text if key == "root" else parse_yaml(text, origin=f"{name}: {key}")
    if not isinstance(arguments.get("download", False), bool):
        raise DataError(f"{name}: download is {arguments['download']!r}; use download=true or leave it out")
    return arguments
