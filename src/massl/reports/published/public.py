"""Tables that other projects publish, with the rules they were measured by, and our results as rows among theirs."""

import datetime
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Strict, model_validator

from massl.reports.published.document import Number, Published, read_document


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
    notes: tuple[str, ...]

    @property
    def accuracy(self) -> float:
        """What its table is ranked by."""
        assert self.values[0] is not None, f"{self.method} has no figure in the first column"
        return self.values[0]


class PublicTable(Published):
    """One table; the first column is the accuracy it is ranked by."""

    name: str
    title: str
    source: Source
    rules: Rules
    columns: tuple[PublicColumn, ...]
    rows: tuple[PublicRow, ...]  # in the source's order
    notes: tuple[str, ...]

    @model_validator(mode="after")
    def _every_column_has_a_value(self) -> Self:
        short = [row.method for row in self.rows if len(row.values) != len(self.columns)]
        assert not short, f"not one value per column: {', '.join(short)}"
        return self


class PublicTables(Published):
    """The whole document."""

    notes: dict[str, str]
    columns: dict[str, PublicColumn]
    sources: dict[str, Source]
    tables: tuple[PublicTable, ...]

    @model_validator(mode="before")
    @classmethod
    def _resolve_names(cls, plain: dict[str, Any]) -> dict[str, Any]:
        """Tables name their source, columns and notes."""
        columns = {name: {"name": name, **column} for name, column in plain["columns"].items()}
        notes = plain["notes"]
        tables = [
            {
                **table,
                "source": plain["sources"][table["source"]],
                "columns": [columns[name] for name in table["columns"]],
                "rows": [_expanded_row(row, table["rules"], notes) for row in table["rows"]],
                "notes": [notes[name] for name in table["notes"]],
            }
            for table in plain["tables"]
        ]
        return {**plain, "columns": columns, "tables": tables}


def _expanded_row(plain: dict[str, Any], rules: dict[str, Any], notes: dict[str, str]) -> dict[str, Any]:
    """A row with the rules of its table, apart from its exceptions."""
    row = dict(plain)
    own_rules = {key: row.pop(key) for key in ("backbone", "batch_size", "temperature") if key in row}
    noted = [notes[row.pop("note")]] if "note" in row else []
    values = [None if value == "--" else value for value in row["values"]]
    return {**row, "rules": {**rules, **own_rules}, "values": values, "notes": noted}


@cache
def public_tables() -> tuple[PublicTable, ...]:
    """All tables of public_tables.toml, in its order."""
    tables = read_document(PublicTables, "public_tables.toml").tables
    assert len({table.name for table in tables}) == len(tables), "two tables share a name"
    return tables


class RankedRow(NamedTuple):
    """A row of a table of theirs and ours."""

    place: int  # 1: best; equal accuracies share a place
    ours: bool
    row: PublicRow


def with_ours(table: PublicTable, ours: Iterable[PublicRow]) -> tuple[RankedRow, ...]:
    """The table with our rows, best accuracy first; of equal ones theirs come first.

    The notes of our rows say where they depart from the rules of the most similar row of theirs.
    """
    rows = [(row, False) for row in table.rows] + [(_with_departures(row, table), True) for row in ours]
    ranked = sorted(rows, key=lambda entry: -entry[0].accuracy)  # stable: theirs stay before ours
    return tuple(
        RankedRow(place=1 + sum(other.accuracy > row.accuracy for other, _ in rows), ours=is_ours, row=row)
        for row, is_ours in ranked
    )


def _with_departures(row: PublicRow, table: PublicTable) -> PublicRow:
    assert row.rules.data == table.rules.data, f"{row.method} was not measured on {table.rules.data}"
    nearest = min((differences(row.rules, other.rules) for other in table.rows), key=len)
    return row.model_copy(update={"notes": (*row.notes, *nearest)})


def differences(ours: Rules, theirs: Rules) -> tuple[str, ...]:
    """Rules that differ, in words: "epochs is 100, not 200"; rules that theirs does not state are skipped."""
    pairs = [(name, getattr(ours, name), getattr(theirs, name)) for name in Rules.model_fields]
    return tuple(
        f"{name} is {_in_words(own)}, not {_in_words(other)}"
        for name, own, other in pairs
        if other is not None and own != other
    )


def _in_words(value: object) -> str:
    words = {None: "not known", "": "the usual one", True: "yes", False: "no"}
    return words[value] if value is None or isinstance(value, bool) or value == "" else str(value)
