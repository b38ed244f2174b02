"""The files of the page: Jinja templates, style and scripts, all in assets/."""

from collections.abc import Mapping
from functools import cache
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def rendered(template: str, values: Mapping[str, object]) -> Markup:
    """A template with its values; text is escaped, so only what is passed as Markup stays markup."""
    return Markup(_environment().get_template(template).render(values))


def asset(name: str) -> str:
    """A style sheet or script, to be written into the page."""
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    loader = PackageLoader("massl.reports.page", "assets")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
