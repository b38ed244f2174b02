import tomllib
from datetime import date
from decimal import Decimal
from importlib import resources
from typing import Any

import pytest

from massl.nn.backbone import BackboneSettings
from massl.reports.published.document import parse_document
from massl.reports.published.public import (
    PublicRow,
    PublicTable,
    PublicTables,
    Rules,
    differences,
    public_tables,
    with_ours,
)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """The tables with every digit as it was typed."""
    text = resources.files("massl.reports.published").joinpath("public_tables.toml").read_text(encoding="utf-8")
    return tomllib.loads(text, parse_float=Decimal)


def public_table(name: str) -> PublicTable:
    (table,) = [table for table in public_tables() if table.name == name]
    return table


@pytest.fixture
def cifar() -> PublicTable:
    return public_table("lightly-cifar10-batch512-200")


def ours(table: PublicTable, accuracy: float | None, *, method: str = "ours", **rules: Any) -> PublicRow:
    values = (accuracy, *(None for _ in table.columns[1:]))
    return PublicRow(method=method, rules=table.rules.model_copy(update=rules), values=values, notes=())


# ---- the data --------------------------------------------------------------------------------------------------------


# Rows, and the sum of each column, added up over the sources themselves; shares (0.842) as percent.
INVENTORY = {
    "lightly-cifar10-batch128-200": (12, "1002.7", "1701.8", "19.6"),
    "lightly-cifar10-batch512-200": (12, "975.4", "1267.1", "63.8"),
    "lightly-cifar10-batch512-800": (12, "1052.2", "4737.2", "66.2"),
    "lightly-imagenette-200": (20, "1451.4", "1407.4", "114.7"),
    "lightly-imagenette-800": (20, "1640.7", "5466.7", "114.7"),
    "lightly-imagenet100": (9, "467.5", "12897.7", "127.8"),
    "lightly-imagenet": (14, "639.8", "1012.2", "883.3", "1184.4", "1054.4", "1295.5"),
    "solo-learn-cifar10": (16, "1461.00", "1595.64"),
    "solo-learn-cifar100": (16, "1082.48", "1444.29"),
    "solo-learn-imagenet100": (18, "1393.77", "1094.50", "1693.99", "1320.80"),
}


def test_all_rows_of_the_sources_are_there_and_add_up(document: dict[str, Any]) -> None:
    found = {}
    for table in document["tables"]:
        columns = zip(*(row["values"] for row in table["rows"]), strict=True)
        found[table["name"]] = (
            len(table["rows"]),
            *(str(sum(value for value in column if value != "--")) for column in columns),
        )
    assert found == INVENTORY


@pytest.mark.parametrize(
    ("table", "method", "backbone", "values"),  # read off the sources a second time
    [
        ("lightly-cifar10-batch128-200", "FastSiam", "resnet18", (90.6, 164.0, 2.7)),
        ("lightly-cifar10-batch512-200", "BYOL", "resnet18", (86.8, 108.3, 5.6)),
        ("lightly-cifar10-batch512-800", "DINO", "resnet18", (84.8, 405.2, 5.0)),
        ("lightly-imagenette-200", "DINO", "resnet18", (87.3, 75.4, 6.6)),
        ("lightly-imagenette-800", "MSN", "vit_small_patch16_224", (82.8, 515.5, 14.7)),
        ("lightly-imagenet100", "Moco", "resnet18", (56.0, 1314.2, 13.1)),
        ("lightly-imagenet", "iBOT", "vit_small_patch16_224", (65.4, 88.5, 72.2, 90.5, 78.3, 94.3)),
        ("lightly-imagenet", "DINO", "resnet50", (49.9, 78.7, 68.2, 87.9, 72.5, 90.8)),
        ("solo-learn-cifar10", "MoCo V3", "resnet18", (93.1, 99.8)),
        ("solo-learn-cifar100", "W-MSE", "resnet18", (61.33, 87.26)),
        ("solo-learn-imagenet100", "DINO", "vit_tiny_patch16_224", (63.04, None, 87.72, None)),
    ],
)
def test_figures_stand_under_their_method_and_column(
    table: str, method: str, backbone: str, values: tuple[float | None, ...]
) -> None:
    rows = [row for row in public_table(table).rows if (row.method, row.rules.backbone) == (method, backbone)]
    assert [row.values for row in rows] == [values]


def test_the_rules_of_lightlys_cifar10_benchmark_are_those_of_its_script() -> None:
    tables = [table for table in public_tables() if table.name.startswith("lightly-cifar10")]
    assert [(table.rules.batch_size, table.rules.epochs) for table in tables] == [(128, 200), (512, 200), (512, 800)]
    for table in tables:
        assert table.rules == Rules(
            data="CIFAR-10",
            backbone="resnet18",
            stem="small",
            epochs=table.rules.epochs,
            batch_size=table.rules.batch_size,
            num_neighbours=200,
            temperature=0.1,
            best_epoch=True,
        )
        assert {row.rules for row in table.rows} == {table.rules}
        assert table.source.date == date(2023, 3, 27)
        assert table.source.address.endswith(
            f"/blob/{table.source.commit}/docs/source/getting_started/benchmarks/cifar10_benchmark.py"
        )


def test_rows_may_depart_from_their_tables_rules() -> None:
    (row,) = [row for row in public_table("lightly-imagenet").rows if row.method == "LeJEPA"]
    table = public_table("lightly-imagenet")
    own = {"backbone": "vit_small_patch16_224", "batch_size": 512, "temperature": 0.07}
    assert row.rules == table.rules.model_copy(update=own)


def test_no_method_is_there_twice_and_accuracies_are_percent() -> None:
    for table in public_tables():
        keys = [(row.method, row.rules) for row in table.rows]
        assert len(set(keys)) == len(keys)
        percent = [number for number, column in enumerate(table.columns) if column.unit == "%"]
        assert percent[0] == 0
        shown = [row.values[number] for row in table.rows for number in percent]
        assert all(10.0 < value < 100.0 for value in shown if value is not None)


def test_every_note_source_and_column_is_used(document: dict[str, Any]) -> None:
    tables = document["tables"]
    noted = {row["note"] for table in tables for row in table["rows"] if "note" in row}
    assert noted.union(*(table["notes"] for table in tables)) == set(document["notes"])
    assert {table["source"] for table in tables} == set(document["sources"])
    assert {column for table in tables for column in table["columns"]} == set(document["columns"])


def test_backbones_are_networks_that_our_recipes_can_name() -> None:
    for rules in {row.rules for table in public_tables() for row in table.rows}:
        BackboneSettings(name=rules.backbone, stem=rules.stem)


# ---- reading is strict -----------------------------------------------------------------------------------------------


def parse_with(**changes: Any) -> PublicTables:
    """The real document with one table, some parts of which are changed."""
    text = resources.files("massl.reports.published").joinpath("public_tables.toml").read_text(encoding="utf-8")
    plain = tomllib.loads(text)
    return parse_document(PublicTables, {**plain, "tables": [{**plain["tables"][0], **changes}]})


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"method": "A", "values": [1.0]}, "one value per column: A"),
        ({"method": "A", "values": [1.0, "n/a"]}, "values"),
        ({"method": "A", "values": [1, 2.0]}, "values"),
        ({"method": "A", "values": [1.0, float("inf")]}, "values"),
        ({"method": "A", "values": [1.0, 2.0], "epoch": 3}, "epoch"),
        ({"method": "A", "values": [1.0, 2.0], "note": "no-such-note"}, "no-such-note"),
        ({"method": "A"}, "values"),
        ({"values": [1.0, 2.0]}, "method"),
    ],
)
def test_a_wrong_row_is_refused(row: dict[str, Any], key: str) -> None:
    parse_with(columns=["knn_top1", "minutes"], rows=[{"method": "A", "values": [1.0, "--"], "note": "tuned"}])
    with pytest.raises(AssertionError, match=key):
        parse_with(columns=["knn_top1", "minutes"], rows=[row])


@pytest.mark.parametrize(
    ("change", "key"), [({"stem": "cifar"}, "stem"), ({"k": 200}, "rules.k"), ({"data": None}, "data")]
)
def test_wrong_rules_are_refused(change: dict[str, Any], key: str, document: dict[str, Any]) -> None:
    rules = {**document["tables"][0]["rules"], **change}
    with pytest.raises(AssertionError, match=key):
        parse_with(rules={name: value for name, value in rules.items() if value is not None})


@pytest.mark.parametrize("change", [{"source": "nobody"}, {"columns": ["hours"]}, {"notes": ["nothing"]}])
def test_a_table_that_names_what_does_not_exist_is_refused(change: dict[str, Any]) -> None:
    (name,) = [value if isinstance(value, str) else value[0] for value in change.values()]
    with pytest.raises(AssertionError, match=name):
        parse_with(**change)


# ---- ours among theirs -----------------------------------------------------------------------------------------------


def test_without_ours_a_table_is_sorted_by_accuracy(cifar: PublicTable) -> None:
    ranked = with_ours(cifar, [])
    assert [entry.row.method for entry in ranked[:3]] == ["BYOL", "SimCLR", "Moco"]
    assert sorted(entry.row.method for entry in ranked) == sorted(row.method for row in cifar.rows)
    assert [entry.place for entry in ranked] == list(range(1, 13))
    assert not any(entry.ours for entry in ranked)


def test_ours_stands_where_its_accuracy_puts_it(cifar: PublicTable) -> None:
    ranked = with_ours(
        cifar,
        [ours(cifar, 50.0, method="worst"), ours(cifar, 84.75, method="middle"), ours(cifar, 99.0, method="best")],
    )
    assert [(entry.place, entry.row.method) for entry in ranked if entry.ours] == [
        (1, "best"),
        (4, "middle"),
        (15, "worst"),
    ]
    assert [entry.row.values[0] for entry in ranked] == sorted(
        (entry.row.values[0] or 0.0 for entry in ranked), reverse=True
    )


def test_equal_accuracies_share_a_place_and_theirs_come_first(cifar: PublicTable) -> None:
    ranked = with_ours(cifar, [ours(cifar, 84.8)])
    assert [(entry.place, entry.row.method) for entry in ranked[1:4]] == [(2, "SimCLR"), (2, "ours"), (4, "Moco")]


def test_figures_of_ours_stand_in_their_columns(cifar: PublicTable) -> None:
    result = PublicRow(method="ours", rules=cifar.rules, values=(90.0, None, 3.5), notes=("one seed",))
    (entry,) = [entry for entry in with_ours(cifar, [result]) if entry.ours]
    assert entry.row.values == (90.0, None, 3.5)
    assert entry.row.notes == ("one seed",)


def test_what_ours_does_otherwise_stands_in_its_notes(cifar: PublicTable) -> None:
    result = ours(cifar, 90.0, epochs=100, stem="", best_epoch=False, num_neighbours=None)
    (entry,) = [entry for entry in with_ours(cifar, [result]) if entry.ours]
    assert entry.row.notes == (
        "stem is the usual one, not small",
        "epochs is 100, not 200",
        "num_neighbours is not known, not 200",
        "best_epoch is no, not yes",
    )


def test_ours_is_held_against_the_nearest_row() -> None:
    table = public_table("lightly-imagenet")
    result = ours(table, 70.0, backbone="vit_small_patch16_224", batch_size=128, temperature=0.07)
    (entry,) = [entry for entry in with_ours(table, [result]) if entry.ours]
    assert entry.row.notes == ()


def test_what_a_source_leaves_open_is_no_difference() -> None:
    open_rules = Rules(data="CIFAR-10", backbone="resnet18", stem="small", epochs=1000, batch_size=256)
    stated = open_rules.model_copy(update={"num_neighbours": 20, "best_epoch": True})
    assert differences(stated, open_rules) == ()
    assert differences(open_rules, stated) == (
        "num_neighbours is not known, not 20",
        "best_epoch is not known, not yes",
    )


def test_a_result_that_has_no_place_in_a_table_is_refused(cifar: PublicTable) -> None:
    with pytest.raises(AssertionError, match="ours"):
        with_ours(cifar, [ours(cifar, None)])
    with pytest.raises(AssertionError, match="CIFAR-10"):
        with_ours(cifar, [ours(cifar, 90.0, data="ImageNet")])
