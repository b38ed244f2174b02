import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "benchmarks/README.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
_BLOCK = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Document:
    """A Markdown file: its prose, and the fenced blocks in it."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def prose(self) -> str:
        return _BLOCK.sub("", self.text)

    @property
    def blocks(self) -> list["Block"]:
        text = self.text
        return [
            Block(self, text[: found.start()].count("\n") + 1, found["language"], found["text"])
            for found in _BLOCK.finditer(text)
        ]


@dataclass(frozen=True)
class Block:
    document: Document
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.document.name}:{self.line}"


@pytest.fixture
def documents() -> list[Document]:
    return [Document(path) for path in DOCUMENTS]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize by all documents, by those that show Python, or by all bash or YAML blocks."""
    documents = [Document(path) for path in DOCUMENTS]
    values: dict[str, list[Document] | list[Block]] = {
        "document": documents,
        "document_with_python": [
            document for document in documents if any(block.language == "python" for block in document.blocks)
        ],
        "bash_block": [block for document in documents for block in document.blocks if block.language == "bash"],
        "yaml_block": [block for document in documents for block in document.blocks if block.language == "yaml"],
    }
    for fixture in values.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(fixture, values[fixture], ids=lambda value: value.name)
