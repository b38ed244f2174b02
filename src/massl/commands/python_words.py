"""Error messages for Python callers. Messages are written for the terminal and name options: --output."""

import re

_OPTION = re.compile(
    r"(?P<command>\b(?:torchrun|docker|pip"
    r"|massl (?:demo|pretrain|plan|evaluate|embed|visualize|export|compare|ablate|report|import|recipes))\b"
    r" [^;,()\n]*)"  # a command line stays as it is
    r"|(?<![\w-])--(?P<no>no-)?(?P<name>[a-z][\w.]*\w)(?: (?P<value>True|False)\b)?"
)
_ARGUMENTS = {"data.source": "data", "set": "overrides"}  # whose names differ from the option's


def in_python(message: str) -> str:
    """ "choose another --output" -> "choose another output"; "--no-figures" -> "figures=False"."""
    return _OPTION.sub(_argument, message)


def _argument(found: re.Match[str]) -> str:
    if found["command"]:
        return found["command"]
    name = _ARGUMENTS.get(found["name"], found["name"])
    value = "False" if found["no"] else found["value"]
    return f"{name}={value}" if value else name
