"""Links between documents lead somewhere in the repository, and what two files both say is the same."""

import re
from pathlib import Path
from typing import Any

import yaml
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"\]\((?P<target>[^)#:\s]*)(?:#(?P<anchor>[^)\s]*))?\)")


def anchors_in(text: str) -> set[str]:
    """Of the headings, as repository pages name them; code blocks may hold lines that look like headings."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return {
        slugify(case="lower")(heading.replace("`", ""), "-")
        for heading in re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    }


def test_links_of_a_document_lead_somewhere(document: Any) -> None:
    for link in _LINK.finditer(document.prose):
        target = (document.path.parent / link["target"]).resolve() if link["target"] else document.path
        assert target.exists(), f"{document.name} points to {link['target']}"
        if link["anchor"]:
            assert link["anchor"] in anchors_in(target.read_text(encoding="utf-8")), (
                f"{document.name} points to {link[0]}"
            )


def test_a_missing_heading_is_noticed() -> None:
    assert anchors_in("# One\n\n```bash\n# no heading\n```\n\n## The `massl` way, k-NN\n") == {
        "one",
        "the-massl-way-k-nn",
    }


def test_the_page_on_citing_says_what_the_citation_file_says() -> None:
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text())["preferred-citation"]
    page = (ROOT / "docs" / "cite.md").read_text()
    for part in (paper["title"], paper["collection-title"], f"{paper['year']}"):
        assert f"{{{part}}}" in page
    plain = page.replace("{\\'i}", "í")
    for author in paper["authors"]:
        assert f"{author['family-names']}, {author['given-names']}" in plain


def test_the_package_and_the_site_agree_on_what_is_installed() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert '".[dev,docs]"' in makefile
