"""The documentation site builds without a warning, holds what it should, and asks no other host for anything."""

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from massl.commands.recipe import PretrainRecipe
from massl.commands.recipes import shipped_recipes
from massl.config import flatten

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
MADE = ("recipes", "settings", "changelog", "benchmarks")
_FETCHED = {
    "script": "src",
    "img": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "use": "href",
    "object": "data",
}
_NOT_FETCHED = {"canonical", "next", "prev", "alternate"}  # kinds of <link> that name a place and load nothing


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.title = ""
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self._in_title = tag == "title"
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if _FETCHED.get(tag, "") in values and not _NOT_FETCHED & set(values.get("rel", "").split()):
            self.fetched.append(values[_FETCHED[tag]])

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data

    def handle_endtag(self, tag: str) -> None:
        self._in_title = False


@dataclass(frozen=True)
class Site:
    folder: Path
    pages: dict[str, _Reader] = field(default_factory=dict)  # path below the folder -> what is in it


def read(folder: Path) -> Site:
    site = Site(folder)
    for path in sorted(folder.rglob("*.html")):
        reader = site.pages[str(path.relative_to(folder))] = _Reader()
        reader.feed(path.read_text(encoding="utf-8"))
    return site


@pytest.fixture(scope="module")
def site(docs_site: Path) -> Site:
    return read(docs_site)


def problems_of(site: Site) -> list[str]:
    """Links and pictures that lead nowhere, and what a page would load from elsewhere."""
    found = []
    for name, page in site.pages.items():
        for target in page.links + page.fetched:
            parts = urlsplit(target)
            if parts.scheme in ("http", "https") or parts.netloc:
                found += [f"{name} loads {target}"] if target in page.fetched else []
            elif parts.scheme == "":
                if name == "404.html" and parts.path.startswith("/"):
                    # shown for any address, so its links start at the root
                    path = site.folder / unquote(parts.path.lstrip("/"))
                else:
                    path = (site.folder / name).parent / unquote(parts.path) if parts.path else site.folder / name
                path = path / "index.html" if path.is_dir() else path
                inside = str(path.resolve().relative_to(site.folder.resolve()))
                if not path.is_file():
                    found.append(f"{name} points to {target}, which is not there")
                elif (
                    parts.fragment
                    and inside in site.pages
                    and unquote(parts.fragment) not in site.pages[inside].anchors
                ):
                    found.append(f"{name} points to {target}, which has no such place")
    return found


def test_every_document_is_a_page_with_a_title(site: Site) -> None:
    documents = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    assert {str(path) for path in documents} | {f"{name}.html" for name in MADE} <= site.pages.keys()
    titles = [page.title.strip() for name, page in site.pages.items() if name != "404.html"]
    assert all(titles)
    assert len(set(titles)) == len(titles)


def test_every_document_can_be_reached_from_the_first_page(site: Site) -> None:
    start = site.pages["index.html"]
    reached = {urlsplit(link).path for link in start.links}
    hidden = {name for name in site.pages if name.endswith("/files.html")} | {"404.html", "index.html"}
    assert site.pages.keys() - hidden <= reached


def test_links_anchors_and_pictures_are_there_and_nothing_is_loaded_from_elsewhere(site: Site) -> None:
    assert sum(len(page.links) for page in site.pages.values()) > 500
    assert problems_of(site) == []


def test_styles_load_nothing_from_elsewhere(site: Site) -> None:
    styles = list(site.folder.rglob("*.css"))
    assert styles
    for style in styles:
        text = style.read_text(encoding="utf-8")
        targets = [target.strip("'\" ") for target in re.findall(r"url\(([^)]*)\)", text)]
        assert all(target.startswith(("data:", "#")) or not urlsplit(target).netloc for target in targets), style
        assert not re.search(r"@import\s+(?:url\()?['\"]?(?:https?:)?//", text), style


def test_the_search_knows_every_page(site: Site) -> None:
    index = (site.folder / "search" / "search_index.json").read_text(encoding="utf-8")
    for name in site.pages.keys() - {"404.html", "index.html"}:
        assert f'"location":"{name}' in index, name


def test_made_pages_name_every_recipe_and_every_setting(site: Site) -> None:
    assert shipped_recipes().keys() <= site.pages["recipes.html"].anchors
    settings = (site.folder / "settings.html").read_text(encoding="utf-8")
    for key in flatten(PretrainRecipe()):
        assert f"<code>{key}</code>" in settings, key


def test_the_api_page_shows_every_public_function(site: Site) -> None:
    import massl

    functions = [getattr(massl, name) for name in massl.__all__]
    assert {f"{function.__module__}.{function.__name__}" for function in functions} <= site.pages["api.html"].anchors


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("<a href='gone.html'>x</a>", "a.html points to gone.html, which is not there"),
        ("<a href='a.html#gone'>x</a>", "a.html points to a.html#gone, which has no such place"),
        ("<img src='gone.png'>", "a.html points to gone.png, which is not there"),
        ("<script src='https://elsewhere.example/x.js'></script>", "a.html loads https://elsewhere.example/x.js"),
        ("<link rel='stylesheet' href='//elsewhere.example/x.css'>", "a.html loads //elsewhere.example/x.css"),
    ],
)
def test_what_is_wrong_with_a_page_is_noticed(body: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        f"<html><head><title>A</title></head><body id='here'><a href='#here'>x</a>{body}</body></html>"
    )
    assert problems_of(read(tmp_path)) == [problem]
