import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from massl.config import MasslError
from massl.evaluations.measurement import Setting
from massl.evaluations.results import ResultRow
from massl.methods import METHODS
from massl.reports.page.sections.public import belongs, departures, tables_with_ours
from massl.reports.page.sections.results import results_section, tables_by_protocol
from massl.reports.page.tables import Line, PageTable
from massl.reports.published.public import PublicTable, public_tables
from massl.reports.run_reader import read_run
from massl.reports.runs import Run

MakeRun = Callable[..., Path]
BENCHMARK = "lightly-cifar10-batch128-200"
# A run by the rules of that table.
BY_THE_RULES: dict[str, Any] = {
    "data.source": "torchvision:CIFAR10?root=data&train=true",
    "backbone.name": "resnet18",
    "backbone.stem": "small",
    "trainer.epochs": 200,
    "trainer.batch_size": 128,
    "probes.queries": "torchvision:CIFAR10?root=data&train=false",
    "probes.num_neighbours": 200,
    "probes.temperature": 0.1,
    "probes.max_queries": 10_000,
    "views.global_size": 32,
    "views.local_size": 16,
}

TO_THE_END: list[dict[str, float]] = [
    {"step": 0, "epoch": 0, "images_per_second": 0.0, "knn_top1": 20.0},
    {"step": 1000, "epoch": 100, "images_per_second": 15.0, "knn_top1": 84.75},
    {"step": 2000, "epoch": 200, "images_per_second": 15.0, "knn_top1": 50.0},
]


def public_table(name: str) -> PublicTable:
    return next(table for table in public_tables() if table.name == name)


def row(protocol: str, setting: str, value: float, **changes: Any) -> ResultRow:
    shared = {
        "data": "ImageNet",
        "metric": "top1",
        "num_samples": 50_000,
        "seconds": 3.0,
        "weights": "w",
        "model": "runs/a",
        "architecture": "ViT-S/16",
        "precision": "fp32",
        "run": "r",
        "train": "",
        "images": "i",
    }
    return ResultRow(protocol=protocol, setting=Setting.parse(setting), value=value, **{**shared, **changes})


def run_of(make_run: MakeRun, name: str = "ours", **changes: Any) -> Run:
    settings = {**BY_THE_RULES, **{key.replace("__", "."): value for key, value in changes.items()}}
    return read_run(make_run(name, settings, rows=TO_THE_END), label=name)


def ours_in(table: PageTable) -> Line:
    (line,) = [line for line in table.lines if line.is_ours]
    return line


def test_each_protocol_has_its_table_with_the_papers_figures() -> None:
    tables = tables_by_protocol([row("knn", "k=20", 70.0), row("retrieval", "medium", 30.0, data="Toys", metric="mAP")])
    assert list(tables) == ["knn", "retrieval"]
    knn = tables["knn"]
    assert knn.columns[:4] == ("data", "setting", "metric", "value")
    assert any(column.startswith("paper (MaSSL") for column in knn.columns)
    assert knn.caption == "runs/a (ViT-S/16, weights w, fp32)"
    assert not any(column.startswith("paper") for column in tables["retrieval"].columns)


def test_only_notes_of_figures_that_are_shown_stand_below_a_table() -> None:
    tables = tables_by_protocol([row("knn", "k=20", 70.0), row("retrieval", "medium", 30.0, data="Toys", metric="mAP")])
    assert len(tables["knn"].footnotes) >= 1
    assert tables["retrieval"].footnotes == ()


def test_without_results_the_section_says_how_to_make_some() -> None:
    html = results_section([]).html
    assert "massl evaluate RUN --protocol knn" in html
    assert "The paper's own time and memory" in html


def test_unreadable_results_are_said(make_run: MakeRun) -> None:
    assert (
        "line 3 is no result &lt;x&gt;"
        in results_section([row("knn", "k=20", 70.0)], remarks=["line 3 is no result <x>"]).html
    )


def test_a_run_by_the_rules_of_a_public_table_is_a_row_of_it(make_run: MakeRun) -> None:
    run = run_of(make_run)
    (table,) = tables_with_ours([run])
    assert table.caption == public_table(BENCHMARK).title
    ours = ours_in(table)
    assert ours.cells[0].text == "massl (ours)"
    assert ours.cells[2].number == 84.75  # the best epoch, as the table counts
    assert len(table.lines) == len(public_table(BENCHMARK).rows) + 1
    assert (
        ours.cells[-1].text
        == "2 × 32 px + 4 × 16 px views; features of the moving average; time without probes, on 1 × NVIDIA H200"
    )
    accuracies = [line.cells[2].number or 0.0 for line in table.lines]
    assert accuracies == sorted(accuracies, reverse=True)
    assert "lightly-ai/lightly" in table.footnotes[0]


def test_our_accuracy_has_two_digits_and_theirs_are_as_published(make_run: MakeRun) -> None:
    (table,) = tables_with_ours([run_of(make_run)])
    assert ours_in(table).cells[2].text == "84.75"
    texts = {line.cells[0].text: [cell.text for cell in line.cells[2:5]] for line in table.lines}
    assert texts["SimCLR"] == ["84.7", "97.7", "1.5"]
    assert texts["BarlowTwins"] == ["84.2", "375.9", "1.7"]


@pytest.mark.parametrize(
    "change",
    [
        {"data__source": "torchvision:CIFAR100?root=data"},
        {"data__source": "tiny-imagenet-100/train.npz"},
        {"data__source": "photos"},
        {"probes__queries": "demo:test"},
        {"probes__queries": "photos/test"},
        {"probes__database": "torchvision:CIFAR100?root=data"},
        {"backbone__name": "resnet50"},
        {"backbone__stem": ""},
        {"trainer__epochs": 100},
        {"trainer__epochs": 800},  # not finished
        {"trainer__batch_size": 256},
        {"probes__num_neighbours": 20},
        {"method__name": "supervised"},
    ],
    ids=str,
)
def test_a_run_by_other_rules_is_in_no_public_table(make_run: MakeRun, change: dict[str, Any]) -> None:
    assert tables_with_ours([run_of(make_run, **change)]) == []


def test_a_run_that_max_steps_ended_early_is_in_no_public_table(make_run: MakeRun) -> None:
    folder = make_run("short", {**BY_THE_RULES, "trainer.max_steps": 1000}, rows=TO_THE_END[:2])
    run = read_run(folder, label="short")
    assert run.finished
    assert tables_with_ours([run]) == []


def test_the_data_set_can_be_named_where_the_sources_do_not_tell_it(make_run: MakeRun) -> None:
    run = run_of(make_run, data__source="train.npz", probes__queries="test.npz")
    assert tables_with_ours([run]) == []
    (table,) = tables_with_ours([run], data_set="CIFAR-10")
    assert ours_in(table).cells[2].number == 84.75
    with pytest.raises(MasslError, match=r"no public table is about 'cifar'; --data_set may be CIFAR-10, "):
        tables_with_ours([run], data_set="cifar")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"data__source": "torchvision:CIFAR100?root=data"},
            r"--data_set CIFAR-10, but data.source of ours is CIFAR-100 \(torchvision:CIFAR100",
        ),
        (
            {"data__source": "x.npz", "probes__queries": "demo:test"},
            r"--data_set CIFAR-10, but probes.queries of ours is Fashion-MNIST \(demo:test\)",
        ),
        ({"data__source": "tiny-imagenet/train"}, "data.source of ours is Tiny-ImageNet"),
    ],
    ids=str,
)
def test_a_data_set_that_a_source_contradicts_is_refused(make_run: MakeRun, change: dict[str, Any], said: str) -> None:
    with pytest.raises(MasslError, match=said):
        tables_with_ours([run_of(make_run, **change)], data_set="CIFAR-10")


def test_smaller_departures_are_said_beside_our_row(make_run: MakeRun) -> None:
    changes: dict[str, Any] = {
        "probes__temperature": 0.07,
        "probes__queries": "",
        "probes__every_epochs": 10.0,
        "views__num_local": 0,
    }
    (table,) = tables_with_ours([run_of(make_run, **changes, probes__max_database=50_000, probes__max_queries=9_000)])
    assert ours_in(table).cells[-1].text.split("; ") == [
        "2 × 32 px views",
        "features of the moving average",
        "probed every 10 epochs",
        "probed on held-out training images",
        "at most 9,000 query images",
        "time without probes, on 1 × NVIDIA H200",
        "temperature is 0.07, not 0.1",
    ]


@pytest.mark.parametrize("method", METHODS)
def test_the_moving_average_is_named_where_a_method_is_judged_by_it(make_run: MakeRun, method: str) -> None:
    run = run_of(make_run, method__name=method, method__teacher__momentum=0.99)
    judged = inspect.getsource(getattr(METHODS[method].method, "backbone_to_evaluate"))  # noqa: B009 - its type does not say that it is a class
    assert ("features of the moving average" in departures(run, data="CIFAR-10")) == ("self.teacher." in judged)


def test_a_run_without_probes_is_in_no_public_table(make_run: MakeRun, rows: list[dict[str, float]]) -> None:
    bare = [{key: value for key, value in one.items() if key != "knn_top1"} for one in rows]
    run = read_run(make_run("bare", {**BY_THE_RULES, "trainer.epochs": 2}, rows=bare), label="bare")
    assert not belongs(run, public_table(BENCHMARK), data="CIFAR-10")
