"""The curves of runs as data: which metrics there are, what they are called, and not more points than a screen can
show.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from massl.reports.runs import Run

Axis = Literal["step", "epoch", "minutes"]
MOST_POINTS = 600  # of a curve: more are finer than the pixels of a chart
NUM_COLOURS = 6  # --run-0 ... --run-5 of page.css; further runs repeat them dashed


class Metric(NamedTuple):
    """How a key of metrics.jsonl is shown."""

    title: str
    unit: str = ""
    hint: str = ""


# In this order.
METRICS: dict[str, Metric] = {
    "loss": Metric("Loss", hint="of the batch at each logged step"),
    "knn_top1": Metric("k-NN accuracy", "%", "the run's own probe"),
    "effective_rank": Metric("Effective rank", hint="how many directions the features use"),
    "teacher_entropy": Metric("Entropy of the teacher", "nats", "near 0: all weight on one row or prototype"),
    "memory_winner_share": Metric("Memory rows that win", hint="share of rows that are nearest to some image"),
    "prototype_entropy": Metric("Entropy of the mean assignment", "nats", "how evenly prototypes are used"),
    "prototype_winner_share": Metric("Prototypes that win", hint="share of prototypes that are nearest to some image"),
    "embedding_spread": Metric("Spread of the embeddings", hint="near 0: all are the same vector"),
    "feature_spread": Metric("Spread of the features", hint="near 0: all are the same vector"),
    "lr": Metric("Learning rate"),
    "images_per_second": Metric("Images per second", hint="over all processes"),
}
FURTHER: dict[str, Metric] = {  # behind a fold, after what a method logs besides under names of its own
    "weight_decay": Metric("Weight decay"),
    "momentum": Metric("Momentum of the teacher"),
    "teacher_temperature": Metric("Temperature of the teacher"),
    "peak_memory_gib": Metric("Peak memory", "GiB", "the most allocated on one GPU so far"),
}
_PLACES = frozenset({"step", "epoch"})


class Point(NamedTuple):
    """One number, at its three places."""

    step: float
    epoch: float
    minutes: float
    value: float


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric of one run."""

    run: int  # its number on the page
    points: tuple[Point, ...]


class Level(NamedTuple):
    """A number to hold a curve against, drawn across the chart."""

    value: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What one panel shows."""

    id: str
    metric: Metric
    series: tuple[Series, ...]
    axis: Axis | None = None  # None: the one the reader chooses
    has_markers: bool = False  # for numbers that come from time to time
    level: Level | None = None


def charts_of(runs: Sequence[Run]) -> tuple[list[Chart], list[Chart]]:
    """Those to look at, then those behind a fold; only metrics that some row has."""
    found = {key for run in runs for row in run.rows for key in row} - _PLACES
    own = {key: Metric(key.replace("_", " ").capitalize()) for key in sorted(found - METRICS.keys() - FURTHER.keys())}
    main, further = [
        [_chart(key, metric, runs) for key, metric in metrics.items() if key in found]
        for metrics in (METRICS, own | FURTHER)
    ]
    accuracy = next((chart for chart in main if chart.id == "knn_top1"), None)
    if accuracy is not None:
        metric = Metric(
            "k-NN accuracy for the time spent", "%", "minutes of training times processes, probes not counted"
        )
        by_cost = Chart(
            id="knn_by_minutes",
            metric=metric,
            series=accuracy.series,
            axis="minutes",
            has_markers=True,
            level=accuracy.level,
        )
        main.insert(main.index(accuracy) + 1, by_cost)
    return [chart for chart in main if chart.series], [chart for chart in further if chart.series]


def _chart(key: str, metric: Metric, runs: Sequence[Run]) -> Chart:
    series = [Series(run=number, points=thinned(points_of(run, key))) for number, run in enumerate(runs)]
    is_accuracy = key == "knn_top1"
    drawn = tuple(one for one in series if one.points)
    return Chart(
        id=key, metric=metric, series=drawn, has_markers=is_accuracy, level=_raw_pixels(runs) if is_accuracy else None
    )


def _raw_pixels(runs: Sequence[Run]) -> Level | None:
    """What k-NN reaches without a network, where there is one run: those of several need not be of the same images."""
    accuracy = runs[0].raw_pixel_knn if len(runs) == 1 else None
    return None if accuracy is None else Level(accuracy, f"raw pixels {accuracy:.1f} %")


def points_of(run: Run, key: str) -> list[Point]:
    """All numbers of a metric; a rate of images is one only after the first step."""
    return [
        Point(row["step"], epoch, minutes, row[key])
        for row, epoch, minutes in zip(run.rows, run.epochs_at_rows, run.gpu_minutes_at_rows, strict=True)
        if key in row and not (key == "images_per_second" and row["step"] == 0)
    ]


def thinned(points: Sequence[Point], *, most: int = MOST_POINTS) -> tuple[Point, ...]:
    """At most that many: first, last, and of each stretch between them its lowest and highest, so that no spike is
    lost.
    """
    if len(points) <= most:
        return tuple(points)
    inner, num_stretches = points[1:-1], (most - 2) // 2
    kept = {0, len(points) - 1}
    for stretch in range(num_stretches):
        places = range(len(inner) * stretch // num_stretches, len(inner) * (stretch + 1) // num_stretches)
        kept.add(1 + min(places, key=lambda place: inner[place].value))
        kept.add(1 + max(places, key=lambda place: inner[place].value))
    return tuple(points[place] for place in sorted(kept))


def default_axis(runs: Sequence[Run]) -> Axis:
    """Epochs, unless a run has not ended its first: then steps tell more."""
    return "epoch" if all(any(row["epoch"] >= 1 for row in run.rows) for run in runs if run.rows) else "step"


def plain(charts: Sequence[Chart], runs: Sequence[Run], *, minutes_of: str) -> dict[str, object]:
    """For the page's scripts: numbers in full precision would only make it longer."""
    return {
        "axis": default_axis(runs),
        "axes": {"step": "step", "epoch": "epoch", "minutes": f"{minutes_of}-minutes"},
        "runs": [{"label": run.label} for run in runs],
        "charts": {chart.id: _plain_chart(chart) for chart in charts},
    }


def _plain_chart(chart: Chart) -> Mapping[str, object]:
    return {
        "title": chart.metric.title,
        "unit": chart.metric.unit,
        "axis": chart.axis,
        "markers": chart.has_markers,
        "level": None if chart.level is None else chart.level._asdict(),
        "series": [
            {"run": one.run, "points": [[float(f"{number:.6g}") for number in point] for point in one.points]}
            for one in chart.series
        ],
    }
