"""The import rules and the sizes that docs/architecture.md promises, read from the source itself."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import massl

PACKAGE = Path(massl.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# A layer may import the layers before it; names of one layer never import each other.
LAYERS = [
    {"keyed_random_kernel", "files", "digests", "interrupts", "failures", "version"},
    {"config", "json_lines", "keyed_random", "distributed"},
    {"ops"},
    {"nn", "data"},
    {"methods", "weights"},
    {"training", "evaluations"},
    {"reports", "planning"},
    {"exports"},
    {"commands"},
    {"cli"},
]
# The same inside a room. "*" stands for all its files and folders that are not named.
SUB_LAYERS = {
    "ops": [{"*", "scoring"}, {"kernels"}],
    "nn": [{"drop_path", "positions"}, {"transformer"}, {"*"}],
    "data": [{"keys"}, {"sources"}, {"*"}, {"loading", "evaluation"}],
    "evaluations": [{"*"}, {"protocols"}],
    "reports": [{"published"}, {"*"}, {"comparison", "ablation", "pictures"}, {"page"}],
    "reports.page": [{"*"}, {"sections"}, {"assembly"}],
    "commands": [{"*"}, {"compare", "evaluate", "report"}, {"ablate", "demo"}, {"completion"}],
}
STRANGERS = {"reports.page.sections"}  # rooms whose files never import each other
ENTRANCES = {PACKAGE / "__init__.py", PACKAGE / "__main__.py"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 320, 60


class Import(NamedTuple):
    name: str  # dotted; `from a import b` gives a.b
    is_lazy: bool  # inside a function


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def module_of(path: Path) -> list[str]:
    parts = ["massl", *path.relative_to(PACKAGE).with_suffix("").parts]
    return parts[:-1] if parts[-1] == "__init__" else parts


MODULES = {".".join(module_of(path)): path for path in FILES}


def imports_of(tree: ast.AST, module: list[str], *, is_package: bool, is_lazy: bool = False) -> Iterator[Import]:
    """Everything a file imports, at any depth; not what is imported for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, is_lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [] if node.module is None else node.module.split(".")
            if node.level:
                above = node.level - 1 if is_package else node.level
                base = module[: len(module) - above] + base
            yield from (Import(".".join([*base, alias.name]), is_lazy) for alias in node.names)
        else:
            inside = is_lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from imports_of(node, module, is_package=is_package, is_lazy=inside)


def imports_of_file(path: Path) -> list[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return list(imports_of(tree, module_of(path), is_package=path.name == "__init__.py"))


def rank(name: str, layers: list[set[str]]) -> int | None:
    named = [number for number, layer in enumerate(layers) if name in layer]
    others = [number for number, layer in enumerate(layers) if "*" in layer]
    return next(iter(named or others), None)


def violations(module: str, imported: Import) -> list[str]:
    """What is wrong with `module` importing `imported`."""
    importer, target = module.split(".")[1:], imported.name.split(".")
    if target[0] != "massl":
        return []
    if target[1:] == []:
        return ["the package itself is for users"]
    if rank(target[1], LAYERS) is None:
        return [f"{target[1]} is no room of the house"]
    if importer[0] != target[1]:
        return between_rooms(importer, target[1:], imported)
    return within_a_room(importer, target[1:], imported)


def between_rooms(importer: list[str], target: list[str], imported: Import) -> list[str]:
    own, other = rank(importer[0], LAYERS), rank(target[0], LAYERS)
    assert own is not None, "a new room: give it a place among the layers"
    assert other is not None
    found = [f"{importer[0]} may not import {target[0]}"] if other >= own else []
    if importer[0] == "training" and target[0] == "methods" and target[1:2] != ["base"]:
        found.append("training sees methods.base, never a method")
    if target[:2] == ["ops", "kernels"] and not imported.is_lazy and importer[:2] != ["nn", "transformer"]:
        found.append("kernels need Triton: import them inside a function, for CUDA tensors only")
    return found


def within_a_room(importer: list[str], target: list[str], imported: Import) -> list[str]:
    if target[:2] == ["ops", "kernels"] and importer[:2] != ["ops", "kernels"]:
        return [] if imported.is_lazy else ["kernels need Triton: import them inside a function"]
    depth = 1
    while importer[depth : depth + 1] == target[depth : depth + 1] != []:
        depth += 1
    room = ".".join(importer[:depth])
    if importer[depth:] == [] or target[depth:] == []:
        return []  # a package's own __init__
    if room in STRANGERS:
        return [f"files of {room} never import each other"]
    layers = SUB_LAYERS.get(room)
    if layers is None:
        return []
    own, other = rank(importer[depth], layers), rank(target[depth], layers)
    if own is None or other is None:
        return [f"{importer[depth]} or {target[depth]} has no place among the layers of {room}"]
    is_file = "*" in layers[own] and not {importer[depth], target[depth]} & set().union(*layers)
    allowed = other < own or (other == own and is_file)
    return [] if allowed else [f"in {room}, {importer[depth]} may not import {target[depth]}"]


@pytest.mark.parametrize("path", [path for path in FILES if path not in ENTRANCES], ids=name_of)
def test_imports_go_from_later_layers_to_earlier_ones_only(path: Path) -> None:
    module = ".".join(module_of(path))
    problems = [
        f"{imported.name}: {problem}" for imported in imports_of_file(path) for problem in violations(module, imported)
    ]
    assert problems == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: set(neighbours(path)) for module, path in MODULES.items() if path not in ENTRANCES}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        if module not in done:
            for imported in sorted(graph.get(module, ())):
                visit(imported, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def neighbours(path: Path) -> Iterator[str]:
    """Modules of massl that are imported together with this one."""
    for imported in imports_of_file(path):
        if not imported.is_lazy:
            name = imported.name if imported.name in MODULES else imported.name.rpartition(".")[0]
            if name in MODULES and name != "massl":
                yield name


def test_every_folder_says_what_lives_there() -> None:
    packages = [path for path in FILES if path.name == "__init__.py"]
    assert [name_of(path) for path in packages if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_only_distributed_imports_torch_distributed() -> None:
    def is_distributed(imported: Import) -> bool:
        return imported.name.startswith(("torch.distributed", "torch.nn.parallel"))

    assert [name_of(path) for path in FILES if any(map(is_distributed, imports_of_file(path)))] == ["distributed.py"]
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
        ("massl.nn.memory", "massl.ops.contrastive", True),
        ("massl.nn.memory", "massl.nn.heads", True),
        ("massl.nn.memory", "torch.nn.Linear", True),
        ("massl.training.trainer", "massl.methods.base", True),
        ("massl.training.trainer", "massl.methods.base.Method", True),
        ("massl.training.trainer", "massl.weights.io", True),
        ("massl.commands.pretrain", "massl.methods.massl", True),
        ("massl.reports.pictures.attention", "massl.evaluations.features", True),
        ("massl.data.loading.loader", "massl.data.sources.base", True),
        ("massl.evaluations.protocols.low_shot", "massl.evaluations.protocols.knn", True),
        ("massl.reports.page.assembly", "massl.reports.page.sections.training", True),
        ("massl.nn.backbone", "massl.nn.transformer.plain", True),
        ("massl.nn.transformer.fused", "massl.nn.positions", True),
        ("massl.ops.kernels.masks", "massl.ops.block_masks", True),
        ("massl.ops.contrastive", "massl.nn.memory", False),
        ("massl.nn.memory", "massl.data.views", False),
        ("massl.weights.io", "massl.methods.base", False),
        ("massl.config", "massl.keyed_random", False),
        ("massl.training.trainer", "massl.methods.massl", False),
        ("massl.training.trainer", "massl.methods", False),
        ("massl.training.trainer", "massl.reports.tables", False),
        ("massl.methods.massl", "massl.cli", False),
        ("massl.commands.pretrain", "massl.pretrain", False),
        ("massl.ops.contrastive", "massl.utils", False),
        ("massl.data.sources.folder", "massl.data.loading.decode", False),
        ("massl.data.loading.loader", "massl.data.evaluation.views", False),
        ("massl.evaluations.features", "massl.evaluations.protocols.knn", False),
        ("massl.reports.published.paper", "massl.reports.tables", False),
        ("massl.reports.comparison.tables", "massl.reports.page.tables", False),
        ("massl.reports.page.sections.results", "massl.reports.page.sections.training", False),
        ("massl.reports.page.tables", "massl.reports.page.sections.training", False),
        ("massl.nn.positions", "massl.nn.transformer.plain", False),
        ("massl.ops.image_ops", "massl.ops.kernels.resample", False),
        ("massl.nn.ema", "massl.ops.kernels.update", False),
        ("massl.commands.console", "massl.commands.report.command", False),
    ],
)
def test_the_rule_says_yes_and_no_where_it_should(module: str, imported: str, allowed: bool) -> None:
    assert (violations(module, Import(imported, is_lazy=False)) == []) is allowed


def test_kernels_may_be_imported_inside_functions() -> None:
    assert violations("massl.nn.ema", Import("massl.ops.kernels.update", is_lazy=True)) == []
    assert violations("massl.ops.image_ops", Import("massl.ops.kernels.resample", is_lazy=True)) == []


def test_every_way_of_importing_is_seen() -> None:
    source = (
        "import massl.a\nfrom massl.b import c\nfrom . import d\nfrom ..e import f\n"
        "if TYPE_CHECKING:\n    import massl.j\n"
        "class K:\n    def g(self):\n        import massl.h as i"
    )
    seen = list(imports_of(ast.parse(source), ["massl", "nn", "memory"], is_package=False))
    assert sorted(imported.name for imported in seen) == ["massl.a", "massl.b.c", "massl.e.f", "massl.h", "massl.nn.d"]
    assert [imported.name for imported in seen if imported.is_lazy] == ["massl.h"]
