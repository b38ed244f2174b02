import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from massl.commands.compare.command import compare
from massl.commands.evaluate.command import evaluate
from massl.commands.pretrain import pretrain
from massl.commands.report import command
from massl.commands.report.command import report
from massl.config import MasslError
from massl.reports.page.templates import Section

Massl = Callable[..., Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, recipe: Path, archive: Path) -> Path:
    """A trained run with an evaluation in its folder."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    pretrain(recipe=recipe, data=archive, output=folder, overrides={"trainer.epochs": 2})
    evaluate(
        folder, protocol="knn", train=archive, test=archive, output=folder / "results", overrides={"device": "cpu"}
    )
    return folder


@pytest.fixture
def copy_of(run: Path, tmp_path: Path) -> Callable[[str], Path]:
    """copy_of("b/tiny"): the run under another name, without what pictures need."""

    def copy(name: str) -> Path:
        return Path(
            shutil.copytree(
                run, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors", "checkpoints", "tensorboard")
            )
        )

    return copy


def page_of(answer: Any) -> str:
    assert answer.status == 0, answer.text
    return Path(answer.output.strip().removeprefix("file://")).read_text(encoding="utf-8")


def test_a_run_becomes_a_page_with_everything(run: Path, tmp_path: Path, massl_here: Massl) -> None:
    file = tmp_path / "new/report.html"
    answer = massl_here("report", run, "--output", file, "--device", "cpu")
    assert answer.output.strip() == file.as_uri()
    page = page_of(answer)
    for section in ("summary", "training", "results", "reproduction"):
        assert f'<section id="{section}"' in page
    assert page.count("<section id=") > 4, "no sections of pictures"
    assert "data:image/" in page
    assert "<h3>knn</h3>" in page
    assert file.stat().st_size < 10e6
    assert not list(file.parent.glob(".*"))


def test_without_figures_no_backbone_is_opened(
    run: Path, tmp_path: Path, massl_here: Massl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "massl.commands.report.figures.figures_of", lambda *given, **options: pytest.fail("figures were drawn")
    )
    page = page_of(massl_here("report", run, "--output", tmp_path / "report.html", "--no-figures"))
    assert "data:image/" not in page
    assert "--no-figures" in page


def test_options_of_figures_reach_them(
    run: Path, tmp_path: Path, massl_here: Massl, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def figures_of(runs: dict[str, Path], *, data: str | None, device: str) -> list[Section]:
        asked.update(runs=runs, data=data, device=device)
        return [Section(id="pictures", title="Pictures", html="<p>drawn</p>")]

    monkeypatch.setattr("massl.commands.report.figures.figures_of", figures_of)
    page = page_of(massl_here("report", run, "--output", tmp_path / "r.html", "--data", "photos", "--device", "cpu"))
    assert asked == {"runs": {"tiny": run}, "data": "photos", "device": "cpu"}
    assert "<p>drawn</p>" in page
    assert "r.html --data photos --device cpu</pre>" in page
    report([run], output=tmp_path / "r.html", device="cuda")
    assert asked["device"] == "cuda"


def test_a_large_page_says_how_it_gets_smaller(
    copy_of: Callable[[str], Path], tmp_path: Path, massl_here: Massl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_LARGE_MIB", 0.001)
    answer = massl_here("report", copy_of("a"), "--output", tmp_path / "a.html", "--no-figures")
    assert "large page" in answer.text
    page_of(answer)
    monkeypatch.undo()
    assert "large page" not in massl_here("report", copy_of("b"), "--output", tmp_path / "b.html", "--no-figures").text


def test_data_that_are_gone_cost_the_pictures_but_not_the_page(run: Path, tmp_path: Path, massl_here: Massl) -> None:
    page = page_of(
        massl_here("report", run, "--output", tmp_path / "r.html", "--data", tmp_path / "gone.npz", "--device", "cpu")
    )
    assert '<section id="summary"' in page
    assert "gone.npz" in page.partition("<main")[2].partition('<section id="reproduction"')[0]


def test_runs_of_one_name_are_told_apart(copy_of: Callable[[str], Path], tmp_path: Path, massl_here: Massl) -> None:
    page = page_of(massl_here("report", copy_of("a/tiny"), copy_of("b/tiny"), "--output", tmp_path / "r.html"))
    data = json.loads(page.partition('id="page-data">')[2].partition("</script>")[0])
    assert data["runs"] == [{"label": "a/tiny"}, {"label": "b/tiny"}]
    assert "<h1>2 runs</h1>" in page


def test_results_elsewhere_can_be_named(copy_of: Callable[[str], Path], tmp_path: Path, massl_here: Massl) -> None:
    bare = copy_of("bare")
    shutil.move(bare / "results", tmp_path / "elsewhere")
    assert "No evaluation was found" in page_of(massl_here("report", bare, "--output", tmp_path / "r.html"))
    assert "<h3>knn</h3>" in page_of(
        massl_here("report", bare, "--results", tmp_path / "elsewhere", "--output", tmp_path / "r.html")
    )
    answer = massl_here("report", bare, "--results", tmp_path, "--output", tmp_path / "r.html")
    assert answer.status == 1
    assert "results.jsonl" in answer.text


def test_results_that_cannot_be_read_are_said_on_the_page(
    copy_of: Callable[[str], Path], tmp_path: Path, massl_here: Massl
) -> None:
    bare = copy_of("bare")
    (bare / "results/results.jsonl").write_text('{"protocol": "knn"}\n')
    assert "line 1" in page_of(massl_here("report", bare, "--output", tmp_path / "r.html"))


def test_a_run_is_held_against_the_recipe_its_command_names(copy_of: Callable[[str], Path]) -> None:
    bare = copy_of("bare")
    file = bare / "environment.json"
    environment = json.loads(file.read_text())
    for words in (["--recipe", "demo-vit"], ["--recipe=demo-vit"]):
        file.write_text(
            json.dumps({**environment, "first_command": ["massl", "pretrain", *words, "--output", "runs/a"]})
        )
        (packaged,) = command.packaged_recipes(report([bare], output=bare / "r.html", figures=False).runs).values()
        assert (packaged.name, packaged.is_named) == ("demo-vit", True)
        assert packaged.changes["trainer.epochs"] == (14, 2)
        assert "optimizer.weight_decay" not in packaged.changes
    file.write_text(json.dumps({**environment, "first_command": ["train.py"]}))
    (packaged,) = command.packaged_recipes(report([bare], output=bare / "r.html", figures=False).runs).values()
    assert not packaged.is_named


def test_settings_that_are_newer_than_a_run_do_not_count_as_changed(copy_of: Callable[[str], Path]) -> None:
    bare = copy_of("bare")
    recipe = bare / "recipe.yaml"
    before = command.packaged_recipes(report([bare], output=bare / "r.html", figures=False).runs)["bare"]
    values = yaml.safe_load(recipe.read_text())
    del values["probes"]["crop_ratio"]  # at its default
    recipe.write_text(yaml.safe_dump(values))
    assert command.packaged_recipes(report([bare], output=bare / "r.html", figures=False).runs)["bare"] == before


def test_an_ablation_alone_makes_a_page(tmp_path: Path, massl_here: Massl) -> None:
    folder = tmp_path / "ablation/block-size"
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).parents[2] / "docs/results/ablations/block-size.json", folder / "ablation.json")
    for named in (folder, folder.parent):
        page = page_of(massl_here("report", named, "--output", tmp_path / "r.html"))
        assert '<section id="ablations"' in page
        assert '<section id="summary"' not in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere"),
        (["photos"], "recipe.yaml"),
        (["tiny", "tiny"], "twice"),
    ],
)
def test_folders_that_are_no_runs_leave_no_page(
    arguments: list[str], said: str, copy_of: Callable[[str], Path], tmp_path: Path, massl_here: Massl
) -> None:
    copy_of("tiny")
    (tmp_path / "photos").mkdir()
    answer = massl_here("report", *(tmp_path / name for name in arguments), "--output", tmp_path / "r.html")
    assert answer.status == 1
    assert said in answer.text
    assert not (tmp_path / "r.html").exists()


def test_no_runs_and_no_output_are_refused_with_advice(run: Path, tmp_path: Path, massl_here: Massl) -> None:
    with pytest.raises(MasslError, match="runs"):
        report([], output=tmp_path / "r.html")
    answer = massl_here("report", run, "--output", tmp_path)
    assert answer.status == 1
    assert str(tmp_path) in answer.text
    assert massl_here("report", run).status == 2


def test_a_run_that_has_only_begun_makes_a_page_that_says_so(
    copy_of: Callable[[str], Path], tmp_path: Path, massl_here: Massl
) -> None:
    bare = copy_of("bare")
    (bare / "metrics.jsonl").write_text("")
    answer = massl_here("report", bare, "--output", tmp_path / "r.html")
    assert "metrics.jsonl is empty" in answer.error
    assert "metrics.jsonl is empty" in page_of(answer)


def test_help_explains_the_options(massl_here: Massl) -> None:
    answer = massl_here("report", "--help")
    assert answer.status == 0
    for words in ("--no-figures", "--results", "--data", "--output", "massl report runs/a --output report.html"):
        assert words in answer.text.replace("_", "-")


@pytest.mark.parametrize("options", [["--data", "photos"], ["--device", "cpu"]], ids=str)
def test_options_of_figures_are_refused_without_figures(
    run: Path, tmp_path: Path, massl_here: Massl, options: list[str]
) -> None:
    answer = massl_here("report", run, "--output", tmp_path / "r.html", "--no-figures", *options)
    assert answer.status == 2
    assert f"{options[0]} " in answer.text
    assert not (tmp_path / "r.html").exists()


def test_an_unknown_data_set_is_refused_beside_an_ablation_too(tmp_path: Path, massl_here: Massl) -> None:
    shutil.copy(Path(__file__).parents[2] / "docs/results/ablations/block-size.json", tmp_path / "ablation.json")
    answer = massl_here("report", tmp_path, "--data_set", "MNIST", "--output", tmp_path / "r.html")
    assert answer.status == 1
    assert "'MNIST'" in answer.text


@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl"])
def test_a_file_that_is_no_page_is_not_replaced(copy_of: Callable[[str], Path], massl_here: Massl, name: str) -> None:
    file = copy_of("bare") / name
    before = file.read_bytes()
    answer = massl_here("report", file.parent, "--output", file)
    assert answer.status == 1
    assert name in answer.text
    assert file.read_bytes() == before
    assert not list(file.parent.glob(".*.partial"))


@pytest.mark.parametrize("content", ["", "<!DOCTYPE HTML>\n<p>old"])
def test_a_page_or_an_empty_file_is_replaced(
    copy_of: Callable[[str], Path], tmp_path: Path, massl_here: Massl, content: str
) -> None:
    file = tmp_path / "r.html"
    file.write_text(content)
    page = page_of(massl_here("report", copy_of("bare"), "--output", file))
    assert '<section id="summary"' in page
    assert "<p>old" not in page


def test_something_that_is_no_plain_file_is_refused(
    copy_of: Callable[[str], Path], tmp_path: Path, massl_here: Massl
) -> None:
    os.mkfifo(tmp_path / "pipe")
    answer = massl_here("report", copy_of("bare"), "--output", tmp_path / "pipe")
    assert answer.status == 1
    assert f"{tmp_path}/pipe" in answer.text


@pytest.mark.parametrize("file", ["n" * 300, "/proc/report.html"], ids=["too long", "proc"])
def test_a_place_where_nothing_can_be_written_is_told_before_the_work(
    copy_of: Callable[[str], Path], tmp_path: Path, massl_here: Massl, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.setattr(command, "report_page", lambda *given, **options: pytest.fail("the page was made"))
    answer = massl_here("report", copy_of("bare"), "--output", tmp_path / file)
    assert answer.status == 1
    assert file[:50] in answer.text or "/proc" in answer.text
    assert "the same command continues" not in answer.text


def test_a_page_that_cannot_be_written_leaves_nothing_behind(
    copy_of: Callable[[str], Path], tmp_path: Path, massl_here: Massl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    bare = copy_of("bare")
    monkeypatch.setattr(Path, "replace", refuse)
    answer = massl_here("report", bare, "--output", tmp_path / "new/r.html")
    assert answer.status == 1
    assert "No space left on device" in answer.text
    assert list((tmp_path / "new").iterdir()) == []


def test_names_that_are_not_utf8_are_shown_escaped(
    run: Path, copy_of: Callable[[str], Path], make_folder: Callable[..., Path], tmp_path: Path, massl_here: Massl
) -> None:
    odd = copy_of(os.fsdecode(b"su\xffrr"))
    assert "<h1>su\\udcffrr</h1>" in page_of(massl_here("report", odd, "--output", tmp_path / "r.html"))
    photos = make_folder("photos", 24, classes=2)
    (photos / "class0").rename(photos / os.fsdecode(b"cl\xffss"))
    page = page_of(massl_here("report", run, "--data", photos, "--device", "cpu", "--output", tmp_path / "r.html"))
    assert "cl\\udcffss" in page
    assert "data:image/" in page
    assert not list(tmp_path.glob(".*"))


def test_the_folder_of_a_comparison_stands_for_its_runs(
    copy_of: Callable[[str], Path], tmp_path: Path, massl_here: Massl
) -> None:
    runs = [copy_of(f"compare/{name}") for name in ("massl", "dino", "failed", "trial-x")]
    compare(runs[:2], output=tmp_path / "compare")
    comparison = tmp_path / "compare/comparison.json"
    comparison.write_text(
        json.dumps({**json.loads(comparison.read_text()), "failed": {"failed": "was never probed", "gone": "no data"}})
    )
    page = page_of(massl_here("report", tmp_path / "compare", "--output", tmp_path / "r.html"))
    data = json.loads(page.partition('id="page-data">')[2].partition("</script>")[0])
    assert data["runs"] == [{"label": "massl"}, {"label": "dino"}, {"label": "failed"}]
    assert "CPU min, %" in page
    compare(runs[:2], output=tmp_path / "apart")
    answer = massl_here("report", tmp_path / "apart", "--output", tmp_path / "r.html")
    assert answer.status == 1
    assert "massl, dino" in answer.text
    (tmp_path / "apart/comparison.json").write_text("[]")
    answer = massl_here("report", tmp_path / "apart", "--output", tmp_path / "r.html")
    assert answer.status == 1
    assert "comparison.json" in answer.text


def test_a_report_of_a_strangers_run_changes_no_file(copy_of: Callable[[str], Path], tmp_path: Path) -> None:
    theirs, own = copy_of("theirs"), tmp_path / "notes.txt"
    own.write_text("first\nlast line without its break")
    before = own.read_bytes()
    (theirs / "results.jsonl").symlink_to(own)
    for name, rejected in (("ev", own), ("dangling", tmp_path / "new.txt")):
        (theirs / name).mkdir()
        (theirs / name / "results.jsonl").write_text("touch pwned")
        (theirs / name / "results.rejected.jsonl").symlink_to(rejected)
    (theirs / "loop").mkdir()
    (theirs / "loop" / "results.jsonl").symlink_to("results.jsonl")
    report([theirs], output=tmp_path / "r.html", figures=False)
    assert own.read_bytes() == before
    assert not (tmp_path / "new.txt").exists()
