"""An ablation as a figure: our curve and the paper's in two panels that can be compared.

Both panels have the same ratios to the default on their horizontal axes, in powers of two, and the same number of
points (percent) on their vertical ones, each around its own figures: a slope is the same slope in both.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
_PAPER_CHANCE = 0.1  # percent: of ImageNet's 1,000 classes
_TITLE_CHARACTERS = 85  # of a line above a panel
_CLOSE = 0.1  # of the height of a panel: nearer points leave no room between them for a number
_HEADROOM = 0.2  # of the span, above and below the curves: room for their numbers


@dataclass(frozen=True, kw_only=True)
class _Curve:
    label: str
    strategy: Strategy
    values: tuple[int, ...]
    accuracies: tuple[float, ...]
    deviations: tuple[float, ...]  # 0 where unknown
    collapsed: tuple[bool, ...]


def ablation_figure(report: AblationReport, *, ours: str) -> Figure:
    """`ours` says above our panel what was trained on what."""
    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    left, right = figure.subplots(1, 2)
    own, papers = _own_curves(report), _paper_curves(report)
    span = max(_LEAST_SPAN, *(_span(curves) for curves in (own, papers)))
    ratios = [point.value / report.default for point in report.points]
    ratios += [point.value / report.ablation.paper_default for point in paper_points(report.kind)]
    for axes, curves, default in ((left, own, report.default), (right, papers, report.ablation.paper_default)):
        axes.set_xscale("log", base=2)
        axes.set_xlim(default * min(ratios) / 1.5, default * max(ratios) * 1.5)
        axes.set_ylim(_limits(curves, span))
        for curve in curves:
            _draw(axes, curve)
        _write_numbers(axes, curves)
        _dress(axes, report.ablation.symbol, default)
    _set_values(left, [point.value for point in report.points])
    _set_values(right, [point.value for point in paper_points(report.kind)])
    _mark_missing(left, report)
    if report.chance is not None:
        _draw_chance(left, report.chance, f"chance, {report.num_classes:,} classes")
    _draw_chance(right, _PAPER_CHANCE, "chance, 1,000 classes")
    left.set_ylabel("k-NN top-1, %", color=INK, fontsize=TEXT_POINTS)
    _write_title(left, f"ours: {ours}; {report.measured}")
    _write_title(right, "the paper: ViT-S/16, ImageNet, 100 epochs")
    for axes in (left, right):
        if len(axes.get_legend_handles_labels()[1]) > 1:
            axes.legend(frameon=False, fontsize=SMALL_POINTS, loc="best", labelcolor=INK)
    figure.suptitle(report.ablation.title, x=0.01, ha="left", fontsize=TEXT_POINTS + 1, color=INK, parse_math=False)
    return figure


def _own_curves(report: AblationReport) -> list[_Curve]:
    curves = []
    for strategy in report.ablation.strategies:
        points = [(point, point.mean) for point in report.of(strategy) if point.mean is not None]
        if points:
            curves.append(
                _Curve(
                    label=f"{strategy} blocks",
                    strategy=strategy,
                    values=tuple(point.value for point, _ in points),
                    accuracies=tuple(mean for _, mean in points),
                    deviations=tuple(point.deviation or 0.0 for point, _ in points),
                    collapsed=tuple(bool(point.num_collapsed) for point, _ in points),
                )
            )
    return curves


def _paper_curves(report: AblationReport) -> list[_Curve]:
    curves = []
    for strategy in report.ablation.strategies:
        points = [point for point in paper_points(report.kind) if point.strategy == strategy]
        curves.append(
            _Curve(
                label=f"{strategy} blocks",
                strategy=strategy,
                values=tuple(point.value for point in points),
                accuracies=tuple(point.figure.value for point in points),
                deviations=(0.0,) * len(points),
                collapsed=(strategy == "blockwise",) * len(points),  # as its text says of all of them
            )
        )
    return curves


def _bounds(curves: Sequence[_Curve]) -> tuple[float, float]:
    pairs = [
        (value, deviation)
        for curve in curves
        for value, deviation in zip(curve.accuracies, curve.deviations, strict=True)
    ]
    return min(value - deviation for value, deviation in pairs), max(value + deviation for value, deviation in pairs)


def _span(curves: Sequence[_Curve]) -> float:
    if not curves:
        return 0.0
    low, high = _bounds(curves)
    return high - low


def _draw(axes: Axes, curve: _Curve) -> None:
    colour, marker = _STYLES[curve.strategy]
    axes.plot(curve.values, curve.accuracies, color=colour, linewidth=1.5, zorder=2)
    if any(curve.deviations):
        axes.errorbar(
            curve.values, curve.accuracies, yerr=curve.deviations, fmt="none", ecolor=colour, capsize=3, linewidth=1.0
        )
    for is_collapsed in (False, True):
        chosen = [number for number, collapsed in enumerate(curve.collapsed) if collapsed == is_collapsed]
        axes.plot(
            [curve.values[number] for number in chosen],
            [curve.accuracies[number] for number in chosen],
            linestyle="none",
            marker=marker,
            markersize=6,
            color=colour,
            markerfacecolor="white" if is_collapsed else colour,
            label=f"{curve.label}{', collapsed' if is_collapsed else ''}" if chosen else None,
            zorder=3,
        )


def _write_numbers(axes: Axes, curves: Sequence[_Curve]) -> None:
    """Above their points; below where another curve runs close above."""
    low, high = axes.get_ylim()
    for curve in curves:
        for value, accuracy, deviation in zip(curve.values, curve.accuracies, curve.deviations, strict=True):
            gaps = [other.accuracies[other.values.index(value)] - accuracy for other in curves if value in other.values]
            if any(0.0 < gap < _CLOSE * (high - low) for gap in gaps):
                _label(axes, f"{accuracy:.1f}", (value, accuracy - deviation), offset=(0, -15))
            else:
                _label(axes, f"{accuracy:.1f}", (value, accuracy + deviation), offset=(0, 6))


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
        path_effects=[withStroke(linewidth=2.0, foreground="white")],  # to be read where it lies on a line
    )


def _draw_chance(axes: Axes, chance: float, label: str) -> None:
    """Only where it is in sight: the curves choose the axis."""
    low, high = axes.get_ylim()
    if low <= chance <= high:
        axes.axhline(chance, color=FAINT, linewidth=1.0, linestyle="--", zorder=1, label=label)


def _mark_missing(axes: Axes, report: AblationReport) -> None:
    """Values without a number: a cross on the axis, and why."""
    low, _ = axes.get_ylim()
    for line, strategy in enumerate(report.ablation.strategies):
        for point in report.of(strategy):
            if point.mean is None:
                colour, _ = _STYLES[strategy]
                axes.plot([point.value], [low], marker="x", color=colour, markersize=7, clip_on=False)
                states = ", ".join(sorted({run.state for run in point.runs}))
                _label(axes, states, (point.value, low), offset=(0, 7 + 10 * line), colour=colour)


def _limits(curves: Sequence[_Curve], span: float) -> tuple[float, float]:
    """Around the curves, of one height in both panels, and hardly below 0."""
    low, high = _bounds(curves) if curves else (0.0, span)
    height = span * (1.0 + 2.0 * _HEADROOM)
    bottom = max((low + high - height) / 2, -0.07 * height)
    return bottom, bottom + height


def _set_values(axes: Axes, values: Sequence[int]) -> None:
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(values))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _write_title(axes: Axes, title: str) -> None:
    lines = textwrap.fill(title, _TITLE_CHARACTERS)
    axes.set_title(lines, loc="left", fontsize=SMALL_POINTS, color=INK, parse_math=False)


def _dress(axes: Axes, symbol: str, default: int) -> None:
    lowest, highest = axes.get_xlim()
    if lowest < default < highest:
        axes.axvline(default, color=FAINT, linewidth=1.0, linestyle=":", zorder=1)
        _label(
            axes, "default", (default, 1.0), of=("data", "axes fraction"), offset=(3, -8), side="left", colour=FAINT
        )
    style_axes(axes, symbol.replace("N_b", "$N_b$"), tick_points=SMALL_POINTS)
