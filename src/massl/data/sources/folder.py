"""Folders of image files: one folder per class, or unlabelled photos in any nesting."""

import hashlib
import os
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import get_args

from massl.config import closest
from massl.data.sources.base import Contents, DataError, EncodedImage, Orientation, known_orientation, split_query
from massl.data.sources.file_stamps import digest_of_files, sizes_of_files
from massl.data.sources.folder_labels import LabelRule, find_labels
from massl.data.sources.formats import COMMON_SUFFIXES, DEEP_SUFFIXES, describe_ignored, ignored_kind, readable_suffixes
from massl.data.sources.listing import NOWHERE, FolderWalk, LeftOut, is_file, is_folder, names_outside, why_no_file
from massl.data.sources.rules import DEFAULT_RULES, ReadRules, read_file

_FILES_PER_REPORT = 1000

OnListing = Callable[[int], None]  # called with the number of files seen so far while a folder is listed


class FolderSource:
    """The images below `root`, sorted by folder and name.

    `remarks` says which classes were found and which image files cannot be read. `label_doubt` says why the classes,
    if nobody chose them, are probably none; "" if nothing speaks against them.
    """

    pixels = None

    def __init__(
        self,
        root: Path,
        *,
        name: str,
        labels: LabelRule = "auto",
        orientation: Orientation = "exif",
        on_listing: OnListing = lambda num_files: None,
        as_before: bool = False,
        rules: ReadRules = DEFAULT_RULES,
    ) -> None:
        """`as_before`: with the files and classes of massl before it read AVIF and HEIC and doubted classes."""
        if not root.is_dir():
            problem = "is a file, not a folder" if root.exists() else "does not exist"
            raise DataError(f"{root} {problem}; expected a folder of images")
        if all((root / name).is_file() for name in ("recipe.yaml", "backbone.safetensors")):
            raise DataError(f"{root} is a run of massl, not images; to continue it: massl pretrain --output {root}")
        self.name = name
        self.rules = rules
        self.maybe_deep = array("q")  # images that may have more than 8 bits, by their suffix
        self.root = root
        self._orientation = known_orientation(orientation, name=name)
        # all file names in one string: the 1.28 million of ImageNet take 36 MB, a list of paths 112 MB
        self._file_names = bytearray()
        self._file_name_ends = array("q")
        self._folders: list[str] = []
        self._folder_ends = array("q")  # position after the last image of each folder
        suffixes = COMMON_SUFFIXES if as_before else readable_suffixes()
        lister = _Lister(suffixes, on_listing)
        for folder, file_names in lister.folders_with_images(root):
            for file_name in file_names:
                if file_name.lower().endswith(DEEP_SUFFIXES):
                    self.maybe_deep.append(len(self._file_name_ends))
                self._file_names += os.fsencode(file_name)
                self._file_name_ends.append(len(self._file_names))
            self._folders.append(folder)
            self._folder_ends.append(len(self._file_name_ends))
        ignored = [*describe_ignored(lister.num_ignored), *(f"left out {what}" for what in lister.left_out.described())]
        if not self._folders:
            raise DataError(_no_images(root, suffixes, lister, ignored))
        if labels == "folders" and self._folders[0] == "":
            problem = f"{root}: labels=folders needs every image inside a class folder"
            raise DataError(f"{problem}, but {self.key_of(0)} is not")
        num_images = [end - start for start, end in zip([0, *self._folder_ends], self._folder_ends, strict=False)]
        found_labels = find_labels(self._folders, num_images, labels, path=str(root), as_before=as_before)
        self.class_names, self._folder_labels = found_labels.class_names, list(found_labels.labels)
        self.label_doubt = found_labels.doubt
        self.remarks = (*found_labels.remarks, *ignored, *lister.outside.described())
        # not classes here, but other parts of the set may have images of them: for messages about class names
        tops = {folder.partition("/")[0] for folder in self._folders}
        self.empty_class_folders = () if self.class_names is None else _other_folders(root, tops)

    def __len__(self) -> int:
        return len(self._file_name_ends)

    def read(self, index: int) -> EncodedImage:
        key, turn_upright = self.key_of(index), self._orientation == "exif"
        data = read_file(self.root / key, self.rules)
        return EncodedImage(data=data, label=self.label_of(index), key=key, turn_upright=turn_upright, rules=self.rules)

    def path_of(self, index: int) -> Path:
        return self.root / self.key_of(index)

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
        files = digest_of_files(self.root, map(self.key_of, range(len(self))))
        return hashlib.sha256(f"{self._reading}{self.rules.key} {files}".encode()).hexdigest()

    def contents(self) -> Contents:
        return Contents(
            f"{self._reading}{self.rules.ranges.key}", sizes_of_files(self.root, map(self.key_of, range(len(self))))
        )

    @property
    def _reading(self) -> str:
        labels = repr((self.class_names is None, self._folder_labels))  # per folder; the image keys name the folders
        return f"{self._orientation} {labels}"


class _Lister:
    """The images of a tree of folders, with a count of what else it holds."""

    def __init__(self, suffixes: tuple[str, ...], on_listing: OnListing) -> None:
        self._suffixes = suffixes
        self.num_ignored: Counter[str] = Counter()  # image files that cannot be read, by suffix
        self.left_out = LeftOut()
        self.outside = LeftOut()
        self._num_files = 0
        self._on_listing = on_listing

    def folders_with_images(self, root: Path) -> Iterator[tuple[str, list[str]]]:
        """(path relative to the root, sorted file names) of each folder with images, depth first.

        Hidden files and folders are skipped.
        """
        walk = FolderWalk(root, skip_hidden=True)
        self.left_out = walk.left_out
        real_root, what = Path(os.path.realpath(root)), f"images are links to outside {root}"
        for relative, entries in walk:
            images = [entry for entry in entries if self._is_image(entry, relative)]
            if images:
                if names := names_outside(images, root / relative, real_root):
                    self.outside.add(what, [f"{relative}/{name}" if relative else name for name in names])
                yield relative, sorted(entry.name for entry in images)

    def _is_image(self, entry: os.DirEntry[str], folder: str) -> bool:
        self._num_files += 1
        if self._num_files % _FILES_PER_REPORT == 0:
            self._on_listing(self._num_files)
        if entry.name.lower().endswith(self._suffixes):
            if is_file(entry):
                return True
            self.left_out.add(why_no_file(entry), [f"{folder}/{entry.name}" if folder else entry.name])
            return False
        if (suffix := ignored_kind(entry.name)) is not None:
            self.num_ignored[suffix] += 1
        return False


def _no_images(root: Path, suffixes: tuple[str, ...], lister: _Lister, ignored: list[str]) -> str:
    if lister.left_out.num[NOWHERE]:
        found = "; ".join(ignored)
        return (
            f"{root} holds no images that can be read: {found}. Connect the disk that the links lead to, or mend them"
        )
    found = f"; {'; '.join(ignored)}" if ignored else ""
    return f"{root} holds no images; expected {' '.join(suffixes)} or class folders of them{found}"


def _other_folders(root: Path, with_images: set[str]) -> tuple[str, ...]:
    """Visible folders directly below the root that hold no images, sorted."""
    with os.scandir(root) as entries:
        folders = {entry.name for entry in entries if not entry.name.startswith(".") and is_folder(entry)}
    return tuple(sorted(folders - with_images))


def require_possible(path: Path) -> None:
    """Raise for a path that the system cannot even look up: too long, or behind a folder without permission."""
    try:
        path.exists()
    except OSError as error:
        raise DataError(f"{str(path)[:200]} cannot be opened: {error.strerror}; check --data") from None


def folder_named(uri: str) -> Path | None:
    """The place, links followed, of the folder that a path or `folder:PATH` names; None if nothing is there."""
    location = uri.removeprefix("folder:")
    path = location if location == uri else location.rpartition("?")[0] or location
    try:
        return Path(path).expanduser().resolve(strict=True) if path else None
    except (OSError, ValueError, RuntimeError):  # too long, holds a zero byte, ~NOBODY
        return None


def open_folder(
    location: str,
    *,
    name: str,
    on_listing: OnListing = lambda num_files: None,
    as_before: bool = False,
    rules: ReadRules = DEFAULT_RULES,
) -> FolderSource:
    """`folder:PATH?labels=none|folders&orientation=exif|stored`; defaults: by the layout, and exif."""
    path, parameters = split_query(location)
    require_possible(Path(path).expanduser())
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
            return FolderSource(
                Path(path).expanduser(),
                name=name,
                labels=rule,
                orientation=orientation,
                on_listing=on_listing,
                as_before=as_before,
                rules=rules,
            )
    raise DataError(f"{name}: labels={labels} is unknown; use labels=none, labels=folders or leave it out")
