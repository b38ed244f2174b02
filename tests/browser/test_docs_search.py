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

    def is_found(_: object) -> bool:  # pages that match the first letters come before
        return any(link.partition("#")[0].partition("?")[0].endswith("/evaluation.html") for link in browser.run(links))

    WebDriverWait(browser.driver, 120).until(is_found)
    assert all(link.startswith("file:") for link in browser.run(links))
    assert [url for url in browser.requests() if not url.startswith(("file:", "data:", "about:"))] == []


def test_the_home_page_shows_a_picture(browser: Any, docs_site: Path) -> None:
    browser.open(docs_site / "index.html")
    widths = browser.run("return [...document.querySelectorAll('.md-content img')].map((one) => one.naturalWidth)")
    assert widths
    assert min(widths) > 300
