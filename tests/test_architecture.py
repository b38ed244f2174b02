"""The import rule and the sizes that docs/architecture.md promises, read from the source itself."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import massl

PACKAGE = Path(massl.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
# Only rightwards may import leftwards; names inside one brace never import each other.
LAYERS = [
    {"keyed_random_kernel"},
    {"config", "keyed_random", "distributed"},
    {"ops"},
    {"nn", "data"},
    {"methods", "weights"},
    {"training", "evaluations", "reports"},
    {"commands"},
    {"cli"},
]
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}
EXEMPT = {PACKAGE / "__init__.py", PACKAGE / "__main__.py"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 320, 60


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def module_of(path: Path) -> list[str]:
    parts = ["massl", *path.relative_to(PACKAGE).with_suffix("").parts]
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports_of(tree: ast.AST, module: list[str], *, is_package: bool) -> Iterator[str]:
    """Dotted names of everything imported, at any depth of the file; `from a import b` counts as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [] if node.module is None else node.module.split(".")
            if node.level:
                above = node.level - 1 if is_package else node.level
                base = module[: len(module) - above] + base
            yield from (".".join([*base, alias.name]) for alias in node.names)


def imports_of_file(path: Path) -> list[str]:
    return list(imports_of(ast.parse(path.read_text()), module_of(path), is_package=path.name == "__init__.py"))


def violations(module: str, imported: str) -> list[str]:
    """What is wrong with `module` importing `imported`, both dotted."""
    importer, target = module.split("."), imported.split(".")
    if target[0] != "massl" or len(target) == 1:
        return [] if target[0] != "massl" else ["the package itself is for users"]
    room, other = importer[1], target[1]
    if room == other:
        return []
    found = []
    if other not in RANK:
        found.append(f"{other} is no room of the house")
    elif RANK[other] >= RANK[room]:
        found.append(f"{room} may not import {other}")
    if room == "training" and other == "methods" and target[2:3] != ["base"]:
        found.append("training sees methods.base, never a method")
    return found


@pytest.mark.parametrize("path", [path for path in FILES if path not in EXEMPT], ids=name_of)
def test_imports_go_from_right_to_left_only(path: Path) -> None:
    module = ".".join(module_of(path))
    assert module.split(".")[1] in RANK, "a new room: give it a place among the layers"
    problems = [
        f"{imported}: {problem}" for imported in imports_of_file(path) for problem in violations(module, imported)
    ]
    assert problems == []


def test_only_distributed_imports_torch_distributed() -> None:
    def is_distributed(name: str) -> bool:
        return name.startswith(("torch.distributed", "torch.nn.parallel"))

    assert [name_of(path) for path in FILES if any(is_distributed(name) for name in imports_of_file(path))] == [
        "distributed.py"
    ]
    names = {
        node.attr for path in FILES for node in ast.walk(ast.parse(path.read_text())) if is_attribute_of_torch(node)
    }
    assert "distributed" not in names


def is_attribute_of_torch(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"


def test_there_is_no_drawer_for_odds_and_ends() -> None:
    assert not [
        name_of(path) for path in PACKAGE.rglob("*") if path.stem in ("utils", "util", "helpers", "misc", "common")
    ]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize(
    ("module", "imported", "allowed"),
    [
        ("massl.nn.memory", "massl.ops.scoring.feature_health", True),
        ("massl.nn.memory", "massl.nn.heads", True),
        ("massl.nn.memory", "torch.nn.Linear", True),
        ("massl.training.trainer", "massl.methods.base", True),
        ("massl.training.trainer", "massl.methods.base.Method", True),
        ("massl.training.trainer", "massl.weights.io", True),
        ("massl.commands.pretrain", "massl.methods.massl", True),
        ("massl.ops.scoring.feature_health", "massl.nn.memory", False),
        ("massl.nn.memory", "massl.data.views", False),
        ("massl.weights.io", "massl.methods.base", False),
        ("massl.config", "massl.keyed_random", False),
        ("massl.training.trainer", "massl.methods.massl", False),
        ("massl.training.trainer", "massl.methods", False),
        ("massl.training.trainer", "massl.reports.tables", False),
        ("massl.methods.massl", "massl.cli", False),
        ("massl.commands.pretrain", "massl.pretrain", False),
        ("massl.ops.scoring.feature_health", "massl.utils", False),
    ],
)
def test_the_rule_says_yes_and_no_where_it_should(module: str, imported: str, allowed: bool) -> None:
    assert (violations(module, imported) == []) is allowed


def test_every_way_of_importing_is_seen() -> None:
    source = (
        "import massl.a\nfrom massl.b import c\nfrom . import d\nfrom ..e import f\ndef g():\n    import massl.h as i"
    )
    seen = list(imports_of(ast.parse(source), ["massl", "nn", "memory"], is_package=False))
    assert sorted(seen) == ["massl.a", "massl.b.c", "massl.e.f", "massl.h", "massl.nn.d"]
