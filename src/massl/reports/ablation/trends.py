"""The trends of an ablation in words, derived from its numbers alone."""

import itertools
import math
import statistics
from collections.abc import Sequence

from massl.reports.ablation.records import AblationReport, paper_points, ratio_text

_STANDARD_ERRORS = 2.0  # chance alone makes two means differ by more in about one case of twenty


def sentences_of(report: AblationReport) -> list[str]:
    """Our trend and the paper's, how well they agree, and how reliable that is."""
    return [*_trends(report), *_sampling(report), *_agreement(report), *_collapse(report), *_trust(report)]


def trend_in_words(points: Sequence[tuple[int, float]], *, symbol: str, noise: float = 0.0) -> str:
    """Rises and falls of a curve of (value, percent), sorted by value. Swings up to `noise` points are ignored."""
    if len(points) == 1:
        return f"is {points[0][1]:.1f} % at {symbol}={points[0][0]:,}, the only value so far"
    accuracies = [accuracy for _, accuracy in points]
    turns = turning_points(accuracies, noise=noise)
    if len(turns) == 1:
        return f"stays level from {_at(points[0], symbol)} to {_at(points[-1], symbol)}"
    parts = []
    for number, (start, end) in enumerate(itertools.pairwise(turns)):
        verb = "rises" if accuracies[end] > accuracies[start] else "falls"
        origin = f" from {_at(points[start], symbol)}" if number == 0 else ""
        parts.append(f"{verb}{origin} to {_at(points[end], symbol)}")
    if turns[-1] < len(points) - 1:
        parts.append(f"stays level up to {_at(points[-1], symbol)}")
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def turning_points(values: Sequence[float], *, noise: float) -> list[int]:
    """Positions of the first value, of each extreme that the curve leaves by more than `noise`, and of the last one.

    A curve that never swings by more than `noise` has only its first position.
    """
    turns, extreme, direction = [0], 0, 0
    for at, value in enumerate(values):
        if direction == 0:
            lowest, highest = min(values[: at + 1]), max(values[: at + 1])
            if highest - lowest > noise:
                direction, extreme = (1 if value == highest else -1), at
        elif (value - values[extreme]) * direction > 0:
            extreme = at
        elif (values[extreme] - value) * direction > noise:
            turns.append(extreme)
            direction, extreme = -direction, at
    return turns if direction == 0 else [*turns, extreme]


def noise_of(report: AblationReport) -> float | None:
    """Points by which means over seeds differ by chance: two standard errors of a difference. None with one seed."""
    repeated = [point for point in report.points if point.deviation is not None and not point.num_collapsed]
    if not repeated:
        return None
    variance = statistics.fmean((point.deviation or 0.0) ** 2 for point in repeated)
    return _STANDARD_ERRORS * math.sqrt(2.0 * variance / min(len(point.accuracies) for point in repeated))


def _at(point: tuple[int, float], symbol: str) -> str:
    return f"{symbol}={point[0]:,} ({point[1]:.1f} %)"


def _trends(report: AblationReport) -> list[str]:
    symbol, strategies = report.ablation.symbol, report.ablation.strategies
    said = []
    for strategy in strategies:
        which = f"with {strategy} blocks " if len(strategies) > 1 else ""
        ours = [(point.value, point.mean) for point in report.of(strategy) if point.mean is not None]
        if ours:
            said.append(
                f"Ours: {which}k-NN accuracy {trend_in_words(ours, symbol=symbol, noise=noise_of(report) or 0.0)}."
            )
        papers = [
            (point.value, point.figure.value) for point in paper_points(report.kind) if point.strategy == strategy
        ]
        said.append(f"The paper: {which}it {trend_in_words(papers, symbol=symbol)}.")
    return said


def _sampling(report: AblationReport) -> list[str]:
    """Blockwise against random blocks of the same size."""
    if "blockwise" not in report.ablation.strategies:
        return []
    random = {point.value: point.mean for point in report.of("random")}
    losses = [
        mean - point.mean
        for point in report.of("blockwise")
        if (mean := random.get(point.value)) is not None and point.mean is not None
    ]
    if not losses:
        return []
    num_below = sum(loss > (noise_of(report) or 0.0) for loss in losses)
    return [
        f"Blockwise is below random blocks at {num_below} of {len(losses)} sizes; random minus blockwise: "
        f"{min(losses):+.1f} to {max(losses):+.1f} points."
    ]


def _agreement(report: AblationReport) -> list[str]:
    """How many pairs of rows have the same order in the paper, and the best value of each."""
    both = [
        (point.mean, point.paper.figure.value)
        for point in report.points
        if point.mean is not None and point.paper is not None
    ]
    differences = [
        (ours - other, papers - others) for at, (ours, papers) in enumerate(both) for other, others in both[:at]
    ]
    distinct = [(ours, papers) for ours, papers in differences if papers != 0]  # the paper's collapsed ones are equal
    if not distinct:
        return []
    num_same = sum(ours * papers > 0 for ours, papers in distinct)
    best = max(report.points, key=lambda point: -math.inf if point.mean is None else point.mean)
    published = max(paper_points(report.kind), key=lambda point: point.figure.value)
    symbol, paper_default = report.ablation.symbol, report.ablation.paper_default
    return [
        f"Pairs of rows in the paper's order: {num_same} of the {len(distinct)} that differ in the paper.",
        f"Best of ours: {symbol}={best.value:,} ({_relative(best.value, report.default)}); "
        f"of the paper's: {symbol}={published.value:,} ({_relative(published.value, paper_default)}).",
    ]


def _relative(value: int, default: int) -> str:
    return "the default" if value == default else f"{ratio_text(value, default)} × the default"


def _collapse(report: AblationReport) -> list[str]:
    said = []
    for strategy in report.ablation.strategies:
        finished = [run for point in report.of(strategy) for run in point.runs if run.state == "finished"]
        collapsed = [run for run in finished if run.collapse_signs]
        share = f"{strategy.capitalize()} blocks: {len(collapsed)} of {len(finished)} runs show signs of collapse"
        if collapsed:
            example = f"{report.ablation.symbol}={collapsed[0].value:,}: {'; '.join(collapsed[0].collapse_signs)}"
            said.append(f"{share}, for example {example}.")
        elif finished and strategy == "blockwise":
            said.append(f"{share}; in the paper all collapse.")
    return said


def _trust(report: AblationReport) -> list[str]:
    """How reliable differences are."""
    noise = noise_of(report)
    numbers = [len(point.accuracies) for point in report.points if point.accuracies]
    if not numbers:
        return []
    if noise is None:
        return ["One run per value does not show how much of the differences is chance; --seeds 0 1 2 does."]
    return [
        f"Differences of up to {noise:.1f} points may be chance (two standard errors, {min(numbers)} seeds a value)."
    ]
