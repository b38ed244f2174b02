import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from massl.commands.console import print_table
from massl.evaluations.measurement import Setting
from massl.evaluations.results import ResultRow
from massl.reports.published.paper import TRANSFER_DATA, PaperFigure, paper_figures
from massl.reports.tables import ResultsTable, as_markdown, results_table, transfer_averages

PUBLISHED = "best over rates and epochs (as published)"


def result(
    protocol: str = "knn", data: str = "Pets", setting: str = "k=20", metric: str = "top1", **changes: Any
) -> ResultRow:
    values = {
        "protocol": protocol,
        "data": data,
        "setting": Setting.parse(setting),
        "metric": metric,
        "value": 91.256,
        "num_samples": 3669,
        "seconds": 12.34,
        "weights": "0123456789abcdef",
        "model": "runs/photos",
        "architecture": "ViT-B/16",
        "precision": "fp32",
        "run": "fedcba9876543210",
        "train": "trainval",
        "images": "00112233",
        "created": "2024-07-21T12:00:00+00:00",
        "version": "0.1.0",
    }
    return ResultRow(**{**values, **changes})


def many_results(**changes: Any) -> list[ResultRow]:
    """What an evaluation of everything leaves, the longest names of it."""
    return [
        *(
            result(data=data, setting=f"k={k}", metric=metric, **changes)
            for data in TRANSFER_DATA
            for k in (10, 200)
            for metric in ("top1", "top5")
        ),
        result("linear", "ImageNet", PUBLISHED, num_samples=50000, seconds=123456.7, **changes),
        result("linear", "ImageNet", "rate chosen on held-out images", **changes),
        result("low-shot", "ImageNet", f"10% linear {PUBLISHED}", value=100.0, num_samples=50000, **changes),
        result("low-shot", "ImageNet", "2 per class linear mean", value=55.555, **changes),
        result("low-shot", "ImageNet", "2 per class linear deviation", value=0.25, **changes),
        result("clustering", "CIFAR-10", "k=47 (as published for ViTs)", "NMI", **changes),
        result("copy-detection", "Copydays", "strong", "mAP", **changes),
        result("backgrounds", "ImageNet-9", "mixed_same", **changes),
        result("retrieval", "ROxford5k", "hard", "mAP", **changes),
    ]


def figure_for(row: ResultRow) -> PaperFigure:
    """MaSSL's number in the paper for what a row measures."""
    names = ("protocol", "data", "setting", "metric", "architecture")
    return paper_figures(**{name: str(getattr(row, name)) for name in names})["MaSSL"]


def cells_of(table: ResultsTable, column: str) -> list[str]:
    at = table.columns.index(column)
    return [line[at] for line in table.lines]


def on_terminal(table: ResultsTable, *, width: int) -> str:
    screen = io.StringIO()
    print_table(Console(file=screen, width=width, color_system=None), table)
    return screen.getvalue()


# ---- what is shown ---------------------------------------------------------------------------------------------------


def test_a_line_says_what_was_measured_and_what_the_paper_has() -> None:
    table = results_table([result("linear", "ImageNet", PUBLISHED, value=79.549, num_samples=50000, seconds=8040.2)])
    assert table.columns == ("protocol", "data", "setting", "metric", "value", "n", "seconds", "paper (MaSSL ViT-B/16)")
    assert table.lines == (("linear", "ImageNet", PUBLISHED, "top1", "79.55", "50,000", "8,040", "79.60"),)
    assert table.footnotes == ()
    assert table.title == "runs/photos (ViT-B/16, weights 0123456789abcdef, fp32)"


@pytest.mark.parametrize(
    "changes",
    [
        {"setting": "k=21"},
        {"metric": "top5"},
        {"architecture": "ViT-L/16"},
        {"data": "my photographs"},
        {"protocol": "logreg"},
    ],
)
def test_beside_what_the_paper_did_not_measure_stands_nothing(changes: dict[str, str]) -> None:
    table = results_table([result(**changes), result("copy-detection", "Copydays", "strong", "mAP")])
    assert cells_of(table, "paper (MaSSL ViT-B/16)") == ["", "87.60"]


def test_a_method_without_any_figure_gets_no_column() -> None:
    table = results_table([result("linear", "ImageNet", PUBLISHED)], methods=("MAE", "NNCLR", "MaSSL"))
    assert table.columns[-2:] == ("paper (NNCLR ViT-B/16)", "paper (MaSSL ViT-B/16)")
    assert table.lines[0][-2:] == ("76.50", "79.60")
    assert results_table([result(data="mine")]).columns[-1] == "seconds"


def test_notes_are_marked_once_each_and_explained_below() -> None:
    rows = [
        result("clustering", "CIFAR-10", "k=47 (as published for ViTs)", "NMI"),
        result("clustering", "CIFAR-10", "k=47 (as published for ViTs)", "AMI"),
        result("low-shot", "ImageNet", "1% knn k=20"),
    ]
    table = results_table(rows, methods=("MaSSL", "DINO"))
    assert cells_of(table, "paper (MaSSL ViT-B/16)") == ["58.72¹,²", "58.44¹", "68.80³"]
    assert cells_of(table, "paper (DINO ViT-B/16)") == ["58.75¹", "58.46¹", "62.49⁴,³"]
    assert [note[0] for note in table.footnotes] == ["¹", "²", "³", "⁴"]
    figure = figure_for(rows[0])
    assert tuple(note[2:] for note in table.footnotes[:2]) == figure.notes
    assert "no target" in table.footnotes[3]


def test_a_tenth_note_has_a_mark_of_two_digits() -> None:
    rows = [
        result("low-shot", "ImageNet", "1% knn k=20"),
        *(
            result("knn", "ImageNet", setting, architecture="ViT-S/16")
            for setting in ("K=65536", "K=32768", "N_b=16384", "k=20")
        ),
        result("retrieval", "ROxford5k", "hard", "mAP"),
        result("retrieval", "ROxford5k", "medium", "mAP", architecture="ViT-S/16"),
        result("backgrounds", "ImageNet-9", "only_fg"),
        result("clustering", "CIFAR-10", "k=47 (as published for ViTs)", "NMI"),
        result(),
        result("linear", "ImageNet", PUBLISHED, architecture="ViT-S/16"),
    ]
    table = results_table(rows, methods=("MaSSL", "DINO", "MoCo-v3"))
    assert len(table.footnotes) > 10
    assert [re.match(r"[⁰¹²³⁴-⁹]+ ", note) is not None for note in table.footnotes] == [True] * len(table.footnotes)
    assert table.footnotes[9].startswith("¹⁰ ")
    assert any("¹⁰" in cell for line in table.lines for cell in line)


# ---- means and deviations --------------------------------------------------------------------------------------------


def test_a_deviation_joins_its_mean_and_the_papers_stands_beside_it() -> None:
    rows = [
        result("low-shot", "ImageNet", "1 per class linear deviation", value=0.404),
        result("low-shot", "ImageNet", "1 per class linear mean", value=44.796),
        result("low-shot", "ImageNet", "2 per class linear mean", value=56.0),
        result("low-shot", "ImageNet", "2 per class linear deviation", value=0.3),
    ]
    table = results_table(rows)
    assert cells_of(table, "setting") == ["1 per class linear mean", "2 per class linear mean"]
    assert cells_of(table, "value") == ["44.80 ± 0.40", "56.00 ± 0.30"]
    assert cells_of(table, "paper (MaSSL ViT-B/16)") == ["44.80 ± 0.40", "56.30 ± 0.30"]


@pytest.mark.parametrize("name", ["data", "metric", "weights", "precision", "protocol"])
def test_a_deviation_of_something_else_stays_a_row(name: str) -> None:
    rows = [
        result(setting="draws mean", value=50.0),
        replace(result(setting="draws deviation", value=0.5), **{name: "other"}),
    ]
    table = results_table(rows)
    assert cells_of(table, "value") == ["50.00", "0.50"]


# ---- order and models ------------------------------------------------------------------------------------------------


def test_rows_of_one_protocol_and_data_set_come_together() -> None:
    rows = [
        result(data="Pets"),
        result("linear", "Pets", PUBLISHED),
        result(data="Cars"),
        result(data="Pets", setting="k=10"),
        result("linear", "Cars", PUBLISHED),
    ]
    table = results_table(rows)
    assert [line[:3] for line in table.lines] == [
        ("knn", "Pets", "k=20"),
        ("knn", "Pets", "k=10"),
        ("knn", "Cars", "k=20"),
        ("linear", "Pets", PUBLISHED),
        ("linear", "Cars", PUBLISHED),
    ]


def test_several_models_are_told_apart_line_by_line() -> None:
    rows = [
        result(),
        result(weights="b", model="dino", architecture="ViT-S/16"),
        result(setting="k=10"),
        result(weights="b", model="dino", architecture="ViT-S/16", setting="k=10"),
    ]
    table = results_table(rows)
    assert table.title == ""
    assert [line[:4] for line in table.lines] == [
        ("runs/photos", "knn", "Pets", "k=20"),
        ("dino", "knn", "Pets", "k=20"),
        ("runs/photos", "knn", "Pets", "k=10"),
        ("dino", "knn", "Pets", "k=10"),
    ]
    # each beside the figure of its own architecture
    assert [cell[:5] for cell in cells_of(table, "paper (MaSSL)")] == ["91.61", "91.85", "91.85", "91.52"]


def test_namesakes_are_told_apart_by_weights_and_precision() -> None:
    assert cells_of(results_table([result(), result(weights="other")]), "model") == [
        "runs/photos 0123456789abcdef",
        "runs/photos other",
    ]
    assert cells_of(results_table([result(), result(precision="bf16")]), "model") == [
        "runs/photos fp32",
        "runs/photos bf16",
    ]


# ---- forms -----------------------------------------------------------------------------------------------------------


def letters(*texts: str) -> int:
    return sum(len("".join(text.split())) for text in texts)


@pytest.mark.parametrize("several_models", [False, True])
def test_at_120_characters_nothing_is_cut_off(several_models: bool) -> None:
    rows = many_results()
    if several_models:
        rows += many_results(weights="b", model="timm/vit_small_patch16_224.dino", architecture="ViT-S/16")
    table = results_table([*rows, *transfer_averages(rows)], methods=("MaSSL", "DINO"))
    text = on_terminal(table, width=120)
    assert max(map(len, text.splitlines())) <= 120
    assert "…" not in text
    # every letter of every cell and no other: words may be folded, but nothing is lost
    cells = [cell for line in (table.columns, *table.lines) for cell in line]
    assert letters(text.replace("─", "")) == letters(table.title, *cells)
    if not several_models:  # one model leaves room for all words
        assert {word for cell in cells for word in cell.split()} <= set(text.split())


def test_a_number_is_not_broken_where_words_have_to_be() -> None:
    text = on_terminal(results_table(many_results()), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "55.55 ± 0.25" in text or "55.56 ± 0.25" in text
    assert "123,457" in text


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    text = on_terminal(results_table([result(data="[red]x[/red]", model="[bold]m")]), width=120)
    assert "[red]x[/red]" in text
    assert "[bold]m" in text


def test_markdown_has_the_same_cells_and_its_footnotes_below() -> None:
    table = results_table([result(), result(data="a|b", setting="k=10", num_samples=12)])
    assert as_markdown(table).splitlines() == [
        "runs/photos (ViT-B/16, weights 0123456789abcdef, fp32)",
        "",
        "| protocol | data | setting | metric | value | n | seconds | paper (MaSSL ViT-B/16) |",
        "| :-- | :-- | :-- | :-- | --: | --: | --: | --: |",
        "| knn | Pets | k=20 | top1 | 91.26 | 3,669 | 12.3 | 91.61¹ |",
        "| knn | a\\|b | k=10 | top1 | 91.26 | 12 | 12.3 |  |",
        "",
        "¹ the paper's transfer table says 800 epochs, its other tables and the public weights of ViT-B/16 400",
    ]


def test_a_table_of_nothing_is_empty_in_either_form() -> None:
    table = results_table([])
    assert table.lines == ()
    assert "protocol" in on_terminal(table, width=120)
    assert as_markdown(table).startswith("| protocol |")


# ---- averages --------------------------------------------------------------------------------------------------------


def eight_sets(**changes: Any) -> list[ResultRow]:
    return [
        result(data=data, **{"value": float(number), "num_samples": 10 * number, **changes})
        for number, data in enumerate(TRANSFER_DATA)
    ]


def test_the_average_over_eight_sets_does_not_weigh_them_by_size() -> None:
    (average,) = transfer_averages(eight_sets())
    assert (average.data, average.value, average.num_samples) == ("average of 8", 3.5, 280)
    assert average.seconds == pytest.approx(8 * 12.34)


def test_averages_of_the_papers_own_figures_are_the_papers_averages() -> None:
    rows = [replace(row, value=figure_for(row).value) for row in eight_sets()]
    (average,) = transfer_averages(rows)
    assert average.value == pytest.approx(63.36438755, abs=1e-6)
    table = results_table([average])
    assert table.lines[0][4] == "63.36"
    assert table.lines[0][-1].startswith("63.36")


def test_there_is_no_average_over_seven_sets_nor_across_models_or_settings() -> None:
    assert transfer_averages(eight_sets()[1:]) == []
    differences: list[dict[str, Any]] = [
        {"setting": Setting(k=10)},
        {"metric": "top5"},
        {"weights": "b"},
        {"precision": "bf16"},
        {"protocol": "logreg"},
    ]
    for changes in differences:
        assert transfer_averages([*eight_sets()[1:], replace(eight_sets()[0], **changes)]) == []
    assert transfer_averages(eight_sets(setting="best k (k=20)")) == []


def test_each_k_and_each_model_has_its_own_average() -> None:
    rows = [*eight_sets(), *eight_sets(setting="k=10", value=1.0), *eight_sets(weights="b", value=2.0)]
    assert [(str(row.setting), row.weights[0], row.value) for row in transfer_averages(rows)] == [
        ("k=20", "0", 3.5),
        ("k=10", "0", 1.0),
        ("k=20", "b", 2.0),
    ]
