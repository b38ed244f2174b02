"""An ablation as ablation.md and ablation.json."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from massl.reports.ablation.records import AblationReport, GridPoint, paper_points, table_of
from massl.reports.ablation.trends import noise_of, sentences_of
from massl.reports.tables import as_markdown


def ablation_document(report: AblationReport, *, command: str, ours: str, cautions: Sequence[str], picture: str) -> str:
    """ablation.md: the command that repeats it, table, figure, trends and cautions."""
    parts = [
        f"# {report.ablation.title}",
        f"```bash\n{command}\n```",
        f"Ours: {ours}. The paper: ViT-S/16 on ImageNet, 100 epochs.",
        as_markdown(table_of(report)),
        f"![k-NN accuracy, ours and the paper's]({picture})",
        "\n".join(f"- {sentence}" for sentence in sentences_of(report)),
    ]
    if cautions:
        parts.append("\n".join(["Cautions:", "", *(f"- {caution}." for caution in cautions)]))
    return "\n\n".join(parts) + "\n"


def ablation_values(report: AblationReport, *, command: str, ours: str, cautions: Sequence[str]) -> dict[str, Any]:
    """ablation.json."""
    return {
        "kind": report.kind,
        "command": command,
        "ours": ours,
        "measured": report.measured,
        "chance": report.chance,
        "default": report.default,
        "paper_default": report.ablation.paper_default,
        "points": [_point_values(point) for point in report.points],
        "paper": [
            {
                "value": point.value,
                "strategy": point.strategy,
                "knn_top1": point.figure.value,
                "notes": list(point.figure.notes),
            }
            for point in paper_points(report.kind)
        ],
        "noise_points": noise_of(report),
        "sentences": sentences_of(report),
        "cautions": list(cautions),
    }


def _point_values(point: GridPoint) -> dict[str, Any]:
    return {
        "value": point.value,
        "strategy": point.strategy,
        "mean": point.mean,
        "deviation": point.deviation,
        "paper_value": None if point.paper is None else point.paper.value,
        "paper_knn_top1": None if point.paper is None else point.paper.figure.value,
        "runs": [{**asdict(run), "accuracy": run.accuracy} for run in point.runs],
    }
