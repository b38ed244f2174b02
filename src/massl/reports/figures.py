"""The common look of Matplotlib figures, and how they are saved."""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from massl.reports.fonts import font_for

INK, FAINT = "#282828", "#969696"  # as in pictures/
TEXT_POINTS, SMALL_POINTS = 9.0, 7.5
_DOTS_PER_INCH = 150


def style_axes(axes: Axes, label: str, *, tick_points: float) -> None:
    """Label the horizontal axis; a light grid, and no frame above and to the right."""
    axes.set_xlabel(label, color=INK, fontsize=TEXT_POINTS)
    axes.grid(alpha=0.25)
    axes.tick_params(colors=INK, labelsize=tick_points)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)


def font_of(text: str, points: float) -> FontProperties:
    """A font of this size that can show the text."""
    file = font_for(text)
    return FontProperties(size=points) if file is None else FontProperties(fname=str(file), size=points)


def save_figure(figure: Figure, stem: Path) -> tuple[Path, Path]:
    """Write STEM.png to look at and STEM.svg to print; returns both."""
    png, svg = stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")
    with matplotlib.rc_context({"svg.hashsalt": "massl"}):  # the same data give the same file, byte for byte
        figure.savefig(png, dpi=_DOTS_PER_INCH)
        figure.savefig(svg, metadata={"Date": None})
    return png, svg
