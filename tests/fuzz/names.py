"""Hostile names of runs, images, classes and metrics: on the page of a report they stay text."""

import contextlib
import functools
import io
import json
import os
from collections import Counter
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import yaml
from PIL import Image

from massl.commands.recipe import load_recipe
from massl.commands.report import command
from massl.config import to_yaml
from tests.reliability.frame import Case, Wrong, fault_class, made_once
from tests.reliability.processes import server
from tests.reliability.world import TINY_RECIPE, tiny_images

_PAYLOADS = (
    "<script>{0}()</script>",
    '"><script>{0}()</script>',
    "'><img src=x onerror={0}()>",
    '" onmouseover="{0}()" x="',
    "' onfocus='{0}()' autofocus='",
    "</title><svg onload={0}()>",
    "</script><script>{0}()</script>",
    "</style><iframe src=//{0}>",
    "--><b id={0}>",
    "]]><{0}>",
    "<!--{0}",
    "<{0}",
    "&lt;script&gt;{0}()",
    "&#60;img src=x onerror={0}()&#62;",
    "javascript:{0}()",
    "{{{{ 104729 * 1299709 }}}}{0}",
    "{{% for x in 'ab' %}}{0}{{% endfor %}}",
    "${{{0}()}}",
    "\\u003cscript\\u003e{0}()",
    "{0}\u2028\u202e<a href=//{0}>",
    "`{0}`",
    "{0}\r\n<base href=//{0}>",
    "\x1b[31m{0}\x07",
    "\ud800{0}<s>",
    "𝒳{0}" * 40,
)
_MARK = "pwned"


def _hostile(random: np.random.Generator) -> str:
    """One or two payloads, within some harmless text or not."""
    drawn = [_PAYLOADS[number].format(_MARK) for number in random.integers(len(_PAYLOADS), size=random.integers(1, 3))]
    return random.choice(["", "a", "a b/"]) + "".join(drawn) + random.choice(["", "z"])


class _Page(HTMLParser):
    """What a browser makes of a page: its elements, and what is in scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.links: Counter[str] = Counter()
        self.num_scripts = 0
        self.code: list[str] = []
        self.data: list[str] = []
        self.text: list[str] = []
        self._inside: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {(tag, name) for name, _ in attrs}
        for name, value in attrs:
            if name in ("href", "src", "xlink:href", "action", "srcdoc") and value:
                self.links[value.partition(":")[0] if ":" in value else value[:1]] += 1
        self.num_scripts += tag == "script"
        self._inside = [(tag, dict(attrs))] if tag in ("script", "style") else []

    def handle_endtag(self, tag: str) -> None:
        self._inside = []

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.text.append(data)
        elif "json" in (self._inside[0][1].get("type") or ""):
            self.data.append(data)
        else:
            self.code.append(data)


@fault_class("hostile names on the page of a report", quick=30, more=200)
def hostile_page(case: Case) -> None:
    """The page has no element, attribute, link or code that a page of plain names has not."""
    folder = _write_run(case.folder, lambda: _hostile(case.random))
    _compare(_page_of(folder, case.folder / "page.html"), _plain_page())


def _compare(page: str, plain: _Page) -> None:
    found = _Page(page)
    for kind in ("tags", "attributes"):
        if foreign := getattr(found, kind) - getattr(plain, kind):
            raise Wrong(f"foreign {kind}: {sorted(foreign)[:5]}")
    if foreign_links := found.links.keys() - plain.links.keys():
        raise Wrong(f"links to {sorted(foreign_links)[:5]}")
    if found.num_scripts != plain.num_scripts:
        raise Wrong(f"{found.num_scripts} scripts instead of {plain.num_scripts}")
    if any(_MARK in code for code in found.code):
        raise Wrong("a name is within code")
    for data in found.data:
        json.loads(data)
    if "136117223861" in "".join(found.text) and "104729 * 1299709" not in "".join(found.text):
        raise Wrong("a name was computed as a template")
    if _MARK not in page:
        raise Wrong("the names are not on the page: nothing was tested")


def _page_of(folder: Path, output: Path, **options: Any) -> str:
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    # the shipped recipe, with which the run's is compared, is read once
    once = mock.patch.object(command, "_flat_recipe", _flat_recipe)
    with quiet[0], quiet[1], once:
        command.report([folder], output=output, **{"figures": False} | options)
    return output.read_text(encoding="utf-8")


_read_flat_recipe = command._flat_recipe
_read_shipped = functools.cache(lambda name, method: _read_flat_recipe(name, {"method.name": method}))


def _flat_recipe(recipe: str | Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = _read_shipped(recipe, overrides["method.name"]) if overrides else _read_flat_recipe(recipe)
    return found


@functools.cache
def _plain_page() -> _Page:
    """All elements of pages with plain names: short ones, long ones, and without the results."""
    folder = made_once("plain pages", _write_plain_runs)
    pages = [_Page(_page_of(run, folder.with_name(f"{run.name}-{os.getpid()}.html"))) for run in folder.glob("*/*")]
    for page in pages[1:]:
        pages[0].tags |= page.tags
        pages[0].attributes |= page.attributes
        pages[0].links += page.links
    assert "svg" in pages[0].tags, "the page has no curves"
    return pages[0]


def _write_plain_runs(folder: Path) -> None:
    for number, name in enumerate((_MARK, _MARK * 40, _MARK)):
        (folder / str(number)).mkdir()
        run = _write_run(folder / str(number), functools.partial(str, name))
        if number == 2:
            (run / "results.jsonl").write_text('{"is": "damaged"}\n')


@functools.cache
def _recipe_text() -> str:
    return to_yaml(load_recipe("demo-vit"))


def _recipe() -> dict[str, Any]:
    recipe: dict[str, Any] = yaml.load(_recipe_text(), yaml.CSafeLoader)
    return recipe


def _write_run(parent: Path, name: Any) -> Path:
    """A run folder as massl pretrain leaves it, with `name()` wherever a user or a file decides."""
    folder = parent / (name().replace("/", "_").replace("\0", "")[:60].encode("utf-8", "replace").decode() or "run")
    folder.mkdir()
    recipe = _recipe()
    changed = {"data": {"source": name()}, "probes": {"queries": name(), "database": name()}}
    recipe |= {section: recipe[section] | values for section, values in changed.items()}
    (folder / "recipe.yaml").write_text(json.dumps(recipe, ensure_ascii=False).replace("\ud800", "?"))  # JSON is YAML
    environment = {
        "device": name(),
        "world_size": 1,
        "packages": {"massl": "0.1.0", "torch": name()},
        "massl_commit": name(),
        "command": ["massl", "pretrain", "--recipe", "demo-vit", "--data.source", name()],
        "python": name(),
        name(): name(),
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    metric, other = name(), name()
    common = {"images_per_second": 9.0, "loss": 1.0, "effective_rank": 2.0}
    rows = [
        common | {"step": step, "epoch": step / 6, "knn_top1": 20.0 + step, metric: step, other: step % 2}
        for step in range(13)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "warnings.jsonl").write_text(json.dumps({"step": 3, "warning": name()}) + "\n")
    texts = {key: name() for key in ("protocol", "data", "metric", "weights", "model", "architecture", "run", "images")}
    result = texts | {"setting": "k=20", "value": 50.0, "num_samples": 5, "seconds": 1.0, "precision": name()}
    result |= {"train": name(), "created": "2024-07-21T12:00:00+00:00", "version": name()}
    (folder / "results.jsonl").write_text(json.dumps(result) + "\n")
    return folder


# ---- pictures --------------------------------------------------------------------------------------------------------


@fault_class("hostile names of images and classes", kind="processes", quick=1, more=3)
def hostile_pictures(case: Case) -> None:
    """Class and file names in the pictures of a report: map, neighbours, matches."""
    photos = case.folder / "photos"
    _write_photos(photos, lambda: _hostile(case.random))
    _compare(_page_of(_small_run(), case.folder / "page.html", figures=True, data=str(photos)), _plain_pictures())


def _write_photos(photos: Path, name: Any) -> None:
    images = iter(tiny_images(24))
    for number in range(4):
        folder = photos / (
            f"{number}" + name().replace("/", "_").replace("\0", "")[:50].encode("utf-8", "replace").decode()
        )
        folder.mkdir(parents=True)
        for image in range(6):
            stem = name().replace("/", "_").replace("\0", "")[:50].encode("utf-8", "replace").decode()
            Image.fromarray(next(images)).save(folder / f"{stem}{image}.png", "PNG")


@functools.cache
def _plain_pictures() -> _Page:
    folder = made_once("plain pictures", lambda folder: _write_photos(folder / "photos", lambda: _MARK))
    page = _page_of(
        _small_run(), folder.with_name(f"pictures-{os.getpid()}.html"), figures=True, data=str(folder / "photos")
    )
    assert all(f"{number}{_MARK}" in page for number in range(4))
    return _Page(page)


def _small_run() -> Path:
    return made_once("run for pictures", _train) / "run"


def _train(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(TINY_RECIPE))
    np.savez(folder / "images.npz", images=tiny_images(16), labels=np.arange(16) % 4)
    images = ["--data.source", folder / "images.npz", "--trainer.max_steps", "2"]
    answer = server().run("pretrain", "--recipe", folder / "recipe.yaml", *images, "--output", folder / "run")
    assert answer.status == 0, answer.text
