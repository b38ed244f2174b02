"""Trees of folders, links and special files, and names that are any bytes, up to the files that `embed` writes."""

import os
from pathlib import Path

import numpy as np
import pyarrow.parquet
import safetensors.numpy

from massl.commands.embed import WRITERS, Embeddings
from massl.config import MasslError
from massl.data.identity import describe_change, identify
from massl.data.keys import original_key, stored_key
from massl.data.sources import open_source
from massl.data.sources.folder import FolderSource
from massl.data.sources.listing import MAX_VISITS, files_below
from tests.reliability.frame import Case, Lost, Wrong, fault_class


@fault_class("trees of links")
def trees_of_links(case: Case) -> None:
    """Folders, links to anything, FIFOs: each real image is listed once or more, and the listing ends."""
    root = case.folder / "root"
    folders = [root]
    images: set[tuple[int, int]] = set()
    root.mkdir()
    for number in range(int(case.random.integers(3, 30))):
        parent = folders[int(case.random.integers(len(folders)))]
        kind = ["folder", "link", "self", "fifo", "image", "image", "fan"][int(case.random.integers(7))]
        path = parent / f"{kind}{number}{'.jpg' if kind in ('image', 'fifo', 'self') else ''}"
        if kind == "folder":
            path.mkdir()
            folders.append(path)
        elif kind == "link":
            path.symlink_to(folders[int(case.random.integers(len(folders)))])
        elif kind == "self":
            path.symlink_to(path)
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "fan":
            for copy in range(4):
                path.with_name(f"{path.name}-{copy}").symlink_to(folders[int(case.random.integers(len(folders)))])
        else:
            path.write_bytes(b"x")
            images.add((path.stat().st_dev, path.stat().st_ino))
    try:
        source = FolderSource(root, name="photos")
    except MasslError as error:
        if images or "no images" not in str(error):
            raise Wrong(f"{len(images)} images were not listed: {error}") from error
        return
    listed = [(root / source.key_of(index)).stat().st_ino for index in range(len(source))]
    if set(listed) != {inode for _, inode in images}:
        raise Wrong(f"{len(set(listed))} of {len(images)} images were listed")
    if len(listed) > MAX_VISITS * len(images):
        raise Wrong(f"{len(listed)} listed for {len(images)} images")
    assert {Path(name).name for name in files_below(root)} >= {Path(source.key_of(0)).name}


@fault_class("names of any bytes")
def names_of_any_bytes(case: Case) -> None:
    """Listing, identity and the formats of `embed` keep every name."""
    root = os.fsencode(case.folder) + b"/root"
    os.mkdir(root)  # noqa: PTH102
    written: set[bytes] = set()
    for _ in range(int(case.random.integers(1, 6))):
        name = _name(case.random) + b".jpg"
        written.add(name)
        with open(root + b"/" + name, "wb") as file:  # noqa: PTH123
            file.write(b"x")
    source = open_source(os.fsdecode(root))
    keys = [source.key_of(index) for index in range(len(source))]
    if {os.fsencode(key) for key in keys} != written:
        raise Lost("a name was not listed as it is")
    identity = identify(source)
    assert describe_change(identity.files, identity.files) == ""
    assert all(source.read(index).data == b"x" for index in range(len(source)))
    ending = case.pick([".npz", ".safetensors", ".parquet"])
    if [
        original_key(key) for key in _round_trip(case.folder / f"rows{ending}", [stored_key(key) for key in keys])
    ] != keys:
        raise Lost("a name did not come back from the file")


def _name(random: np.random.Generator) -> bytes:
    pieces = (
        b"\n",
        b"\r\n",
        b"\t",
        b"\xff",
        b"\xc3",
        b"\xed\xa0\x80",
        b"percent:",
        b"%0A",
        b",",
        b'"',
        b"'",
        b"\\",
        b" ",
    )
    chosen = [pieces[number] for number in random.integers(len(pieces), size=random.integers(1, 6))]
    drawn = bytes(random.integers(1, 256, random.integers(1, 20), dtype=np.uint8))
    return (b"a" + b"".join(chosen) + drawn).replace(b"/", b"_").replace(b"\0", b"_")


def _round_trip(path: Path, keys: list[str]) -> list[str]:
    num = len(keys)
    rows = Embeddings(
        features=np.zeros((num, 2), dtype=np.float32), labels=np.full(num, -1), keys=keys, classes=[""] * num
    )
    WRITERS[path.suffix](path, rows, {"data": "x"})
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as archive:
            return [str(key) for key in archive["keys"]]
    if path.suffix == ".parquet":
        return [str(key) for key in pyarrow.parquet.read_table(path).column("key").to_pylist()]
    return safetensors.numpy.load_file(path)["keys_utf8_lines"].tobytes().decode().split("\n")
