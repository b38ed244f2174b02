"""What a file is that should hold weights and cannot be read: by its first bytes and names, without unpacking it."""

import zipfile
from pathlib import Path

from massl.digests import is_zip
from massl.weights.facts import for_message

_UNPACK = "unpack it and give the weights file in it"
_BEGINNINGS = {
    b"version https://git-lfs": "a pointer of Git LFS instead of the file; fetch that with: git lfs pull",
    b"<": "a web page; download the weights file itself",
    b"\x1f\x8b": f"packed by gzip; {_UNPACK}",
    b"BZh": f"packed by bzip2; {_UNPACK}",
    b"\xfd7zXZ\0": f"packed by xz; {_UNPACK}",
}
_SHOWN = 3  # names in a message


def other_kind(path: Path) -> str | None:
    """What the file is instead, and what to do; None if it may be a checkpoint of torch.save."""
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError:
        return None
    if is_zip(path):
        return _kind_of_zip(path)
    if head[257:262] == b"ustar":
        first = head[:100].rstrip(b"\0").decode(errors="replace")
        return f"a tar archive, which begins with {for_message(first)}; {_UNPACK}"
    if head[8:10] == b'{"' and path.suffix != ".safetensors":
        return "of the format safetensors; let its name end in .safetensors"
    return next((kind for beginning, kind in _BEGINNINGS.items() if head.startswith(beginning)), None)


def _kind_of_zip(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except Exception:  # damaged or hostile: zipfile raises errors of many kinds
        return None
    if any(name.endswith("/constants.pkl") for name in names):
        return (
            "a TorchScript program; if you trust it, save its weights: "
            "torch.save(torch.jit.load(FILE).state_dict(), NEW_FILE)"
        )
    if any(name.endswith("/data.pkl") for name in names):
        return None
    return f"a zip archive of {', '.join(map(for_message, names[:_SHOWN])) or 'no files'}; {_UNPACK}"
