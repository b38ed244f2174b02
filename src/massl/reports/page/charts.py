"""Charts as SVG, for print and for readers without scripts; assets/charts.js redraws them with the same geometry."""

import math
from collections.abc import Sequence

from markupsafe import Markup

from massl.reports.page.series import NUM_COLOURS, Axis, Chart, Point, Series
from massl.reports.page.templates import rendered

WIDTH, HEIGHT = 520, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 10, 40  # margins of the plot: numbers to its left, numbers and a title below it
_LEVEL_ROW = 20  # above the plot: the level's name, where no curve can pass through it
_MOST_TICKS = 5
_LEAST_SPAN = 1e-290  # a smaller one cannot be divided into ticks
_DASHES = ("", "6 4", "2 4")  # of the first six runs, of the next six with the same colours, and of all others


def static_chart(chart: Chart, *, axis: Axis, axis_title: str) -> Markup:
    """The chart over one axis, with the colours of the page's style sheet."""
    points = [point for one in chart.series for point in one.points]
    across = (0.0, max(_place(point, axis) for point in points) or 1.0)
    level = chart.level
    top = _TOP if level is None else _TOP + _LEVEL_ROW
    values = [point.value for point in points] + ([] if level is None else [level.value])
    x_ticks, y_ticks = ticks(*across), ticks(min(values), max(values))
    up = (min(y_ticks[0], *values), max(y_ticks[-1], *values))

    def along(place: float) -> float:
        return _scaled(place, across, (_LEFT, WIDTH - _RIGHT))

    def above(value: float) -> float:
        return _scaled(value, up, (HEIGHT - _BOTTOM, top))

    drawing = {
        "width": WIDTH,
        "height": HEIGHT,
        "left": _LEFT,
        "right": WIDTH - _RIGHT,
        "bottom": HEIGHT - _BOTTOM,
        "x_ticks": [(round(along(tick), 1), tick_text(tick, x_ticks)) for tick in x_ticks if tick <= across[1]],
        "y_ticks": [(round(above(tick), 1), tick_text(tick, y_ticks)) for tick in y_ticks],
        "axis_title": axis_title,
        "title": chart.metric.title,
        "level": None if level is None else (round(above(level.value), 1), level.label),
        "lines": [
            _line(one, [(along(_place(point, axis)), above(point.value)) for point in one.points])
            for one in chart.series
        ],
    }
    return rendered("chart.html.j2", drawing)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from at most `low` to at least `high`."""
    if high - low <= max(1e-9 * max(abs(low), abs(high)), _LEAST_SPAN):  # equal but for rounding
        margin = abs(low) * 0.1 if abs(low) > _LEAST_SPAN else 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / _MOST_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def tick_text(tick: float, of: Sequence[float]) -> str:
    """Short, and in the same style along an axis: 12,500 or 0.25; 5e-4 if all are small, 2e9 if it would be long."""
    if tick == 0:
        return "0"
    if max(map(abs, of)) < 0.01 or abs(tick) >= 1e8:
        digits, _, power = f"{tick:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{tick:,.0f}" if abs(tick) >= 1000 else f"{tick:.4g}"


def _place(point: Point, axis: Axis) -> float:
    place: float = getattr(point, axis)
    return place


def _scaled(value: float, source: tuple[float, float], target: tuple[float, float]) -> float:
    return target[0] + (value - source[0]) / (source[1] - source[0]) * (target[1] - target[0])


def _line(series: Series, corners: Sequence[tuple[float, float]]) -> dict[str, object]:
    return {
        "colour": f"var(--run-{series.run % NUM_COLOURS})",
        "dash": dash_of(series.run),
        "corners": " ".join(f"{x:.1f},{y:.1f}" for x, y in corners),
        "alone": corners[0] if len(corners) == 1 else None,
    }


def dash_of(run: int) -> str:
    return _DASHES[min(run // NUM_COLOURS, len(_DASHES) - 1)]
