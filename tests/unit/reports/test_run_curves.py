from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from massl.config import RecipeError
from massl.reports.run_curves import CurveError, KnnPoint, distinct_labels, read_run

Rows = list[dict[str, float]]


def test_a_run_is_read_with_its_recipe_and_machine(make_run: Callable[..., Path]) -> None:
    curve = read_run(make_run("a", {"method.name": "dino", "backbone.timm_options": {"depth": 3}}, world_size=4))
    assert (curve.label, curve.method, curve.epochs, curve.batch_size) == ("a", "dino", 2, 60)
    assert (curve.device, curve.num_processes) == ("NVIDIA H200", 4)
    assert curve.settings["method.memory.num_rows"] == 2048
    assert curve.settings["backbone.timm_options.depth"] == 3
    assert [row["step"] for row in curve.rows] == [0, 5, 10, 15, 20]
    assert curve.images_seen == 20 * 60


def test_minutes_are_those_of_the_steps_between_rows(make_run: Callable[..., Path]) -> None:
    # 300 images each at 6, 30, 15 and 15 a second: 50 + 10, + 20, + 20 s
    curve = read_run(make_run("a"))
    assert curve.knn == (
        KnnPoint(0.0, 0.0, 20.0),
        KnnPoint(1.0, pytest.approx(1.0), 40.0),
        KnnPoint(1.5, pytest.approx(80 / 60), 55.0),
        KnnPoint(2.0, pytest.approx(100 / 60), 50.0),
    )
    assert curve.gpu_minutes == pytest.approx(100 / 60)


def test_four_processes_cost_four_times_the_minutes(make_run: Callable[..., Path]) -> None:
    assert read_run(make_run("a", world_size=4)).last.gpu_minutes == pytest.approx(400 / 60)


def test_minutes_count_steps_after_the_last_probe_and_the_point_does_not(
    make_run: Callable[..., Path], rows: Rows
) -> None:
    curve = read_run(make_run("a", rows=[*rows[:4], {"step": 18, "epoch": 1, "images_per_second": 18.0}]))
    assert curve.last.gpu_minutes == pytest.approx(80 / 60)
    assert curve.gpu_minutes == pytest.approx(90 / 60)


def test_first_last_and_best_probe_are_told_apart(make_run: Callable[..., Path]) -> None:
    curve = read_run(make_run("a"))
    assert (curve.first.knn_top1, curve.last.knn_top1) == (20.0, 50.0)
    assert (curve.best.knn_top1, curve.best.epoch) == (55.0, 1.5)


def test_of_equally_good_probes_the_earliest_is_the_best(make_run: Callable[..., Path], rows: Rows) -> None:
    rows[-1]["knn_top1"] = 55.0
    assert read_run(make_run("a", rows=rows)).best.epoch == 1.5


def test_epochs_are_whole_ones_as_long_as_none_is_done(make_run: Callable[..., Path], rows: Rows) -> None:
    rows[1]["knn_top1"] = 30.0
    assert [point.epoch for point in read_run(make_run("a", rows=rows[:2])).knn] == [0, 0]


def test_epochs_are_right_where_no_row_but_the_last_ends_one(make_run: Callable[..., Path]) -> None:
    steps = [0, 4, 8, 12, 16, 20]
    rows = [{"step": step, "epoch": step // 10, "images_per_second": 1.0, "knn_top1": 50.0} for step in steps]
    assert [point.epoch for point in read_run(make_run("a", rows=rows)).knn] == [0.0, 0.4, 0.8, 1.2, 1.6, 2.0]


def test_the_speed_is_the_median_without_the_first_stretch(make_run: Callable[..., Path], rows: Rows) -> None:
    rows[1]["images_per_second"] = 0.5  # the stretch that compiles
    assert read_run(make_run("a", rows=rows)).images_per_second == 15.0
    assert read_run(make_run("b", rows=rows[:3])).images_per_second == 30.0


@pytest.mark.parametrize("num_rows", [1, 2])
def test_nobody_knows_the_speed_of_a_run_that_has_just_begun(
    make_run: Callable[..., Path], rows: Rows, num_rows: int
) -> None:
    assert read_run(make_run("a", rows=rows[:num_rows])).images_per_second is None


def test_the_peak_of_memory_is_the_largest_of_all_rows(make_run: Callable[..., Path], rows: Rows) -> None:
    for row, gib in zip(rows[1:], (3.0, 7.5, 6.0, 6.0), strict=True):
        row["peak_memory_gib"] = gib
    assert read_run(make_run("a", rows=rows)).peak_memory_gib == 7.5
    assert read_run(make_run("b")).peak_memory_gib is None


@pytest.mark.parametrize(
    ("num_rows", "max_steps", "finished"),
    [(5, None, True), (4, None, False), (4, 15, True), (3, 15, False), (5, 1000, True)],
)
def test_a_run_is_finished_at_its_last_epoch_or_step(
    make_run: Callable[..., Path], rows: Rows, num_rows: int, max_steps: int | None, finished: bool
) -> None:
    assert read_run(make_run("a", {"trainer.max_steps": max_steps}, rows=rows[:num_rows])).finished is finished


def test_a_line_that_is_being_written_is_left_out(make_run: Callable[..., Path], rows: Rows) -> None:
    folder = make_run("a", rows=rows[:3])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 15, "epoch": 1, "images_per_second": 15.0}')  # whole, but for all we know it goes on
    assert [row["step"] for row in read_run(folder).rows] == [0, 5, 10]


def test_the_label_of_a_folder_named_by_a_dot_is_its_name(
    make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_run("a"))
    assert read_run(".").label == "a"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CurveError, match="nowhere is no folder; name the --output of a massl pretrain"):
        read_run(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("recipe.yaml", "holds no recipe.yaml, so it is no run of massl"),
        ("environment.json", "holds no environment.json, so nobody knows on how many GPUs"),
        ("metrics.jsonl", "holds no metrics.jsonl: its training has not begun"),
    ],
)
def test_a_folder_without_one_of_its_files_is_refused(make_run: Callable[..., Path], file: str, message: str) -> None:
    folder = make_run("a")
    (folder / file).unlink()
    with pytest.raises(CurveError, match=message):
        read_run(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("recipe.yaml", "method: [", "recipe.yaml is not valid YAML"),
        ("recipe.yaml", "just words", "recipe.yaml holds no recipe"),
        ("environment.json", "{", "environment.json is not valid JSON"),
        ("environment.json", '{"device": "cpu"}', "environment.json does not say world_size"),
        ("environment.json", "[]", "environment.json does not say device, world_size"),
        ("metrics.jsonl", "", "metrics.jsonl is empty so far"),
        ("metrics.jsonl", '{"step": 0', "metrics.jsonl is empty so far"),
        ("metrics.jsonl", '{"step": 0\n{"step": 5}\n', "line 1 is not valid JSON"),
        ("metrics.jsonl", '{"step": 0, "epoch": 0}\n', "line 1 does not say images_per_second"),
        ("metrics.jsonl", "7\n", "line 1 does not say step, epoch, images_per_second"),
        ("metrics.jsonl", '{"step": 0, "epoch": 0, "images_per_second": 0.0}\n' * 2, "line 2 goes back to step 0"),
        ("metrics.jsonl", '{"step": 5, "epoch": 0, "images_per_second": 0.0}\n', "line 1: 0.0 images a second"),
        (
            "metrics.jsonl",
            '{"step": 0, "epoch": 0, "images_per_second": 0.0}\n',
            "was never probed by k-NN: .* probes.every_epochs above 0",
        ),
    ],
)
def test_what_cannot_be_read_is_said(make_run: Callable[..., Path], file: str, content: str, message: str) -> None:
    folder = make_run("a")
    (folder / file).write_text(content)
    with pytest.raises((CurveError, RecipeError), match=message):
        read_run(folder)


def test_a_recipe_that_lacks_what_is_compared_is_refused(make_run: Callable[..., Path]) -> None:
    folder = make_run("a")
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    del recipe["trainer"]["batch_size"]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(CurveError, match=r"recipe.yaml does not say trainer.batch_size"):
        read_run(folder)


def test_labels_are_as_short_as_tells_folders_apart() -> None:
    folders = [Path("/x/one/massl"), Path("/x/two/massl"), Path("/x/two/dino")]
    assert distinct_labels(folders) == ["one/massl", "two/massl", "dino"]
    assert distinct_labels([Path("/a/b/c"), Path("/d/b/c"), Path("/d/e/c")]) == ["a/b/c", "d/b/c", "e/c"]
    assert distinct_labels([Path("/c"), Path("/d/c")]) == ["/c", "d/c"]


def test_a_folder_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CurveError, match="is named twice; name every run once"):
        distinct_labels([tmp_path / "a", tmp_path / "b" / ".." / "a"])
