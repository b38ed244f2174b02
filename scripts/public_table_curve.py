"""k-NN accuracy of a run over its epochs, between the rows of a public table.

cd docs/results/lightly-cifar10; python ../../../scripts/public_table_curve.py metrics.jsonl lightly-cifar10-batch512-200 curve.png
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from massl.reports.public import public_tables


def main(metrics: str, table_name: str, picture: str) -> None:
    rows = [json.loads(line) for line in Path(metrics).read_text(encoding="utf-8").splitlines()]
    probes = [(row["epoch"], row["knn_top1"]) for row in rows if "knn_top1" in row]
    table = next(table for table in public_tables() if table.name == table_name)
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    axes.plot(*zip(*probes, strict=True), marker="o", markersize=3.5, color="#0067b1", label=f"MaSSL, {max(k for _, k in probes):.2f} %")
    last_epoch = probes[-1][0]
    heights: list[float] = []
    for row in sorted(table.rows, key=lambda row: -(row.values[0] or 0.0)):
        accuracy = row.values[0]
        if accuracy is None or accuracy < 78:
            continue
        axes.hlines(accuracy, 0, last_epoch, color="0.75", linewidth=0.8, zorder=0)
        height = min([accuracy, *(other - 0.75 for other in heights[-1:])])  # names that would overlap move down
        heights.append(height)
        axes.text(last_epoch * 1.02, height, f"{row.method} {accuracy:.1f}", fontsize=7.5, color="0.3", va="center")
    axes.set(xlabel="epoch", ylabel="k-NN accuracy, % (k = 200, T = 0.1)", ylim=(68, 89), xlim=(0, last_epoch * 1.2), title=table.title)
    axes.set_xticks(range(0, last_epoch + 1, last_epoch // 8))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    main(*sys.argv[1:])
