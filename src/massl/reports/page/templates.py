"""Rendering: Jinja templates, style sheets and scripts of assets/, and the section that all parts of the page are."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


@dataclass(frozen=True, kw_only=True)
class Section:
    """One titled part of the page. `html` is trusted: whoever builds a section escapes what it shows."""

    id: str
    title: str
    html: str
    style: str = ""  # equal styles and scripts of several sections are written once
    script: str = ""


def rendered(template: str, values: Mapping[str, object]) -> Markup:
    """A template with its values. Text is escaped; only what is passed as Markup stays markup."""
    return Markup(_environment().get_template(template).render(values))


def asset(name: str) -> str:
    """A style sheet or script, to be written into the page."""
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("massl.reports.page", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    return environment
