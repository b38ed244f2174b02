"""Tables of results, for the terminal and as Markdown, with the paper's figure beside ours where both measured the
same.

A row is a plain mapping with the entries of a line of results.jsonl. Everything here is a pure function of rows.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from massl.config import fingerprint
from massl.reports.published.paper import TRANSFER_AVERAGE, TRANSFER_DATA, PaperFigure, paper_figures

Row = Mapping[str, Any]

_MEAN, _DEVIATION = " mean", " deviation"  # how the settings of the two halves of "44.80 ± 0.40" end
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


def results_table(rows: Iterable[Row], *, methods: Sequence[str] = ("MaSSL",)) -> ResultsTable:
    """Rows side by side with the paper's figures for `methods`, wherever architecture, data, setting and metric are the
    same.
    """
    merged = _merge_deviations(_grouped(list(rows)))
    published = [paper_figures(**{name: row[name] for name in (*_NAMES, "architecture")}) for row in merged]
    columns = [_paper_column(method, merged, published) for method in methods]
    models = {_model_key(row): _model_label(row, merged) for row in merged}
    shows_models = len(models) > 1
    marks: dict[str, str] = {}
    lines = []
    for row, figures in zip(merged, published, strict=True):
        line = [models[_model_key(row)]] if shows_models else []
        line += [*(str(row[name]) for name in _NAMES), _with_deviation(row["value"], row.get("deviation"))]
        line += [f"{row['num_samples']:,}", _seconds_text(row["seconds"])]
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


def transfer_averages(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """For each k the unweighted mean over the eight transfer sets (the paper's "Avg @k"), of models measured on all of
    them.

    Of several rows for one data set the last counts.
    """
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row["protocol"] == "knn" and row["data"] in TRANSFER_DATA and row["setting"].startswith("k="):
            groups.setdefault((row["setting"], row["metric"], *_model_key(row)), {})[row["data"]] = row
    averages = []
    for by_data in groups.values():
        if len(by_data) == len(TRANSFER_DATA):
            members = [by_data[data] for data in TRANSFER_DATA]
            averages.append(
                {
                    **members[0],
                    "data": TRANSFER_AVERAGE,
                    "value": statistics.fmean(row["value"] for row in members),
                    "num_samples": sum(row["num_samples"] for row in members),
                    "seconds": sum(row["seconds"] for row in members),
                    "run": fingerprint({"mean of": [row["run"] for row in members]}),
                    "created": max(row["created"] for row in members),
                }
            )
    return averages


def _grouped(rows: list[Row]) -> list[Row]:
    """Rows of one protocol together, in it those of one data set, in it those of one number; otherwise in the given
    order.
    """
    ranks: dict[tuple[Any, ...], int] = {}

    def place(row: Row) -> list[int]:
        names = tuple(row[name] for name in _NAMES)
        return [ranks.setdefault(prefix, len(ranks)) for prefix in (names[:1], names[:2], names)]

    return sorted(rows, key=place)


def _merge_deviations(rows: list[Row]) -> list[Row]:
    """Rows of a mean take the deviation of theirs as an entry; its row goes."""

    def key(row: Row, ending: str) -> tuple[Any, ...]:
        return (row["protocol"], row["data"], row["setting"].removesuffix(ending), row["metric"], *_model_key(row))

    means = {key(row, _MEAN) for row in rows if row["setting"].endswith(_MEAN)}
    deviations = {key(row, _DEVIATION): row["value"] for row in rows if row["setting"].endswith(_DEVIATION)}
    merged: list[Row] = []
    for row in rows:
        if row["setting"].endswith(_MEAN):
            merged.append({**row, "deviation": deviations.get(key(row, _MEAN))})
        elif not (row["setting"].endswith(_DEVIATION) and key(row, _DEVIATION) in means):
            merged.append(row)
    return merged


def _model_key(row: Row) -> tuple[str, str]:
    return row["weights"], row["precision"]


def _model_label(row: Row, rows: list[Row]) -> str:
    """The model's name, and what else it takes to tell it from the others."""
    namesakes = {_model_key(other) for other in rows if other["model"] == row["model"]}
    label = str(row["model"])
    if len({weights for weights, _ in namesakes}) > 1:
        label += f" {row['weights']}"
    if len({precision for _, precision in namesakes}) > 1:
        label += f" {row['precision']}"
    return label


def _title(rows: list[Row], *, shows_models: bool) -> str:
    if shows_models or not rows:
        return ""
    return f"{rows[0]['model']} ({rows[0]['architecture']}, weights {rows[0]['weights']}, {rows[0]['precision']})"


def _with_deviation(value: float, deviation: float | None) -> str:
    return f"{value:.2f}" if deviation is None else f"{value:.2f} ± {deviation:.2f}"


def _paper_column(method: str, rows: list[Row], published: list[dict[str, PaperFigure]]) -> str:
    """What stands above a method's figures: each is for the architecture of its row. Nothing where there are none."""
    architectures = {row["architecture"] for row, figures in zip(rows, published, strict=True) if method in figures}
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
