"""Figure of runs side by side: k-NN accuracy, or a measure without labels, against GPU-minutes and epochs."""

import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from massl.reports.comparison.tables import cautions, device_word, shared_by
from massl.reports.figures import INK, SMALL_POINTS, TEXT_POINTS, font_of, style_axes
from massl.reports.fonts import drawable
from massl.reports.runs import PROBE_METRICS, Run

# One for each method: the colour-blind safe palette of Okabe and Ito, with a dark red for yellow, which is hardly seen
# on white. Markers differ too, for prints in grey; lines beyond the eighth are dashed.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#882255")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
_WIDTH, _HEIGHT = 10.0, 4.4  # inches
_LABEL_STEP = 0.055  # one line of text: least distance of two labels, as a share of the usual panel's height
_MOST_MARKERS = 15  # more would hide the line
_LONGEST_LABEL = 30  # characters
_TITLES = {
    "knn_top1": "k-NN top-1 of the probe, %",
    "other_view_top1": "other view found by the probe, %",
    "effective_rank": "effective rank of the features",
}


def comparison_figure(runs: Sequence[Run]) -> Figure:
    """Two panels that share the axis of the most telling metric: against cost, and against epochs.

    Runs that lack the metric are named below and not drawn.
    """
    metric = next((key for key in PROBE_METRICS if any(run.measured(key) for run in runs)), "knn_top1")
    missing = [run.label for run in runs if not run.measured(metric)]
    growth = max(1.0, len(runs) * _LABEL_STEP)  # panels grow until every name has its own line
    figure = Figure(figsize=(_WIDTH, _HEIGHT * growth), layout="constrained")
    by_cost, by_epoch = figure.subplots(1, 2, sharey=True)
    for number, run in enumerate(runs):
        points = run.measured(metric)
        if not points:
            continue
        for axes, places in (
            (by_cost, [point.gpu_minutes for point in points]),
            (by_epoch, [point.epoch for point in points]),
        ):
            axes.plot(
                places,
                [point.value for point in points],
                color=_COLOURS[number % len(_COLOURS)],
                marker=_MARKERS[number % len(_MARKERS)],
                linestyle="-" if number < len(_COLOURS) else "--",
                markevery=-(-len(places) // _MOST_MARKERS),
                markersize=4,
                linewidth=1.5,
            )
    for axes, label in (
        (by_cost, f"{device_word(runs)}-minutes of training (probes not counted)"),
        (by_epoch, "epochs"),
    ):
        axes.set_xlim(left=0.0)
        style_axes(axes, label, tick_points=TEXT_POINTS - 0.5)
    by_cost.set_ylabel(_TITLES[metric], color=INK, fontsize=TEXT_POINTS)
    _write_labels(by_epoch, runs, metric, step=_LABEL_STEP / growth)
    title = shared_by(runs)
    look: dict[str, Any] = {"x": 0.01, "ha": "left", "color": INK, "parse_math": False}
    figure.suptitle(drawable(title), fontproperties=font_of(title, TEXT_POINTS + 1), **look)
    sentences = [*cautions(runs), *([f"not drawn, without this metric: {', '.join(missing)}"] if missing else [])]
    remarks = "\n".join(line for sentence in sentences for line in textwrap.wrap(sentence, width=150))
    if remarks:
        figure.supxlabel(drawable(remarks), fontproperties=font_of(remarks, SMALL_POINTS), **look)
    return figure


def spread(wanted: Sequence[float], *, step: float) -> list[float]:
    """Places in [0, 1] near the wanted ones, in their order, at least `step` apart; below 0 if there is no room."""
    order = sorted(range(len(wanted)), key=lambda number: wanted[number])
    places = [0.0] * len(wanted)
    lowest = -float("inf")
    for number in order:
        places[number] = lowest = max(wanted[number], lowest + step)
    highest = 1.0
    for number in reversed(order):
        places[number] = min(places[number], highest)
        highest = places[number] - step
    return places


def _write_labels(axes: Axes, runs: Sequence[Run], metric: str, *, step: float) -> None:
    """Each run's name and last value to the right of its line's end, so that no legend is needed."""
    low, high = axes.get_ylim()
    ends = [(number, run.label, run.measured(metric)[-1]) for number, run in enumerate(runs) if run.measured(metric)]
    places = spread([(end.value - low) / (high - low) for _, _, end in ends], step=step)
    for (number, label, end), place in zip(ends, places, strict=True):
        axes.annotate(
            f"{drawable(_shortened(label))}  {end.value:.1f}",
            xy=(end.epoch, end.value),
            xytext=(1.06, place),
            textcoords="axes fraction",
            va="center",
            color=INK,
            fontproperties=font_of(label, TEXT_POINTS),
            annotation_clip=False,
            parse_math=False,
            arrowprops={
                "arrowstyle": "-",
                "relpos": (0.0, 0.5),
                "color": _COLOURS[number % len(_COLOURS)],
                "linewidth": 0.8,
                "shrinkA": 1,
                "shrinkB": 2,
            },
        )


def _shortened(label: str) -> str:
    """Without the middle if it is long: both ends of a path are informative."""
    if len(label) <= _LONGEST_LABEL:
        return label
    half = (_LONGEST_LABEL - 3) // 2
    return f"{label[:half]}...{label[-half:]}"
