"""The curves of runs as data: the metrics with their titles, in no more points than a screen can show."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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


# In the order of the page.
METRICS: dict[str, Metric] = {
    "loss": Metric("Loss", hint="of the batch at each logged step"),
    "knn_top1": Metric("k-NN accuracy", "%", "the run's own probe"),
    "other_view_top1": Metric("Other view found", "%", "how often a random crop finds its own image"),
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
_FURTHER: dict[str, Metric] = {  # behind a fold, after further metrics that the method logs
    "weight_decay": Metric("Weight decay"),
    "momentum": Metric("Momentum of the teacher"),
    "teacher_temperature": Metric("Temperature of the teacher"),
    "peak_memory_gib": Metric("Peak memory", "GiB", "the most allocated on one GPU so far"),
}
_PLACES = frozenset({"step", "epoch"})


class Point(NamedTuple):
    """One number, at its place on each axis."""

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
    """A number to compare a curve with, drawn across the chart."""

    value: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What one panel shows."""

    id: str
    metric: Metric
    series: tuple[Series, ...]
    axis: Axis | None = None  # None: the one the reader chooses
    has_markers: bool = False  # for rare numbers
    level: Level | None = None


def charts_of(runs: Sequence[Run]) -> tuple[list[Chart], list[Chart]]:
    """The main charts and those behind a fold, of metrics that some run logged."""
    found = {key for run in runs for row in run.rows for key in row} - _PLACES
    own = {key: Metric(key.replace("_", " ").capitalize()) for key in sorted(found - METRICS.keys() - _FURTHER.keys())}
    main, further = [
        [_chart(key, metric, runs) for key, metric in metrics.items() if key in found]
        for metrics in (METRICS, own | _FURTHER)
    ]
    accuracy = next((chart for chart in main if chart.id == "knn_top1"), None)
    if accuracy is not None:
        hint = "minutes of training times processes, probes not counted"
        metric = Metric("k-NN accuracy for the time spent", "%", hint)
        by_cost = replace(accuracy, id="knn_by_minutes", metric=metric, axis="minutes")
        main.insert(main.index(accuracy) + 1, by_cost)
    return [chart for chart in main if chart.series], [chart for chart in further if chart.series]


def _chart(key: str, metric: Metric, runs: Sequence[Run]) -> Chart:
    series = [Series(run=number, points=thinned(_points_of(run, key))) for number, run in enumerate(runs)]
    drawn = tuple(one for one in series if one.points)
    if key != "knn_top1":
        return Chart(id=key, metric=metric, series=drawn)
    raw_pixels = runs[0].raw_pixel_knn if len(runs) == 1 else None  # several runs may be of different images
    level = None if raw_pixels is None else Level(raw_pixels, f"raw pixels {raw_pixels:.1f} %")
    return Chart(id=key, metric=metric, series=drawn, has_markers=True, level=level)


def _points_of(run: Run, key: str) -> list[Point]:
    """All numbers of a metric; the rate of images is meaningless at step 0."""
    return [
        Point(row["step"], epoch, minutes, row[key])
        for row, epoch, minutes in zip(run.rows, run.epochs_at_rows, run.gpu_minutes_at_rows, strict=True)
        if key in row and not (key == "images_per_second" and row["step"] == 0)
    ]


def thinned(points: Sequence[Point], *, most: int = MOST_POINTS) -> tuple[Point, ...]:
    """At most that many: first, last, and the lowest and highest of each stretch between, so that spikes stay."""
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
    """Epochs, or steps if a run has not finished its first epoch."""
    return "epoch" if all(any(row["epoch"] >= 1 for row in run.rows) for run in runs if run.rows) else "step"


def axis_titles(device: str) -> dict[Axis, str]:
    return {"step": "step", "epoch": "epoch", "minutes": f"{device}-minutes"}


def plain(charts: Sequence[Chart], runs: Sequence[Run], *, device: str) -> dict[str, object]:
    """Data for the page's scripts; six digits, because full precision would only make the page longer."""
    by_id = {}
    for chart in charts:
        by_id[chart.id] = {
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
    labels = [{"label": run.label} for run in runs]
    return {"axis": default_axis(runs), "axes": axis_titles(device), "runs": labels, "charts": by_id}
