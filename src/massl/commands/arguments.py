"""Command-line arguments as settings: the fields of a Settings class are the options of its command."""

import contextlib
import io
import itertools
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import tyro
from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from massl.config import Settings, UsageError, explain

Arguments = TypeVar("Arguments", bound=Settings)

ModelName = Annotated[
    tyro.conf.Positional[str],
    Field(
        description="a run of massl (its folder), a weights file (massl, DINO, DINOv2, DINOv3, iBOT, MaSSL, MoCo, "
        "SwAV, MAE, DeiT, ConvNeXt, ResNets, timm) or a timm model name"
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
                registry=_REGISTRY,
                config=() if has_flags else (tyro.conf.FlagConversionOff,),
            )
    except SystemExit as exit_request:
        problem = (
            _validation_problem(exit_request, arguments_type)
            or _type_problem(exit_request, arguments)
            or _choice_problem(printed.getvalue())
            or _other_name_problem(printed.getvalue(), arguments_type, arguments)
        )
        if problem is None:  # --help, or an unknown option
            sys.stderr.write(printed.getvalue())
            raise
        raise UsageError(f"{problem}; see massl {command} --help") from None


def _indent_examples(description: str) -> str:
    """tyro joins the lines of a paragraph unless they are indented, and adds a blank line before indented ones."""
    return re.sub(r"\n+(?=(massl|torchrun) )", "\n  ", description)


def _validation_problem(exit_request: SystemExit, arguments_type: type[Settings]) -> str | None:
    """pydantic's complaint in one line, found in the chain of exceptions; None if there was none."""
    section, link = "", exit_request.__context__
    while link is not None and not isinstance(link, ValidationError):
        part = str(getattr(link, "arg", ""))  # tyro's error says where it arose: "knn" or "method.teacher"
        section = f"{part}: " if part.partition(".")[0] in arguments_type.model_fields else section
        link = link.__context__
    return None if link is None else section + explain(link)


def _type_problem(exit_request: SystemExit, arguments: Sequence[str]) -> str | None:
    """ "--trainer.epochs two: expected a whole number", if tyro could not convert a value."""
    argument = getattr(getattr(exit_request.__context__, "arg", None), "lowered", None)
    if argument is None:
        return None
    option = next(
        (name for name in argument.name_or_flags if any(_is_given_as(name, word) for word in arguments)), None
    )
    if option is None:
        return None
    position = next(at for at, word in enumerate(arguments) if _is_given_as(option, word))
    following = itertools.takewhile(lambda word: not word.startswith("--"), arguments[position + 1 :])
    given = shlex.join([*arguments[position].split("=", 1), *following])
    return f"{given}: expected {_in_words(argument.metavar or '')}"


def _is_given_as(option: str, word: str) -> bool:
    return word == option or word.startswith(f"{option}=")


_CHOICE = re.compile(
    r"invalid choice '(?P<given>.*?)' for argument '(?P<option>.*?)'\. Expected one of \((?P<all>.*?)\)"
)


def _choice_problem(printed: str) -> str | None:
    """ "--trainer.precision fp8: expected fp32 or bf16", found in the box that tyro prints."""
    found = _CHOICE.search(" ".join(re.sub("[│╭╮╰╯─]", " ", printed).split()))
    if found is None:
        return None
    choices = re.findall("'(.*?)'", found["all"])
    return f"{found['option']} {found['given']}: expected {' or '.join(choices)}"


# What other programs of the field call an option -> what it may be called here.
_OTHER_NAMES = {
    "arch": ("backbone.name",),
    "backbone": ("backbone.name",),
    "batch_size": ("trainer.batch_size",),
    "device": ("trainer.device",),
    "gpu": ("trainer.device", "device"),
    "image_size": ("views.global_size",),
    "img_size": ("views.global_size", "image_size"),
    "learning_rate": ("optimizer.learning_rate",),
    "lr": ("optimizer.learning_rate",),
    "model": ("backbone.name",),
    "num_workers": ("data.num_workers",),
    "weight_decay": ("optimizer.weight_decay",),
    "workers": ("data.num_workers", "num_workers"),
}


def _other_name_problem(printed: str, arguments_type: type[Settings], arguments: Sequence[str]) -> str | None:
    """ "--lr: here it is --optimizer.learning_rate (peak ...)", if tyro does not know the option and it is here."""
    unknown = printed.partition("Unrecognized options")[2].partition("Perhaps you meant")[0]
    for given in (word.partition("=")[0] for word in arguments):
        names = _OTHER_NAMES.get(given.removeprefix("--").replace("-", "_"), ()) if given in unknown else ()
        for name in names:
            if (field := _field_at(arguments_type, name)) is not None:
                return f"{given}: here it is --{name} ({field.description})"
    return None


def _field_at(settings_type: Any, name: str) -> FieldInfo | None:
    """The field of a dotted name; None if there is none."""
    section, _, rest = name.partition(".")
    field: FieldInfo | None = getattr(settings_type, "model_fields", {}).get(section)
    return _field_at(field.annotation, rest) if field is not None and rest else field


def _in_words(metavar: str) -> str:
    """tyro's description of a value: "{None}|INT" -> "None or a whole number"."""
    words = {"INT": "a whole number", "FLOAT": "a number", "STR": "a word"}
    one = [
        " or ".join(words.get(part, part.strip("{}").replace(",", " or ")) for part in value.split("|"))
        for value in metavar.removeprefix("[").partition(" [")[0].split()
    ]
    return ", then ".join(one) + (", any number of times" if metavar.startswith("[") else "")


ALIASES = {"source": ("--data",), "weights": ("--init",)}  # short for --data.source and --init.weights

# ---- options ---------------------------------------------------------------------------------------------------------


def _fields_of(info: StructTypeInfo) -> StructConstructorSpec | None:
    """The options of a Settings class, as tyro sees them."""
    if not (isinstance(info.type, type) and issubclass(info.type, Settings)):
        return None
    types = get_type_hints(info.type, include_extras=True)
    fields = []
    for name, field in info.type.model_fields.items():
        if isinstance(info.default, Settings):
            default = getattr(info.default, name)
        else:
            default = tyro.MISSING_NONPROP if field.is_required() else field.get_default(call_default_factory=True)
        field_type, text = types[name], field.description or ""
        if name == "name" and (methods := _methods_beside(info.type)):
            field_type = Literal[methods]
            text = "the method to train; the recipe's values for it become the defaults"
        configuration = tyro.conf.arg(
            help_behavior_hint=_hint(text, default),
            aliases=ALIASES.get(name),
            metavar="IMAGES" if name == "images" else None,  # the positional argument of pretrain and plan
        )
        annotated: Any = Annotated[field_type, configuration]
        fields.append(StructFieldSpec(name=name, type=annotated, default=default, helptext=text or None))
    return StructConstructorSpec(instantiate=info.type, fields=tuple(fields))


def _methods_beside(settings_type: type[Settings]) -> tuple[str, ...]:
    """All methods, if these are the settings of one of them: an option lists every value, not only the chosen one."""
    if "massl.methods" not in sys.modules:  # imports torch; then these are no settings of a method either
        return ()
    from massl.methods import METHODS

    return tuple(METHODS) if any(settings_type is entry.settings for entry in METHODS.values()) else ()


def _hint(text: str, default: object) -> str | Callable[[str], str] | None:
    """What --help says after the text; None: tyro's "(default: 3)". Texts explain a default that is derived."""
    if default is tyro.MISSING_NONPROP:
        return "(required)"
    is_explained = "default:" in text
    if default is None or (isinstance(default, str | tuple | list | dict) and not default):
        return "" if is_explained else "(default: none)"
    return "(here: {})".format if is_explained and not isinstance(default, Settings) else None


_REGISTRY = ConstructorRegistry()
_REGISTRY.struct_rule(_fields_of)


def exit_status(signal_number: int | None, *, failed: bool = False) -> int:
    return int(failed) if signal_number is None else 128 + signal_number
