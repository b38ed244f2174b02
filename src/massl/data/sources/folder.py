"""Folders of image files: one folder per class, or unlabelled photos in any nesting."""

import hashlib
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from massl.config import closest
from massl.data.sources.base import DataError, EncodedImage, Orientation, known_orientation, split_query
from massl.data.sources.file_stamps import digest_of_files

_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")

LabelRule = Literal["auto", "none", "folders"]


class FolderSource:
    """The images below `root`, sorted by folder and name.

    With `labels="auto"`, the folders directly below `root` are classes if all images are inside two or more of them.
    """

    pixels = None

    def __init__(self, root: Path, *, name: str, labels: LabelRule = "auto", orientation: Orientation = "exif") -> None:
        if not root.is_dir():
            problem = "is a file, not a folder" if root.exists() else "does not exist"
            raise DataError(f"{root} {problem}; expected a folder of images")
        self.name = name
        self._root = root
        self._orientation = known_orientation(orientation, name=name)
        # all file names in one string: the 1.28 million of ImageNet take 36 MB, a list of paths 112 MB
        self._file_names = bytearray()
        self._file_name_ends = array("q")
        self._folders: list[str] = []
        self._folder_ends = array("q")  # position after the last image of each folder
        for folder, file_names in _folders_with_images(root, "", ancestors=()):
            for file_name in file_names:
                self._file_names += os.fsencode(file_name)
                self._file_name_ends.append(len(self._file_names))
            self._folders.append(folder)
            self._folder_ends.append(len(self._file_name_ends))
        if not self._folders:
            raise DataError(f"{root} holds no images; expected {' '.join(_IMAGE_SUFFIXES)} or class folders of them")
        self.class_names, self._folder_labels = self._find_classes(labels)
        # not classes here, but other parts of the set may have images of them: for messages about class names
        self.empty_class_folders = () if self.class_names is None else _other_folders(root, self.class_names)

    def _find_classes(self, labels: LabelRule) -> tuple[tuple[str, ...] | None, list[int]]:
        top_folders = [folder.partition("/")[0] for folder in self._folders]
        class_names = tuple(dict.fromkeys(top_folders))
        images_in_root = "" in class_names
        if labels == "folders" and images_in_root:
            problem = f"{self._root}: labels=folders needs every image inside a class folder"
            raise DataError(f"{problem}, but {self.key_of(0)} is not")
        if labels == "none" or images_in_root or (labels == "auto" and len(class_names) < 2):
            return None, []
        label_of_class = {class_name: label for label, class_name in enumerate(class_names)}
        return class_names, [label_of_class[top_folder] for top_folder in top_folders]

    def __len__(self) -> int:
        return len(self._file_name_ends)

    def read(self, index: int) -> EncodedImage:
        key, turn_upright = self.key_of(index), self._orientation == "exif"
        data = (self._root / key).read_bytes()
        return EncodedImage(data=data, label=self.label_of(index), key=key, turn_upright=turn_upright)

    def label_of(self, index: int) -> int | None:
        return None if self.class_names is None else self._folder_labels[bisect_right(self._folder_ends, index)]

    def key_of(self, index: int) -> str:
        folder = self._folders[bisect_right(self._folder_ends, index)]
        start = self._file_name_ends[index - 1] if index > 0 else 0
        file_name = os.fsdecode(bytes(self._file_names[start : self._file_name_ends[index]]))
        return f"{folder}/{file_name}" if folder else file_name

    def fingerprint(self) -> str:
        """Computed once, at the first call: 6 s for the 1.28 million images of ImageNet.

        Later changes give another fingerprint to the next FolderSource, so cached features are never confused.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        labels = repr((self.class_names is None, self._folder_labels))  # per folder; the image keys name the folders
        files = digest_of_files(self._root, map(self.key_of, range(len(self))))
        return hashlib.sha256(f"{self._orientation} {labels} {files}".encode()).hexdigest()


def _folders_with_images(
    path: Path, relative: str, ancestors: tuple[tuple[int, int], ...]
) -> Iterator[tuple[str, list[str]]]:
    """(path relative to the root, sorted file names) of each folder with images, depth first; hidden ones skipped."""
    file_names, folder_names = [], []
    try:
        status = path.stat()
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    folder_names.append(entry.name)
                elif entry.name.lower().endswith(_IMAGE_SUFFIXES) and entry.is_file():
                    file_names.append(entry.name)
    except OSError as error:
        raise DataError(f"{path} cannot be listed: {error.strerror}") from None
    identity = (status.st_dev, status.st_ino)
    if identity in ancestors:  # a link to one of its own parent folders
        return
    if file_names:
        yield relative, sorted(file_names)
    for folder_name in sorted(folder_names):
        below = f"{relative}/{folder_name}" if relative else folder_name
        yield from _folders_with_images(path / folder_name, below, (*ancestors, identity))


def _other_folders(root: Path, class_names: tuple[str, ...]) -> tuple[str, ...]:
    """Visible folders directly below the root that are not classes, sorted."""
    with os.scandir(root) as entries:
        folders = {entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()}
    return tuple(sorted(folders - set(class_names)))


def open_folder(location: str, *, name: str) -> FolderSource:
    """`folder:PATH?labels=none|folders&orientation=exif|stored`; defaults: by the layout, and exif."""
    path, parameters = split_query(location)
    known = ("labels", "orientation")
    for parameter in parameters.keys() - set(known):
        raise DataError(
            f"{name}: a folder has no parameter {parameter!r}.{closest(parameter, known)} "
            "Use ?labels=none, ?labels=folders or ?orientation=stored"
        )
    labels = parameters.get("labels", "auto")
    orientation = known_orientation(parameters.get("orientation", "exif"), name=name)
    for rule in get_args(LabelRule):
        if labels == rule:
            return FolderSource(Path(path).expanduser(), name=name, labels=rule, orientation=orientation)
    raise DataError(f"{name}: labels={labels} is unknown; use labels=none, labels=folders or leave it out")
