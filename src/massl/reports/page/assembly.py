"""Joins sections to one self-contained HTML file that loads nothing from elsewhere."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

from markupsafe import Markup

from massl.reports.comparison.tables import shared_by
from massl.reports.page.sections.training import legend_markup, summary_section, training_section
from massl.reports.page.sections.verdicts import verdicts_section
from massl.reports.page.templates import Section, asset, rendered
from massl.reports.runs import Run
from massl.version import version

_LONGEST_SOURCE = 120  # characters of data.source in the head; joined sources can be very long
_SCRIPTS = ("charts.js", "tables.js", "page.js")


def report_page(runs: Sequence[Run], further: Sequence[Section], *, title: str, created: datetime) -> str:
    """The page: verdict, summary and curves of the runs, if any, then the further sections."""
    sections, data = list(further), dict[str, object]()
    if runs:
        training, data = training_section(runs)
        sections = [verdicts_section(runs), summary_section(runs), training, *further]
    ids = [section.id for section in sections]
    assert len(set(ids)) == len(ids), f"two sections with the same id: {', '.join(ids)}"
    in_full = shared_by(runs) if runs else ""
    source = str(runs[0].settings["data.source"]) if runs else ""
    subtitle = in_full.replace(source, f"{source[:_LONGEST_SOURCE]}…") if len(source) > _LONGEST_SOURCE else in_full
    values: dict[str, object] = {
        "title": title,
        "subtitle": subtitle,
        "subtitle_in_full": in_full if in_full != subtitle else "",
        "created": f"{created:%-d %B %Y, %H:%M} UTC · massl {version()}",
        "version": version(),
        "styles": _once([asset("page.css"), *(section.style for section in sections)]),
        "scripts": _once([*map(asset, _SCRIPTS), *(section.script for section in sections)]),
        "sections": [
            {"id": section.id, "title": section.title, "markup": Markup(section.html)} for section in sections
        ],
        "legend": legend_markup(runs) if any(run.rows for run in runs) else "",
        "axes": data.get("axes", {}),
        "chosen_axis": data.get("axis", ""),
        "data": _embedded(data),
        "foot": f"Made by massl {version()}. Nothing on this page is loaded from elsewhere.",
    }
    return rendered("page.html.j2", values)


def _once(texts: Sequence[str]) -> list[Markup]:
    """The texts without empty and repeated ones; a closing tag inside one would end its element."""
    wanted = dict.fromkeys(text for text in texts if text)
    assert not any("</script" in text or "</style" in text for text in wanted), "a style or script would end early"
    return [Markup(text) for text in wanted]


def _embedded(data: Mapping[str, object]) -> Markup:
    """JSON that no label can break out of."""
    return Markup(json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))
