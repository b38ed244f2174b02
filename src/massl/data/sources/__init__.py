"""Sources of images, one file per storage; `open_source` picks one by URI."""

import re
from functools import partial
from pathlib import Path
from typing import Protocol

from massl.config import closest
from massl.data.sources.array import open_npz
from massl.data.sources.base import DataError, EncodedImage, ImageFiles, ImageSource
from massl.data.sources.demo import open_demo
from massl.data.sources.folder import FolderSource, OnListing, open_folder, require_possible
from massl.data.sources.joined import JoinedSource, open_joined
from massl.data.sources.rules import DEFAULT_RULES, ReadRules
from massl.data.sources.subset import SubsetSource, held_out
from massl.data.sources.torchvision_set import open_torchvision

__all__ = [
    "DataError",
    "EncodedImage",
    "ImageSource",
    "files_of",
    "held_out",
    "home_of",
    "label_doubt",
    "open_source",
    "remarks_of",
]


class Opener(Protocol):
    def __call__(self, location: str, *, name: str) -> ImageSource:
        """`location` is the part after the scheme, `name` the whole URI."""
        ...


def _openers(on_listing: OnListing, as_before: bool, rules: ReadRules, may_download: bool) -> dict[str, Opener]:
    open_part = partial(open_source, on_listing=on_listing, as_before=as_before, rules=rules, may_download=may_download)
    return {
        "folder": partial(open_folder, on_listing=on_listing, as_before=as_before, rules=rules),
        "demo": open_demo,
        "torchvision": partial(open_torchvision, may_download=may_download),
        "joined": partial(open_joined, open_part=open_part),
    }


def open_source(
    uri: str | Path,
    *,
    on_listing: OnListing = lambda num_files: None,
    as_before: bool = False,
    rules: ReadRules = DEFAULT_RULES,
    may_download: bool = False,
) -> ImageSource:
    """Open `scheme:location`, or a plain path: a folder, or an archive when it ends in .npz.

    `on_listing` is called now and then with the number of files seen, while a folder is listed. `as_before` finds the
    files and classes of runs that began before massl read AVIF and HEIC and doubted classes. `rules` limits the size of
    image files and gives the range of those with more than 8 bits. `may_download` is for URIs that the user names:
    those of recipes and run folders may be a stranger's and start no download.
    """
    if "\0" in str(uri):
        raise DataError(f"{str(uri)!r} holds a zero byte, which no path does; check --data")
    scheme = re.match(r"([A-Za-z][\w+-]*):", uri) if isinstance(uri, str) else None
    if scheme is None:
        return _open_path(uri, on_listing, as_before, rules)
    openers = _openers(on_listing, as_before, rules, may_download)
    opener = openers.get(scheme[1])
    if opener is None:
        schemes = ", ".join(f"{known}:" for known in openers)
        problem = f"{uri}: unknown scheme {scheme[1]!r}.{closest(scheme[1], openers)}"
        raise DataError(f"{problem} Use {schemes} or a path (./{uri} if it is one)")
    return opener(str(uri)[scheme.end() :], name=str(uri))


def _open_path(path: str | Path, on_listing: OnListing, as_before: bool, rules: ReadRules) -> ImageSource:
    name = str(path)
    if not name:
        raise DataError("no images; set --data to a folder, a .npz archive, demo:train or torchvision:NAME")
    expanded = Path(path).expanduser()
    require_possible(expanded)
    if expanded.suffix == ".npz":
        return open_npz(expanded, name=name)
    return FolderSource(expanded, name=name, on_listing=on_listing, as_before=as_before, rules=rules)


def remarks_of(source: ImageSource) -> list[str]:
    """What a folder's listing found, for the user: classes, and files in formats that cannot be read."""
    if isinstance(source, JoinedSource):
        return [remark for part in source.parts for remark in remarks_of(part)]
    return [f"{source.name}: {remark}" for remark in source.remarks] if isinstance(source, FolderSource) else []


def home_of(source: ImageSource) -> str:
    """What the keys of its images are relative to, equal for sources that share files; the name if it is no folder."""
    if isinstance(source, SubsetSource):
        return home_of(source.in_whole(())[0])
    return str(source.root.resolve()) if isinstance(source, FolderSource) else source.name


def files_of(source: ImageSource) -> list[ImageFiles]:
    """The parts of a source that read image files."""
    if isinstance(source, SubsetSource):
        return files_of(source.in_whole(())[0])
    if isinstance(source, JoinedSource):
        return [files for part in source.parts for files in files_of(part)]
    return [source] if isinstance(source, ImageFiles) else []


def label_doubt(source: ImageSource) -> str:
    """Why classes that nobody chose are probably none; "" if nothing speaks against them."""
    if isinstance(source, SubsetSource):
        return label_doubt(source.in_whole(())[0])
    if isinstance(source, JoinedSource):
        return next(filter(None, map(label_doubt, source.parts)), "")
    return source.label_doubt if isinstance(source, FolderSource) else ""
