"""Tables that other projects publish, with the rules they were measured by, and our results as rows among theirs."""

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import Strict, model_validator

from massl.reports.published.document import Note, Number, Published, read_document


class Rules(Published):
    """What two results must share to be comparable, named as in our recipes; None: not stated or not applicable."""

    data: str  # CIFAR-10, Imagenette, ...
    backbone: str  # as timm calls it
    stem: Literal["", "small"]  # small: 3 x 3 without halving, for images of about 32 px
    epochs: int
    batch_size: int  # over all processes
    num_neighbours: int | None = None  # k of the k-NN classifier
    temperature: float | None = None  # of its votes
    best_epoch: bool | None = None  # whether the best epoch on the test images counts; false: the last


class Source(Published):
    """Where a table was published, and the rules that are words."""

    repository: str  # owner/name on GitHub
    file: str
    commit: str  # at which the file was read
    date: Annotated[datetime.date, Strict()]  # of the table, or of the file's last change where it says none
    optimiser: str
    views: str
    measured: str  # on what, and when
    hardware: str

    @property
    def address(self) -> str:
        """The file as it was read."""
        return f"https://github.com/{self.repository}/blob/{self.commit}/{self.file}"


class PublicColumn(Published):
    """What the figures of one column are."""

    name: str
    title: str
    unit: Literal["%", "min", "GiB"]


class PublicRow(Published):
    """One method in one table."""

    method: str
    rules: Rules  # the table's, with this row's exceptions
    values: tuple[Number | None, ...]  # one per column; None where the source prints none
    notes: tuple[Note, ...]


class PublicTable(Published):
    """One table; the first column is the accuracy it is ranked by."""

    name: str
    title: str
    source: Source
    rules: Rules
    columns: tuple[PublicColumn, ...]
    rows: tuple[PublicRow, ...]  # in the source's order
    notes: tuple[Note, ...]

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, plain: dict[str, Any]) -> dict[str, Any]:
        return {**plain, "rows": [_expanded_row(row, plain["rules"]) for row in plain["rows"]]}

    @model_validator(mode="after")
    def _every_column_has_a_value(self) -> Self:
        short = [row.method for row in self.rows if len(row.values) != len(self.columns)]
        assert not short, f"not one value per column: {', '.join(short)}"
        return self


def _expanded_row(plain: dict[str, Any], rules: dict[str, Any]) -> dict[str, Any]:
    """A row with the rules of its table, apart from its exceptions."""
    row = dict(plain)
    own_rules = {key: row.pop(key) for key in ("backbone", "batch_size", "temperature") if key in row}
    notes = [row.pop("note")] if "note" in row else []
    values = [None if value == "--" else value for value in row["values"]]
    return {**row, "rules": {**rules, **own_rules}, "values": values, "notes": notes}


class PublicTables(Published):
    """The whole document."""

    notes: dict[str, str]
    columns: dict[str, PublicColumn]
    sources: dict[str, Source]
    tables: tuple[PublicTable, ...]

    @model_validator(mode="before")
    @classmethod
    def _resolve_names(cls, plain: dict[str, Any]) -> dict[str, Any]:
        """Tables name their source and columns."""
        columns = {name: {"name": name, **column} for name, column in plain["columns"].items()}
        tables = [
            {
                **table,
                "source": plain["sources"][table["source"]],
                "columns": [columns[name] for name in table["columns"]],
            }
            for table in plain["tables"]
        ]
        return {**plain, "columns": columns, "tables": tables}


@dataclass(frozen=True, kw_only=True)
class OurResult:
    """A result of ours, to be listed in a table."""

    method: str
    rules: Rules
    values: Mapping[str, float]  # name of a column -> figure; the first column's must be among them
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankedRow:
    """A row of a table of theirs and ours."""

    place: int  # 1: best; equal accuracies share a place
    ours: bool
    row: PublicRow


def with_ours(table: PublicTable, ours: Iterable[OurResult]) -> tuple[RankedRow, ...]:
    """The table with our results as rows, best accuracy first; of equal ones theirs come first.

    The notes of our rows say where they depart from the rules of the most similar row. ValueError for a result on other
    data or without the accuracy that the table is ranked by.
    """
    rows = [(row, False) for row in table.rows] + [(_as_row(result, table), True) for result in ours]
    accuracies = [_accuracy(row) for row, _ in rows]
    ranked = sorted(rows, key=lambda entry: -_accuracy(entry[0]))  # stable: theirs stay before ours
    places = [1 + sum(other > _accuracy(row) for other in accuracies) for row, _ in ranked]
    return tuple(
        RankedRow(place=place, ours=is_ours, row=row) for place, (row, is_ours) in zip(places, ranked, strict=True)
    )


def differences(ours: Rules, theirs: Rules) -> tuple[str, ...]:
    """Rules that differ, in words: "epochs is 100, not 200"; rules that theirs does not state are skipped."""
    pairs = [(name, getattr(ours, name), getattr(theirs, name)) for name in Rules.model_fields]
    return tuple(
        f"{name} is {_in_words(own)}, not {_in_words(other)}"
        for name, own, other in pairs
        if other is not None and own != other
    )


@cache
def public_tables() -> tuple[PublicTable, ...]:
    """All tables of public_tables.toml, in its order."""
    tables = read_document(PublicTables, "public_tables.toml").tables
    assert len({table.name for table in tables}) == len(tables), "two tables share a name"
    return tables


def _as_row(result: OurResult, table: PublicTable) -> PublicRow:
    names = [column.name for column in table.columns]
    unknown = sorted(set(result.values) - set(names))
    if unknown:
        raise ValueError(
            f"{result.method}: {table.name} has no column {', '.join(unknown)}; its columns are {', '.join(names)}"
        )
    if names[0] not in result.values:
        raise ValueError(f"{result.method}: {table.name} is ranked by {names[0]}; give a figure for it")
    if result.rules.data != table.rules.data:
        raise ValueError(f"{result.method}: measured on {result.rules.data}, but {table.name} is of {table.rules.data}")
    nearest = min((differences(result.rules, row.rules) for row in table.rows), key=len)
    values = tuple(result.values.get(name) for name in names)
    notes = (*result.notes, *nearest)
    return PublicRow.model_construct(method=result.method, rules=result.rules, values=values, notes=notes)


def _accuracy(row: PublicRow) -> float:
    accuracy = row.values[0]
    assert accuracy is not None, f"{row.method} has no figure in the column that its table is ranked by"
    return accuracy


def _in_words(value: object) -> str:
    words = {None: "not known", "": "the usual one", True: "yes", False: "no"}
    return words[value] if value is None or isinstance(value, bool) or value == "" else str(value)
