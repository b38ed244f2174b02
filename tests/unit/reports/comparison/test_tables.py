import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from massl.reports.comparison.documents import comparison_document, comparison_values
from massl.reports.comparison.tables import (
    base_of,
    cautions,
    comparison_table,
    differing_settings,
    equal_cost,
    in_words,
    minutes_text,
    other_differences,
    paper_time_table,
    shared_by,
)
from massl.reports.run_reader import read_run
from massl.reports.runs import Run
from massl.reports.tables import ResultsTable

Rows = list[dict[str, float]]


@pytest.fixture
def run_of(make_run: Callable[..., Path]) -> Callable[..., Run]:
    return lambda *given, **named: read_run(make_run(*given, **named), strict=True)


def line_of(table: ResultsTable, run: str) -> dict[str, str]:
    (line,) = [line for line in table.lines if line[0] == run]
    return dict(zip(table.columns, line, strict=True))


def test_a_line_says_what_was_learnt_and_what_it_cost(run_of: Callable[..., Run], rows: Rows) -> None:
    for row in rows:
        row["peak_memory_gib"] = 5.0 + row["epoch"]
    dino = run_of("dino", {"method.name": "dino"}, rows=rows, world_size=2)
    for row in rows:
        row["images_per_second"] *= 2
        row["peak_memory_gib"] *= 2
    massl = run_of("massl", rows=rows, world_size=2)
    table = comparison_table([dino, massl])
    assert line_of(table, "dino") == {
        "run": "dino",
        "method": "dino",
        "epochs done": "2/2",
        "k-NN start": "20.0",
        "k-NN last": "50.0",
        "k-NN best (epoch)": "55.0 (1.5)",
        "k-NN at 1.67 GPU min (probe at)": "–",  # only the untrained network was probed by then
        "GPU min": "3.33",
        "time ×": "2.00",
        "images a second": "15",
        "GiB a GPU": "7.0",
        "GiB ×": "0.50",
    }
    assert line_of(table, "massl")["time ×"] == line_of(table, "massl")["GiB ×"] == "1.00"
    assert table.title == "vit_tiny_patch16_224 on photos, batch 60, 2 x NVIDIA H200"
    multiples, at_equal_cost = table.footnotes
    assert multiples.startswith("×: as a multiple of massl")
    assert at_equal_cost.startswith("k-NN at 1.67 GPU min is at equal cost")


def test_the_title_says_in_what_a_network_is_not_as_its_name_says(run_of: Callable[..., Run]) -> None:
    small = run_of("small", {"backbone.patch_size": 8, "backbone.image_size": 64})
    assert shared_by([small]).startswith("vit_tiny_patch16_224 (patches of 8 px, images of 64 px) on photos")
    assert shared_by([run_of("images", {"backbone.image_size": 32})]).startswith(
        "vit_tiny_patch16_224 (images of 32 px) on photos"
    )
    assert shared_by([small, run_of("as named")]).startswith("on photos")


def test_local_views_are_not_told_of_runs_without_any(run_of: Callable[..., Run]) -> None:
    sizes = {"none": (0, 96), "some": (4, 32), "other": (4, 14)}
    none, some, other = (
        run_of(name, {"views.num_local": count, "views.local_size": size}) for name, (count, size) in sizes.items()
    )
    assert "views.local_size" not in differing_settings([none, some])
    assert differing_settings([none, some, other])["views.local_size"] == {"some": 32, "other": 14}
    assert "views.local_size" not in " ".join(cautions([none, some]))


def test_runs_of_unequal_length_are_told_at_the_minutes_all_of_them_had(run_of: Callable[..., Run], rows: Rows) -> None:
    # probes at 15, 22.5 and 30 s
    quick = run_of("quick", rows=[rows[0], *({**row, "images_per_second": 40.0} for row in rows[1:])])
    # one probe, at 25 s
    slow = run_of("slow", rows=[rows[0], {**rows[1], "images_per_second": 12.0, "knn_top1": 30.0}])
    table = comparison_table([quick, slow])
    column = "k-NN at 0.42 GPU min (probe at)"
    assert line_of(table, "quick")[column] == "55.0 (0.38)"
    assert line_of(table, "slow")[column] == "30.0 (0.42)"
    assert (line_of(table, "quick")["GPU min"], line_of(table, "slow")["GPU min"]) == ("0.50", "0.42")
    assert equal_cost([quick, slow]) == {
        "gpu_minutes": pytest.approx(25 / 60),
        "knn": {
            "quick": {"epoch": 1.5, "gpu_minutes": pytest.approx(22.5 / 60), "knn_top1": 55.0},
            "slow": {"epoch": 0, "gpu_minutes": pytest.approx(25 / 60), "knn_top1": 30.0},
        },
    }


def test_a_run_without_a_probe_until_then_has_no_figure(run_of: Callable[..., Run], rows: Rows) -> None:
    # the latter's first 15 steps take as long as 60 s
    short, late = run_of("short", rows=rows[:3]), run_of("late", rows=rows[3:])
    assert line_of(comparison_table([short, late]), "late")["k-NN at 1.00 GPU min (probe at)"] == "55.0 (1.00)"
    shorter = run_of("shorter", rows=rows[:1])
    assert line_of(comparison_table([shorter, late]), "late")["k-NN at 0.00 GPU min (probe at)"] == "–"
    assert equal_cost([shorter, late])["knn"]["late"] is None


def test_one_run_alone_has_no_ratios(run_of: Callable[..., Run]) -> None:
    table = comparison_table([run_of("a")])
    assert not [column for column in table.columns if "×" in column or "k-NN at" in column]
    assert table.footnotes == ()


def test_the_ratio_of_time_is_that_of_an_image_whatever_the_length(run_of: Callable[..., Run], rows: Rows) -> None:
    whole = run_of("a", rows=[rows[0], *({**row, "images_per_second": 10.0} for row in rows[1:])])
    half = run_of("b", rows=[rows[0], *({**row, "images_per_second": 5.0} for row in rows[1:3])])
    assert line_of(comparison_table([whole, half]), "b")["time ×"] == "2.00"


def test_a_run_before_its_first_step_has_no_ratio(run_of: Callable[..., Run], rows: Rows) -> None:
    line = line_of(comparison_table([run_of("a"), run_of("b", rows=rows[:1])]), "b")
    assert (line["GPU min"], line["time ×"], line["images a second"]) == ("0.00", "–", "–")


def test_memory_has_columns_where_a_run_tells_it(run_of: Callable[..., Run], rows: Rows) -> None:
    without, told = run_of("a"), run_of("b", rows=[{**row, "peak_memory_gib": 5.0} for row in rows])
    assert not [column for column in comparison_table([without]).columns if "GiB" in column]
    line = line_of(comparison_table([without, told]), "a")
    assert (line["GiB a GPU"], line["GiB ×"]) == ("–", "–")


@pytest.mark.parametrize(
    ("devices", "column"),
    [(("cpu", "cpu"), "CPU min"), (("NVIDIA H200", "V100"), "GPU min"), (("cpu", "V100"), "device min")],
)
def test_minutes_are_called_by_the_device(run_of: Callable[..., Run], devices: tuple[str, str], column: str) -> None:
    runs = [run_of(f"run{number}", device=device) for number, device in enumerate(devices)]
    assert column in comparison_table(runs).columns


def test_ratios_are_to_the_first_run_of_massl_or_to_the_first(run_of: Callable[..., Run]) -> None:
    dino, first, second = run_of("dino", {"method.name": "dino"}), run_of("massl-1"), run_of("massl-2")
    assert base_of([dino, first, second]) is first
    assert base_of([dino]) is dino


@pytest.mark.parametrize(
    ("changes", "caution"),
    [
        ({"trainer.epochs": 4}, "not after equal epochs: trainer.epochs is 2 (a), 4 (b)"),
        ({"trainer.batch_size": 120}, "not at equal cost: trainer.batch_size is 60 (a), 120 (b)"),
        ({"data.source": "other"}, "not at equal cost: data.source is photos (a), other (b)"),
        ({"views.num_local": 10}, "not at equal cost: views.num_local is 4 (a), 10 (b)"),
        (
            {"backbone.timm_options": {"depth": 2}},
            "not at equal cost: backbone.timm_options.depth is not set (a), 2 (b)",
        ),
        ({"trainer.max_steps": 20}, "not after equal epochs: trainer.max_steps is not set (a), 20 (b)"),
        ({"probes.queries": "held-out"}, "k-NN is not measured alike: probes.queries is not set (a), held-out (b)"),
        ({"probes.num_neighbours": 5}, "k-NN is not measured alike: probes.num_neighbours is 20 (a), 5 (b)"),
        ({"trainer.seed": 1}, "k-NN is not measured alike: trainer.seed is 0 (a), 1 (b)"),
    ],
)
def test_runs_that_are_not_alike_are_flagged(run_of: Callable[..., Run], changes: dict[str, Any], caution: str) -> None:
    assert cautions([run_of("a"), run_of("b", changes)])[0] == caution


def test_methods_and_how_they_are_tuned_are_no_caution(run_of: Callable[..., Run]) -> None:
    changes = {
        "method.name": "dino",
        "method.memory.num_rows": 1,
        "optimizer.learning_rate": 1e-4,
        "probes.every_epochs": 2,
    }
    runs = [run_of("a"), run_of("b", changes)]
    assert cautions(runs) == ()
    assert other_differences(runs) == (
        "optimizer.learning_rate is 0.001 (a), 0.0001 (b)",
        "probes.every_epochs is not set (a), 2 (b)",
    )


def test_what_is_told_as_a_caution_is_not_told_again(run_of: Callable[..., Run]) -> None:
    assert other_differences([run_of("a"), run_of("b", {"trainer.epochs": 4, "trainer.seed": 1})]) == ()


def test_different_machines_are_flagged(run_of: Callable[..., Run]) -> None:
    (caution,) = cautions([run_of("a"), run_of("b", world_size=2)])
    assert caution == "time and memory are of different machines: machine is 1 x NVIDIA H200 (a), 2 x NVIDIA H200 (b)"


def test_a_run_under_way_is_flagged_with_its_place(run_of: Callable[..., Run], rows: Rows) -> None:
    (caution,) = cautions([run_of("a"), run_of("b", rows=rows[:4])])
    assert caution == "not finished: b is at epoch 1.5 of 2"


def test_settings_that_differ_are_listed_by_run(run_of: Callable[..., Run]) -> None:
    found = differing_settings([run_of("a"), run_of("b", {"optimizer.warmup_epochs": 3}), run_of("c")])
    assert found == {"optimizer.warmup_epochs": {"a": None, "b": 3, "c": None}}


def test_runs_of_one_value_are_told_together() -> None:
    assert in_words("trainer.epochs", {"a": 1, "b": 2, "c": 1}) == "trainer.epochs is 1 (a, c), 2 (b)"


@pytest.mark.parametrize(("minutes", "text"), [(0.034, "0.03"), (9.994, "9.99"), (12.34, "12.3"), (1234.5, "1,234")])
def test_minutes_have_the_digits_that_matter(minutes: float, text: str) -> None:
    assert minutes_text(minutes) == text


def test_the_papers_table_has_its_figures_and_ratios() -> None:
    table = paper_time_table()
    assert len(table.lines) == 9
    assert ("iBOT", "800", "75.2", "193.4", "1.09", "19.5", "1.29") in table.lines
    assert ("MaSSL", "100", "72.7", "24.2", "1.00", "15.1", "1.00") in table.lines
    assert ("DINO", "300", "72.8", "72.6", "1.00", "15.4", "1.02") in table.lines
    assert any("two settings" in note for note in table.footnotes)
    assert table.title == "The paper's: ViT-S/16, ImageNet, batch of 1024 on 16 V100"


def test_the_document_has_table_picture_failures_and_commands(run_of: Callable[..., Run]) -> None:
    runs = [run_of("a"), run_of("b", {"trainer.epochs": 4, "optimizer.learning_rate": 1e-4}, world_size=4)]
    text = comparison_document(
        runs, failed={"ibot": "no such recipe"}, command="massl compare --runs a b --output c", picture="x.png"
    )
    assert "| a | massl | 2/2 |" in text
    assert "not after equal epochs: trainer.epochs is 2 (a), 4 (b)" in text
    assert "](x.png)" in text
    assert "- optimizer.learning_rate is 0.001 (a), 0.0001 (b)" in text
    assert "- ibot: no such recipe" in text
    assert "massl compare --runs a b --output c" in text
    assert f"massl pretrain --recipe {runs[0].folder}/recipe.yaml --output {runs[0].folder}-again\n" in text
    assert f"torchrun --nproc-per-node 4 -m massl pretrain --recipe {runs[1].folder}/recipe.yaml" in text
    assert "- a: 1,200 images seen; 1 x NVIDIA H200; massl 0.1.0, torch 2.11.0, commit c0ffee" in text


@pytest.mark.parametrize(
    ("source", "data_set", "has_paper"),
    [
        ("photos", None, False),
        ("torchvision:CIFAR10?root=data", None, False),
        ("data/tiny-imagenet-200/train", None, False),
        ("data/imagenet/train", None, True),
        ("photos", "ImageNet", True),
        ("photos", "CIFAR-10", False),
        ("data/cifar-10/train.npz", "ImageNet", False),  # its name says what it is
    ],
)
def test_the_papers_table_stands_below_runs_on_imagenet_only(
    run_of: Callable[..., Run], source: str, data_set: str | None, has_paper: bool
) -> None:
    runs = [run_of("a", {"data.source": source})]
    text = comparison_document(runs, failed={}, command="massl compare", picture="x.png", data_set=data_set)
    assert ("| iBOT | 800 | 75.2 | 193.4 |" in text) == has_paper
    assert ("The paper's" in text) == has_paper


def test_a_document_without_failures_or_differences_leaves_them_out(run_of: Callable[..., Run]) -> None:
    text = comparison_document([run_of("a")], failed={}, command="massl compare", picture="x.png")
    assert "Failed" not in text
    assert "settings that differ" not in text


def test_a_run_in_json_holds_its_curve_settings_and_machine(run_of: Callable[..., Run]) -> None:
    (plain,) = json.loads(json.dumps(comparison_values([run_of("a")], failed={})))["runs"]
    assert plain["knn_best"] == {"epoch": 1.5, "gpu_minutes": pytest.approx(80 / 60), "knn_top1": 55.0}
    assert (plain["knn_first"]["knn_top1"], plain["knn_last"]["knn_top1"]) == (20.0, 50.0)
    assert [point["knn_top1"] for point in plain["knn"]] == [20.0, 40.0, 55.0, 50.0]
    assert plain["settings"]["trainer.batch_size"] == 60
    assert plain["environment"]["massl_commit"] == "c0ffee"
    assert (plain["images_seen"], plain["images_per_second"], plain["peak_memory_gib"], plain["finished"]) == (
        1200,
        15.0,
        None,
        True,
    )


def without_labels(rows: Rows, **last: float) -> Rows:
    """The rows as a run without labels has them."""
    made = [{key: value for key, value in row.items() if key != "knn_top1"} for row in rows]
    for number, row in enumerate(made):
        if "knn_top1" in rows[number]:
            row |= {"effective_rank": 10.0 + row["step"], "embedding_spread": 0.9}
    made[-1] |= last
    return made


def test_runs_without_labels_are_compared_by_rank_spread_other_view_and_cost(
    run_of: Callable[..., Run], rows: Rows
) -> None:
    new = run_of("new", rows=without_labels(rows, other_view_top1=61.2))
    old = run_of("old", {"method.name": "dino"}, rows=without_labels(rows))
    table = comparison_table([new, old])
    assert line_of(table, "new") == {
        "run": "new",
        "method": "massl",
        "epochs done": "2/2",
        "rank start": "10.0",
        "rank last": "30.0",
        "spread": "0.900",
        "other view, %": "61.2",
        "GPU min": "1.67",
        "time ×": "1.00",
        "images a second": "15",
    }
    assert line_of(table, "old")["other view, %"] == "–"  # of a version that did not measure it
    assert "other view, %" not in comparison_table([old]).columns
    text = comparison_document([new, old], failed={}, command="massl compare", picture="x.png")
    assert "| new | massl | 2/2 | 10.0 | 30.0 |" in text
    plain = json.loads(json.dumps(comparison_values([new, old], failed={})))
    assert plain["runs"][0]["knn_last"] is None
    assert [point["value"] for point in plain["runs"][0]["effective_rank"]] == [10.0, 20.0, 25.0, 30.0]
    assert plain["runs"][0]["other_view_top1"] == [
        {"epoch": 2.0, "gpu_minutes": pytest.approx(100 / 60), "value": 61.2}
    ]


def test_with_and_without_labels_stand_in_one_table(run_of: Callable[..., Run], rows: Rows) -> None:
    table = comparison_table([run_of("with"), run_of("without", rows=without_labels(rows))])
    assert line_of(table, "with")["k-NN last"] == "50.0"
    assert line_of(table, "with")["rank last"] == line_of(table, "without")["k-NN last"] == "–"
    assert line_of(table, "without")["rank last"] == "30.0"
    assert not [column for column in table.columns if column.startswith("k-NN at")]  # one run alone has k-NN


def test_other_probes_are_a_caution_without_labels_too(run_of: Callable[..., Run], rows: Rows) -> None:
    runs = [run_of("a", rows=without_labels(rows)), run_of("b", {"trainer.seed": 1}, rows=without_labels(rows)[:-1])]
    assert cautions(runs) == (
        "the probe is not measured alike: trainer.seed is 0 (a), 1 (b)",
        "not finished: b is at epoch 1.5 of 2",
    )


def test_a_run_that_was_best_untrained_is_commented(run_of: Callable[..., Run], rows: Rows) -> None:
    rows[0]["knn_top1"] = 60.0
    table = comparison_table([run_of("worse", rows=rows)])
    assert line_of(table, "worse")["k-NN best (epoch)"] == "60.0 (0)"
    assert table.footnotes == ("best before training: worse was never better than random weights",)
