import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from massl.config import RecipeError
from massl.reports.run_reader import read_run
from massl.reports.runs import RunError

MakeRun = Callable[..., Path]
Rows = list[dict[str, float]]


# ---- what pages need -------------------------------------------------------------------------------------------------


def test_a_run_is_read_as_comparisons_read_it(make_run: MakeRun) -> None:
    folder = make_run("a", world_size=2)
    run = read_run(folder)
    assert run == read_run(folder, strict=True)
    assert [point.gpu_minutes for point in run.probes] == pytest.approx(
        [minutes for row, minutes in zip(run.rows, run.gpu_minutes_at_rows, strict=True) if "knn_top1" in row]
    )
    assert run.epochs_at_rows == (0.0, 0.5, 1.0, 1.5, 2.0)
    assert run.best.knn_top1 == 55.0
    assert run.state == "finished"
    assert run.remarks == ()
    assert "learning_rate" in run.recipe


def test_folders_that_are_no_runs_are_refused_with_advice(tmp_path: Path, make_run: MakeRun) -> None:
    with pytest.raises(RunError, match=r"nowhere .* --output of massl pretrain or massl ablate"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "photos").mkdir()
    with pytest.raises(RunError, match=r"photos has no recipe.yaml"):
        read_run(tmp_path / "photos")
    run = make_run("edited")
    (run / "recipe.yaml").write_text("trainer: {epochs: 3}\n")
    with pytest.raises(RunError, match=r"lacks method.name, backbone.name, data.source, trainer.batch_size"):
        read_run(run)


@pytest.mark.parametrize(
    ("content", "remark"),
    [
        ("", "metrics.jsonl is empty"),
        (None, "metrics.jsonl is missing"),
        ('{"step": 0, "epo', "the last line of metrics.jsonl is half written"),
    ],
)
def test_a_run_that_has_only_begun_is_shown_without_rows(make_run: MakeRun, content: str | None, remark: str) -> None:
    folder = make_run("a")
    metrics = folder / "metrics.jsonl"
    if content is None:
        metrics.unlink()
    else:
        metrics.write_text(content)
    run = read_run(folder)
    assert [found.startswith(remark) for found in run.remarks] == [True]
    assert (run.rows, run.probes, run.gpu_minutes, run.epochs_done, run.images_seen) == ((), (), 0.0, 0.0, 0)
    assert not run.finished
    assert run.state == "no row yet"


def test_a_half_written_last_line_is_left_out_and_said(make_run: MakeRun) -> None:
    folder = make_run("a")
    whole = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(whole + '{"step": 25, "ep')
    run = read_run(folder)
    assert [row["step"] for row in run.rows] == [0, 5, 10, 15, 20]
    assert run.remarks == ("the last line of metrics.jsonl is half written and left out",)


def test_a_line_in_the_middle_that_is_no_row_is_named(make_run: MakeRun) -> None:
    folder = make_run("a")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[1] = '{"step": 5, "images_per_second": "fast"}'
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run = read_run(folder)
    assert [row["step"] for row in run.rows] == [0, 10, 15, 20]
    assert len(run.remarks) == 1
    assert run.remarks[0].startswith("line 2 of metrics.jsonl")


def test_numbers_that_are_none_are_counted_and_not_drawn(make_run: MakeRun, rows: list[dict[str, float]]) -> None:
    rows[1]["loss"], rows[2]["loss"], rows[3]["loss"] = 3.0, float("nan"), float("inf")
    rows[4]["knn_top1"] = float("nan")
    run = read_run(make_run("a", rows=rows))
    assert [row["loss"] for row in run.rows if "loss" in row] == [3.0]
    assert [point.knn_top1 for point in run.probes] == [20.0, 40.0, 55.0]
    assert run.remarks == ("knn_top1 is not a finite number in 1 row", "loss is not a finite number in 2 rows")


def test_a_run_under_way_says_how_far_it_is(make_run: MakeRun, rows: list[dict[str, float]]) -> None:
    run = read_run(make_run("a", {"trainer.epochs": 5}, rows=rows))
    assert run.remarks == ("in progress or stopped: at step 20, epoch 2 of 5",)
    assert run.state == "in progress or stopped"


def test_of_rows_of_one_step_the_later_counts(make_run: MakeRun, rows: list[dict[str, float]]) -> None:
    again = {**rows[2], "knn_top1": 41.0}
    run = read_run(make_run("a", rows=[rows[0], *rows[2:4], again, rows[4], rows[1]]))
    assert [row["step"] for row in run.rows] == [0, 5, 10, 15, 20]
    assert [point.knn_top1 for point in run.probes] == [20.0, 41.0, 55.0, 50.0]


@pytest.mark.parametrize(
    ("content", "remark"),
    [
        (None, "environment.json cannot be read"),
        ("{", "environment.json cannot be read"),
        ("[1]", "environment.json lacks device, world_size"),
    ],
)
def test_without_a_known_machine_minutes_are_of_one_process(
    make_run: MakeRun, content: str | None, remark: str
) -> None:
    folder = make_run("a", world_size=8)
    if content is None:
        (folder / "environment.json").unlink()
    else:
        (folder / "environment.json").write_text(content)
    run = read_run(folder)
    assert run.remarks[0].startswith(remark)
    assert run.num_processes == 1
    assert run.gpu_minutes == pytest.approx(100 / 60)


def test_a_run_without_probes_has_no_accuracy(make_run: MakeRun, rows: list[dict[str, float]]) -> None:
    run = read_run(
        make_run("a", rows=[{key: value for key, value in row.items() if key != "knn_top1"} for row in rows])
    )
    assert run.probes == ()
    assert run.finished
    assert json.dumps(run.epochs_at_rows) == "[0.0, 0.5, 1.0, 1.5, 2.0]"


def edited_recipe(folder: Path, **changes: object) -> Path:
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["trainer"].update(changes)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epochs": None}, "trainer.epochs is None"),
        ({"batch_size": "x"}, "trainer.batch_size is 'x'"),
        ({"max_steps": "many"}, "trainer.max_steps is 'many'"),
        ({"epochs": 0}, "trainer.epochs is 0"),
    ],
    ids=str,
)
def test_a_recipe_without_whole_numbers_is_refused(make_run: MakeRun, changes: dict[str, object], said: str) -> None:
    folder = edited_recipe(make_run("a"), **changes)
    with pytest.raises(RunError, match=f"recipe.yaml: {said}"):
        read_run(folder)
    with pytest.raises(RunError, match=said):
        read_run(folder, strict=True)


@pytest.mark.parametrize("number", ["x", None, 0, 1.5, True])
def test_a_number_of_processes_that_is_none_is_said(make_run: MakeRun, number: object) -> None:
    folder = make_run("a")
    file = folder / "environment.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "world_size": number}))
    run = read_run(folder)
    assert len(run.remarks) == 1
    assert f"world_size in environment.json is {number!r}" in run.remarks[0]
    assert (run.num_processes, run.device) == (1, "NVIDIA H200")
    with pytest.raises(RunError, match="world_size"):
        read_run(folder, strict=True)


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": 9},  # more than steps
        {"step": -1},
        {"step": 10**400},
        {"images_per_second": 1e-308},
        {"images_per_second": 10**400},
        {"epoch": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_rows_that_cannot_be_are_left_out(
    make_run: MakeRun, rows: list[dict[str, float]], change: dict[str, float]
) -> None:
    rows[1].update(change)
    run = read_run(make_run("a", rows=rows))
    assert [row["step"] for row in run.rows] == [0, 10, 15, 20]
    assert len(run.remarks) == 1
    assert run.remarks[0].startswith("line 2 of metrics.jsonl")
    assert run.epochs_at_rows == (0.0, 1.0, 1.5, 2.0)


def test_numbers_that_are_too_large_to_draw_are_counted(make_run: MakeRun, rows: list[dict[str, float]]) -> None:
    for row, loss in zip(rows, (1.7e308, -1.7e308, 10**400, 3.0, 2.0), strict=True):
        row["loss"] = loss
    run = read_run(make_run("a", rows=rows))
    assert [row["loss"] for row in run.rows if "loss" in row] == [3.0, 2.0]
    assert run.remarks == ("loss is beyond ±1e+100, too large to draw, in 3 rows",)


@pytest.mark.parametrize(
    "content", ["{", "[1]", '{"raw_pixel_knn": "x"}', '{"raw_pixel_knn": 310}', '{"raw_pixel_knn": NaN}', "{}"]
)
def test_a_baseline_that_is_none_is_left_out(make_run: MakeRun, content: str) -> None:
    folder = make_run("a")
    (folder / "baseline.json").write_text(content)
    run = read_run(folder)
    assert run.raw_pixel_knn is None
    assert len(run.remarks) == (0 if content in ("[1]", "{}") else 1)


def test_warnings_that_cannot_be_read_are_counted(make_run: MakeRun) -> None:
    folder = make_run("a")
    whole = '{"step": 3, "warning": "asleep"}'
    (folder / "warnings.jsonl").write_text(f'{whole}\n{whole}\n{{"step": 4}}\n[1]\n{{"step": 5, "war')
    run = read_run(folder)
    assert run.warnings == ((3, "asleep"),)
    assert run.remarks == ("3 lines of warnings.jsonl cannot be read and left out",)


def test_entries_that_are_no_numbers_are_left_out_and_counted(make_run: MakeRun, rows: Rows) -> None:
    changed = [{**row, "layers": {"a": 1}, "loss": "low", "ids": [1, 2], "none": None, "flag": True} for row in rows]
    run = read_run(make_run("a", rows=changed))
    assert [dict(row) for row in run.rows] == rows
    assert run.remarks == tuple(f"{key} is not a number in 5 rows" for key in ("flag", "ids", "layers", "loss", "none"))


@pytest.mark.parametrize(
    "line", [b"\xff\xfe", b"{}", b"[" * 100_000, b'{"step": 1, "epoch": 0}', b"\x00"], ids=range(5)
)
def test_a_damaged_line_is_left_out_and_the_later_rows_are_shown(make_run: MakeRun, line: bytes) -> None:
    folder = make_run("a")
    for name, first in (("metrics.jsonl", b""), ("warnings.jsonl", b'{"step": 1, "warning": "slow"}\n')):
        whole = first or (folder / name).read_bytes()
        (folder / name).write_bytes(line + b"\n" + whole.replace(b"\n", b"\r\n"))
    run = read_run(folder)
    assert [row["step"] for row in run.rows] == [0, 5, 10, 15, 20]
    assert [warning.text for warning in run.warnings] == ["slow"]
    assert [remark.partition(":")[0].partition(" of ")[0] for remark in run.remarks] == ["line 1", "1 line"]


def test_files_that_are_folders_are_said(make_run: MakeRun) -> None:
    folder = make_run("a")
    (folder / "metrics.jsonl").unlink()
    for name in ("metrics.jsonl", "warnings.jsonl", "baseline.json"):
        (folder / name).mkdir()
    run = read_run(folder)
    assert run.rows == ()
    assert any("metrics.jsonl cannot be read" in remark for remark in run.remarks)
    assert any("warnings.jsonl cannot be read" in remark for remark in run.remarks)


def test_thousands_of_metrics_and_warnings_are_cut_and_counted(make_run: MakeRun, rows: Rows) -> None:
    folder = make_run("a", rows=[{**row, **{f"metric {number:04}": 1.0 for number in range(3000)}} for row in rows])
    (folder / "warnings.jsonl").write_text(
        "".join(json.dumps({"step": 1, "warning": f"{number} " + "x" * 10_000}) + "\n" for number in range(1000))
    )
    run = read_run(folder)
    assert len({key for row in run.rows for key in row}) <= 100
    assert all(key in run.rows[0] for key in rows[0])
    assert len(run.warnings) <= 200
    assert max(len(warning.text) for warning in run.warnings) < 3000
    assert [remark.partition(" ")[0] for remark in run.remarks] == ["2,904", "800"]


# ---- what comparisons need -------------------------------------------------------------------------------------------


def test_the_plan_of_auto_is_read_but_not_through_a_link(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run("a")
    assert read_run(folder).plan == ""
    (folder / "plan.txt").write_bytes(b"auto chooses \xff\n  trainer.epochs 9: because\n")
    assert read_run(folder).plan == "auto chooses \ufffd\n  trainer.epochs 9: because"
    (folder / "plan.txt").rename(tmp_path / "private.txt")
    (folder / "plan.txt").symlink_to(tmp_path / "private.txt")
    run = read_run(folder)
    assert run.plan == ""
    assert "plan.txt is a link and is left out" in run.remarks


def test_a_line_that_is_being_written_is_left_out(make_run: MakeRun, rows: Rows) -> None:
    folder = make_run("a", rows=rows[:3])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 15, "epoch": 1, "images_per_second": 15.0}')  # whole, but for all we know it goes on
    assert [row["step"] for row in read_run(folder, strict=True).rows] == [0, 5, 10]


def test_the_label_of_a_folder_named_by_a_dot_is_its_name(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_run("a"))
    assert read_run(".").label == "a"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"nowhere .* --output of massl pretrain"):
        read_run(tmp_path / "nowhere", strict=True)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("recipe.yaml", "has no recipe.yaml"),
        ("environment.json", "environment.json cannot be read"),
        ("metrics.jsonl", "metrics.jsonl is missing"),
    ],
)
def test_a_folder_without_one_of_its_files_is_refused(make_run: MakeRun, file: str, message: str) -> None:
    folder = make_run("a")
    (folder / file).unlink()
    with pytest.raises(RunError, match=message):
        read_run(folder, strict=True)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("recipe.yaml", "method: [", "recipe.yaml is not valid YAML"),
        ("recipe.yaml", "just words", "recipe.yaml holds no recipe"),
        ("environment.json", "{", "environment.json cannot be read"),
        ("environment.json", '{"device": "cpu"}', "environment.json lacks world_size"),
        ("environment.json", "[]", "environment.json lacks device, world_size"),
        ("metrics.jsonl", "", "metrics.jsonl is empty"),
        ("metrics.jsonl", '{"step": 0', "metrics.jsonl is empty"),
        ("metrics.jsonl", '{"step": 0\n{"step": 5}\n', "line 1 .*is not JSON"),
        ("metrics.jsonl", '{"step": 0, "epoch": 0}\n', "line 1 .*lacks images_per_second"),
        ("metrics.jsonl", "7\n", "line 1 .*is not a JSON object"),
        ("metrics.jsonl", '{"step": 0, "epoch": 0, "images_per_second": 0.0}\n' * 2, "line 2 .*goes back to step 0"),
        ("metrics.jsonl", '{"step": 5, "epoch": 0, "images_per_second": 0.0}\n', "line 1 .*0.0 images a second"),
        (
            "metrics.jsonl",
            '{"step": 0, "epoch": 0, "images_per_second": 0.0}\n',
            "never probed: .*probes.every_epochs",
        ),
    ],
)
def test_what_cannot_be_read_is_said(make_run: MakeRun, file: str, content: str, message: str) -> None:
    folder = make_run("a")
    (folder / file).write_text(content)
    with pytest.raises((RunError, RecipeError), match=message):
        read_run(folder, strict=True)


def test_a_recipe_that_lacks_what_is_compared_is_refused(make_run: MakeRun) -> None:
    folder = make_run("a")
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    del recipe["trainer"]["batch_size"]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(RunError, match=r"recipe.yaml lacks trainer.batch_size"):
        read_run(folder, strict=True)


# ---- folders of strangers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["environment.json", "metrics.jsonl", "warnings.jsonl", "plan.txt"])
def test_a_fifo_blocks_no_reader(make_run: MakeRun, make_fifo: Callable[[Path], Path], name: str) -> None:
    folder = make_run("a")
    (folder / name).unlink(missing_ok=True)
    make_fifo(folder / name)
    assert any(name in remark and "not a file" in remark for remark in read_run(folder).remarks)


@pytest.mark.parametrize("name", ["environment.json", "metrics.jsonl", "warnings.jsonl", "baseline.json", "plan.txt"])
def test_a_file_that_is_too_large_is_left_out_and_named(make_run: MakeRun, name: str) -> None:
    folder = make_run("a")
    with (folder / name).open("wb") as file:
        file.truncate(2**30)  # takes no room
    assert any(name in remark and "MiB are more" in remark for remark in read_run(folder).remarks)


def test_metrics_of_countless_other_lines_are_read_no_further(make_run: MakeRun) -> None:
    folder = make_run("a")
    metrics = folder / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes() + b"{}\n" * 110_000 + metrics.read_bytes().replace(b"20,", b"30,"))
    run = read_run(folder)
    assert [row["step"] for row in run.rows] == [0, 5, 10, 15, 20]
    assert any("more than 100,000 lines of metrics.jsonl" in remark for remark in run.remarks)
    assert len(run.remarks) < 30


@pytest.mark.parametrize("line", ["{{}}", '{{"step": {number}, "warning": "slow"}}'])
def test_countless_warnings_are_read_no_further(make_run: MakeRun, line: str) -> None:
    folder = make_run("a")
    (folder / "warnings.jsonl").write_text("".join(line.format(number=number) + "\n" for number in range(110_000)))
    assert any("read no further than line 100,001" in remark for remark in read_run(folder).remarks)
