r"""Plot the k-NN accuracy of runs over epochs, with the rows of a public table as lines.

cd docs/results/lightly-cifar10; python ../../../scripts/public_table_curve.py lightly-cifar10-batch512-200 curve.png \
    "MaSSL, temperature 0.04 to 0.07=metrics.jsonl" "MaSSL, temperature 0.04 throughout=sharp-teacher.jsonl"
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from massl.reports.published.public import public_tables

LOWEST = 70  # percent: start of the axis
COLOURS = ("#0067b1", "#d45d00", "#009e73")


def probes_of(metrics: str) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in Path(metrics).read_text(encoding="utf-8").splitlines()]
    return [(row["epoch"], row["knn_top1"]) for row in rows if "knn_top1" in row]


def main(table_name: str, picture: str, *runs: str) -> None:
    table = next(table for table in public_tables() if table.name == table_name)
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    highest = max(row.values[0] or 0.0 for row in table.rows)
    for run, colour in zip(runs, COLOURS, strict=False):
        label, _, metrics = run.partition("=")
        probes = probes_of(metrics)
        best = max(accuracy for _, accuracy in probes)
        highest = max(highest, best)
        axes.plot(*zip(*probes, strict=True), marker="o", markersize=3, color=colour, label=f"{label}: {best:.2f} %")
        last_epoch = probes[-1][0]
    heights: list[float] = []
    for row in sorted(table.rows, key=lambda row: -(row.values[0] or 0.0)):
        accuracy = row.values[0]
        if accuracy is None or accuracy < LOWEST:
            continue
        axes.hlines(accuracy, 0, last_epoch, color="0.75", linewidth=0.8, zorder=0)
        height = min([accuracy, *(other - 0.58 for other in heights[-1:])])  # move names down that would overlap
        heights.append(height)
        axes.plot([last_epoch, last_epoch * 1.03], [accuracy, height], color="0.75", linewidth=0.8, zorder=0)
        axes.text(last_epoch * 1.035, height, f"{row.method} {accuracy:.1f}", fontsize=7, color="0.3", va="center")
    axes.set(
        xlabel="epoch",
        ylabel="k-NN accuracy, % (k = 200, T = 0.1)",
        ylim=(LOWEST, highest + 2),
        xlim=(0, last_epoch * 1.2),
        title=table.title,
    )
    axes.set_xticks(range(0, last_epoch + 1, last_epoch // 8))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    main(*sys.argv[1:])
