import tomllib
from decimal import Decimal
from importlib import resources
from typing import Any

import pytest

from massl.reports.published.document import parse_document
from massl.reports.published.paper import (
    SETTINGS,
    TRANSFER_AVERAGE,
    TRANSFER_DATA,
    PaperColumn,
    PaperFigure,
    PaperTables,
    paper_figures,
    paper_tables,
)

NUM_TEST_IMAGES = {
    "Pets": 3669,
    "Flowers": 6149,
    "Aircraft": 3333,
    "Cars": 8041,
    "Country211": 21100,
    "Food101": 25250,
    "STL-10": 8000,
    "GTSRB": 12630,
    "DTD": 1880,
    "CIFAR-100": 10000,
    "ImageNet": 50000,
    "ImageNet-LT": 50000,
    "ImageNet-9": 4050,
}
KS = (10, 20, 100, 200)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """The tables with every digit as it was typed."""
    text = resources.files("massl.reports.published").joinpath("paper_tables.toml").read_text(encoding="utf-8")
    return tomllib.loads(text, parse_float=Decimal)


def plain_cells(document: dict[str, Any], table: str) -> list[tuple[dict[str, str], dict[str, Any], Decimal]]:
    """Column, row and printed number of every cell that has one."""
    plain = next(plain for plain in document["tables"] if plain["id"] == table)
    shared = {key: value for key, value in plain.items() if isinstance(value, str)}
    cells = []
    for row in plain["rows"]:
        for column, cell in zip(plain["columns"], row["values"], strict=True):
            number = cell["value"] if isinstance(cell, dict) else cell
            if number != "--":
                cells.append(({**shared, **column}, row, number))
    return cells


def is_share_of(number: Decimal, num_images: int) -> bool:
    """Whether some number of right answers, in percent, is printed so."""
    num_right = round(number * num_images / 100)
    half_of_last_digit = Decimal(5).scaleb(number.as_tuple().exponent - 1)  # type: ignore[operator]
    return abs(Decimal(100 * num_right) / num_images - number) <= half_of_last_digit


def knn_figure(method: str, data: str, k: int, architecture: str) -> PaperFigure:
    names = {"protocol": "knn", "data": data, "setting": f"k={k}", "metric": "top1", "architecture": architecture}
    return paper_figures(**names)[method]


# ---- the data --------------------------------------------------------------------------------------------------------


# Label in the paper's LaTeX source -> rows and columns here, printed figures, and their sum, added up over the LaTeX
# source.
INVENTORY = {
    "tab:knn-transfer": (5, 12, 5 * 12, "3107.804899996"),
    "tab:transfer-logreg": (3, 6, 3 * 6, "1421.99807463"),
    "tab:linear-probing": (14, 2, 14 + 9, "1766.6"),
    "tab:image-retrieval": (9, 4, 9 * 4, "1295.80"),
    "tab:copy-detection": (6, 1, 6, "513.5"),
    "tab:low-shot-imnet": (6, 6, 18 * 2, "2490.834"),  # 18 rows of 2 in the paper
    "tab:low-shot-and-long-tail": (4, 4, 4 * 4, "861.304"),
    "tab:robustness-eval": (2, 8, 2 * 8, "1067.60"),
    "tab:clutering-eval": (5, 9, 5 * 6, "1521.42327462"),  # CIFAR-10 stands in two blocks here
    "tab:time-and-memory": (9, 3, 3 * 7 + 3 * 2, "1652.5"),  # the paper has memory once a method: 1552.5 and twice 50.0
    "tab:effects-of-memory-size": (1, 5, 5, "352.011"),
    "tab:effect-of-memory-block-size": (1, 7, 7, "491.851"),
    "tab:memory-block-sampling": (2, 4, 2 * 4, "277.9"),
    "tab:transferLearningFull": (9, 8 * 4, 9 * 8 * 4, "14953.487472628"),
}


def test_all_tables_of_the_paper_are_there_and_their_figures_add_up(document: dict[str, Any]) -> None:
    found = {}
    for plain in document["tables"]:
        numbers = [number for _, _, number in plain_cells(document, plain["id"])]
        found[plain["label"]] = (len(plain["rows"]), len(plain["columns"]), len(numbers), str(sum(numbers)))
    assert found == INVENTORY
    deviations = [
        cell["deviation"]
        for row in all_rows(document)
        for cell in row["values"]
        if isinstance(cell, dict) and "deviation" in cell
    ]
    assert (len(deviations), str(sum(deviations))) == (12, "4.9")


def test_what_is_read_is_what_was_typed(document: dict[str, Any]) -> None:
    assert [table.label for table in paper_tables()] == list(INVENTORY)
    for table in paper_tables():
        figures = [figure.value for row in table.rows for figure in row.figures if figure is not None]
        assert figures == [float(number) for _, _, number in plain_cells(document, table.id)]


def changed(table: dict[str, Any], place: str, **changes: Any) -> dict[str, Any]:
    """A copy of a table with a change at the top, in its first column, its first row or the first cell of it."""
    rows = [dict(row) for row in table["rows"]]
    columns = [dict(column) for column in table["columns"]]
    if place == "cell":
        rows[0]["values"] = [{"value": 1.0, **changes}, *rows[0]["values"][1:]]
    {"row": rows[0], "column": columns[0]}.get(place, {}).update(changes)
    return {**table, "rows": rows, "columns": columns, **(changes if place == "table" else {})}


@pytest.mark.parametrize(
    ("place", "changes", "key"),
    [
        ("table", {"captoin": "x"}, "captoin"),
        ("table", {"caption": 3}, "caption"),
        ("table", {"note": "no-such-note"}, "no-such-note"),
        ("column", {"metrics": "top1"}, "metrics"),
        ("row", {"epoch": 100}, "epoch"),
        ("row", {"values": [1.0]}, "argument 2 is longer"),
        ("cell", {"std": 0.1}, "std"),
        ("cell", {"value": 85}, "value"),
        ("cell", {"value": "n/a"}, "value"),
        ("cell", {"value": float("nan")}, "value"),
        ("cell", {"note": "no-such-note"}, "no-such-note"),
    ],
)
def test_a_table_with_a_mistake_is_refused(place: str, changes: dict[str, Any], key: str) -> None:
    text = resources.files("massl.reports.published").joinpath("paper_tables.toml").read_text(encoding="utf-8")
    plain = next(table for table in tomllib.loads(text)["tables"] if table["id"] == "transfer-logreg")
    parse_document(PaperTables, {"notes": {}, "tables": [plain]})
    with pytest.raises(AssertionError, match=key):
        parse_document(PaperTables, {"notes": {}, "tables": [changed(plain, place, **changes)]})


@pytest.mark.parametrize("missing", ["id", "caption", "columns", "rows"])
def test_a_table_without_a_part_is_refused(missing: str) -> None:
    text = resources.files("massl.reports.published").joinpath("paper_tables.toml").read_text(encoding="utf-8")
    plain = {key: value for key, value in tomllib.loads(text)["tables"][1].items() if key != missing}
    with pytest.raises(AssertionError, match=missing):
        parse_document(PaperTables, {"notes": {}, "tables": [plain]})


def test_every_column_says_what_it_measures_and_no_row_is_there_twice() -> None:
    for table in paper_tables():
        assert len(set(table.columns)) == len(table.columns)
        keys = [(row.method, row.architecture, row.epochs) for row in table.rows]
        assert len(set(keys)) == len(keys)


def test_every_note_is_used(document: dict[str, Any]) -> None:
    used = set()
    for table in document["tables"]:
        used |= {table.get("note"), *table.get("remarks", ())}
        used |= {part.get("note") for part in (*table["columns"], *table["rows"])}
        used |= {cell.get("note") for row in table["rows"] for cell in row["values"] if isinstance(cell, dict)}
    assert used - {None} == set(document["notes"])


@pytest.mark.parametrize("method", ["MAE", "MoCo-v3", "DINO", "iBOT", "MaSSL"])
@pytest.mark.parametrize("k", KS)
def test_printed_averages_are_unweighted_means_over_the_eight_data_sets(method: str, k: int) -> None:
    mean = sum(knn_figure(method, data, k, "ViT-B/16").value for data in TRANSFER_DATA) / 8
    assert knn_figure(method, TRANSFER_AVERAGE, k, "ViT-B/16").value == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize("table", ["transfer-knn", "transfer-knn-full", "transfer-logreg", "backgrounds"])
def test_accuracies_are_whole_numbers_of_test_images(document: dict[str, Any], table: str) -> None:
    cells = [
        (column["data"], number)
        for column, _, number in plain_cells(document, table)
        if column["data"] != TRANSFER_AVERAGE
    ]
    assert [(data, number) for data, number in cells if not is_share_of(number, NUM_TEST_IMAGES[data])] == []


def test_only_two_accuracies_on_imagenet_cannot_be_and_they_are_marked(document: dict[str, Any]) -> None:
    cells = [
        cell
        for table in ("low-shot", "long-tail", "memory-size", "block-size")
        for cell in plain_cells(document, table)
    ]
    impossible = {
        str(number) for column, _, number in cells if not is_share_of(number, NUM_TEST_IMAGES[column["data"]])
    }
    marked = {
        str(cell["value"]) for row in all_rows(document) for cell in row["values"] if is_marked(cell, "odd-thousandth")
    }
    assert impossible == marked == {"70.529", "68.521"}


def all_rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for table in document["tables"] for row in table["rows"]]


def is_marked(cell: Any, note: str) -> bool:
    return isinstance(cell, dict) and cell.get("note") == note


def test_the_check_for_whole_numbers_of_images_can_fail() -> None:
    assert is_share_of(Decimal("91.60534206"), 3669)
    assert not is_share_of(Decimal("91.60534206"), 3680)
    assert not is_share_of(Decimal("91.6053421"), 3668)


def test_tables_that_repeat_a_figure_agree(document: dict[str, Any]) -> None:
    seen: dict[tuple[str, ...], list[Decimal]] = {}
    for table in document["tables"]:
        for column, row, number in plain_cells(document, table["id"]):
            names = tuple(column[name] for name in ("protocol", "data", "setting", "metric"))
            full_table_has_no_lengths = "" if table["id"].startswith("transfer-knn") else str(row.get("epochs"))
            seen.setdefault((*names, row["method"], row["architecture"], full_table_has_no_lengths), []).append(number)
    repeated = [numbers for numbers in seen.values() if len(numbers) > 1]
    assert len(repeated) == 5 * 8 + 3 * 2 + 4  # transfer at k=20; ImageNet k-NN at 300 and 800 epochs; block sizes
    for numbers in repeated:
        coarsest = max(numbers, key=lambda number: int(number.as_tuple().exponent))
        assert {number.quantize(coarsest) for number in numbers} == {coarsest}


@pytest.mark.parametrize(
    ("method", "architecture", "values"),  # to three decimals, read off the paper a second time
    [
        ("DINO", "ViT-S/16", (91.197, 82.517, 40.084, 27.857, 15.095, 69.315, 98.425, 61.148)),
        ("DINO", "ViT-B/16", (90.052, 84.615, 38.494, 32.670, 15.919, 70.717, 98.888, 64.695)),
        ("iBOT", "ViT-B/16", (89.234, 83.363, 33.693, 28.815, 15.697, 72.586, 98.988, 63.048)),
        ("MaSSL", "ViT-S/16", (91.851, 83.575, 37.924, 31.041, 14.972, 70.281, 98.313, 65.653)),
        ("MaSSL", "ViT-B/16", (91.605, 84.648, 41.134, 33.279, 15.678, 72.451, 98.800, 69.319)),
    ],
)
def test_transfer_figures_stand_under_their_data_set(method: str, architecture: str, values: tuple[float, ...]) -> None:
    found = [knn_figure(method, data, 20, architecture).value for data in TRANSFER_DATA]
    assert found == pytest.approx(values, abs=0.00051)


def test_published_clusterings_of_cifar10_stand_under_the_number_of_clusters_that_they_fit() -> None:
    # Vinh et al., 2010: (NMI - AMI) / (1 - AMI) depends on the sizes of clusters only; about 0.0018 for 10 of CIFAR-10,
    # 0.0069 for 47.
    for setting, architecture, chance in (
        ("k=10 (classes)", "RN-50", 0.0018),
        ("k=47 (as published for ViTs)", "ViT-B/16", 0.0069),
    ):
        nmi, ami = (
            paper_figures(
                protocol="clustering", data="CIFAR-10", setting=setting, metric=metric, architecture=architecture
            )
            for metric in ("NMI", "AMI")
        )
        assert len(nmi) == (2 if architecture == "RN-50" else 3)
        for method, figure in nmi.items():
            assert (figure.value - ami[method].value) / (100 - ami[method].value) == pytest.approx(chance, abs=0.0002)


def test_remarks_on_the_text_follow_from_the_tables() -> None:
    gains = {
        other: [
            knn_figure("MaSSL", TRANSFER_AVERAGE, k, "ViT-B/16").value
            - knn_figure(other, TRANSFER_AVERAGE, k, "ViT-B/16").value
            for k in KS
        ]
        for other in ("DINO", "iBOT")
    }
    remarks = {table.id: table.remarks for table in paper_tables() if table.remarks}
    assert set(remarks) == {"transfer-knn", "time-and-memory"}
    for values in gains.values():
        assert f"{min(values):.2f} to {max(values):.2f}" in remarks["transfer-knn"][0]
    hours, memory = (
        paper_figures(
            protocol="training",
            data="ImageNet",
            setting="batch of 1024 on 16 V100",
            metric=metric,
            architecture="ViT-S/16",
        )
        for metric in ("hours", "GB")
    )
    more_time, more_memory = (100 * (figures["iBOT"].value / figures["MaSSL"].value - 1) for figures in (hours, memory))
    assert f"{more_time:.1f} % more time and {more_memory:.1f} % more memory" in remarks["time-and-memory"][0]


# ---- finding a figure ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("protocol", "data", "setting", "metric", "architecture", "value"),
    [
        ("linear", "ImageNet", "best over rates and epochs (as published)", "top1", "ViT-B/16", 79.6),
        ("logreg", "CIFAR-100", "lambda=2e-06", "top1", "ViT-B/16", 83.08),
        ("retrieval", "RParis6k", "medium", "mAP", "ViT-S/16", 63.42),
        ("copy-detection", "Copydays", "strong", "mAP", "ViT-B/16", 87.6),
        ("low-shot", "ImageNet", "10% logreg lambda=2e-06", "top1", "ViT-S/16", 73.154),
        ("low-shot", "ImageNet", "1% knn k=20", "top1", "ViT-B/16", 68.804),
        ("low-shot", "ImageNet", "1% linear best over rates and epochs (as published)", "top1", "ViT-B/16", 70.4),
        ("long-tail", "ImageNet-LT", "best over rates and epochs (as published)", "top1", "ViT-B/16", 67.898),
        ("backgrounds", "ImageNet-9", "mixed_rand", "top1", "ViT-B/16", 82.99),
        ("backgrounds", "ImageNet-9", "original", "top1", "ViT-B/16", 97.6),
        ("clustering", "ImageNet-1%", "k=1000 (classes)", "ARI", "ViT-B/16", 44.06934797),
        ("knn", "average of 8", "k=200", "top1", "ViT-B/16", 61.83397873),
    ],
)
def test_names_of_our_results_find_the_papers_figure(
    protocol: str, data: str, setting: str, metric: str, architecture: str, value: float
) -> None:
    figures = paper_figures(protocol=protocol, data=data, setting=setting, metric=metric, architecture=architecture)
    assert figures["MaSSL"].value == value


@pytest.mark.parametrize("ours", SETTINGS, ids=" ".join)
def test_every_renamed_setting_leads_to_a_figure(ours: tuple[str, str]) -> None:
    (protocol, setting), (name, *notes) = ours, SETTINGS[ours]
    columns = {column for table in paper_tables() for column in table.columns}
    matching = [column for column in columns if (column.protocol, column.setting) == (protocol, name)]
    assert matching
    for column in matching:
        names = {"protocol": protocol, "data": column.data, "setting": setting, "metric": column.metric}
        figures = paper_figures(**names, architecture="ViT-B/16")
        assert "MaSSL" in figures
        assert all(note in figure.notes for figure in figures.values() for note in notes)


@pytest.mark.parametrize(
    ("setting", "metric", "architecture"),
    [("k=21", "top1", "ViT-B/16"), ("k=20", "top5", "ViT-B/16"), ("k=20", "top1", "ViT-L/16")],
)
def test_what_the_paper_did_not_measure_has_no_figure(setting: str, metric: str, architecture: str) -> None:
    assert paper_figures(protocol="knn", data="Pets", setting=setting, metric=metric, architecture=architecture) == {}


def test_ablations_of_short_runs_do_not_pass_for_a_figure_of_the_method() -> None:
    assert PaperColumn(protocol="knn", data="ImageNet", setting="K=65536", metric="top1") in [
        column for table in paper_tables() for column in table.columns
    ]
    assert knn_figure("MaSSL", "ImageNet", 20, "ViT-S/16").value == 75.1


def test_of_several_lengths_of_pre_training_the_longest_counts_and_is_named() -> None:
    figure = paper_figures(
        protocol="linear",
        data="ImageNet",
        setting="best over rates and epochs (as published)",
        metric="top1",
        architecture="ViT-S/16",
    )["DINO"]
    assert (figure.value, figure.epochs) == (77.0, 800)
    assert figure.notes == ("after 800 epochs, the longest pre-training the paper has figures for (others: 300)",)


def test_notes_of_column_and_length_come_together() -> None:
    figure = knn_figure("iBOT", "ImageNet", 20, "ViT-S/16")
    assert (figure.value, figure.epochs) == (75.2, 800)
    assert figure.notes == (
        "the paper does not say for which k",
        "after 800 epochs, the longest pre-training the paper has figures for (others: 100 and 300)",
    )


def test_a_deviation_over_draws_comes_with_its_mean() -> None:
    figures = paper_figures(
        protocol="low-shot", data="ImageNet", setting="2 per class linear mean", metric="top1", architecture="ViT-B/16"
    )
    assert {method: (figure.value, figure.deviation) for method, figure in figures.items()} == {
        "MoCo-v3": (47.8, 0.6),
        "DINO": (49.3, 0.8),
        "iBOT": (52.8, 0.3),
        "MaSSL": (56.3, 0.3),
    }


def test_errors_of_the_paper_are_marked_and_sound_figures_are_not() -> None:
    assert all("12" in str(knn_figure("MoCo-v3", data, k, "ViT-S/16").notes) for data in TRANSFER_DATA for k in KS)
    assert all(knn_figure("MoCo-v3", data, k, "ViT-B/16").notes == () for data in TRANSFER_DATA for k in KS)
    for percent, value in (("1%", 62.486), ("10%", 70.112)):
        figures = paper_figures(
            protocol="low-shot", data="ImageNet", setting=f"{percent} knn k=20", metric="top1", architecture="ViT-B/16"
        )
        assert figures["DINO"].value == value
        assert "no target" in str(figures["DINO"].notes)
        assert "no target" not in str(figures["iBOT"].notes)
    hard = paper_figures(protocol="retrieval", data="ROxford5k", setting="hard", metric="mAP", architecture="ViT-B/16")
    assert hard["iBOT"].value - hard["MaSSL"].value == pytest.approx(0.13)
    assert hard["DINO"].value < hard["MaSSL"].value
    assert "0.13" in str(hard["MaSSL"].notes)
    assert hard["iBOT"].notes == ()


def test_settings_bear_the_names_that_the_protocols_give_their_results() -> None:
    from massl.evaluations.protocols.backgrounds import BACKGROUNDS
    from massl.evaluations.protocols.clustering import cluster_numbers
    from massl.evaluations.protocols.linear_training import PUBLISHED
    from massl.evaluations.protocols.logreg import LogisticSettings

    names = {column.setting for table in paper_tables() for column in table.columns} | {
        setting for _, setting in SETTINGS
    }
    clusters = {
        str(setting)
        for data, num_classes in (("CIFAR-10", 10), ("x", 1000))
        for setting in cluster_numbers(data, num_classes=num_classes, ks=()).values()
    }
    assert {
        PUBLISHED,
        f"1% linear {PUBLISHED}",
        LogisticSettings().label,
        f"1% logreg {LogisticSettings().label}",
        *clusters,
    } <= names
    assert set(BACKGROUNDS) <= names
