"""Tables of results, for the terminal and as Markdown, with the paper's figure where it measured the same."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from massl.config import fingerprint
from massl.evaluations.measurement import Setting
from massl.evaluations.results import ResultRow
from massl.reports.published.paper import TRANSFER_AVERAGE, TRANSFER_DATA, PaperFigure, paper_figures

_NAMES = ("protocol", "data", "setting", "metric")  # what a row measures
_WORDS = frozenset({*_NAMES, "model"})  # columns of text
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, kw_only=True)
class ResultsTable:
    """A table as text, for the terminal, Markdown and the page."""

    title: str  # the model; "" if a column names it
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]  # one text per column
    footnotes: tuple[str, ...]  # each begins with its mark
    text_columns: frozenset[str]  # left-aligned; all others hold numbers
    group_by: str = ""  # column whose change starts a new group of lines


def results_table(rows: Iterable[ResultRow], *, methods: Sequence[str] = ("MaSSL",)) -> ResultsTable:
    """Rows with the paper's figures for `methods` where architecture, data, setting and metric are the same."""
    with_deviations = _merge_deviations(_grouped(rows))
    merged = [row for row, _ in with_deviations]
    published = [_published(row) for row in merged]
    paper_columns = {method: _paper_column(method, merged, published) for method in methods}
    shown_methods = [method for method, column in paper_columns.items() if column]
    models = {_model_key(row): _model_label(row, merged) for row in merged}
    shows_models = len(models) > 1
    marks: dict[str, str] = {}
    lines = []
    for (row, deviation), figures in zip(with_deviations, published, strict=True):
        line = [models[_model_key(row)]] if shows_models else []
        line += [row.protocol, row.data, str(row.setting), row.metric, _with_deviation(row.value, deviation)]
        line += [f"{row.num_samples:,}", f"{row.seconds:,.0f}" if row.seconds >= 100 else f"{row.seconds:.1f}"]
        lines.append((*line, *(_figure_text(figures.get(method), marks) for method in shown_methods)))
    measured = (*(("model",) if shows_models else ()), *_NAMES, "value", "n", "seconds")
    return ResultsTable(
        title="" if shows_models or not merged else _title(merged[0]),
        columns=(*measured, *(paper_columns[method] for method in shown_methods)),
        lines=tuple(lines),
        footnotes=tuple(f"{mark} {note}" for note, mark in marks.items()),
        text_columns=_WORDS,
        group_by="protocol",
    )


def as_markdown(table: ResultsTable) -> str:
    """The table and its footnotes."""
    alignments = [":--" if column in table.text_columns else "--:" for column in table.columns]
    lines = "\n".join(map(_markdown_line, [table.columns, alignments, *table.lines]))
    return "\n\n".join([*([table.title] if table.title else []), lines, *table.footnotes])


def transfer_averages(rows: Iterable[ResultRow]) -> list[ResultRow]:
    """For each k the mean over the eight transfer sets (the paper's "Avg @k"), of models measured on all of them.

    Of several rows for one data set the last counts.
    """
    groups: dict[tuple[Setting | str, ...], dict[str, ResultRow]] = {}
    for row in rows:
        if row.protocol == "knn" and row.data in TRANSFER_DATA and row.setting.k is not None:
            groups.setdefault((row.setting, row.metric, *_model_key(row)), {})[row.data] = row
    averages = []
    for by_data in groups.values():
        if len(by_data) == len(TRANSFER_DATA):
            members = [by_data[data] for data in TRANSFER_DATA]
            averages.append(
                replace(
                    members[0],
                    data=TRANSFER_AVERAGE,
                    value=statistics.fmean(row.value for row in members),
                    num_samples=sum(row.num_samples for row in members),
                    seconds=sum(row.seconds for row in members),
                    run=fingerprint({"mean of": [row.run for row in members]}),
                    created=max(row.created for row in members),
                )
            )
    return averages


def _grouped(rows: Iterable[ResultRow]) -> list[ResultRow]:
    """Rows by protocol, then data set, then setting and metric, each in the order of first appearance."""
    ranks: dict[tuple[Setting | str, ...], int] = {}

    def place(row: ResultRow) -> list[int]:
        names = (row.protocol, row.data, row.setting, row.metric)
        return [ranks.setdefault(prefix, len(ranks)) for prefix in (names[:1], names[:2], names)]

    return sorted(rows, key=place)


def _merge_deviations(rows: list[ResultRow]) -> list[tuple[ResultRow, float | None]]:
    """Rows with their deviations; deviations become rows only without a mean."""

    def key(row: ResultRow) -> tuple[Setting | str, ...]:
        return (row.protocol, row.data, replace(row.setting, statistic=""), row.metric, *_model_key(row))

    means = {key(row) for row in rows if row.setting.statistic == "mean"}
    deviations = {key(row): row.value for row in rows if row.setting.statistic == "deviation"}
    return [
        (row, deviations.get(key(row)) if row.setting.statistic == "mean" else None)
        for row in rows
        if not (row.setting.statistic == "deviation" and key(row) in means)
    ]


def _model_key(row: ResultRow) -> tuple[str, str]:
    return row.weights, row.precision


def _model_label(row: ResultRow, rows: list[ResultRow]) -> str:
    """The model's name, with weights and precision where needed to tell it from the others."""
    namesakes = {_model_key(other) for other in rows if other.model == row.model}
    label = row.model
    if len({weights for weights, _ in namesakes}) > 1:
        label += f" {row.weights}"
    if len({precision for _, precision in namesakes}) > 1:
        label += f" {row.precision}"
    return label


def _title(row: ResultRow) -> str:
    return f"{row.model} ({row.architecture}, weights {row.weights}, {row.precision})"


def _published(row: ResultRow) -> dict[str, PaperFigure]:
    names = {"protocol": row.protocol, "data": row.data, "setting": str(row.setting), "metric": row.metric}
    return paper_figures(**names, architecture=row.architecture)


def _with_deviation(value: float, deviation: float | None) -> str:
    return f"{value:.2f}" if deviation is None else f"{value:.2f} ± {deviation:.2f}"


def _paper_column(method: str, rows: list[ResultRow], published: list[dict[str, PaperFigure]]) -> str:
    """The heading of a method's figures, each for the architecture of its row; "" if there are none."""
    architectures = {row.architecture for row, figures in zip(rows, published, strict=True) if method in figures}
    if not architectures:
        return ""
    return f"paper ({method} {architectures.pop()})" if len(architectures) == 1 else f"paper ({method})"


def _figure_text(figure: PaperFigure | None, marks: dict[str, str]) -> str:
    """The paper's number with the marks of its notes; new notes are added to `marks`."""
    if figure is None:
        return ""
    own = [marks.setdefault(note, str(len(marks) + 1).translate(_RAISED)) for note in figure.notes]
    return _with_deviation(figure.value, figure.deviation) + ",".join(own)


def _markdown_line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
