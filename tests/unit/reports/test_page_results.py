from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from massl.config import MasslError
from massl.reports.page_public import belongs, rules_of, tables_with_ours
from massl.reports.page_results import results_section, tables_by_protocol
from massl.reports.page_runs import PageRun, read_page_run
from massl.reports.public import PublicTable, public_tables

MakeRun = Callable[..., Path]
BENCHMARK = "lightly-cifar10-batch128-200"
# A run by the rules of that table.
BY_THE_RULES: dict[str, Any] = {
    "data.source": "torchvision:CIFAR10?root=data&train=true",
    "backbone.name": "resnet18",
    "backbone.stem": "small",
    "trainer.epochs": 200,
    "trainer.max_steps": 20,
    "trainer.batch_size": 128,
    "probes.queries": "torchvision:CIFAR10?root=data&train=false",
    "probes.num_neighbours": 200,
    "probes.temperature": 0.1,
    "probes.max_queries": 10_000,
    "views.global_size": 32,
    "views.local_size": 16,
}


def public_table(name: str) -> PublicTable:
    return next(table for table in public_tables() if table.name == name)


def row(protocol: str, setting: str, value: float, **changes: Any) -> dict[str, Any]:
    shared = {"data": "ImageNet", "metric": "top1", "num_samples": 50_000, "seconds": 3.0, "weights": "w", "model": "runs/a"}
    return {"protocol": protocol, "setting": setting, "value": value, "architecture": "ViT-S/16", "precision": "fp32", **shared, **changes}


def run_of(make_run: MakeRun, name: str = "ours", **changes: Any) -> PageRun:
    return read_page_run(make_run(name, {**BY_THE_RULES, **{key.replace("__", "."): value for key, value in changes.items()}}), label=name)


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
    assert "line 3 is no result &lt;x&gt;" in results_section([row("knn", "k=20", 70.0)], remarks=["line 3 is no result <x>"]).html


def test_a_run_by_the_rules_of_a_public_table_is_a_row_of_it(make_run: MakeRun) -> None:
    run = run_of(make_run)
    (table,) = tables_with_ours([run])
    assert table.caption == public_table(BENCHMARK).title
    (ours,) = [line for line in table.lines if line.is_ours]
    assert ours.cells[0].text == "massl (ours)"
    assert ours.cells[2].number == 55.0  # the best epoch, as the table counts
    assert len(table.lines) == len(public_table(BENCHMARK).rows) + 1
    assert ours.cells[-1].text == "2 × 32 px + 4 × 16 px views; at most 10,000 query images; time without probes, on 1 × NVIDIA H200"
    accuracies = [line.cells[2].number or 0.0 for line in table.lines]
    assert accuracies == sorted(accuracies, reverse=True)
    assert "lightly-ai/lightly" in table.footnotes[0]


@pytest.mark.parametrize(
    "change",
    [
        {"data__source": "torchvision:CIFAR100?root=data"},
        {"backbone__name": "resnet50"},
        {"backbone__stem": ""},
        {"trainer__epochs": 100},
        {"trainer__batch_size": 256},
        {"probes__num_neighbours": 20},
        {"trainer__max_steps": None},  # not finished
    ],
    ids=str,
)
def test_a_run_by_other_rules_is_in_no_public_table(make_run: MakeRun, change: dict[str, Any]) -> None:
    assert tables_with_ours([run_of(make_run, **change)]) == []


def test_the_data_set_can_be_named_where_the_source_does_not_tell_it(make_run: MakeRun) -> None:
    run = run_of(make_run, data__source="train.npz")
    assert tables_with_ours([run]) == []
    (table,) = tables_with_ours([run], data_set="CIFAR-10")
    assert [line.is_ours for line in table.lines].count(True) == 1
    with pytest.raises(MasslError, match=r"no public table is about 'cifar'; --data_set may be CIFAR-10, "):
        tables_with_ours([run], data_set="cifar")


def test_smaller_departures_are_said_beside_our_row(make_run: MakeRun) -> None:
    changes: dict[str, Any] = {"probes__temperature": 0.07, "probes__queries": "", "probes__every_epochs": 10.0, "views__num_local": 0}
    (table,) = tables_with_ours([run_of(make_run, **changes, method__teacher__momentum=0.99)])
    (ours,) = [line for line in table.lines if line.is_ours]
    assert ours.cells[-1].text.split("; ") == [
        "2 × 32 px views",
        "features of the moving average",
        "probed every 10 epochs",
        "probed on held-out training images",
        "at most 10,000 query images",
        "time without probes, on 1 × NVIDIA H200",
        "temperature is 0.07, not 0.1",
    ]


def test_a_run_without_probes_is_in_no_public_table(make_run: MakeRun, rows: list[dict[str, float]]) -> None:
    bare = [{key: value for key, value in one.items() if key != "knn_top1"} for one in rows]
    run = read_page_run(make_run("bare", BY_THE_RULES, rows=bare), label="bare")
    assert not belongs(run, public_table(BENCHMARK))


@pytest.mark.parametrize(
    ("source", "data"),
    [
        ("torchvision:CIFAR10?root=data", "CIFAR-10"),
        ("/data/cifar-10/train.npz", "CIFAR-10"),
        ("torchvision:CIFAR100?root=data", "CIFAR-100"),
        ("/data/imagenette2-160/train", "Imagenette"),
        ("photos", "photos"),
    ],
)
def test_data_sets_are_known_by_the_names_of_their_sources(make_run: MakeRun, source: str, data: str) -> None:
    assert rules_of(run_of(make_run, data__source=source), best_epoch=None).data == data
