"""Sources of images, one file per storage; `open_source` picks one by URI."""

import re
from pathlib import Path
from typing import Protocol

from massl.config import closest
from massl.data.sources.array import open_npz
from massl.data.sources.base import DataError, EncodedImage, ImageSource
from massl.data.sources.demo import open_demo
from massl.data.sources.folder import FolderSource, open_folder
from massl.data.sources.joined import open_joined
from massl.data.sources.torchvision_set import open_torchvision

__all__ = ["DataError", "EncodedImage", "ImageSource", "open_source"]


class Opener(Protocol):
    def __call__(self, location: str, *, name: str) -> ImageSource:
        """`location` is the part after the scheme, `name` the whole URI."""
        ...


def _open_parts(location: str, *, name: str) -> ImageSource:
    return open_joined(location, name=name, open_part=open_source)


_OPENERS: dict[str, Opener] = {
    "folder": open_folder,
    "demo": open_demo,
    "torchvision": open_torchvision,
    "joined": _open_parts,
}


def open_source(uri: str | Path) -> ImageSource:
    """Open `scheme:location`, or a plain path: a folder, or an archive when it ends in .npz."""
    scheme = re.match(r"([A-Za-z][\w+-]*):", uri) if isinstance(uri, str) else None
    if scheme is None:
        return _open_path(uri)
    opener = _OPENERS.get(scheme[1])
    if opener is None:
        schemes = ", ".join(f"{known}:" for known in _OPENERS)
        problem = f"{uri}: unknown scheme {scheme[1]!r}.{closest(scheme[1], _OPENERS)}"
        raise DataError(f"{problem} Use {schemes} or a path (./{uri} if it is one)")
    return opener(str(uri)[scheme.end() :], name=str(uri))


def _open_path(path: str | Path) -> ImageSource:
    name = str(path)
    if not name:
        raise DataError("no images; set --data.source to a folder, a .npz archive, demo:train or torchvision:NAME")
    expanded = Path(path).expanduser()
    return open_npz(expanded, name=name) if expanded.suffix == ".npz" else FolderSource(expanded, name=name)
