"""The version of massl."""

import tomllib
from importlib import metadata
from pathlib import Path


def version() -> str:
    """The installed version; in a checkout that is not installed, that of pyproject.toml with "+checkout"."""
    try:
        return metadata.version("massl")
    except metadata.PackageNotFoundError:
        project = Path(__file__).parents[2] / "pyproject.toml"
        if not project.is_file():
            return "unknown"
        return f"{tomllib.loads(project.read_text(encoding='utf-8'))['project']['version']}+checkout"
