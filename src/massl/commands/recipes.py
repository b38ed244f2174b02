"""`massl recipes`: the recipe files that come with massl. Reads only YAML and comments, so that it answers at once.

A recipe file begins with a comment: the command, then facts for the table, then prose.

    # massl pretrain --recipe massl-tiny --data photos/ --output runs/a
    # for: 64-px photos
    # needs: 1 GPU
    # expect: k-NN 5.9 -> 29.4

It may extend another recipe, a shipped one or a file beside it: `base: massl-tiny`. Its own values are merged into the
sections of the base. If it names another method, the section `method` of the base is left out.
"""

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import tyro
from pydantic import Field

from massl.commands.arguments import parse
from massl.commands.console import print_line, print_table, result_console
from massl.config import RecipeError, Settings, closest, overlay, read_yaml
from massl.planning.rules_text import rules_text
from massl.reports.tables import ResultsTable

DESCRIPTION = """List the recipes that come with massl.

massl recipes
massl recipes --method massl --for photos
massl recipes massl-tiny"""

AUTO = "auto"  # no file: chosen by the rules of massl.planning
_AUTO_LINE = {
    "recipe": AUTO,
    "method": "massl",
    "network": "chosen",
    "px": "any",
    "epochs": "any",
    "for": "your images",
    "needs": "any",
    "expect": "",
}
_MAX_BASES = 16
_FACTS = ("for", "needs", "expect")
_FACT = re.compile(rf"# ({'|'.join(_FACTS)}): (.+)")
_SIZES = {"tiny": "Ti", "small": "S", "base": "B", "large": "L"}
_HINT = (
    "expect: percent at the start -> at the end as measured here, or the figure that the authors publish.\n"
    "massl recipes NAME prints a recipe; massl pretrain --recipe NAME --help explains its values."
)


class RecipesSettings(Settings):
    """Which recipes to list."""

    name: tyro.conf.Positional[str] = Field("", description="print this recipe in full; default: the table of all")
    method: str = Field("", description="only recipes of this method; default: all methods")
    purpose: Annotated[str, tyro.conf.arg(name="for")] = Field(
        "", description="only recipes for such images, e.g. photos, thumbnails or 64; default: all"
    )


# ---- recipe files ----------------------------------------------------------------------------------------------------


def shipped_recipes() -> dict[str, Path]:
    """Recipe name -> file, for the recipes that come with the package."""
    folder = Path(str(resources.files("massl") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def recipe_path(name: str, *, folder: Path = Path()) -> Path:
    """The file of a shipped recipe, or the file of this name, relative to `folder`."""
    shipped = shipped_recipes()
    if name == AUTO:
        raise RecipeError("auto is no file: it is chosen for images, by massl pretrain photos/ or massl plan photos/")
    path = shipped.get(name) or folder / Path(name).expanduser()
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # a name that is too long, or holds a zero byte
        is_file = False
    if not is_file:
        suggestion = f"{closest(name, shipped)} `massl recipes` lists the shipped ones"
        raise RecipeError(f"no recipe {name!r}: neither shipped nor a file.{suggestion}")
    return path


def read_recipe(path: Path) -> dict[str, Any]:
    """The values of a recipe file, merged into those of its `base`."""
    return _read(path, ())


def _read(path: Path, extended_by: tuple[Path, ...]) -> dict[str, Any]:
    values = read_yaml(path)
    variants = values.get("with_method") or {}
    if not isinstance(variants, Mapping) or not all(isinstance(variant, Mapping) for variant in variants.values()):
        raise RecipeError(
            f"{path}: with_method holds one section for each method, e.g. with_method: {{dino: {{optimizer: ...}}}}"
        )
    base = values.pop("base", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise RecipeError(f"{path}: base names one recipe, shipped or a file (got {base!r})")
    files = (*extended_by, path.resolve())
    try:
        base_path = recipe_path(base, folder=path.parent)
    except RecipeError as error:
        raise RecipeError(f"{path}: base: {error}") from None
    if base_path.resolve() in files:
        circle = " -> ".join(file.name for file in (*files, base_path))
        raise RecipeError(f"{path}: base {base} is a recipe that extends this one: {circle}")
    if len(files) > _MAX_BASES:
        raise RecipeError(f"{path}: more than {_MAX_BASES} recipes extend each other; write them as fewer files")
    beneath = _read(base_path, files)
    own = method_of(beneath)
    method = method_of(values, default=own)
    return overlay(beneath if method == own else for_method(beneath, method), values)


def method_of(values: Mapping[str, Any], *, default: str = "massl") -> str:
    """`method.name` of a recipe's values."""
    method = values.get("method")
    return str(method.get("name", default)) if isinstance(method, Mapping) else default


def for_method(values: Mapping[str, Any], method: str) -> dict[str, Any]:
    """The recipe for another method than its own: the section `method` is replaced by that in with_method."""
    variants = values.get("with_method") or {}
    changed = overlay({**values, "method": {}}, variants.get(method, {}))
    changed["method"]["name"] = method
    return changed


def recipe_header(path: Path) -> str:
    """The opening comment of a recipe file without its facts: the command, then prose."""
    return "\n".join(line.removeprefix("#").strip() for line in _comment(path) if not _FACT.fullmatch(line))


def recipe_facts(path: Path) -> dict[str, str]:
    """What the opening comment says in lines such as "# for: photos"; "" for what it does not say."""
    found = {match[1]: match[2] for match in map(_FACT.fullmatch, _comment(path)) if match}
    return {key: found.get(key, "") for key in _FACTS}


def _comment(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return lines[:end]


# ---- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    settings = parse(RecipesSettings, "recipes", DESCRIPTION, arguments)
    if settings.name:
        print(recipe_text(settings.name))
        return 0
    screen = result_console()
    print_table(screen, recipes_table(method=settings.method, purpose=settings.purpose))
    print_line(screen, _HINT)
    return 0


def recipe_text(name: str) -> str:
    """A recipe's file and, below it, the files that it extends; of auto, its rules."""
    if name == AUTO:
        return rules_text()
    parts, path = [], recipe_path(name)
    read_recipe(path)  # a circle of files is an error, not an endless text
    while True:
        parts.append(path.read_text(encoding="utf-8").rstrip())
        base = read_yaml(path).get("base")
        if base is None:
            return "\n\n".join(parts)
        path = recipe_path(base, folder=path.parent)
        parts.append(f"# ---- the base, {base} ----")


def recipes_table(*, method: str = "", purpose: str = "") -> ResultsTable:
    """The shipped recipes, those of MaSSL first, with what their headers say."""
    lines = [_AUTO_LINE, *(_line(name, path) for name, path in shipped_recipes().items())]
    lines.sort(key=lambda line: (line["method"] != "massl", line["method"], line["recipe"] != AUTO, line["recipe"]))
    methods = dict.fromkeys(line["method"] for line in lines)
    if method and method not in methods:
        raise RecipeError(f"no method {method!r}; there are {', '.join(methods)}.{closest(method, methods)}")
    shown = [line for line in lines if method in ("", line["method"]) and purpose.casefold() in line["for"].casefold()]
    if not shown:
        purposes = "; ".join(dict.fromkeys(line["for"] for line in lines))
        raise RecipeError(f"no recipe is for {purpose!r}; --for may be a part of: {purposes}")
    return ResultsTable(
        title="",
        columns=tuple(shown[0]),
        lines=tuple(tuple(line.values()) for line in shown),
        footnotes=(),
        text_columns=frozenset(shown[0]) - {"px", "epochs"},
        group_by="method",
    )


def _line(name: str, path: Path) -> dict[str, str]:
    values, facts = read_recipe(path), recipe_facts(path)
    return {
        "recipe": name,
        "method": method_of(values),
        "network": _network(values["backbone"]),
        "px": str(values["views"]["global_size"]),
        "epochs": str(values["trainer"]["epochs"]),
        **facts,
    }


def _network(backbone: Mapping[str, Any]) -> str:
    """ "ViT-S/16" for vit_small_patch16_224; other networks by timm's name."""
    found = re.fullmatch(r"vit_([a-z]+)_patch(\d+)_\d+", backbone["name"])
    if found is None:
        return str(backbone["name"])
    return f"ViT-{_SIZES.get(found[1], found[1])}/{backbone.get('patch_size', found[2])}"
