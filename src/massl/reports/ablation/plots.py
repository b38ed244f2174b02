"""An ablation as a figure: our curve and the paper's in two panels that can be compared.

Horizontal axes show the same ratios to the default, in powers of two. Vertical axes span the same number of points
(percent), each around its own values, so a slope means the same in both panels.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from massl.reports.ablation.records import AblationReport, Strategy, paper_points
from massl.reports.figures import FAINT, INK, SMALL_POINTS, TEXT_POINTS, style_axes

# From the colour-blind safe palette of Okabe and Ito; markers differ too, for prints in grey.
_STYLES: dict[Strategy, tuple[str, str]] = {"random": ("#0072B2", "o"), "blockwise": ("#D55E00", "s")}
_WIDTH, _HEIGHT = 10.0, 4.2  # inches
_LEAST_SPAN = 4.0  # points on the vertical axis: less would make noise look like a finding
_PAPER_CHANCE = 0.1  # percent: ImageNet has 1,000 classes
_TITLE_CHARACTERS = 85  # in a line above a panel
_CLOSE = 0.1  # of a panel's height: between closer points there is no room for a number
_HEADROOM = 0.2  # of the span, above and below the curves: room for numbers


class _Point(NamedTuple):
    value: int
    accuracy: float
    deviation: float  # 0 if unknown
    is_collapsed: bool


_Curves = Mapping[Strategy, Sequence[_Point]]  # none is empty


def ablation_figure(report: AblationReport, *, ours: str) -> Figure:
    """`ours` says above our panel what was trained on what."""
    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    left, right = figure.subplots(1, 2)
    own, papers = _own_curves(report), _paper_curves(report)
    span = max(_LEAST_SPAN, *(high - low for low, high in (_bounds(own), _bounds(papers))))
    own_values = [point.value for point in report.points]
    paper_values = [point.value for point in paper_points(report.kind)]
    paper_default = report.ablation.paper_default
    ratios = [value / report.default for value in own_values] + [value / paper_default for value in paper_values]
    for axes, curves, default, values in (
        (left, own, report.default, own_values),
        (right, papers, paper_default, paper_values),
    ):
        axes.set_xscale("log", base=2)
        axes.set_xlim(default * min(ratios) / 1.5, default * max(ratios) * 1.5)
        axes.set_ylim(_limits(curves, span))
        for strategy, points in curves.items():
            _draw(axes, strategy, points)
        _write_numbers(axes, list(curves.values()))
        _mark_default(axes, default)
        style_axes(axes, report.ablation.symbol.replace("N_b", "$N_b$"), tick_points=SMALL_POINTS)
        _set_ticks(axes, values)
    _mark_missing(left, report)
    if report.chance is not None:
        _draw_chance(left, report.chance, f"chance, {report.num_classes:,} classes")
    _draw_chance(right, _PAPER_CHANCE, "chance, 1,000 classes")
    left.set_ylabel("k-NN top-1, %", color=INK, fontsize=TEXT_POINTS)
    titles = {left: f"ours: {ours}; {report.measured}", right: "the paper: ViT-S/16, ImageNet, 100 epochs"}
    for axes, title in titles.items():
        lines = textwrap.fill(title, _TITLE_CHARACTERS)
        axes.set_title(lines, loc="left", fontsize=SMALL_POINTS, color=INK, parse_math=False)
        if len(axes.get_legend_handles_labels()[1]) > 1:
            axes.legend(frameon=False, fontsize=SMALL_POINTS, loc="best", labelcolor=INK)
    figure.suptitle(report.ablation.title, x=0.01, ha="left", fontsize=TEXT_POINTS + 1, color=INK, parse_math=False)
    return figure


def _own_curves(report: AblationReport) -> _Curves:
    curves = {
        strategy: [
            _Point(point.value, point.mean, point.deviation or 0.0, bool(point.num_collapsed))
            for point in report.of(strategy)
            if point.mean is not None
        ]
        for strategy in report.ablation.strategies
    }
    return {strategy: points for strategy, points in curves.items() if points}


def _paper_curves(report: AblationReport) -> _Curves:
    """The text says that all blockwise runs collapse."""
    return {
        strategy: [
            _Point(point.value, point.figure.value, 0.0, strategy == "blockwise")
            for point in paper_points(report.kind)
            if point.strategy == strategy
        ]
        for strategy in report.ablation.strategies
    }


def _bounds(curves: _Curves) -> tuple[float, float]:
    points = [point for curve in curves.values() for point in curve]
    lowest = min((point.accuracy - point.deviation for point in points), default=0.0)
    return lowest, max((point.accuracy + point.deviation for point in points), default=0.0)


def _limits(curves: _Curves, span: float) -> tuple[float, float]:
    """Around the curves, equally high in both panels, and hardly below 0."""
    low, high = _bounds(curves)
    height = span * (1.0 + 2.0 * _HEADROOM)
    bottom = max((low + high - height) / 2, -0.07 * height)
    return bottom, bottom + height


def _draw(axes: Axes, strategy: Strategy, points: Sequence[_Point]) -> None:
    colour, marker = _STYLES[strategy]
    values, accuracies, deviations = ([point[place] for point in points] for place in range(3))
    axes.plot(values, accuracies, color=colour, linewidth=1.5, zorder=2)
    if any(deviations):
        axes.errorbar(values, accuracies, yerr=deviations, fmt="none", ecolor=colour, capsize=3, linewidth=1.0)
    for is_collapsed in (False, True):
        chosen = [point for point in points if point.is_collapsed == is_collapsed]
        axes.plot(
            [point.value for point in chosen],
            [point.accuracy for point in chosen],
            linestyle="none",
            marker=marker,
            markersize=6,
            color=colour,
            markerfacecolor="white" if is_collapsed else colour,
            label=f"{strategy} blocks{', collapsed' if is_collapsed else ''}" if chosen else None,
            zorder=3,
        )


def _write_numbers(axes: Axes, curves: Sequence[Sequence[_Point]]) -> None:
    """Above the points; below if another curve runs close above."""
    low, high = axes.get_ylim()
    everywhere = [point for curve in curves for point in curve]
    for point in everywhere:
        gaps = [other.accuracy - point.accuracy for other in everywhere if other.value == point.value]
        if any(0.0 < gap < _CLOSE * (high - low) for gap in gaps):
            _label(axes, f"{point.accuracy:.1f}", (point.value, point.accuracy - point.deviation), offset=(0, -15))
        else:
            _label(axes, f"{point.accuracy:.1f}", (point.value, point.accuracy + point.deviation), offset=(0, 6))


def _label(
    axes: Axes,
    text: str,
    place: tuple[float, float],
    *,
    of: tuple[Literal["data", "axes fraction"], Literal["data", "axes fraction"]] = ("data", "data"),
    offset: tuple[int, int],  # points
    side: Literal["left", "center", "right"] = "center",
    colour: str = INK,
) -> None:
    axes.annotate(
        text,
        xy=place,
        xycoords=of,
        xytext=offset,
        textcoords="offset points",
        ha=side,
        va="bottom",
        fontsize=SMALL_POINTS,
        color=colour,
        annotation_clip=False,
        path_effects=[withStroke(linewidth=2.0, foreground="white")],  # readable on a line
    )


def _mark_default(axes: Axes, default: int) -> None:
    lowest, highest = axes.get_xlim()
    if lowest < default < highest:
        axes.axvline(default, color=FAINT, linewidth=1.0, linestyle=":", zorder=1)
        _label(axes, "default", (default, 1.0), of=("data", "axes fraction"), offset=(3, -8), side="left", colour=FAINT)


def _draw_chance(axes: Axes, chance: float, label: str) -> None:
    """Only if it lies within the axis, which the curves determine."""
    low, high = axes.get_ylim()
    if low <= chance <= high:
        axes.axhline(chance, color=FAINT, linewidth=1.0, linestyle="--", zorder=1, label=label)


def _mark_missing(axes: Axes, report: AblationReport) -> None:
    """Values without a number: a cross on the axis, and the reason."""
    low, _ = axes.get_ylim()
    for line, strategy in enumerate(report.ablation.strategies):
        for point in report.of(strategy):
            if point.mean is None:
                colour, _ = _STYLES[strategy]
                axes.plot([point.value], [low], marker="x", color=colour, markersize=7, clip_on=False)
                states = ", ".join(sorted({run.state for run in point.runs}))
                _label(axes, states, (point.value, low), offset=(0, 7 + 10 * line), colour=colour)


def _set_ticks(axes: Axes, values: Iterable[int]) -> None:
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(values))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
