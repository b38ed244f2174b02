"""How the TOML files of published numbers are read and checked."""

import tomllib
from importlib import resources
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError


class Published(BaseModel):
    """Base of all models of these files: frozen, finite numbers, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _with_decimals(value: object) -> object:
    if not isinstance(value, float):
        raise ValueError("a published number is written with its decimals")
    return value


Number = Annotated[float, BeforeValidator(_with_decimals)]
Document = TypeVar("Document", bound=Published)


def read_document(document_type: type[Document], file: str) -> Document:
    """A TOML file of this folder."""
    return parse_document(document_type, tomllib.loads(resources.files(__package__).joinpath(file).read_text("utf-8")))


def parse_document(document_type: type[Document], plain: dict[str, Any]) -> Document:
    """AssertionError for a wrong document: these files are part of the package, so a mistake in one is a bug."""
    try:
        return document_type.model_validate(plain)
    except (ValidationError, KeyError) as error:  # KeyError: a name that the file does not define
        raise AssertionError(f"{document_type.__name__}: {error}") from None
