"""The small picture of a model card: loss and probes over training."""

from pathlib import Path

from matplotlib.figure import Figure

from massl.reports.figures import SMALL_POINTS, style_axes
from massl.reports.runs import Run

_TITLES = {
    "loss": "loss",
    "knn_top1": "k-NN top-1 (%)",
    "other_view_top1": "other view found (%)",
    "effective_rank": "effective rank",
}
_MOST_PANELS = 3


def draw_curves(run: Run, path: Path) -> bool:
    """Write the picture; False if the run has no curve of at least two points."""
    curves = {
        title: [(row["step"], row[metric]) for row in run.rows if metric in row] for metric, title in _TITLES.items()
    }
    shown = [(title, points) for title, points in curves.items() if len(points) >= 2][:_MOST_PANELS]
    if not shown:
        return False
    figure = Figure(figsize=(3.2 * len(shown), 2.4), layout="constrained")
    for number, (title, points) in enumerate(shown):
        axes = figure.add_subplot(1, len(shown), number + 1)
        axes.plot(*zip(*points, strict=True), linewidth=1.4)
        axes.set_title(title, fontsize=SMALL_POINTS + 1)
        style_axes(axes, "step", tick_points=SMALL_POINTS)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return True
