"""Ablations: figure, table and what the numbers say."""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from massl.config import MasslError
from massl.json_lines import read_json
from massl.reports.ablation.records import AblationReport, RunOutcome, report_of, table_of
from massl.reports.ablation.trends import sentences_of
from massl.reports.page.tables import page_table, table_markup
from massl.reports.page.templates import Section, rendered

FILE = "ablation.json"
# Colours of the figure -> colours of the page, which follow its light or dark theme.
_THEME = {
    "#282828": "var(--ink)",
    "#969696": "var(--faint)",
    "#0072b2": "var(--run-0)",
    "#d55e00": "var(--run-1)",
    "#ffffff": "var(--card)",
    "#b0b0b0": "var(--faint)",
    "#000000": "var(--ink)",
}


class PageError(MasslError, ValueError):
    """An ablation folder cannot be shown; the message says what to do."""


def ablation_files(folder: Path) -> list[Path]:
    """The file of one ablation, or of several below one --output; none if the folder is no ablation's."""
    own = folder / FILE
    return [own] if own.is_file() else sorted(folder.glob(f"*/{FILE}"))


def ablations_section(files: Sequence[Path]) -> Section:
    """All ablations, one after another."""
    parts = []
    for number, file in enumerate(files):
        try:
            parts.append(_part(read_json(file), number))
        except (OSError, LookupError, AttributeError, TypeError, ValueError, ArithmeticError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise PageError(f"{file} is not what massl ablate writes ({problem}); run the ablation again") from None
    return Section(id="ablations", title="Ablations", html=rendered("ablations.html.j2", {"parts": parts}))


def read_ablation(plain: Mapping[str, Any]) -> AblationReport:
    """The report that ablation.json was written from."""
    outcomes = [_outcome(run) for point in plain["points"] for run in point["runs"]]
    return report_of(
        plain["kind"],
        outcomes,
        default=plain["default"],
        measured=plain["measured"],
        num_classes=None if plain["chance"] is None else round(100.0 / plain["chance"]),
    )


def _outcome(run: Mapping[str, Any]) -> RunOutcome:
    own = {key: value for key, value in run.items() if key != "accuracy"}  # which follows from the others
    own["collapse_signs"] = tuple(own["collapse_signs"])
    if own["evaluated"] is not None:
        own["evaluated"] = {int(neighbours): accuracy for neighbours, accuracy in own["evaluated"].items()}
    return RunOutcome(**own)


def _part(plain: Mapping[str, Any], number: int) -> dict[str, object]:
    report = read_ablation(plain)
    return {
        "title": report.ablation.title,
        "ours": plain["ours"],
        "command": plain["command"],
        "figure": _figure(report, str(plain["ours"]), prefix=f"ablation-{number}-"),
        "table": table_markup(page_table(table_of(report))),
        "sentences": sentences_of(report),
        "cautions": plain["cautions"],
    }


def _figure(report: AblationReport, ours: str, *, prefix: str) -> Markup:
    """The figure of massl ablate as SVG, with the colours of the page and unique ids."""
    import matplotlib  # here: takes 0.7 s to load, and only ablations need it

    from massl.reports.ablation.plots import ablation_figure

    written = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "massl", "svg.fonttype": "path"}):
        ablation_figure(report, ours=ours).savefig(written, format="svg", transparent=True, metadata={"Date": None})
    svg = re.sub(r"^.*?(?=<svg)|<metadata>.*?</metadata>", "", written.getvalue(), flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", svg)
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda found: _THEME.get(found.group(), found.group()), svg)
    label = f"{report.ablation.title}: k-NN accuracy, ours and the paper's"
    return Markup(svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1))
