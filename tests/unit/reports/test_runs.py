from collections.abc import Callable
from pathlib import Path

import pytest

from massl.reports.run_reader import read_run
from massl.reports.runs import KnnPoint, Run, RunError, distinct_labels

MakeRun = Callable[..., Path]
Rows = list[dict[str, float]]


def run_of(folder: Path) -> Run:
    return read_run(folder, strict=True)


def test_a_run_is_read_with_its_recipe_and_machine(make_run: MakeRun) -> None:
    run = run_of(make_run("a", {"method.name": "dino", "backbone.timm_options": {"depth": 3}}, world_size=4))
    assert (run.label, run.method, run.num_epochs, run.batch_size) == ("a", "dino", 2, 60)
    assert (run.device, run.num_processes) == ("NVIDIA H200", 4)
    assert run.settings["method.memory.num_rows"] == 2048
    assert run.settings["backbone.timm_options.depth"] == 3
    assert [row["step"] for row in run.rows] == [0, 5, 10, 15, 20]
    assert run.images_seen == 20 * 60


def test_minutes_are_those_of_the_steps_between_rows(make_run: MakeRun) -> None:
    # 300 images each at 6, 30, 15 and 15 a second: 50 + 10, + 20, + 20 s
    run = run_of(make_run("a"))
    assert run.probes == (
        KnnPoint(0.0, 0.0, 20.0),
        KnnPoint(1.0, pytest.approx(1.0), 40.0),
        KnnPoint(1.5, pytest.approx(80 / 60), 55.0),
        KnnPoint(2.0, pytest.approx(100 / 60), 50.0),
    )
    assert run.gpu_minutes == pytest.approx(100 / 60)


def test_four_processes_cost_four_times_the_minutes(make_run: MakeRun) -> None:
    assert run_of(make_run("a", world_size=4)).last.gpu_minutes == pytest.approx(400 / 60)


def test_minutes_count_steps_after_the_last_probe_and_the_point_does_not(make_run: MakeRun, rows: Rows) -> None:
    run = run_of(make_run("a", rows=[*rows[:4], {"step": 18, "epoch": 1, "images_per_second": 18.0}]))
    assert run.last.gpu_minutes == pytest.approx(80 / 60)
    assert run.gpu_minutes == pytest.approx(90 / 60)


def test_first_last_and_best_probe_are_told_apart(make_run: MakeRun) -> None:
    run = run_of(make_run("a"))
    assert (run.first.knn_top1, run.last.knn_top1) == (20.0, 50.0)
    assert (run.best.knn_top1, run.best.epoch) == (55.0, 1.5)


def test_of_equally_good_probes_the_earliest_is_the_best(make_run: MakeRun, rows: Rows) -> None:
    rows[-1]["knn_top1"] = 55.0
    assert run_of(make_run("a", rows=rows)).best.epoch == 1.5


def test_epochs_are_whole_ones_as_long_as_none_is_done(make_run: MakeRun, rows: Rows) -> None:
    rows[1]["knn_top1"] = 30.0
    assert [point.epoch for point in run_of(make_run("a", rows=rows[:2])).probes] == [0, 0]


def test_epochs_are_right_where_no_row_but_the_last_ends_one(make_run: MakeRun) -> None:
    steps = [0, 4, 8, 12, 16, 20]
    rows = [{"step": step, "epoch": step // 10, "images_per_second": 1.0, "knn_top1": 50.0} for step in steps]
    assert [point.epoch for point in run_of(make_run("a", rows=rows)).probes] == [0.0, 0.4, 0.8, 1.2, 1.6, 2.0]


def test_the_speed_is_the_median_without_the_first_stretch(make_run: MakeRun, rows: Rows) -> None:
    rows[1]["images_per_second"] = 0.5  # the stretch that compiles
    assert run_of(make_run("a", rows=rows)).images_per_second == 15.0
    assert run_of(make_run("b", rows=rows[:3])).images_per_second == 30.0


@pytest.mark.parametrize("num_rows", [1, 2])
def test_nobody_knows_the_speed_of_a_run_that_has_just_begun(make_run: MakeRun, rows: Rows, num_rows: int) -> None:
    assert run_of(make_run("a", rows=rows[:num_rows])).images_per_second is None


def test_the_peak_of_memory_is_the_largest_of_all_rows(make_run: MakeRun, rows: Rows) -> None:
    for row, gib in zip(rows[1:], (3.0, 7.5, 6.0, 6.0), strict=True):
        row["peak_memory_gib"] = gib
    assert run_of(make_run("a", rows=rows)).peak_memory_gib == 7.5
    assert run_of(make_run("b")).peak_memory_gib is None


@pytest.mark.parametrize(
    ("num_rows", "max_steps", "finished"),
    [(5, None, True), (4, None, False), (4, 15, True), (3, 15, False), (5, 1000, True)],
)
def test_a_run_is_finished_at_its_last_epoch_or_step(
    make_run: MakeRun, rows: Rows, num_rows: int, max_steps: int | None, finished: bool
) -> None:
    assert run_of(make_run("a", {"trainer.max_steps": max_steps}, rows=rows[:num_rows])).finished is finished


def test_labels_are_as_short_as_tells_folders_apart() -> None:
    folders = [Path("/x/one/massl"), Path("/x/two/massl"), Path("/x/two/dino")]
    assert distinct_labels(folders) == ["one/massl", "two/massl", "dino"]
    assert distinct_labels([Path("/a/b/c"), Path("/d/b/c"), Path("/d/e/c")]) == ["a/b/c", "d/b/c", "e/c"]
    assert distinct_labels([Path("/c"), Path("/d/c")]) == ["/c", "d/c"]


def test_a_folder_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is named twice; name every run once"):
        distinct_labels([tmp_path / "a", tmp_path / "b" / ".." / "a"])


def test_the_best_probe_by_the_rule_without_labels_is_told_beside_the_last(make_run: MakeRun, rows: Rows) -> None:
    assert (run_of(make_run("old")).best_row, run_of(make_run("older")).best_words) == (None, "")
    probed = [row for row in rows if "knn_top1" in row and row["step"] > 0]
    for number, row in enumerate(probed):
        row |= {"other_view_top1": 30.0 - number, "best_step": probed[min(number, 1)]["step"], "flat_probes": number}
    run = run_of(make_run("a", rows=rows))
    assert run.best_row == probed[1]
    assert "step 15, not the last probe of step 20" in run.best_words
    assert "k-NN 55.0 against 50.0 %" in run.best_words
    probed[-1]["best_step"] = 20
    assert "the last probe, of step 20" in run_of(make_run("b", rows=rows)).best_words


def test_a_run_that_ended_early_by_its_settings_is_finished(make_run: MakeRun, rows: Rows) -> None:
    for row in rows:
        row |= {"flat_probes": 2, "fell_below_start": 1.0}
    assert not run_of(make_run("a", {"trainer.epochs": 9}, rows=rows)).finished
    for name, key, value in (("flat", "trainer.stop_when_flat", 2), ("guard", "trainer.guard", "stop")):
        run = run_of(make_run(name, {"trainer.epochs": 9, key: value}, rows=rows))
        assert (run.finished, run.state) == (True, "ended early at step 20")


def test_what_the_first_probe_looked_at_is_told(make_run: MakeRun) -> None:
    folder = make_run("a")
    assert run_of(folder).start_words == "random weights"
    (folder / "start.json").write_text("{}")
    assert run_of(folder).start_words == "the weights it started from"
