"""What each run comes to, in words: the first thing on the page."""

from collections.abc import Sequence

from massl.reports.page.templates import Section, rendered
from massl.reports.runs import Run
from massl.reports.verdict import verdict


def verdicts_section(runs: Sequence[Run]) -> Section:
    """The verdict on each run, with its reasons, the next command and the page of the docs that helps."""
    parts = [{"number": number, "label": run.label, "verdict": verdict(run)} for number, run in enumerate(runs)]
    html = rendered("verdicts.html.j2", {"parts": parts, "names_runs": len(runs) > 1})
    return Section(id="verdict", title="Verdict" if len(runs) == 1 else "Verdicts", html=html)
