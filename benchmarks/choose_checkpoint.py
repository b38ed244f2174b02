"""How well measures without labels choose a checkpoint: all runs with several probes below a folder.

    python benchmarks/choose_checkpoint.py docs/results --output docs/results/choosing-checkpoints/table.md

Reads every .jsonl file whose rows have knn_top1 and a label-free measure, three probes or more to a run, and prints as
Markdown: the rank correlation of each measure with k-NN and with a linear classifier, within runs and over all probes
of one data set; what each rule chooses; the rule chosen on all data sets but one, on that one; the falls that the guard
must tell apart; what --trainer.stop_when_flat would have cost; and every run. The probe of random weights never counts;
that of a run that starts from trained weights does.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from massl.training.best import MAY_FALL, SCORE, judged

_SAME_IMAGES = {"fashion": "demo", "lightly-cifar10": "cifar10", "tiny-imagenet-100": "tiny-imagenet"}
_LEAST_PROBES = 3
MEASURES: Mapping[str, Callable[[Mapping[str, float]], float | None]] = {
    "other_view_top1": lambda row: row.get(SCORE),
    "effective_rank": lambda row: row.get("effective_rank"),
    "-alpha_req": lambda row: -row["alpha_req"] if "alpha_req" in row else None,
    "-abs(alpha_req - 1)": lambda row: -abs(row["alpha_req"] - 1) if "alpha_req" in row else None,
    "-loss": lambda row: -row["loss"],
}
MARGINS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)


@dataclass(frozen=True)
class Run:
    data: str
    name: str
    rows: tuple[Mapping[str, Any], ...]  # of its probes

    @property
    def knn(self) -> list[float]:
        return [row["knn_top1"] for row in self.rows]

    def values(self, measure: str) -> list[float] | None:
        values = [MEASURES[measure](row) for row in self.rows]
        return None if None in values else [value for value in values if value is not None]


Rule = Callable[[Run], int | None]  # the number of the chosen probe; None: the run lacks the measure


def read_runs(root: Path) -> list[Run]:
    runs = []
    for file in sorted(root.rglob("*.jsonl")):
        by_name: dict[str, list[dict[str, Any]]] = {}
        for line in file.read_text().splitlines():
            row = json.loads(line)
            if isinstance(row, dict) and {"step", "loss", "knn_top1", "effective_rank"} <= row.keys():
                by_name.setdefault(str(row.get("name", file.stem)), []).append(row)
        is_own = file.parent.name == "choosing-checkpoints"
        data = "demo" if file.stem.startswith("demo") else file.stem if is_own else file.parent.name
        for name, rows in by_name.items():
            counted = [row for row in rows if row["step"] > 0 or name.startswith("continued")]
            if len(counted) >= _LEAST_PROBES:
                runs.append(
                    Run(
                        _SAME_IMAGES.get(data, data),
                        f"{file.stem}/{name}" if name != file.stem else name,
                        tuple(counted),
                    )
                )
    return runs


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Rank correlation; None if one of them is constant."""
    ranks = [
        [(sum(x < y for x in values) + sum(x <= y for x in values)) / 2 for y in values] for values in (first, second)
    ]
    try:
        return statistics.correlation(*ranks)
    except statistics.StatisticsError:
        return None


def highest(values: Sequence[float]) -> int:
    """The probe with the highest value; the latest of equal ones."""
    return max(range(len(values)), key=lambda number: (values[number], number))


def newest_within(values: Sequence[float], margin: float) -> int:
    """The newest probe, unless it is below the highest so far by more than `margin`; then the one chosen before."""
    chosen, top = 0, values[0]
    for number, value in enumerate(values):
        top = max(top, value)
        if value >= (1 - margin) * top:
            chosen = number
    return chosen


def rules() -> dict[str, Rule]:
    def by(measure: str, choose: Callable[[Sequence[float]], int]) -> Rule:
        return lambda run: None if (values := run.values(measure)) is None else choose(values)

    found: dict[str, Rule] = {"last": lambda run: len(run.rows) - 1}
    found |= {f"highest {measure}": by(measure, highest) for measure in MEASURES}
    for measure in ("other_view_top1", "effective_rank"):
        for margin in MARGINS[1:]:
            found[f"newest within {margin:.0%} of the highest {measure}"] = by(
                measure, lambda values, margin=margin: newest_within(values, margin)
            )
    return found


def lost(run: Run, rule: Rule) -> tuple[float, float] | None:
    """k-NN of the best probe above the chosen one, and of the chosen one above the last."""
    chosen = rule(run)
    return None if chosen is None else (max(run.knn) - run.knn[chosen], run.knn[chosen] - run.knn[-1])


def mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else math.nan


def correlation_table(runs: Sequence[Run]) -> list[str]:
    lines = [
        "| measure | runs | within runs: k-NN | linear | over all probes of a data set: k-NN |",
        "|---|---|---|---|---|",
    ]
    for measure in MEASURES:
        known = [(run, values) for run in runs if (values := run.values(measure)) is not None]
        linear = [
            spearman(values, [row["linear_top1"] for row in run.rows])
            for run, values in known
            if all("linear_top1" in row for row in run.rows)
        ]
        sets = []
        for data in sorted({run.data for run, _ in known}):
            own = [
                (value, knn)
                for run, values in known
                if run.data == data
                for value, knn in zip(values, run.knn, strict=True)
            ]
            sets.append(f"{data} {spearman(*zip(*own, strict=True)):+.2f}")
        within = mean(spearman(values, run.knn) for run, values in known)
        lines.append(f"| `{measure}` | {len(known)} | {within:+.2f} | {mean(linear):+.2f} | {', '.join(sets)} |")
    return lines


def rule_table(runs: Sequence[Run]) -> list[str]:
    lines = [
        "| rule | runs | below the best probe | above the last, mean | at worst | at best |",
        "|---|---|---|---|---|---|",
    ]
    for name, rule in rules().items():
        found = [result for run in runs if (result := lost(run, rule)) is not None]
        behind, gains = [pair[0] for pair in found], [pair[1] for pair in found]
        row = f"{mean(behind):.2f} | {mean(gains):+.2f} | {min(gains):+.1f} | {max(gains):+.1f}"
        lines.append(f"| {name} | {len(found)} | {row} |")
    return lines


def _mean_loss(rule: Rule, runs: Sequence[Run]) -> float:
    return mean(result[0] for run in runs if (result := lost(run, rule)) is not None)


def _never_loses(rule: Rule, runs: Sequence[Run]) -> bool:
    """Whether the chosen probe is never below the last one."""
    return all(result[1] >= 0 for run in runs if (result := lost(run, rule)) is not None)


def left_out_table(runs: Sequence[Run]) -> list[str]:
    """Of the rules that never lose to the last probe on the other data sets, the one with the least loss there."""
    runs = [run for run in runs if run.values("other_view_top1") is not None]
    lines = [
        "| left out | runs | chosen on the others | below the best probe | last | above the last |",
        "|---|---|---|---|---|---|",
    ]
    for data in sorted({run.data for run in runs}):
        inside, outside = [run for run in runs if run.data != data], [run for run in runs if run.data == data]

        table = {name: rule for name, rule in rules().items() if _never_loses(rule, inside)}
        name = min((_mean_loss(rule, inside), name) for name, rule in table.items())[1]
        chosen, last = _mean_loss(table[name], outside), _mean_loss(table["last"], outside)
        lines.append(f"| {data} | {len(outside)} | {name} | {chosen:.2f} | {last:.2f} | {last - chosen:+.2f} |")
    return lines


def guard_table(runs: Sequence[Run]) -> list[str]:
    """Probes of continued runs: what the score does where k-NN falls by more than 3 points, and where it does not."""
    groups: dict[str, list[float]] = {"more than 3 points below": [], "within 3 points, or above": []}
    for run in runs:
        if "/continued" in run.name and SCORE in run.rows[0]:
            for row in run.rows[1:]:
                fell = run.rows[0]["knn_top1"] - row["knn_top1"] > 3
                groups["more than 3 points below" if fell else "within 3 points, or above"].append(
                    row[SCORE] / run.rows[0][SCORE]
                )
    lines = [
        "| k-NN against the start | probes | other_view_top1 / that of the start | below 70 % of it |",
        "|---|---|---|---|",
    ]
    for name, ratios in groups.items():
        low = sum(ratio < 1 - MAY_FALL for ratio in ratios)
        lines.append(f"| {name} | {len(ratios)} | {min(ratios):.2f} to {max(ratios):.2f} | {low} of {len(ratios)} |")
    return lines


def early_table(runs: Sequence[Run]) -> list[str]:
    lines = [
        "| stop_when_flat | runs ended early | probes saved | k-NN of the best, against the full run | at worst |",
        "|---|---|---|---|---|",
    ]
    known = [run for run in runs if run.values("other_view_top1") is not None]
    for patience in (2, 3, 5):
        saved, changes, ended = [], [], 0
        for run in known:
            rows: list[Mapping[str, Any]] = []
            for row in run.rows:
                rows.append({**row, **judged(row, rows, has_start=True, num_queries=2000)})
            stop = next((n for n, row in enumerate(rows) if row["flat_probes"] >= patience), len(rows) - 1)
            knn = {row["step"]: row["knn_top1"] for row in rows}
            ended += stop < len(rows) - 1
            saved.append(1 - (stop + 1) / len(rows))
            changes.append(knn[rows[stop]["best_step"]] - knn[rows[-1]["best_step"]])
        lines.append(
            f"| {patience} | {ended} of {len(known)} | {mean(saved):.0%} | {mean(changes):+.2f} | {min(changes):+.1f} |"
        )
    return lines


def run_table(runs: Sequence[Run]) -> list[str]:
    lines = [
        "| data | run | probes | k-NN best | last | chosen | at step | rank correlation |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        values = run.values("other_view_top1")
        if values is None:
            continue
        chosen = newest_within(values, MAY_FALL)
        found = spearman(values, run.knn)
        words = "" if found is None else f"{found:+.2f}"
        knn = f"{max(run.knn):.1f} | {run.knn[-1]:.1f} | {run.knn[chosen]:.1f}"
        step = f"{run.rows[chosen]['step']}" + ("" if chosen == len(run.rows) - 1 else f" of {run.rows[-1]['step']}")
        lines.append(f"| {run.data} | {run.name} | {len(run.rows)} | {knn} | {step} | {words} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="How well measures without labels choose a checkpoint.")
    parser.add_argument("folder", type=Path, help="searched for .jsonl files")
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    chosen = parser.parse_args(arguments)
    runs = read_runs(chosen.folder)
    parts = {
        "Rank correlation": correlation_table(runs),
        "Rules, on all runs": rule_table(runs),
        "Rules, on a data set that had no part in choosing them": left_out_table(runs),
        "The guard without labels": guard_table(runs),
        "Ending early": early_table(runs),
        "Every run with other_view_top1": run_table(runs),
    }
    text = "\n".join(line for title, lines in parts.items() for line in (f"## {title}", "", *lines, ""))
    print(text)
    if chosen.output is not None:
        chosen.output.write_text(text)


if __name__ == "__main__":
    main()
