"""Names of images as text that every file format and terminal takes, and back.

A file name is any bytes. Python keeps bytes that are not UTF-8 as half characters, which no file format stores, and a
line break in a name would end a line of a list. Such names, and only they, are written as percent:NAME with those
bytes as %XX; `urllib.parse.unquote_to_bytes` gives the bytes back.
"""

import os
import re
from typing import Final
from urllib.parse import quote_from_bytes, unquote_to_bytes

from massl.failures import UNPRINTABLE

PREFIX: Final = "percent:"
_KEPT: Final = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"


def stored_key(key: str) -> str:
    """The key itself, unless it holds what cannot be stored; `original_key` is the inverse."""
    if not UNPRINTABLE.search(key) and not key.startswith(PREFIX):
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
