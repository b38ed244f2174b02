"""Names of images as text that every file format and terminal takes, and back.

A file name is any bytes. Python keeps bytes that are not UTF-8 as half characters, which no file format stores, and a
line break in a name would end a line of a list. Such names, and only they, are written as percent:NAME with those
bytes as %XX; `urllib.parse.unquote_to_bytes` gives the bytes back.
"""

import os
import re
from typing import Final
from urllib.parse import quote_from_bytes, unquote_to_bytes

PREFIX: Final = "percent:"
# control characters, what Unicode takes for line breaks, half characters, and what turns the direction of text
_NEEDS_ESCAPE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_KEPT: Final = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"


def stored_key(key: str) -> str:
    """The key itself, unless it holds what cannot be stored; `original_key` is the inverse."""
    if not _NEEDS_ESCAPE.search(key) and not key.startswith(PREFIX):
        return key
    content = key.encode("utf-8", "surrogateescape" if _is_file_name(key) else "surrogatepass")
    return PREFIX + quote_from_bytes(content, safe=_KEPT)


def original_key(stored: str) -> str:
    """The key as the source gave it: `open` takes it as a path."""
    if not stored.startswith(PREFIX):
        return stored
    return os.fsdecode(unquote_to_bytes(stored.removeprefix(PREFIX)))


def _is_file_name(key: str) -> bool:
    """Whether half characters, if any, stand for bytes of a file name."""
    return not re.search("[\ud800-\udc7f\udd00-\udfff]", key)


def printable(text: str) -> str:
    """For messages: control characters other than line breaks and tabs, and half characters, as \\x1b and the like."""

    def escaped(found: re.Match[str]) -> str:
        return found[0] if found[0] in "\n\t" else found[0].encode("unicode_escape").decode()

    return _NEEDS_ESCAPE.sub(escaped, text)
