"""Archives of arrays with changed bytes, claims that nothing holds, and strange arrays."""

import functools
import io
import struct
import zipfile

import numpy as np

from massl.data.sources import open_source
from massl.data.sources.base import DataError
from tests.reliability.frame import Case, Wrong, fault_class

_NUM_IMAGES = 12
_IMAGES = np.random.default_rng(0).integers(0, 50, (_NUM_IMAGES, 9, 7, 3), dtype=np.uint8)
_LABELS = np.arange(_NUM_IMAGES) % 4


@functools.cache
def _archive(kind: str) -> bytes:
    buffer = io.BytesIO()
    save = np.savez_compressed if kind == "compressed" else np.savez
    images = np.asfortranarray(_IMAGES) if kind == "fortran" else _IMAGES
    labels = _LABELS.astype(">i4") if kind == "big-endian" else _LABELS
    save(buffer, images=images, labels=labels)
    return buffer.getvalue()


@fault_class("archives with changed bytes", mib=200)
def changed_bytes(case: Case) -> None:
    """A few bytes anywhere, in the headers, or in the last part, which lists the members."""
    data = bytearray(_archive(case.pick(["compressed", "plain", "fortran", "big-endian"])))
    kind = case.pick(["flip", "byte", "cut", "insert", "copy", "numbers", "headers"])
    for _ in range(case.random.integers(1, 6)):
        high = 250 if kind == "headers" and case.random.random() < 0.5 else len(data)
        low = max(0, len(data) - 250) if kind == "headers" and high == len(data) else 0
        at = int(case.random.integers(low, high))
        if kind == "flip":
            data[at] ^= 1 << int(case.random.integers(8))
        elif kind == "cut":
            del data[at : at + int(case.random.integers(1, 200))]
        elif kind == "insert":
            data[at:at] = case.random.bytes(int(case.random.integers(1, 20)))
        elif kind == "copy":
            data[at : at + 30] = data[-30:]
        elif kind == "numbers":
            data[at : at + 4] = struct.pack("<I", int(case.random.choice([0, 1, 2**31 - 1, 2**32 - 1])))
        else:
            data[at] = int(case.random.integers(256))
    _open(case, bytes(data), is_mutation=True)


@fault_class("archives that claim too much", mib=200)
def claims(case: Case) -> None:
    descr = case.pick(
        ["|u1", "<u2", "<f4", "|O", "|b1", "<U9", "|V3", "<M8[s]", "[('a','u1')]", "(2,)u1", "<f8", "|S0"]
    )
    shape = tuple(
        int(case.random.choice([0, 1, 2, 3, 16, 255, 2**20, 2**40, -1])) for _ in range(case.random.integers(6))
    )
    described = descr if descr[0] != "[" else [("a", "u1")]
    header = repr({"descr": described, "fortran_order": bool(case.random.integers(2)), "shape": shape})
    if case.random.random() < 0.3:
        header = header.replace("'", str(case.random.choice(['"', "", "''", "\n", "(", "\\"])), 1)
    content = (
        b"\x93NUMPY" + bytes([int(case.random.integers(1, 4)), 0]) + struct.pack("<H", len(header)) + header.encode()
    )
    content += bytes(int(case.random.integers(0, 2000)))
    buffer = io.BytesIO()
    method = int(case.random.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2]))
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("images.npy", content)
        if case.random.random() < 0.1:
            archive.writestr("images.npy", content)
        if case.random.random() < 0.3:
            labels = io.BytesIO()
            np.save(labels, case.random.integers(-2, 2**40, 16))
            archive.writestr("labels.npy", labels.getvalue())
    _open(case, buffer.getvalue(), is_mutation=False)


def _open(case: Case, data: bytes, *, is_mutation: bool) -> None:
    path = case.folder / "photos.npz"
    path.write_bytes(data)
    try:
        source = open_source(path)
    except DataError as error:
        if str(path) not in str(error):
            raise Wrong(f"the message does not name the file: {error}") from error
        return
    pixels = source.pixels
    assert pixels is not None
    if is_mutation and pixels.shape == _IMAGES.shape and not np.array_equal(pixels, _IMAGES):
        raise Wrong("other pixels without an error")
    labels = [source.label_of(index) for index in range(len(source))]
    assert source.class_names is None or max(label or 0 for label in labels) < len(source.class_names)
    source.fingerprint()
