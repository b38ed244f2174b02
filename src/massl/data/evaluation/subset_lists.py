"""Published lists that choose images: the 1 % and 10 % of ImageNet (SimCLR), and ImageNet-LT."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from massl.data.sources.base import DataError, ImageSource
from massl.data.sources.files import FileListSource


def read_name_list(path: Path, source: ImageSource) -> Tensor:  # -> int64 [n] sorted
    """Indices of the images whose file names are listed, one per line without folder (Chen et al., 2020)."""
    wanted: dict[str, int] = {}  # name -> index of its image, -1 until found
    for number, line in _lines(path):
        if "/" in line or len(line.split()) > 1:
            raise DataError(
                f"{path}, line {number}: {line!r} is not the name of a file; expected one a line, without its folder"
            )
        if line in wanted:
            raise DataError(f"{path}, line {number}: {line} is listed a second time; remove it")
        wanted[line] = -1
    for index in range(len(source)):
        name = source.key_of(index).rpartition("/")[2]
        if name in wanted:
            if wanted[name] >= 0:
                first, second = source.key_of(wanted[name]), source.key_of(index)
                raise DataError(
                    f"{path}: {name} may be {first} or {second} of {source.name}; names must be unique there"
                )
            wanted[name] = index
    missing = [name for name, index in wanted.items() if index < 0]
    if missing:
        shown = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        raise DataError(
            f"{len(missing)} of {len(wanted)} images that {path} lists are not in {source.name} ({shown}); "
            "give the complete set that the list was made for, as a folder of files"
        )
    return torch.tensor(sorted(wanted.values()))


def read_path_list(path: Path, root: Path, *, name: str, class_names: tuple[str, ...] | None = None) -> FileListSource:
    """The images of a list of lines `relative/path label` (Liu et al., 2019), in its order."""
    files, labels = [], []
    for number, line in _lines(path):
        *file, label = line.rsplit(maxsplit=1)
        if not file or not (label.isascii() and label.isdigit()):
            raise DataError(
                f"{path}, line {number}: {line!r} is not of the form 'relative/path label' with a whole number as label"
            )
        files += file
        labels.append(int(label))
    return FileListSource(root, files, labels=labels, class_names=class_names, name=name)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, with their numbers."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "it is no text"
        raise DataError(f"the list {path} cannot be read: {reason}") from None
    stripped = [line.strip() for line in text.split("\n")]
    if not any(stripped):
        raise DataError(f"the list {path} is empty")
    yield from ((number, line) for number, line in enumerate(stripped, start=1) if line)
