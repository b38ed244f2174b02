"""Image files from a list: published splits, queries of retrieval sets."""

import hashlib
import itertools
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from massl.data.sources.base import Contents, DataError, EncodedImage, Orientation, known_orientation, numbered_classes
from massl.data.sources.file_stamps import digest_of_files, in_threads, sizes_of_files
from massl.data.sources.formats import DEEP_SUFFIXES
from massl.data.sources.rules import DEFAULT_RULES, ReadRules, read_file


class FileListSource:
    """The images root/file in the order of `files`; all must exist. A negative label means unlabelled.

    By default they are not turned upright: published evaluations on such lists do not.
    """

    pixels = None

    def __init__(
        self,
        root: Path,
        files: Sequence[str],
        *,
        labels: Sequence[int] | None = None,
        class_names: tuple[str, ...] | None = None,
        name: str,
        orientation: Orientation = "stored",
        rules: ReadRules = DEFAULT_RULES,
    ) -> None:
        self.name = name
        self.rules = rules
        self.class_names = _class_names(labels, class_names, num_files=len(files), name=name)
        self._root = root
        self._files = tuple(files)
        self._labels = None if labels is None else array("q", labels)
        self._orientation = known_orientation(orientation, name=name)
        self._require_all()

    def _require_all(self) -> None:
        def missing_of(chunk: list[str]) -> list[str]:
            return [file for file in chunk if not (self._root / file).is_file()]

        missing = list(itertools.chain.from_iterable(in_threads(missing_of, self._files)))
        if missing:
            shown = ", ".join(str(self._root / file) for file in missing[:3]) + (" ..." if len(missing) > 3 else "")
            raise DataError(
                f"{self.name}: {len(missing)} of {len(self)} listed images do not exist ({shown}); "
                f"complete {self._root}, or give the folder that the list is relative to"
            )

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int) -> EncodedImage:
        return EncodedImage(
            data=read_file(self.path_of(index), self.rules),
            label=self.label_of(index),
            key=self.key_of(index),
            turn_upright=self._orientation == "exif",
            rules=self.rules,
        )

    @property
    def maybe_deep(self) -> Sequence[int]:
        return [index for index, file in enumerate(self._files) if file.lower().endswith(DEEP_SUFFIXES)]

    def path_of(self, index: int) -> Path:
        return self._root / self._files[index]

    def label_of(self, index: int) -> int | None:
        return None if self._labels is None or self._labels[index] < 0 else self._labels[index]

    def key_of(self, index: int) -> str:
        return self._files[index]

    def fingerprint(self) -> str:
        """Computed once, at the first call."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        files = f"{self._orientation} {digest_of_files(self._root, self._files)}{self.rules.key}"
        digest = hashlib.sha256(files.encode())
        digest.update(self._labels or b"")
        return digest.hexdigest()

    def contents(self) -> Contents:
        labels = hashlib.sha256(self._labels or b"").hexdigest()
        reading = f"{self._orientation} {labels}{self.rules.ranges.key}"
        return Contents(reading, sizes_of_files(self._root, self._files))


def _class_names(
    labels: Sequence[int] | None, class_names: tuple[str, ...] | None, *, num_files: int, name: str
) -> tuple[str, ...] | None:
    """The given class names, or the label numbers; raises if they do not fit the labels."""
    if num_files == 0:
        raise DataError(f"{name} lists no images")
    if labels is None:
        if class_names is not None:
            raise DataError(f"{name}: {len(class_names)} class names, but no labels; give one for each image")
        return None
    if len(labels) != num_files:
        raise DataError(f"{name}: {len(labels)} labels for {num_files} images; give one for each")
    num_classes = max(labels) + 1
    if class_names is None:
        return numbered_classes(num_classes, name=name)
    if num_classes > len(class_names):
        known = f"the {len(class_names)} classes, numbered from 0"
        raise DataError(f"{name}: label {num_classes - 1} is not among {known}")
    return class_names
