"""MkDocs hook (mkdocs.yml): generates the pages on recipes and settings, and rewrites links that leave docs/.

The documents are written for readers of the repository, where `../benchmarks/README.md` and the folder
`results/cifar10/` exist; on the site, such links lead to the page generated from them.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic_core import PydanticUndefined

from massl.commands.ablate.command import AblateSettings
from massl.commands.compare.command import CompareSettings
from massl.commands.embed import EmbedSettings
from massl.commands.evaluate.settings import EvaluateSettings
from massl.commands.recipe import PretrainRecipe, load_recipe
from massl.commands.recipes import recipe_header, shipped_recipes
from massl.commands.report.command import ReportSettings
from massl.commands.visualize import VisualizeSettings
from massl.config import Settings
from massl.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
# page -> the file outside docs/ that it shows
COPIES = {"changelog.md": "CHANGELOG.md", "benchmarks.md": "benchmarks/README.md", "security.md": "SECURITY.md"}
INSTEAD = {  # file outside docs/ -> page with the same content
    "README.md": "index.md",
    "CITATION.cff": "cite.md",
    "src/massl/recipes": "recipes.md",
    "src/massl/commands/recipe.py": "settings.md",
}
COMMANDS: dict[str, type[Settings]] = {
    "evaluate": EvaluateSettings,
    "embed": EmbedSettings,
    "visualize": VisualizeSettings,
    "compare": CompareSettings,
    "ablate": AblateSettings,
    "report": ReportSettings,
}
_FOUND_LAST = "---\nsearch:\n  boost: 0.3\n---\n"  # rank long lists below explanations
_UNDESCRIBED = {"method.name": "chooses the method"}
_LINK = re.compile(r"(?<=\]\()(?P<target>[^)#\s:]+)(?=[)#\s])")
_FENCE = re.compile(r"^ *```.*?^ *```", flags=re.MULTILINE | re.DOTALL)


# ---- what MkDocs calls -----------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace the entry `Results: results` by the existing pages."""
    docs = Path(config.docs_dir)
    for entry in config.nav or []:
        for title, target in entry.items():
            if target == "results":
                entry[title] = [f"results/{path.name}" for path in sorted((docs / "results").glob("*.md"))]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    made = {"recipes.md": _FOUND_LAST + recipes_page(), "settings.md": _FOUND_LAST + settings_page()}
    made |= {page: (ROOT / original).read_text(encoding="utf-8") for page, original in COPIES.items()}
    made |= {
        f"{folder}/files.md": listing(Path(config.docs_dir) / folder) for folder in data_folders(Path(config.docs_dir))
    }
    for page, content in made.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links of the repository to links of the site, except in code."""
    original = COPIES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def on_site(match: re.Match[str]) -> str:
        return site_link(match["target"], original=original, page=page.file.src_uri, files=files)

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(on_site, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(on_site, markdown[end:])])


# ---- links -----------------------------------------------------------------------------------------------------------


def site_link(target: str, *, original: str, page: str, files: Files) -> str:
    """The site link on `page` for `target` in the repository file `original`."""
    in_repository = posixpath.normpath(posixpath.join(posixpath.dirname(original), target))
    shown_at = {file: copy for copy, file in COPIES.items()} | INSTEAD
    within = in_repository.removeprefix("docs/")
    section = ""
    if posixpath.dirname(in_repository) == "src/massl/recipes":
        wanted, section = "recipes.md", f"#{posixpath.basename(in_repository).removesuffix('.yaml')}"
    elif in_repository in shown_at:
        wanted = shown_at[in_repository]
    elif within == in_repository:
        raise PluginError(f"{original} links to {target}, which is not part of the site; name the file without a link")
    else:
        wanted = f"{within}/files.md" if (ROOT / "docs" / within).is_dir() else within
    if files.get_file_from_path(wanted) is None:
        raise PluginError(f"{original} links to {target}, which does not exist")
    return posixpath.relpath(wanted, posixpath.dirname(page) or ".") + section


def data_folders(docs: Path) -> list[str]:
    """Folders of docs/results that hold data files."""
    return sorted(str(path.relative_to(docs)) for path in (docs / "results").iterdir() if path.is_dir())


def listing(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    rows = [f"| [{path.name}]({path.name}) | {path.stat().st_size / 1000:,.1f} |" for path in files]
    return "\n".join(
        [
            f"# Files of {folder.name}",
            "",
            f"[{folder.name}](../{folder.name}.md) explains them.",
            "",
            "| file | kB |",
            "|---|---|",
            *rows,
        ]
    )


# ---- recipes ---------------------------------------------------------------------------------------------------------


def recipes_page() -> str:
    """Every shipped recipe: a table of the main values, then each file."""
    intro = [
        "# Recipes",
        "",
        "A recipe is a YAML file with the values of a run; `base` names another recipe that it extends. These come "
        "with massl; `massl recipes` lists them too. Any value can be changed on the command line "
        "([settings](settings.md)), and you can pass your own YAML file with the same keys: `--recipe my-recipe.yaml`. "
        "This page is generated from the files.",
        "",
        "| recipe | method | network | views | batch | epochs |",
        "|---|---|---|---|---:|---:|",
    ]
    # MaSSL first
    names = sorted(shipped_recipes(), key=lambda name: list(METHODS).index(load_recipe(name).method.name))
    sections = [recipe_section(name, shipped_recipes()[name]) for name in names]
    return "\n".join([*intro, *map(recipe_row, names), "", *sections])


def recipe_row(name: str) -> str:
    recipe = load_recipe(name)
    views, backbone = recipe.views, recipe.backbone
    sizes = f"{views.num_global} x {views.global_size} px" + (
        f" + {views.num_local} x {views.local_size} px" if views.num_local else ""
    )
    patch = f", patch {backbone.patch_size}" if backbone.patch_size else ""
    cells = [
        f"[{name}](#{name})",
        recipe.method.name,
        backbone.name + patch,
        sizes,
        f"{recipe.trainer.batch_size:,}",
        f"{recipe.trainer.epochs:,}",
    ]
    return f"| {' | '.join(cell.replace(' ', '&nbsp;') for cell in cells)} |"


def recipe_section(name: str, path: Path) -> str:
    command, *said = recipe_header(path).splitlines()
    about = re.sub(r"docs/([\w/.-]+\.md)", r"[\1](\1)", " ".join(said))
    content = path.read_text(encoding="utf-8")
    values = "\n".join(f"    {line}" for line in ["```yaml", *content.splitlines(), "```"])
    return f'## {name}\n\n{about}\n\n```bash\n{command}\n```\n\n??? note "{path.name}"\n\n{values}\n'


# ---- settings --------------------------------------------------------------------------------------------------------


def settings_page() -> str:
    """Every value of a recipe and every option of the commands, from their settings classes."""
    parts = [
        "# Settings",
        "",
        "Every value, generated from the settings classes. The defaults apply if a recipe does not set the value; "
        "`massl pretrain --recipe NAME --help` shows those of a recipe. On the command line: `--trainer.epochs 100`. "
        'In a YAML file: `trainer: {epochs: 100}`. In Python: `overrides={"trainer.epochs": 100}`.',
        "",
        "## Pre-training",
        "",
    ]
    for section, field in PretrainRecipe.model_fields.items():
        if section != "method":
            parts += settings_table(f"`{section}`", settings_class(field.annotation), prefix=f"{section}.")
    for name, entry in METHODS.items():
        parts += settings_table(f"`method` of {name}", entry.settings, prefix="method.")
    for command, settings in COMMANDS.items():
        parts += settings_table(f"massl {command}", settings, prefix="", level="##")
    return "\n".join(parts)


def settings_table(title: str, settings: type[Settings], *, prefix: str, level: str = "###") -> list[str]:
    rows = [
        f"| `{key}` | {default} | {meaning} |".replace("\n", " ")
        for key, default, meaning in settings_rows(settings, prefix)
    ]
    return [f"{level} {title}", "", "| key | default | |", "|---|---|---|", *rows, ""]


def settings_rows(
    settings: type[Settings], prefix: str, defaults: Settings | None = None
) -> Iterator[tuple[str, str, str]]:
    """Key, default and meaning of every value; nested values have dotted keys."""
    for name, field in settings.model_fields.items():
        default = field.get_default(call_default_factory=True) if defaults is None else getattr(defaults, name)
        if isinstance(default, Settings):
            yield from settings_rows(type(default), f"{prefix}{name}.", default)
        else:
            meaning = field.description or _UNDESCRIBED.get(f"{prefix}{name}")
            if meaning is None:
                raise PluginError(f"{settings.__name__}.{name} has no description")
            yield f"{prefix}{name}", shown(default), meaning.replace("|", "\\|")


def settings_class(annotation: Any) -> type[Settings]:
    if not (isinstance(annotation, type) and issubclass(annotation, Settings)):
        raise PluginError(f"a section of the recipe is not a single settings class: {annotation}")
    return annotation


def shown(default: Any) -> str:
    if default is PydanticUndefined:
        return "required"
    if default is None or default in ("", (), {}):
        return "none"
    plain = list(default) if isinstance(default, tuple) else default
    text = yaml.safe_dump(plain, default_flow_style=True, width=1000)
    return f"`{text.removesuffix(chr(10)).removesuffix('...').strip()}`"
