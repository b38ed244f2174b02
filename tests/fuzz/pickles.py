"""Pickles that run code when they are opened, through every reader of .pth and .pt files."""

import argparse
import builtins
import functools
import io
import operator
import os
import pathlib
import pickle
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from massl.config import MasslError
from massl.training.checkpoint import CheckpointStore, load_checkpoint
from massl.weights.io import load_backbone, read_pickled
from massl.weights.models import open_model
from tests.reliability.frame import Case, Wrong, fault_class
from tests.reliability.mutations import mutated


class _Call:
    """Unpickling it calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, state: Any = None) -> None:
        self.parts = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


def _calls(canary: Path) -> list[_Call]:
    """Objects that create the file `canary` when they are unpickled, or that would lead there."""
    code = f"open({str(canary)!r}, 'w').close()"
    nested = pickle.dumps(_Call(pathlib.Path.touch, canary), protocol=2)
    return [
        _Call(os.system, f"touch {canary}"),
        _Call(os.mkdir, str(canary)),
        _Call(builtins.eval, code),
        _Call(builtins.exec, code),
        _Call(builtins.open, str(canary), "w"),
        _Call(subprocess.Popen, ["touch", str(canary)]),
        _Call(pathlib.Path.touch, canary),
        _Call(pickle.loads, nested),
        _Call(shutil.copyfile, "/etc/hostname", str(canary)),
        _Call(functools.partial, os.system, f"touch {canary}"),
        _Call(operator.methodcaller("touch"), canary),
        _Call(getattr, pathlib.Path, "touch"),
        _Call(torch.load, str(canary), state={"a": 1}),
        _Call(torch.save, 1, str(canary)),
        _Call(torch.hub.download_url_to_file, "file:///etc/hostname", str(canary)),
        _Call(argparse.Namespace, state={"x": _Call(os.system, f"touch {canary}")}),
        _Call(argparse.FileType("w"), str(canary)),
    ]


def _wrapped(case: Case, found: _Call) -> Any:
    """The object where a reader expects weights."""
    tensors = {"cls_token": torch.zeros(1, 1, 4)}
    wrappings: list[Callable[[], Any]] = [
        lambda: found,
        lambda: {"model": {**tensors, "x": found}},
        lambda: {"state_dict": tensors, "args": argparse.Namespace(x=found)},
        lambda: {"method": tensors, "recipe": {}, "optimizer": found, "step": 1},
        lambda: [tensors, found],
    ]
    return wrappings[int(case.random.integers(len(wrappings)))]()


def _as_pickle(case: Case, value: Any) -> bytes:
    return pickle.dumps(value, protocol=int(case.random.integers(0, 6)))


def _as_zip(case: Case, value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _as_legacy(case: Case, value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def _as_tar(case: Case, value: Any) -> bytes:
    """The oldest layout of torch.save."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            content = _as_pickle(case, value)
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _as_torchscript(case: Case, value: Any) -> bytes:
    """A zip file with the entries of torch.jit.save, which torch.load opens otherwise."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in ("constants.pkl", "data.pkl", "version", "code/__torch__.py", "byteorder"):
            archive.writestr(f"x/{name}", _as_pickle(case, value) if name.endswith("pkl") else "3\n")
    return buffer.getvalue()


def _latest(path: Path) -> object:
    """As the newest checkpoint of a run that goes on."""
    store = CheckpointStore(path.parent / "checkpoints", keep_last=1)
    store.folder.mkdir()
    shutil.copyfile(path, store.path(7))
    return store.load_latest(lambda _: None)


_LAYOUTS = (_as_zip, _as_pickle, _as_legacy, _as_tar, _as_torchscript)
_READERS: tuple[tuple[str, Callable[[Path], object]], ...] = (
    ("pth", read_pickled),
    ("pt", functools.partial(open_model, num_heads=2)),
    ("bin", open_model),
    ("safetensors", load_backbone),
    ("pt", load_checkpoint),
    ("pt", _latest),
)


@fault_class("hostile pickles", mib=600, quick=90, more=510)
def hostile_pickles(case: Case) -> None:
    canary = case.folder / "canary"
    calls = _calls(canary)
    layout = _LAYOUTS[case.number // len(_READERS) % len(_LAYOUTS)]
    found = calls[case.number // (len(_READERS) * len(_LAYOUTS)) % len(calls)]
    content = layout(case, _wrapped(case, found))
    suffix, read = case.pick(_READERS)
    path = case.folder / f"x.{suffix}"
    path.write_bytes(content if case.random.random() < 0.7 else mutated(content, case.random, header=256))
    try:
        read(path)
    except MasslError as error:
        if "x." not in str(error) and "checkpoints" not in str(error):
            raise Wrong(f"the message does not name the file: {error}") from error
    else:
        if content == path.read_bytes():
            raise Wrong("a pickle with code in it was accepted")
    if canary.exists():
        raise Wrong("code in the file was run")
