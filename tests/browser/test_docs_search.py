"""The documentation site opened from disk: its search finds pages, without a server."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def test_the_search_works_on_pages_opened_from_disk(browser: Any, docs_site: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    browser.open(docs_site / "index.html")
    browser.run(
        "document.querySelector('#__search').checked = true;"
        "document.querySelector('#__search').dispatchEvent(new Event('change'));"
        "document.querySelector('.md-search__input').focus()"
    )
    browser.press(".md-search__input", "correspondence")
    links = "return [...document.querySelectorAll('.md-search-result__link')].map((link) => link.href)"
    found = WebDriverWait(browser.driver, 20).until(lambda _: browser.run(links))
    assert any(link.partition("#")[0].partition("?")[0].endswith("/evaluation.html") for link in found)
    assert all(link.startswith("file:") for link in found)
    assert [url for url in browser.requests() if not url.startswith(("file:", "data:", "about:"))] == []


def test_the_home_page_shows_a_picture(browser: Any, docs_site: Path) -> None:
    browser.open(docs_site / "index.html")
    widths = browser.run("return [...document.querySelectorAll('.md-content img')].map((one) => one.naturalWidth)")
    assert widths
    assert min(widths) > 300
