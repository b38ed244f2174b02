"""Tables of results, for the terminal and as Markdown, with the paper's figure where it measured the same."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from massl.config import fingerprint
from massl.evaluations.measurement import Setting
from massl.evaluations.results import ResultRow
from massl.reports.published.paper import TRANSFER_AVERAGE, TRANSFER_DATA, PaperFigure, paper_figures

_NAMES = ("protocol", "data", "setting", "metric")  # what a row measures
_WORDS = frozenset({*_NAMES, "model"})  # columns to set flush left; all others hold numbers
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, kw_only=True)
class ResultsTable:
    """What is shown, as text, whatever shows it."""

    title: str  # whose results these are; empty where a column says it
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]  # one text a column
    footnotes: tuple[str, ...]  # each begins with its mark
    text_columns: frozenset[str]  # left-aligned; all others hold numbers
    group_by: str = ""  # column whose change starts a new group of lines


def results_table(rows: Iterable[ResultRow], *, methods: Sequence[str] = ("MaSSL",)) -> ResultsTable:
    """Rows side by side with the paper's figures for `methods`, wherever architecture, data, setting and metric are the
    same.
    """
    with_deviations = _merge_deviations(_grouped(rows))
    merged = [row for row, _ in with_deviations]
    published = [
        paper_figures(
            protocol=row.protocol,
            data=row.data,
            setting=str(row.setting),
            metric=row.metric,
            architecture=row.architecture,
        )
        for row in merged
    ]
    columns = [_paper_column(method, merged, published) for method in methods]
    models = {_model_key(row): _model_label(row, merged) for row in merged}
    shows_models = len(models) > 1
    marks: dict[str, str] = {}
    lines = []
    for (row, deviation), figures in zip(with_deviations, published, strict=True):
        line = [models[_model_key(row)]] if shows_models else []
        line += [row.protocol, row.data, str(row.setting), row.metric, _with_deviation(row.value, deviation)]
        line += [f"{row.num_samples:,}", _seconds_text(row.seconds)]
        line += [
            _figure_text(figures.get(method), marks) for method, column in zip(methods, columns, strict=True) if column
        ]
        lines.append(tuple(line))
    return ResultsTable(
        title=_title(merged, shows_models=shows_models),
        columns=(
            *(("model",) if shows_models else ()),
            *_NAMES,
            "value",
            "n",
            "seconds",
            *(column for column in columns if column),
        ),
        lines=tuple(lines),
        footnotes=tuple(f"{mark} {note}" for note, mark in marks.items()),
        text_columns=_WORDS,
        group_by="protocol",
    )


def as_markdown(table: ResultsTable) -> str:
    """For documents: the same table and footnotes."""
    header = [
        _markdown_line(table.columns),
        _markdown_line([":--" if column in table.text_columns else "--:" for column in table.columns]),
    ]
    parts = [
        [table.title] if table.title else [],
        [*header, *map(_markdown_line, table.lines)],
        *([note] for note in table.footnotes),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


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
    """Rows with their deviations; a deviation whose mean is there has no row of its own."""

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


def _title(rows: list[ResultRow], *, shows_models: bool) -> str:
    if shows_models or not rows:
        return ""
    first = rows[0]
    return f"{first.model} ({first.architecture}, weights {first.weights}, {first.precision})"


def _with_deviation(value: float, deviation: float | None) -> str:
    return f"{value:.2f}" if deviation is None else f"{value:.2f} ± {deviation:.2f}"


def _paper_column(method: str, rows: list[ResultRow], published: list[dict[str, PaperFigure]]) -> str:
    """What stands above a method's figures: each is for the architecture of its row. Nothing where there are none."""
    architectures = {row.architecture for row, figures in zip(rows, published, strict=True) if method in figures}
    if not architectures:
        return ""
    return f"paper ({method} {architectures.pop()})" if len(architectures) == 1 else f"paper ({method})"


def _figure_text(figure: PaperFigure | None, marks: dict[str, str]) -> str:
    """The paper's number with the marks of its notes; notes not met before get the next ones."""
    if figure is None:
        return ""
    own = [marks.setdefault(note, str(len(marks) + 1).translate(_RAISED)) for note in figure.notes]
    return _with_deviation(figure.value, figure.deviation) + ",".join(own)


def _seconds_text(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.1f}"


def _markdown_line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
