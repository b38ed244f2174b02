"""How a `massl` command tells its error: once, also when several processes of a run end for the same reason."""

import json
import os
import re
import sys
import time
from pathlib import Path

_SECONDS_UNTIL_ENDED = 10.0  # torchrun ends the other processes as soon as it notices that one has ended


# control characters, what Unicode takes for line breaks, half characters, and what turns the direction of text
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

# of gloo, NCCL and the store that processes meet at
_LOST_CONNECTION = ("closed by peer", "reset by peer", "Connection refused", "Broken pipe", "remote process exited")


class ToldElsewhere(Exception):
    """An error that another process of the run tells already."""


def is_lost_connection(error: Exception) -> bool:
    """Whether an error means that another process of the run is gone."""
    is_one_of_many = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return is_one_of_many and any(words in str(error) for words in _LOST_CONNECTION)


def tell_lost_connection(error: Exception) -> None:
    """Tell that another process is gone, unless torchrun ends this one first: the other one has told why."""
    what = " ".join(str(error).split())
    text = f"massl: error: another process of this run has ended ({what}); see what it printed. If that is nothing, it"
    text += " was killed, perhaps for lack of memory. The same command continues from the last checkpoint."
    tell(text, is_told_elsewhere="TORCHELASTIC_ERROR_FILE" in os.environ)


def printable(text: str) -> str:
    """For messages: control characters other than line breaks and tabs, and half characters, as \\x1b and the like."""

    def escaped(found: re.Match[str]) -> str:
        return found[0] if found[0] in "\n\t" else found[0].encode("unicode_escape").decode()

    return UNPRINTABLE.sub(escaped, text)


def tell(text: str, *, is_told_elsewhere: bool = False) -> None:
    """Print the error. Under torchrun it is written where torchrun finds it: its summary, the last output, shows it.

    `is_told_elsewhere`: another process of the run tells the same, or what caused this.
    """
    text = printable(text)  # names in it may be a stranger's
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not error_file:
        if not is_told_elsewhere:
            print(text, file=sys.stderr)
        return
    if is_told_elsewhere:
        time.sleep(_SECONDS_UNTIL_ENDED)  # else torchrun could take this process for the one that failed first
    try:
        found = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        Path(error_file).write_text(json.dumps({"message": found}), encoding="utf-8")
    except OSError:
        print(text, file=sys.stderr)
        return
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"):
        print(text, file=sys.stderr)  # torchrun starts the processes again, without a summary
