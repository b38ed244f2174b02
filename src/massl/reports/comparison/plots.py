"""Figures of runs side by side: k-NN accuracy against the GPU-minutes and against the epochs it took."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from massl.reports.comparison.tables import cautions, device_word, shared_by
from massl.reports.runs import Run

# Okabe and Ito's colours, which are told apart with any colour vision, with a dark red for their yellow, which is
# hardly seen on white: as many as there are methods. Markers differ too, so that a print in grey can be read; lines
# beyond the eighth are dashed.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#882255")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
_INK, _FAINT = "#282828", "#969696"  # the ink and grey of pictures.py
_WIDTH, _HEIGHT = 10.0, 4.4  # inches; together with 150 dots an inch a picture of 1500 px
_DOTS_PER_INCH = 150
_TEXT_POINTS, _SMALL_POINTS = 9.0, 7.5
_LABEL_STEP = 0.055  # least distance of two labels, as a part of the usual panel's height: one line of text
_MOST_MARKERS = 15  # on a line; more would hide it
_LONGEST_LABEL = 30  # characters


def comparison_figure(runs: Sequence[Run]) -> Figure:
    """Two panels with one axis of k-NN accuracy: what was learnt for the cost, and what was learnt from the data."""
    growth = max(1.0, len(runs) * _LABEL_STEP)  # of the panels' height, until every name has its line
    figure = Figure(figsize=(_WIDTH, _HEIGHT * growth), layout="constrained")
    by_cost, by_epoch = figure.subplots(1, 2, sharey=True)
    for number, run in enumerate(runs):
        accuracies = [point.knn_top1 for point in run.probes]
        for axes, places in (
            (by_cost, [point.gpu_minutes for point in run.probes]),
            (by_epoch, [point.epoch for point in run.probes]),
        ):
            axes.plot(
                places,
                accuracies,
                color=_COLOURS[number % len(_COLOURS)],
                marker=_MARKERS[number % len(_MARKERS)],
                linestyle="-" if number < len(_COLOURS) else "--",
                markevery=-(-len(places) // _MOST_MARKERS),
                markersize=4,
                linewidth=1.5,
            )
    device = device_word(runs)
    _dress(by_cost, f"{device}-minutes of training (probes not counted)")
    _dress(by_epoch, "epochs")
    by_cost.set_ylabel("k-NN top-1 of the probe, %", color=_INK, fontsize=_TEXT_POINTS)
    _write_labels(by_epoch, runs, step=_LABEL_STEP / growth)
    figure.suptitle(shared_by(runs), x=0.01, ha="left", fontsize=_TEXT_POINTS + 1, color=_INK, parse_math=False)
    remarks = _lines(cautions(runs), width=150)
    if remarks:
        figure.supxlabel(remarks, x=0.01, ha="left", fontsize=_SMALL_POINTS, color=_INK, parse_math=False)
    return figure


def save_figure(figure: Figure, stem: Path) -> tuple[Path, Path]:
    """STEM.png to look at and STEM.svg to print; returns both."""
    png, svg = stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")
    with matplotlib.rc_context({"svg.hashsalt": "massl"}):  # the same runs give the same file, byte for byte
        figure.savefig(png, dpi=_DOTS_PER_INCH)
        figure.savefig(svg, metadata={"Date": None})
    return png, svg


def spread(wanted: Sequence[float], *, step: float) -> list[float]:
    """Places in [0, 1] near the wanted ones, in their order, no two nearer than `step`; beyond 0 where there is no room
    for all.
    """
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


def _dress(axes: Axes, what: str) -> None:
    axes.set_xlabel(what, color=_INK, fontsize=_TEXT_POINTS)
    axes.set_xlim(left=0.0)
    axes.grid(alpha=0.25)
    axes.tick_params(colors=_INK, labelsize=_TEXT_POINTS - 0.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)


def _write_labels(axes: Axes, runs: Sequence[Run], *, step: float) -> None:
    """Each run's name and last accuracy to the right of where its line ends: nobody has to look up a colour."""
    low, high = axes.get_ylim()
    places = spread([(run.last.knn_top1 - low) / (high - low) for run in runs], step=step)
    for number, (run, place) in enumerate(zip(runs, places, strict=True)):
        axes.annotate(
            f"{_shortened(run.label)}  {run.last.knn_top1:.1f}",
            xy=(run.last.epoch, run.last.knn_top1),
            xytext=(1.06, place),
            textcoords="axes fraction",
            va="center",
            color=_INK,
            fontsize=_TEXT_POINTS,
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
    """Its middle left out where it is long: of a path both ends tell something."""
    if len(label) <= _LONGEST_LABEL:
        return label
    half = (_LONGEST_LABEL - 3) // 2
    return f"{label[:half]}...{label[-half:]}"


def _lines(sentences: Sequence[str], *, width: int) -> str:
    return "\n".join(line for sentence in sentences for line in textwrap.wrap(sentence, width))
