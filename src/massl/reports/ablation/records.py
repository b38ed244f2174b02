"""The paper's three ablations (Section 5): its figures, our runs beside them, and the table of both.

A grid varies the size K of the memory, the size N_b of its blocks, or how rows are assigned to blocks. Our memory and
the paper's differ in size, so figures with the same ratio to the default are compared. All functions are pure.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from massl.reports.published.paper import PaperFigure, paper_tables
from massl.reports.tables import ResultsTable

AblationName = Literal["memory-size", "block-size", "block-sampling"]
Strategy = Literal["random", "blockwise"]  # how blocks get their rows: "Stochastic" and "Blockwise" in the paper
State = Literal["finished", "unfinished", "failed", "waiting"]

COMPARED_NEIGHBOURS = 20  # the k that is compared, as in DINO and iBOT


class Ablation(NamedTuple):
    """What a grid varies."""

    title: str
    symbol: str  # in the paper
    key: str  # in a recipe
    paper_default: int  # in the paper's other experiments (appendix on implementation)
    strategies: tuple[Strategy, ...]


ABLATIONS: dict[AblationName, Ablation] = {
    "memory-size": Ablation("Size K of the memory", "K", "method.memory.num_rows", 65_536, ("random",)),
    "block-size": Ablation("Size N_b of a memory block", "N_b", "method.memory.block_size", 16_384, ("random",)),
    "block-sampling": Ablation(
        "How memory rows are assigned to blocks", "N_b", "method.memory.block_size", 16_384, ("random", "blockwise")
    ),
}
# names of the strategies in paper_tables.toml
_PAPER_METHODS: dict[Strategy, str] = {"random": "MaSSL", "blockwise": "MaSSL (contiguous blocks)"}
_MAY_BE_SHARED = ("K", "N_b", "seeds", "untrained")  # columns that move to the title if all their cells are equal
_TEXT_COLUMNS = frozenset({"blocks", "state"})  # left-aligned; all others hold numbers


@dataclass(frozen=True, kw_only=True)
class PaperPoint:
    """One figure of the paper's table."""

    value: int  # K or N_b
    strategy: Strategy
    figure: PaperFigure


def paper_points(kind: AblationName) -> list[PaperPoint]:
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
    """The paper's value in proportion to our default, in whole rows."""
    return round(paper_value * default / paper_default)


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """One run of a grid and its results."""

    value: int  # K or N_b, whichever varies
    strategy: Strategy
    num_rows: int  # K
    block_size: int  # N_b
    seed: int
    folder: str
    state: State = "waiting"
    error: str = ""  # why it failed
    knn_start: float | None = None  # percent, by the run's own probe before training
    knn_last: float | None = None  # and at the end
    evaluated: Mapping[int, float] | None = None  # number of neighbours -> percent, by the protocol knn if requested
    effective_rank: float | None = None
    images_per_second: float | None = None
    collapse_signs: tuple[str, ...] = ()

    @property
    def accuracy(self) -> float | None:
        """What is compared: the protocol's number if requested, otherwise the last probe's; None if unfinished."""
        if self.state != "finished":
            return None
        if self.evaluated is None:
            return self.knn_last
        return self.evaluated[min(COMPARED_NEIGHBOURS, max(self.evaluated))]  # few images have fewer neighbours

    @property
    def best(self) -> tuple[int, float] | None:
        """Number of neighbours with the highest accuracy, and that accuracy; the fewest neighbours if equal."""
        if self.state != "finished" or not self.evaluated:
            return None
        return max(sorted(self.evaluated.items()), key=lambda entry: entry[1])


@dataclass(frozen=True)
class GridPoint:
    """All runs of one value, one per seed."""

    value: int
    strategy: Strategy
    runs: tuple[RunOutcome, ...]
    paper: PaperPoint | None  # with the same ratio to the default

    @cached_property
    def accuracies(self) -> tuple[float, ...]:
        return tuple(run.accuracy for run in self.runs if run.accuracy is not None)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.accuracies) if self.accuracies else None

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation over seeds."""
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

    kind: AblationName
    default: int  # the recipe's value, which ratios refer to
    measured: str  # how accuracies were measured: "last probe, k=20, 2,000 images"
    num_classes: int | None  # of the images that k-NN was measured on
    points: tuple[GridPoint, ...]  # by strategy, then by value

    @property
    def ablation(self) -> Ablation:
        return ABLATIONS[self.kind]

    @property
    def chance(self) -> float | None:
        """Accuracy of guessing in percent, if classes are equally large."""
        return None if self.num_classes is None else 100.0 / self.num_classes

    def of(self, strategy: Strategy) -> tuple[GridPoint, ...]:
        return tuple(point for point in self.points if point.strategy == strategy)


def report_of(
    kind: AblationName, outcomes: Sequence[RunOutcome], *, default: int, measured: str, num_classes: int | None
) -> AblationReport:
    """Group runs by value and add the paper's figure with the same ratio."""
    ablation = ABLATIONS[kind]
    published = {
        (scaled(point.value, default=default, paper_default=ablation.paper_default), point.strategy): point
        for point in paper_points(kind)
    }
    points = []
    for strategy in ablation.strategies:
        runs = [run for run in outcomes if run.strategy == strategy]
        for value in sorted({run.value for run in runs}):
            of_value = tuple(run for run in runs if run.value == value)
            points.append(GridPoint(value, strategy, of_value, published.get((value, strategy))))
    return AblationReport(kind=kind, default=default, measured=measured, num_classes=num_classes, points=tuple(points))


def ratio_text(value: int, default: int) -> str:
    """As people write it: 1/8, 1, 2."""
    if value < default and default % value == 0:
        return f"1/{default // value}"
    return f"{value / default:.3g}"


# ---- the table -------------------------------------------------------------------------------------------------------


def table_of(report: AblationReport) -> ResultsTable:
    """One line per grid point. Empty columns are left out; sizes that do not vary move to the title."""
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
        text_columns=_TEXT_COLUMNS,
    )


def _columns(report: AblationReport, marks: dict[str, str]) -> dict[str, Callable[[GridPoint], str]]:
    """Heading -> text of a cell."""
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
    """Mean over seeds of the best accuracy, with the numbers of neighbours that gave it."""
    best = [run.best for run in point.runs if run.best is not None]
    if not best:
        return ""
    neighbours = ", ".join(map(str, sorted({k for k, _ in best})))
    return f"{statistics.fmean(accuracy for _, accuracy in best):.2f} (k={neighbours})"


def _number(number: float | None, form: str) -> str:
    return "" if number is None else f"{number:{form}}"


def _state_text(point: GridPoint) -> str:
    """Empty if all runs are finished and healthy."""
    states: list[str] = [run.state for run in point.runs if run.state != "finished"]
    states += ["collapsed"] * point.num_collapsed
    total = f" of {len(point.runs)}" if len(point.runs) > 1 else ""
    return ", ".join(f"{states.count(state)}{total} {state}" if total else state for state in dict.fromkeys(states))


def _figure_text(figure: PaperFigure, marks: dict[str, str]) -> str:
    """The paper's number with the marks of its footnotes."""
    own = [marks.setdefault(note, f"[{len(marks) + 1}]") for note in figure.notes]
    return " ".join([f"{figure.value:.1f}", *own])
