"""Settings: frozen, validated objects; YAML files and dotted overrides become one of them.

A part's settings live beside the part (`MemorySettings` in nn/memory.py and so on) and derive from `Settings`. Here is
only what they share: the base class, errors that say what to type instead, reading YAML, merging overrides, and the
fingerprint of a resolved recipe.
"""

import difflib
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

SettingsType = TypeVar("SettingsType", bound="Settings")

# The beginning of a name counts as the name if it has this many letters and is this much alike.
_MIN_PREFIX, _PREFIX_LIKENESS = 4, 0.8
_MAX_YAML_BYTES = 2**20
_MAX_YAML_DEPTH = 32
_MAX_YAML_VALUES = 20_000


class MasslError(Exception):
    """An error the user can mend; the message says how. Any other exception that escapes is a bug in massl."""


class UsageError(MasslError):
    """A command-line option has an invalid value; the message names the option."""


class RecipeError(MasslError, ValueError):
    """A recipe or an override is wrong; the message says what to change."""


class Settings(BaseModel):
    """Base of all settings: cannot be changed after creation, refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def closest(word: str, candidates: typing.Iterable[str]) -> str:
    """' Did you mean X?' for the nearest candidate, or nothing; the first of several that are equally near."""
    likeness = {candidate: _likeness(word, candidate) for candidate in candidates}
    best = max(likeness, key=likeness.__getitem__, default="")
    return f" Did you mean {best!r}?" if likeness.get(best, 0.0) >= 0.5 else ""


def _likeness(word: str, candidate: str) -> float:
    """From 0 to 1. The beginning of a long name is like the name: vit_tinny, vit_tiny_patch16_224."""
    matcher = difflib.SequenceMatcher(None, candidate, word)  # keeps what it knows of the second word
    whole = matcher.ratio()
    if min(len(word), len(candidate)) < _MIN_PREFIX or len(candidate) <= len(word):
        return whole
    matcher.set_seq1(candidate[: len(word)])
    prefix = matcher.ratio()
    return max(whole, prefix if prefix > _PREFIX_LIKENESS else 0.0)


def validate(settings_type: type[SettingsType], values: Mapping[str, Any], *, origin: str) -> SettingsType:
    """Build settings from plain values; every problem is named with its dotted key."""
    unknown = _unknown_keys(settings_type, values, prefix="")
    if unknown:
        raise RecipeError(f"{origin}: " + " ".join(unknown))
    try:
        return settings_type.model_validate(dict(values))
    except ValidationError as error:
        raise RecipeError(f"{origin}: {explain(error, settings_type)}") from None


# pydantic's kinds of problems, in the words that the command line uses
_PROBLEMS = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float", "int_parsing_size"), "expected a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "expected a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "expected True or False"),
    **dict.fromkeys(("tuple_type", "list_type"), "expected a list"),
    "finite_number": "expected a finite number",
    "string_type": "expected text",
    "literal_error": "expected {expected}",
    "missing": "is missing",
}


def explain(error: ValidationError, settings_type: type[Settings] | None = None) -> str:
    """Each problem with its dotted key and, where it is a single value, the value given."""
    problems = []
    for problem in error.errors():
        key = ".".join(str(part) for part in _without_choices(problem["loc"], settings_type))
        words = _PROBLEMS.get(problem["type"])
        message = words.format(**problem.get("ctx", {})) if words else problem["msg"].removeprefix("Value error, ")
        given = "" if isinstance(problem["input"], Mapping | BaseModel) else f" (got {problem['input']!r})"
        problems.append(f"{key}: {message}{given}" if key else f"{message}{given}")
    return "; ".join(problems)


def _without_choices(location: tuple[int | str, ...], settings_type: type[Settings] | None) -> tuple[int | str, ...]:
    """The key as in a recipe: for a union of settings pydantic inserts which one, method.massl.head for method.head."""
    if settings_type is None or not location or location[0] not in settings_type.model_fields:
        return location
    key, *rest = location
    annotation = settings_type.model_fields[str(key)].annotation
    options = [option for option in typing.get_args(annotation) if isinstance(option, type)]
    is_union = sum(issubclass(option, Settings) for option in options) > 1
    return (key, *(rest[1:] if is_union else rest))


def _unknown_keys(settings_type: type[Settings], values: Mapping[str, Any], prefix: str) -> list[str]:
    problems = []
    for key, value in values.items():
        field = settings_type.model_fields.get(str(key))
        if field is None:
            problems.append(f"unknown key {prefix}{key}.{closest(str(key), settings_type.model_fields)}")
            continue
        nested = _nested_settings(field.annotation, value) if isinstance(value, Mapping) else None
        if nested is not None:
            problems.extend(_unknown_keys(nested, value, prefix=f"{prefix}{key}."))
    return problems


def _nested_settings(annotation: Any, values: Mapping[str, Any]) -> type[Settings] | None:
    """The settings class for `values`; in a union the one whose default name is given, or the first."""
    fitting = _section_types(annotation)
    named = [
        option
        for option in fitting
        if "name" in option.model_fields and option.model_fields["name"].default == values.get("name")
    ]
    return next(iter(named or fitting), None)


def _section_types(annotation: Any) -> list[type[Settings]]:
    """The settings classes that a field takes; none if it is a plain value."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return [option for option in options if isinstance(option, type) and issubclass(option, Settings)]


class _BoundedLoader(yaml.SafeLoader):
    """Refuses nested aliases that grow without bound, and nesting that no recipe has."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._num_values = 0  # with aliases written out
        self._size_of: dict[int, int] = {}  # of nodes that are complete, by id

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self._depth >= _MAX_YAML_DEPTH:
            raise yaml.YAMLError(f"it is nested more than {_MAX_YAML_DEPTH} deep")
        is_alias, before = self.check_event(yaml.AliasEvent), self._num_values
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and id(node) not in self._size_of:
            raise yaml.YAMLError("an alias stands inside of what it names")
        self._num_values += self._size_of[id(node)] if is_alias else 1
        self._size_of.setdefault(id(node), self._num_values - before)
        if self._num_values > _MAX_YAML_VALUES:
            raise yaml.YAMLError(f"it holds more than {_MAX_YAML_VALUES:,} values")
        return node


def parse_yaml(text: str, *, origin: str) -> Any:
    """Plain values from YAML of unknown origin, limited in size, depth and number of values."""
    try:
        if len(text) > _MAX_YAML_BYTES:
            raise ValueError(f"it is longer than {_MAX_YAML_BYTES:,} characters")
        loader = _BoundedLoader(text)
        try:
            values = loader.get_single_data()
        finally:
            loader.dispose()
        _require_plain(values)
        return values
    except Exception as error:  # a foreign file: besides YAMLError, scalars raise ValueError, KeyError, IndexError ...
        raise RecipeError(f"{origin} is not valid YAML: {error}") from None


def _require_plain(value: Any) -> None:
    """YAML also knows dates, sets and bytes, which no setting takes."""
    if isinstance(value, dict | list):
        for item in value if isinstance(value, list) else (*value.keys(), *value.values()):
            _require_plain(item)
    elif isinstance(value, str):
        # bytes of file names that are not UTF-8 are kept this way; other half characters could not be written
        value.encode(errors="surrogateescape")
    elif value is not None and not isinstance(value, bool | int | float):
        raise ValueError(f"{value} is read as a {type(value).__name__}; write it in quotes")


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_YAML_BYTES + 1)
        text = content.decode("utf-8")
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not valid YAML: {error}") from None
    values = parse_yaml(text, origin=str(path))
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds no recipe: expected sections such as 'data:' and 'trainer:'")
    return values


def merge(values: Mapping[str, Any], overrides: Mapping[str, Any], settings_type: type[Settings]) -> dict[str, Any]:
    """Values with overrides applied. {"trainer.epochs": 2} and {"trainer": {"epochs": 2}} change the same one value."""
    merged: dict[str, Any] = json.loads(json.dumps(values))
    for key, value in dotted(overrides, settings_type).items():
        *parents, last = key.split(".")
        section = merged
        for parent in parents:
            if section.get(parent) is None:
                section[parent] = {}
            section = section[parent]
            if not isinstance(section, dict):
                raise RecipeError(f"override {key}: {parent} is a value, not a section")
        section[last] = value
    return merged


def dotted(overrides: Mapping[str, Any], *settings_types: type[Settings], prefix: str = "") -> dict[str, Any]:
    """Overrides by dotted key. Sections are opened; a value stays whole, also one that is a mapping (timm_options)."""
    flat: dict[str, Any] = {}
    for key, value in overrides.items():
        name, _, rest = str(key).partition(".")
        given = {rest: value} if rest else value
        fields = [options.model_fields[name] for options in settings_types if name in options.model_fields]
        sections = [section for field in fields for section in _section_types(field.annotation)]
        if sections and isinstance(given, Mapping):
            flat |= dotted(given, *sections, prefix=f"{prefix}{name}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def overlay(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values overwritten by `changes`, section by section: overlay({"a": {"x": 1, "y": 2}}, {"a": {"x": 3}})."""
    merged: dict[str, Any] = json.loads(json.dumps(values))
    for key, value in changes.items():
        own = merged.get(key)
        merged[key] = overlay(own, value) if isinstance(own, Mapping) and isinstance(value, Mapping) else value
    return merged


def flatten(values: Settings | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> plain value, the form in which two recipes are compared."""
    flat: dict[str, Any] = {}
    for key, value in (values.model_dump(mode="json") if isinstance(values, Settings) else values).items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def changed(settings: Settings, *, besides: typing.Collection[str] = ()) -> list[str]:
    """Values that differ from their defaults, in words: "temperature 0.1". Keys that end in `besides` are omitted."""
    defaults = flatten(type(settings)())
    return [
        f"{key.rpartition('.')[2].replace('_', ' ')} {_in_words(value)}"
        for key, value in flatten(settings).items()
        if value != defaults[key] and key.rpartition(".")[2] not in besides
    ]


def _in_words(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_in_words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def fingerprint(values: Mapping[str, Any]) -> str:
    """Short digest of plain values, equal exactly when they are equal."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def to_yaml(settings: Settings) -> str:
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)
