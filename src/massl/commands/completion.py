"""`massl --completion bash`: a script that completes commands, options and their values in a shell.

The script lists all words, so that a key press starts no Python. Where it knows none, the shell completes file names.
"""

import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import tyro

from massl.commands.ablate.command import AblateSettings
from massl.commands.arguments import ALIASES
from massl.commands.compare.command import CompareSettings
from massl.commands.demo import DemoSettings
from massl.commands.embed import EmbedSettings
from massl.commands.evaluate.settings import EvaluateSettings
from massl.commands.export import ExportSettings
from massl.commands.import_weights import ImportSettings
from massl.commands.pretrain_arguments import PretrainArguments
from massl.commands.recipes import AUTO, RecipesSettings, shipped_recipes
from massl.commands.report.command import ReportSettings
from massl.commands.visualize import VisualizeSettings
from massl.config import Settings, UsageError
from massl.evaluations.named_features import FEATURES, PATCHES
from massl.evaluations.protocols import PROTOCOLS
from massl.methods import METHODS

SETTINGS: dict[str, type[Settings]] = {
    "demo": DemoSettings,
    "pretrain": PretrainArguments,
    "plan": PretrainArguments,
    "evaluate": EvaluateSettings,
    "embed": EmbedSettings,
    "visualize": VisualizeSettings,
    "export": ExportSettings,
    "compare": CompareSettings,
    "ablate": AblateSettings,
    "report": ReportSettings,
    "import": ImportSettings,
    "recipes": RecipesSettings,
}
_HELP = """usage: massl --completion bash|zsh

Prints a script that completes commands, options and their values. For bash:

  massl --completion bash > ~/.massl-completion
  echo 'source ~/.massl-completion' >> ~/.bashrc"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
_SCRIPT = """_massl() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}"
  local last="" words="" at
  for ((at = 2; at < COMP_CWORD; at++)); do
    case "${{COMP_WORDS[at]}}" in -*) last="${{COMP_WORDS[at]}}" ;; esac
  done
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands}"
  else
    case "$current" in
      -*) case "$command" in
{options}
        esac ;;
      *) case "$command $previous" in
{values}
        *) case "$command $last" in  # options that take several values
{several}
          *) case "$command" in
{positional}
            esac ;;
          esac ;;
        esac ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _massl massl"""


class _Option(typing.NamedTuple):
    words: tuple[str, ...]  # "--data.source", "--data"; none of a positional argument
    values: tuple[str, ...]  # those that can be listed
    takes_several: bool


def main(arguments: Sequence[str]) -> int:
    if list(arguments) in (["-h"], ["--help"]):
        print(_HELP)
        return 0
    if list(arguments) not in (["bash"], ["zsh"]):
        raise UsageError("for which shell? massl --completion bash, or massl --completion zsh")
    print((_ZSH if arguments[0] == "zsh" else "") + completion_script())
    return 0


def completion_script() -> str:
    listed: dict[str, dict[str, list[str]]] = {"options": {}, "values": {}, "several": {}, "positional": {}}
    for command, settings_type in SETTINGS.items():
        known = list(_options_of(settings_type, has_flags=command == "report"))
        listed["options"][command] = ["--help", *(word for option in known for word in option.words)]
        for option in known:
            for word in option.words if option.values else ():
                listed["several" if option.takes_several else "values"].setdefault(f"{command} {word}", []).extend(
                    option.values
                )
            if not option.words and option.values:
                listed["positional"][command] = list(option.values)
    return _SCRIPT.format(
        commands=" ".join([*SETTINGS, "--help", "--version", "--completion"]),
        **{kind: _cases(words) for kind, words in listed.items()},
    )


def _cases(words: Mapping[str, Sequence[str]]) -> str:
    return "\n".join(f'        "{key}") words="{" ".join(dict.fromkeys(given))}" ;;' for key, given in words.items())


def _options_of(settings_type: type[Settings], prefix: str = "", *, has_flags: bool = False) -> Iterator[_Option]:
    for name, field in settings_type.model_fields.items():
        sections = [part for part in _parts(field.annotation) if isinstance(part, type) and issubclass(part, Settings)]
        for section in sections:
            yield from _options_of(section, f"{prefix}{name}.")
        if sections:
            continue
        named = next((mark.name for mark in field.metadata if getattr(mark, "name", None)), name)
        key = prefix + named
        is_positional, is_flag = tyro.conf.Positional in field.metadata, has_flags and field.annotation is bool
        others = [*ALIASES.get(named, ()), *([f"--no-{key}"] if is_flag else [])]
        yield _Option(
            words=() if is_positional else (f"--{key}", *others),
            values=()
            if is_flag
            else _VALUES.get((settings_type, key)) or _VALUES.get(key) or tuple(_choices(field.annotation)),
            takes_several=typing.get_origin(field.annotation) is tuple
            and Ellipsis in typing.get_args(field.annotation),
        )


def _parts(annotation: Any) -> tuple[Any, ...]:
    return (annotation, *typing.get_args(annotation))


def _choices(annotation: Any) -> Iterator[str]:
    if typing.get_origin(annotation) is Literal:
        yield from (value for value in typing.get_args(annotation) if value)
    elif annotation is bool:
        yield from ("True", "False")
    elif typing.get_origin(annotation) is not dict:
        for part in typing.get_args(annotation):
            yield from _choices(part)


_RECIPES = (AUTO, *shipped_recipes())
# Values of options whose type says only "text": by key, or by settings and key.
_VALUES: dict[str | tuple[type[Settings], str], tuple[str, ...]] = {
    "recipe": _RECIPES,
    "recipes": _RECIPES,
    (RecipesSettings, "name"): _RECIPES,
    "method": tuple(METHODS),
    "methods": tuple(METHODS),
    "method.name": tuple(METHODS),
    "protocol": tuple(PROTOCOLS),
    "feature": tuple(FEATURES),
    (EmbedSettings, "feature"): (*FEATURES, PATCHES),
}
