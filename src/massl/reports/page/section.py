"""The parts a report page is assembled from."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Section:
    """One titled part of the page: ready markup, and what it adds to the page once.

    ``html`` is trusted: whoever builds a section escapes what it shows.
    Equal ``style`` or ``script`` texts of several sections are written once.
    """

    id: str
    title: str
    html: str
    style: str = ""
    script: str = ""
