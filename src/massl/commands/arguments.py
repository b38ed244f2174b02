"""Command-line arguments as settings: the fields of a Settings class are the options of its command."""

import contextlib
import io
import sys
from collections.abc import Sequence
from typing import Annotated, TypeVar

import tyro
from pydantic import Field, ValidationError

from massl.config import Settings, UsageError, explain

Arguments = TypeVar("Arguments", bound=Settings)

ModelName = Annotated[
    tyro.conf.Positional[str],
    Field(
        description="a run of massl (its folder), a weights file (massl, DINO, iBOT, MaSSL, MoCo-v3, MAE, DeiT, timm) "
        "or a timm model name"
    ),
]


def parse(
    arguments_type: type[Arguments],
    command: str,
    description: str,
    arguments: Sequence[str],
    *,
    default: Arguments | None = None,
    has_flags: bool = False,  # --figures and --no-figures instead of --figures True
) -> Arguments:
    """The settings that the arguments give. Exits after --help and on unknown options, as argparse does."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(
                arguments_type,
                prog=f"massl {command}",
                description=_indent_examples(description),
                default=tyro.MISSING_NONPROP if default is None else default,
                args=list(arguments),
                use_underscores=True,
                config=() if has_flags else (tyro.conf.FlagConversionOff,),
            )
    except SystemExit as exit_request:
        problem = _validation_problem(exit_request, arguments_type)
        if problem is None:  # --help, or an unknown option
            sys.stderr.write(printed.getvalue())
            raise
        raise UsageError(f"{problem}; see massl {command} --help") from None


def _indent_examples(description: str) -> str:
    """tyro joins the lines of a paragraph unless they are indented, and adds a blank line before indented ones."""
    return description.replace("\nmassl ", "\n  massl ").replace("\n\n  massl ", "\n  massl ")


def _validation_problem(exit_request: SystemExit, arguments_type: type[Settings]) -> str | None:
    """pydantic's complaint in one line, found in the chain of exceptions; None if there was none."""
    section, link = "", exit_request.__context__
    while link is not None and not isinstance(link, ValidationError):
        part = str(getattr(link, "arg", ""))  # tyro's error says where it arose: "knn" or "method.teacher"
        section = f"{part}: " if part.partition(".")[0] in arguments_type.model_fields else section
        link = link.__context__
    return None if link is None else section + explain(link)


def exit_status(signal_number: int | None, *, failed: bool = False) -> int:
    return int(failed) if signal_number is None else 128 + signal_number
