"""The paper's three ablations (Section 5): its figures, our runs beside them, and the table of both.

A grid varies one number, the size K of the memory or the size N_b of its blocks, or deals the rows to blocks in two
ways. Ours and the paper's memories differ in size, so figures stand side by side where the ratio to the default is the
same. Everything here is a pure function of outcomes.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from massl.reports.published.paper import PaperFigure, paper_tables
from massl.reports.tables import ResultsTable

Kind = Literal["memory-size", "block-size", "block-sampling"]
Strategy = Literal["random", "blockwise"]  # how rows are dealt to blocks: "Stochastic" and "Blockwise" in the paper
State = Literal["finished", "unfinished", "failed", "waiting"]

COMPARED_NEIGHBOURS = 20  # of the protocol's several k the one that is compared: DINO's and iBOT's figures have it


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What a grid varies."""

    title: str
    symbol: str  # of the number, as the paper writes it
    key: str  # its place in a recipe
    paper_default: int  # its value in all other experiments of the paper (appendix on implementation)
    strategies: tuple[Strategy, ...]


ABLATIONS: dict[Kind, Ablation] = {
    "memory-size": Ablation(
        title="Size K of the memory",
        symbol="K",
        key="method.memory.num_rows",
        paper_default=65_536,
        strategies=("random",),
    ),
    "block-size": Ablation(
        title="Size N_b of a memory block",
        symbol="N_b",
        key="method.memory.block_size",
        paper_default=16_384,
        strategies=("random",),
    ),
    "block-sampling": Ablation(
        title="How rows of the memory are dealt to blocks",
        symbol="N_b",
        key="method.memory.block_size",
        paper_default=16_384,
        strategies=("random", "blockwise"),
    ),
}
# Under these names the strategies stand in paper_tables.toml.
_PAPER_METHODS: dict[Strategy, str] = {"random": "MaSSL", "blockwise": "MaSSL (contiguous blocks)"}


_MAY_BE_SHARED = ("K", "N_b", "seeds", "untrained")  # columns that are left out where all their cells are equal
_WORDS = frozenset({"blocks", "state"})  # columns to set flush left; all others hold numbers


@dataclass(frozen=True, kw_only=True)
class PaperPoint:
    """One figure of the paper's table."""

    value: int  # of K or N_b
    strategy: Strategy
    figure: PaperFigure


def paper_points(kind: Kind) -> list[PaperPoint]:
    """The paper's table for this ablation, row by row."""
    (table,) = (table for table in paper_tables() if table.id == kind)
    rows = {row.method: row for row in table.rows}
    found = []
    for strategy in ABLATIONS[kind].strategies:
        for column, figure in zip(table.columns, rows[_PAPER_METHODS[strategy]].figures, strict=True):
            assert figure is not None, f"{kind}: {column.setting} has no figure"
            found.append(PaperPoint(value=int(column.setting.partition("=")[2]), strategy=strategy, figure=figure))
    return found


def scaled(paper_value: int, *, default: int, paper_default: int) -> int:
    """The value that is to our default as the paper's is to the paper's, in whole rows."""
    return round(paper_value * default / paper_default)


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """One run of a grid: what it was, and what came of it."""

    value: int  # of K or N_b, whichever varies
    strategy: Strategy
    num_rows: int  # K
    block_size: int  # N_b
    seed: int
    folder: str
    state: State = "waiting"
    error: str = ""  # of a run that failed
    knn_start: float | None = None  # percent, by the run's own probes: of the untrained network
    knn_last: float | None = None  # and at the end
    # number of neighbours -> percent, by the protocol `knn` on images named for it
    evaluated: Mapping[int, float] | None = None
    effective_rank: float | None = None
    images_per_second: float | None = None
    collapse_signs: tuple[str, ...] = ()

    @property
    def accuracy(self) -> float | None:
        """What is compared: the protocol's number where it was asked for, otherwise that of the last probe; none of
        half a run.
        """
        if self.state != "finished":
            return None
        if self.evaluated is None:
            return self.knn_last
        # of ten images there are no twenty neighbours
        return self.evaluated[min(COMPARED_NEIGHBOURS, max(self.evaluated))]

    @property
    def best(self) -> tuple[int, float] | None:
        """Number of neighbours and accuracy where that is highest; of equal ones the fewest neighbours."""
        if self.state != "finished" or not self.evaluated:
            return None
        return max(sorted(self.evaluated.items()), key=lambda entry: entry[1])


@dataclass(frozen=True)
class GridPoint:
    """All runs of one value, one a seed."""

    value: int
    strategy: Strategy
    runs: tuple[RunOutcome, ...]
    paper: PaperPoint | None  # of the same ratio to the default

    @cached_property
    def accuracies(self) -> tuple[float, ...]:
        return tuple(run.accuracy for run in self.runs if run.accuracy is not None)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.accuracies) if self.accuracies else None

    @property
    def deviation(self) -> float | None:
        """Sample deviation over seeds."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None

    @property
    def num_collapsed(self) -> int:
        return sum(bool(run.collapse_signs) for run in self.runs if run.state == "finished")

    def average(self, number_of: Callable[[RunOutcome], float | None]) -> float | None:
        numbers = [number for run in self.runs if (number := number_of(run)) is not None]
        return statistics.fmean(numbers) if numbers else None


@dataclass(frozen=True, kw_only=True)
class AblationReport:
    """Everything that tables, sentences and plots show."""

    kind: Kind
    default: int  # of the recipe: what ratios refer to
    measured: str  # how accuracies were: "last probe, k=20 of 10 classes"
    num_classes: int | None  # of the images that k-NN was measured on
    points: tuple[GridPoint, ...]  # by strategy, in it by value

    @property
    def ablation(self) -> Ablation:
        return ABLATIONS[self.kind]

    @property
    def chance(self) -> float | None:
        """Percent that guessing reaches on classes of one size."""
        return None if self.num_classes is None else 100.0 / self.num_classes

    def of(self, strategy: Strategy) -> tuple[GridPoint, ...]:
        return tuple(point for point in self.points if point.strategy == strategy)


def report_of(
    kind: Kind, outcomes: Sequence[RunOutcome], *, default: int, measured: str, num_classes: int | None
) -> AblationReport:
    """Runs of one value together, and beside them the paper's figure of the same ratio."""
    ablation = ABLATIONS[kind]
    published = {
        (scaled(point.value, default=default, paper_default=ablation.paper_default), point.strategy): point
        for point in paper_points(kind)
    }
    keys = sorted(
        {(run.value, run.strategy) for run in outcomes}, key=lambda key: (ablation.strategies.index(key[1]), key[0])
    )
    points = []
    for value, strategy in keys:
        runs = tuple(run for run in outcomes if (run.value, run.strategy) == (value, strategy))
        points.append(GridPoint(value, strategy, runs, published.get((value, strategy))))
    return AblationReport(kind=kind, default=default, measured=measured, num_classes=num_classes, points=tuple(points))


def ratio_text(value: int, default: int) -> str:
    """How people say it: 1/8, 1, 2."""
    if value < default and default % value == 0:
        return f"1/{default // value}"
    return f"{value / default:.3g}"


# ---- the table -------------------------------------------------------------------------------------------------------


def table_of(report: AblationReport) -> ResultsTable:
    """One line a grid point; columns that would be empty are left out, and of what does not vary one number stands in
    the title.
    """
    marks: dict[str, str] = {}
    columns = {heading: [text(point) for point in report.points] for heading, text in _columns(report, marks).items()}
    shared = {
        heading: columns.pop(heading)[0]
        for heading in _MAY_BE_SHARED
        if heading != report.ablation.symbol and len(set(columns[heading])) == 1
    }
    shown = {heading: cells for heading, cells in columns.items() if any(cells)}
    setting = "; ".join([report.measured, *(f"{heading} {cell}" for heading, cell in shared.items() if cell)])
    failures = [f"{run.folder}: {run.error}" for point in report.points for run in point.runs if run.state == "failed"]
    return ResultsTable(
        title=f"{report.ablation.title} ({setting})",
        columns=tuple(shown),
        lines=tuple(zip(*shown.values(), strict=True)),
        footnotes=(*(f"{mark} {note}" for note, mark in marks.items()), *failures),
        text_columns=_WORDS,
    )


def _columns(report: AblationReport, marks: dict[str, str]) -> dict[str, Callable[[GridPoint], str]]:
    """Heading -> what stands below it."""
    symbol, is_memory = report.ablation.symbol, report.kind == "memory-size"
    varies_strategy, other = len(report.ablation.strategies) > 1, "N_b" if is_memory else "K"
    return {
        "blocks": lambda point: point.strategy if varies_strategy else "",
        symbol: lambda point: f"{point.value:,}",
        "× default": lambda point: ratio_text(point.value, report.default),
        other: lambda point: f"{point.runs[0].block_size if is_memory else point.runs[0].num_rows:,}",
        "seeds": lambda point: str(len(point.accuracies)) if len(point.runs) > 1 else "",
        "k-NN": lambda point: _accuracy_text(point.mean, point.deviation),
        "best k": _best_text,
        "untrained": lambda point: _number(point.average(lambda run: run.knn_start), ".1f"),
        "effective rank": lambda point: _number(point.average(lambda run: run.effective_rank), ".1f"),
        "images/s": lambda point: _number(point.average(lambda run: run.images_per_second), ",.0f"),
        "state": _state_text,
        f"paper's {symbol}": lambda point: "" if point.paper is None else f"{point.paper.value:,}",
        "paper's k-NN": lambda point: "" if point.paper is None else _figure_text(point.paper.figure, marks),
    }


def _accuracy_text(mean: float | None, deviation: float | None) -> str:
    if mean is None:
        return "--"
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"


def _best_text(point: GridPoint) -> str:
    """Mean over seeds of each one's best, with the numbers of neighbours that gave them."""
    best = [run.best for run in point.runs if run.best is not None]
    if not best:
        return ""
    return f"{statistics.fmean(accuracy for _, accuracy in best):.2f} (k={', '.join(str(k) for k in sorted({k for k, _ in best}))})"


def _number(number: float | None, form: str) -> str:
    return "" if number is None else f"{number:{form}}"


def _state_text(point: GridPoint) -> str:
    """Nothing where all runs are finished and well."""
    states: list[str] = [run.state for run in point.runs if run.state != "finished"] + [
        "collapsed"
    ] * point.num_collapsed
    total = f" of {len(point.runs)}" if len(point.runs) > 1 else ""
    return ", ".join(f"{states.count(state)}{total} {state}" if total else state for state in dict.fromkeys(states))


def _figure_text(figure: PaperFigure, marks: dict[str, str]) -> str:
    """The paper's number with the marks of its notes, which are explained below the table."""
    own = [marks.setdefault(note, f"[{len(marks) + 1}]") for note in figure.notes]
    return " ".join([f"{figure.value:.1f}", *own])
