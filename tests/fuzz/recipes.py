"""Hostile recipes, torchvision URIs, and values of --set."""

import functools
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from massl.commands.recipe import load_recipe, parse_set_options
from massl.commands.recipes import shipped_recipes
from massl.config import MasslError
from massl.data.sources import open_source
from tests.reliability.frame import Case, Wrong, fault_class

_PIECES = (
    *("&a ", "*a", "<<: *a", "[", "]", "{", "}", "- ", "? ", ": ", "|\n", ">\n", "#", "!!int ", "!!binary ", "!!set "),
    *("!!python/object/apply:os.system ", "!!timestamp ", "!!float ", "---\n", "...\n", "%YAML 1.1\n", "%TAG ! x\n"),
    *('"\\ud800"', '"\\0"', "\\", "'", "~", ".nan", ".inf", "1e999", "0x", "0o9", "9" * 5000, "2021-01-01", "1:2:3"),
    *("\t", "\r", "\u2028", "\ufeff", "\x00", "\x85", "base: self.yaml\n", "null", "true", "-1", "1_0"),
)


@functools.cache
def _shipped() -> tuple[str, ...]:
    return tuple(path.read_text() for path in list(shipped_recipes().values())[:12])


def _mutated(text: str, random: np.random.Generator) -> str:
    for _ in range(random.integers(1, 5)):
        at = int(random.integers(len(text) + 1))
        piece = _PIECES[int(random.integers(len(_PIECES)))]
        end = at + int(random.choice([0, 0, 1, 5, 200]))
        text = text[:at] + piece * int(random.choice([1, 1, 1, 3, 60])) + text[end:]
    return text


@fault_class("hostile recipes", mib=100, quick=20, more=200)
def hostile_recipes(case: Case) -> None:
    path = case.folder / "self.yaml"
    text = _mutated(str(case.pick(_shipped())), case.random)
    if case.number % 5 == 4:
        size = int(case.random.choice([10, 100, 3000]))
        text = str(case.random.choice(["[", "{a: ", "- ", "&a [*a, "])) * size
    if case.number % 5 == 3:
        names = "abcdefghij"[: int(case.random.integers(2, 10))]
        text = "".join(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("x" + names))
        text = "x: &x [1, 2, 3]\n" + text
    path.write_bytes(text.encode(errors="surrogatepass"))
    _refused_or_fine(str(path), lambda: load_recipe(path))


@fault_class("hostile values of --set", mib=100)
def hostile_values(case: Case) -> None:
    item = _mutated(str(case.pick(["trainer.epochs=3", "data.source=photos", "a=[1, 2]", "=", "views"])), case.random)
    _refused_or_fine("--set", lambda: parse_set_options([item]))


@fault_class("hostile torchvision URIs", mib=100, quick=20, more=200)
def hostile_uris(case: Case) -> None:
    sets = (
        "FakeData",
        "LSUN",
        "CIFAR10",
        "ImageFolder",
        "EuroSAT",
        "MNIST",
        "VisionDataset",
        "os",
        "__class__",
        "wrap_dataset",
        "",
    )
    keys = ("root", "size", "image_size", "train", "split", "transform", "loader", "download", "num_classes", "x", "")
    values = (
        "3",
        "-1",
        "[3, 4, 4]",
        "[3, -1, 4]",
        "true",
        "no",
        "..",
        "/proc/self",
        "a\0b",
        "[[",
        "{a: b}",
        "1e9",
        "*a",
    )
    query = "&".join(
        f"{case.random.choice(keys)}={values[int(case.random.integers(len(values)))]}"
        for _ in range(case.random.integers(4))
    )
    uri = f"torchvision:{case.pick(sets)}?root={case.folder}&{query}"
    if "download=true" in uri:
        return  # asked for
    _refused_or_fine("", lambda: open_source(uri))


def _refused_or_fine(expected: str, call: Callable[[], object]) -> None:
    try:
        call()
    except MasslError as error:
        if expected not in str(error) and "no method" not in str(error):
            raise Wrong(f"the message does not name {expected}: {error}") from error
