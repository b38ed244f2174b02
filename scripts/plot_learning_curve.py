"""Plot k-NN accuracy and effective rank over epochs: plot_learning_curve.py OUT.png LABEL=METRICS.jsonl ..."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from massl.training.metrics_log import read_metrics


def main(out: str, *labelled_files: str) -> None:
    figure, (knn_axes, rank_axes) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for labelled in labelled_files:
        label, _, file = labelled.partition("=")
        rows = [row for row in read_metrics(Path(file)) if "knn_top1" in row]
        epochs = [row["epoch"] for row in rows]
        knn_axes.plot(epochs, [row["knn_top1"] for row in rows], marker="o", markersize=3, label=label)
        rank_axes.plot(epochs, [row["effective_rank"] for row in rows], marker="o", markersize=3, label=label)
    knn_axes.set(xlabel="epoch", ylabel="k-NN top-1 of the teacher, %")
    rank_axes.set(xlabel="epoch", ylabel="effective rank of its features")
    for axes in (knn_axes, rank_axes):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
