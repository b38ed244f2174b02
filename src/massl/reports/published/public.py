"""Tables that other projects publish, with the rules they were measured by, and our results as rows among theirs."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import date
from functools import cache
from importlib import resources
from typing import Any, Literal

from massl.reports.published.paper import checked_keys


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What two results must share to be comparable, named as in our recipes; None where a source does not say or it
    does not apply.
    """

    data: str  # CIFAR-10, Imagenette, ...
    backbone: str  # as timm calls it
    stem: Literal["", "small"]  # small: 3 x 3 without halving, for images of about 32 px
    epochs: int
    batch_size: int  # over all processes
    num_neighbours: int | None = None  # k of the k-NN classifier
    temperature: float | None = None  # of its votes
    best_epoch: bool | None = None  # whether the best epoch on the test images counts; false: the last


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a table stands, and the rules that are words."""

    repository: str  # owner/name on GitHub
    file: str
    commit: str  # at which the file was read
    date: date  # of the table, or of the file's last change where it says none
    optimiser: str
    views: str
    measured: str  # on what, and when
    hardware: str

    @property
    def address(self) -> str:
        """The file as it was read."""
        return f"https://github.com/{self.repository}/blob/{self.commit}/{self.file}"


@dataclass(frozen=True, kw_only=True)
class PublicColumn:
    """What the figures of one column are."""

    name: str
    title: str
    unit: Literal["%", "min", "GiB"]


@dataclass(frozen=True, kw_only=True)
class PublicRow:
    """One method in one table."""

    method: str
    rules: Rules  # the table's, with what this row does otherwise
    values: tuple[float | None, ...]  # one a column; None where the source prints none
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PublicTable:
    """One table; the first column is the accuracy it is ranked by."""

    name: str
    title: str
    source: Source
    rules: Rules
    columns: tuple[PublicColumn, ...]
    rows: tuple[PublicRow, ...]  # in the source's order
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class OurResult:
    """A result of ours that is to stand in a table."""

    method: str
    rules: Rules
    values: Mapping[str, float]  # name of a column -> figure; the first column's must be among them
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankedRow:
    """A row of a table that has ours among theirs."""

    place: int  # 1: best; equal accuracies share a place
    ours: bool
    row: PublicRow


def with_ours(table: PublicTable, ours: Iterable[OurResult]) -> tuple[RankedRow, ...]:
    """The table with our results as rows, best accuracy first; of equal ones theirs come first.

    In what ours departs from the rules of the nearest row of the table stands in its notes. A result on other data, or
    without the figure that the table is ranked by, has no place in it: a ValueError says so.
    """
    rows = [(row, False) for row in table.rows] + [(_as_row(result, table), True) for result in ours]
    accuracies = [_accuracy(row) for row, _ in rows]
    ranked = sorted(rows, key=lambda entry: -_accuracy(entry[0]))  # stable: theirs stay before ours
    places = [1 + sum(other > _accuracy(row) for other in accuracies) for row, _ in ranked]
    return tuple(
        RankedRow(place=place, ours=is_ours, row=row) for place, (row, is_ours) in zip(places, ranked, strict=True)
    )


def differences(ours: Rules, theirs: Rules) -> tuple[str, ...]:
    """Rules that differ, in words: "epochs is 100, not 200"; what theirs leaves open cannot differ."""
    pairs = [(field.name, getattr(ours, field.name), getattr(theirs, field.name)) for field in fields(Rules)]
    return tuple(
        f"{name} is {_in_words(own)}, not {_in_words(other)}"
        for name, own, other in pairs
        if other is not None and own != other
    )


@cache
def public_tables() -> tuple[PublicTable, ...]:
    """All tables of public_tables.toml, in its order."""
    document = tomllib.loads(resources.files(__package__).joinpath("public_tables.toml").read_text(encoding="utf-8"))
    checked_keys(document, "public_tables.toml", needed={"notes", "columns", "sources", "tables"})
    columns = {name: _column(name, plain) for name, plain in document["columns"].items()}
    sources = {name: _source(name, plain) for name, plain in document["sources"].items()}
    tables = tuple(
        _table(plain, columns=columns, sources=sources, notes=document["notes"]) for plain in document["tables"]
    )
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
    return PublicRow(method=result.method, rules=result.rules, values=values, notes=(*result.notes, *nearest))


def _accuracy(row: PublicRow) -> float:
    accuracy = row.values[0]
    assert accuracy is not None, f"{row.method} has no figure in the column that its table is ranked by"
    return accuracy


def _in_words(value: object) -> str:
    words = {None: "not known", "": "the usual one", True: "yes", False: "no"}
    return words[value] if value is None or isinstance(value, bool) or value == "" else str(value)


def _column(name: str, plain: dict[str, Any]) -> PublicColumn:
    checked_keys(plain, f"column {name}", needed={"title", "unit"})
    assert plain["unit"] in ("%", "min", "GiB"), f"column {name}: {plain['unit']!r} is no unit"
    return PublicColumn(name=name, **plain)


def _source(name: str, plain: dict[str, Any]) -> Source:
    checked_keys(plain, f"source {name}", needed={field.name for field in fields(Source)})
    assert type(plain["date"]) is date, f"source {name}: {plain['date']!r} is no date"
    return Source(**plain)


def _table(
    plain: dict[str, Any], *, columns: dict[str, PublicColumn], sources: dict[str, Source], notes: dict[str, str]
) -> PublicTable:
    name = plain["name"]
    checked_keys(plain, name, needed={"name", "title", "source", "notes", "rules", "columns", "rows"})
    return PublicTable(
        name=name,
        title=plain["title"],
        source=sources[plain["source"]],
        rules=_rules(plain["rules"], name),
        columns=tuple(columns[column] for column in plain["columns"]),
        rows=tuple(_row(row, plain, notes=notes) for row in plain["rows"]),
        notes=tuple(notes[note] for note in plain["notes"]),
    )


def _row(plain: dict[str, Any], table: dict[str, Any], *, notes: dict[str, str]) -> PublicRow:
    where = f"{table['name']}, {plain['method']}"
    own_rules = {"backbone", "batch_size", "temperature"}
    checked_keys(plain, where, needed={"method", "values"}, allowed={"note", *own_rules})
    values = plain["values"]
    assert len(values) == len(table["columns"]), f"{where}: {len(values)} values in {len(table['columns'])} columns"
    wrong = [value for value in values if not (isinstance(value, float) or value == "--")]
    assert not wrong, f"{where}: {wrong} are no figures"
    return PublicRow(
        method=plain["method"],
        rules=_rules({**table["rules"], **{key: plain[key] for key in own_rules & plain.keys()}}, where),
        values=tuple(None if value == "--" else value for value in values),
        notes=(notes[plain["note"]],) if "note" in plain else (),
    )


def _rules(plain: dict[str, Any], where: str) -> Rules:
    needed = {"data", "backbone", "stem", "epochs", "batch_size"}
    checked_keys(plain, where, needed=needed, allowed={"num_neighbours", "temperature", "best_epoch"})
    assert plain["stem"] in ("", "small"), f"{where}: {plain['stem']!r} is no stem"
    return Rules(**plain)
