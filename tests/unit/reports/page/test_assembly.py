import json
from collections.abc import Callable
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from massl.reports.page.assembly import report_page
from massl.reports.page.sections.reproduction import PackagedRecipe, changes_between, commands_of, reproduction_section
from massl.reports.page.sections.training import summary_table, unlike
from massl.reports.page.templates import Section
from massl.reports.run_reader import read_run
from massl.reports.runs import Run

MakeRun = Callable[..., Path]
NOON = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)


class Balance(HTMLParser):
    """Whether every element that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in ("meta", "link", "br", "img", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def run_of(folder: Path) -> Run:
    return read_run(folder, label=folder.name)


def page_of(runs: list[Run], *further: Section) -> str:
    return report_page(runs, further, title="A <title>", created=NOON)


def data_in(page: str) -> dict[str, Any]:
    text = page.partition('id="page-data">')[2].partition("</script>")[0]
    data: dict[str, Any] = json.loads(text)
    return data


def test_a_page_is_whole_and_says_when_it_was_made(make_run: MakeRun) -> None:
    page = page_of(
        [run_of(make_run("a")), run_of(make_run("b"))], Section(id="more", title="More", html="<p>words</p>")
    )
    checked = Balance()
    checked.feed(page)
    assert checked.open == []
    assert len(set(checked.ids)) == len(checked.ids)
    assert {"verdict", "summary", "training", "more", "page-data"} <= set(checked.ids)
    assert checked.ids.index("verdict") < checked.ids.index("summary")
    assert "4 May 2026, 12:00 UTC" in page
    assert "A &lt;title&gt;" in page
    assert "<p>words</p>" in page


def test_a_page_refers_to_nothing_outside(make_run: MakeRun) -> None:
    page = page_of([run_of(make_run("a"))])
    assert "default-src 'none'" in page
    for words in ('src="http', "src='http", "@import", "url(http", '<link rel="stylesheet', "fetch(", "XMLHttpRequest"):
        assert words not in page


def test_equal_styles_and_scripts_are_written_once(make_run: MakeRun) -> None:
    parts = [Section(id=name, title=name, html="", style=".mine{}", script="let mine;") for name in ("one", "two")]
    page = page_of([run_of(make_run("a"))], *parts)
    assert page.count(".mine{}") == 1
    assert page.count("let mine;") == 1


def test_names_cannot_end_the_script_that_holds_them(make_run: MakeRun) -> None:
    run = run_of(make_run("a"))
    sly = read_run(run.folder, label="</script><script>alert(1)")
    page = page_of([sly])
    assert data_in(page)["runs"] == [{"label": "</script><script>alert(1)"}]
    assert "<script>alert(1)" not in page


@pytest.mark.parametrize("num_runs", [1, 2])
def test_runs_without_rows_make_a_page_too(make_run: MakeRun, num_runs: int) -> None:
    page = page_of([run_of(make_run(f"empty{number}", rows=[])) for number in range(num_runs)])
    assert "no row of metrics.jsonl has been written" in page
    assert "metrics.jsonl is empty so far" in page
    assert 'class="legend"' not in page


def test_a_page_without_runs_holds_the_further_sections_alone() -> None:
    page = page_of([], Section(id="ablations", title="Ablations", html="<p>words</p>"))
    assert data_in(page) == {}
    assert 'id="summary"' not in page
    assert '<section id="ablations"' in page


def test_the_summary_has_a_line_a_run(make_run: MakeRun, rows: list[dict[str, float]]) -> None:
    under_way = run_of(make_run("b", {"trainer.epochs": 4, "method.name": "dino"}, world_size=2))
    table = summary_table([run_of(make_run("a")), under_way, run_of(make_run("c", rows=[]))])
    texts = [[cell.text for cell in line.cells] for line in table.lines]
    at_equal_cost = "k-NN at 1.67 GPU min, %"
    assert table.columns == (
        "run",
        "k-NN last, %",
        "k-NN best, %",
        at_equal_cost,
        "method",
        "epochs",
        "GPU-minutes",
        "images/s",
        "state",
    )
    assert texts[0] == ["a", "50.0", "55.0", "50.0", "massl", "2 of 2", "1.67", "15", "finished"]
    assert texts[1] == ["b", "50.0", "55.0", "–", "dino", "2 of 4", "3.33", "15", "in progress or stopped"]
    assert texts[2] == ["c", "–", "–", "–", "massl", "0 of 2", "–", "–", "no row yet"]
    assert [line.cells[0].run for line in table.lines] == [0, 1, 2]
    assert any("at equal cost" in note for note in table.footnotes)


def test_without_a_second_probed_run_there_is_no_column_of_equal_cost(
    make_run: MakeRun, rows: list[dict[str, float]]
) -> None:
    for other in (run_of(make_run("empty", rows=[])), run_of(make_run("begun", rows=rows[:1]))):
        table = summary_table([run_of(make_run(f"beside-{other.label}")), other])
        assert not any("min, %" in column for column in table.columns)
        assert not any("equal cost" in note for note in table.footnotes)


def test_a_run_without_labels_is_summed_up_by_what_is_known(make_run: MakeRun, rows: list[dict[str, float]]) -> None:
    for row in rows:
        if "knn_top1" in row:
            del row["knn_top1"]
            row |= {"effective_rank": 10.0 + row["step"], "feature_spread": 0.75, "other_view_top1": 3.0 * row["step"]}
    run = run_of(make_run("a", rows=rows))
    page = page_of([run])
    assert "<dt>Effective rank</dt><dd>30.0<small>10.0 at the start</small>" in page
    assert "<dt>Other view found</dt><dd>60.0 %<small>0.0 % at the start</small>" in page
    assert "<dt>k-NN" not in page
    table = summary_table([run, run_of(make_run("b", rows=rows))])
    assert table.columns[:5] == ("run", "other view, %", "effective rank", "spread", "method")
    assert [cell.text for cell in table.lines[0].cells[:4]] == ["a", "60.0", "30.0", "0.750"]


def test_a_run_that_was_best_untrained_is_marked(make_run: MakeRun, rows: list[dict[str, float]]) -> None:
    rows[0]["knn_top1"] = 60.0
    run = run_of(make_run("a", rows=rows))
    table = summary_table([run, run_of(make_run("b"))])
    assert [line.cells[2].text for line in table.lines] == ["60.0 (before training)", "55.0"]
    assert table.lines[0].cells[2].number == 60.0
    assert any(note.startswith("before training:") for note in table.footnotes)
    assert "60.0 %<small>at epoch 0, before training</small>" in page_of([run])


def test_a_run_that_max_steps_ended_says_so(make_run: MakeRun, rows: list[dict[str, float]]) -> None:
    rows[1]["knn_top1"] = 46.5
    run = run_of(make_run("a", {"trainer.max_steps": 5}, rows=rows[:2]))
    assert run.state == "ended by trainer.max_steps at step 5"
    assert run.remarks == ()
    page = page_of([run])
    assert "&lt;1 of 2<small>ended by trainer.max_steps at step 5" in page
    assert "46.5 %<small>at step 5" in page


def test_raw_pixels_and_warnings_stand_in_the_summary(make_run: MakeRun) -> None:
    first, second = make_run("a"), make_run("b")
    assert "raw pixels" not in page_of([run_of(first)]).partition("<main")[2]
    (first / "baseline.json").write_text('{"raw_pixel_knn": 31.04}')
    (first / "warnings.jsonl").write_text('{"step": 1388, "warning": "the <teacher> sleeps"}\n')
    page = page_of([run_of(first)])
    assert "50.0 %<small>at epoch 2; raw pixels 31.0 %</small>" in page
    assert "Warnings during training" in page
    assert "<li>step 1,388: the &lt;teacher&gt; sleeps</li>" in page
    assert page.count('class="level-name"') == 2  # in both charts of k-NN
    assert data_in(page)["charts"]["knn_by_minutes"]["level"] == {"value": 31.04, "label": "raw pixels 31.0 %"}
    assert data_in(page)["charts"]["images_per_second"]["level"] is None
    runs = [run_of(first), run_of(second)]
    table = summary_table(runs)
    place = table.columns.index("raw pixels, %")
    assert [line.cells[place].text for line in table.lines] == ["31.0", "–"]
    assert "<li>a: step 1,388:" in page_of(runs)
    assert 'class="level-name"' not in page_of(runs)  # of which images would it be?


def test_what_the_runs_are_not_alike_in_is_unfolded(make_run: MakeRun) -> None:
    page = page_of([run_of(make_run("a")), run_of(make_run("b", {"trainer.batch_size": 30}))])
    assert '<details class="unlike" open>' in page


def test_a_long_source_does_not_fill_the_head(make_run: MakeRun) -> None:
    source = "joined:" + "|".join(f"/data/part-{number}" for number in range(100))
    page = page_of([run_of(make_run("a", {"data.source": source}))])
    head = page.partition("<body>")[2].partition("</header>")[0]
    assert f'title="vit_tiny_patch16_224 on {source}, batch 60' in head
    shown = head.partition(f"{source}, batch 60")[2]
    assert f"on {source[:120]}…, batch 60" in shown
    short = page_of([run_of(make_run("b"))])
    assert " title=" not in short.partition("<body>")[2].partition("</header>")[0]


def test_what_cannot_be_compared_is_said(make_run: MakeRun) -> None:
    same, other = run_of(make_run("a")), run_of(make_run("b", {"trainer.batch_size": 30}))
    assert unlike([same]) == []
    assert unlike([same, other]) == ["Not at equal cost: trainer.batch_size is 60 (a), 30 (b)."]


def with_command(folder: Path, command: list[str], **changes: object) -> Run:
    file = folder / "environment.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "command": command, **changes}))
    return run_of(folder)


def test_commands_are_the_one_that_was_given_and_one_from_the_folder(make_run: MakeRun) -> None:
    folder = make_run("a", world_size=4)
    run = with_command(folder, ["/home/me/bin/massl", "pretrain", "--recipe", "my demo", "--output", "runs/a"])
    launcher = "torchrun --nproc-per-node 4 -m massl pretrain"
    assert [command for _, command in commands_of(run)] == [
        f"{launcher} --recipe 'my demo' --output runs/a",
        f"{launcher} --recipe {folder}/recipe.yaml --output {folder}-again",
    ]
    script = with_command(make_run("b"), ["/home/me/train.py", "3"])
    assert commands_of(script)[0][1] == "python train.py 3"
    assert len(commands_of(run_of(make_run("c")))) == 1


def test_what_auto_chose_is_shown_folded_and_escaped_where_a_run_has_it(make_run: MakeRun) -> None:
    folder = make_run("a")
    heading = "<summary>How the settings were chosen</summary>"
    assert heading not in reproduction_section([run_of(folder)], {}, command="").html
    (folder / "plan.txt").write_text("auto chooses for <script>alert(1)</script> & you\n  trainer.epochs 9: because\n")
    html = reproduction_section([run_of(folder)], {}, command="").html
    assert f'<details class="plan">\n{heading}' in html
    assert "auto chooses for &lt;script&gt;alert(1)&lt;/script&gt; &amp; you\n  trainer.epochs 9: because" in html


def test_changes_are_values_that_differ_and_keys_of_one_recipe_alone() -> None:
    changes = changes_between({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5, "d": 4})
    assert changes == {"b": (2, 5), "c": (3, None), "d": (None, 4)}


def test_reproduction_shows_machine_recipe_and_differences(make_run: MakeRun) -> None:
    run = run_of(make_run("a", {"data.source": "<photos>"}))
    packaged = PackagedRecipe(
        name="demo", is_named=True, changes={"trainer.epochs": (14, 2), "data.source": (None, "")}
    )
    html = reproduction_section([run], {"a": packaged}, command="massl report a").html
    assert "1 × NVIDIA H200" in html
    assert "massl 0.1.0, torch 2.11.0" in html
    assert "c0ffee" in html
    assert "source: &lt;photos&gt;" in html
    assert '<td class="word">trainer.epochs</td>' in html
    assert html.index(">not set<") < html.index(">empty<")
    assert "massl report a" in html
    same = PackagedRecipe(name="demo", is_named=True, changes={})
    assert "equals the packaged demo" in reproduction_section([run], {"a": same}, command="").html
    assert (
        "the most similar one"
        in reproduction_section(
            [run], {"a": PackagedRecipe(name="demo", is_named=False, changes={"a": (1, 2)})}, command=""
        ).html
    )
