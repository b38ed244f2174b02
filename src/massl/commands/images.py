"""Opening images for a command: long listings show progress, what was found is said, unreadable images are left out."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.status import Status

from massl.commands.console import message_console, print_line
from massl.data.loading.image_reader import MAX_UNREADABLE_SHARE
from massl.data.loading.range_sample import settle_ranges
from massl.data.sources import ImageSource, home_of, open_source, remarks_of
from massl.data.sources.base import DataError
from massl.data.sources.rules import DEFAULT_RULES, ReadRules
from massl.data.sources.subset import UnreadableImages

_SECONDS_ON_TERMINAL = 1.0
_SECONDS_ELSEWHERE = 10.0

Result = TypeVar("Result")


def open_images(
    uri: str | Path, *, as_before: bool = False, rules: ReadRules = DEFAULT_RULES, may_download: bool = False
) -> ImageSource:
    """The images, after printing which classes were found, which files were ignored and how deep images are read.

    `as_before`, `rules`, `may_download`: see `open_source`.
    """
    # by the environment: the processes may not be connected yet
    console = message_console(quiet=os.environ.get("RANK", "0") != "0")
    with _listing_on(console) as show:
        source = open_source(uri, on_listing=show, as_before=as_before, rules=rules, may_download=may_download)
    for remark in (*remarks_of(source), *settle_ranges(source)):
        print_line(console, remark)
    return source


def download_named(named: Mapping[str, object], *keys: str) -> None:
    """Fetch the files of sets that the user named with download=true; whatever opens them later starts no download."""
    for uri in (str(named[key]) for key in keys if named.get(key)):
        if uri.startswith("torchvision:") and "download=true" in uri:
            open_source(uri, may_download=True)


@contextmanager
def _listing_on(console: Console) -> Iterator[Callable[[int], None]]:
    """The number of files seen: every second on a terminal, elsewhere a line every 10 s."""
    pause = _SECONDS_ON_TERMINAL if console.is_terminal else _SECONDS_ELSEWHERE
    last_shown = time.monotonic()
    status: Status | None = None
    with ExitStack() as shown:

        def show(num_files: int) -> None:
            nonlocal last_shown, status
            if time.monotonic() - last_shown < pause:
                return
            last_shown = time.monotonic()
            text = f"reading folder: {num_files:,} files"
            if not console.is_terminal:
                print_line(console, text)
            elif status is None:
                status = shown.enter_context(console.status(text))
            else:
                status.update(text)

        yield show


class SkippedImages:
    """Names each unreadable image once, and counts them."""

    def __init__(self, console: Console) -> None:
        self.say: Callable[..., None] = partial(print_line, console)  # a progress bar prints above itself instead
        self._named: set[str] = set()

    def add(self, message: str, home: str = "") -> None:
        """`message`: the image's key and the reason; `home`: see `home_of`. A file of two sources is counted once."""
        place = str(Path(home).absolute() / message)  # keys of a folder are paths within it
        if place not in self._named:
            self._named.add(place)
            self.say(f"warning: skipped an unreadable image: {message}", style="yellow")

    def print_total(self) -> None:
        if self._named:
            images = "image" if len(self._named) == 1 else "images"
            self.say(f"skipped {len(self._named):,} unreadable {images} in all", style="yellow")


class UnreadableLeftOut:
    """Repeats work without the images that turn out to be unreadable, and names these."""

    def __init__(self, console: Console) -> None:
        self._skipped = SkippedImages(console)

    def run(self, work: Callable[..., Result], *sources: ImageSource | None) -> Result:
        """work(*sources), on the readable images of each source; too many unreadable ones raise DataError."""
        left = list(sources)
        while True:
            try:
                result = work(*left)
            except UnreadableImages as error:
                rest = [None if source is None else error.without(source) for source in left]
                if all(now is before for now, before in zip(rest, left, strict=True)):
                    raise
                for source, readable in zip(sources, rest, strict=True):
                    if source is not None and readable is not None:
                        require_few(source, len(source) - len(readable), error)
                for message in error.messages:
                    self._skipped.add(message, home_of(error.source))
                left = rest
            else:
                if left != list(sources):
                    self._skipped.print_total()
                return result


def require_few(source: ImageSource, num_unreadable: int, error: UnreadableImages) -> None:
    if num_unreadable > MAX_UNREADABLE_SHARE * len(source):
        raise DataError(
            f"{num_unreadable} of {len(source)} images of {source.name} cannot be read, more than "
            f"{MAX_UNREADABLE_SHARE:.0%}; repair or remove them. For example {'; '.join(error.messages[:3])}"
        )
