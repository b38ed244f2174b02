import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from massl.methods import METHODS
from massl.reports import fonts
from massl.reports.comparison.plots import comparison_figure, spread
from massl.reports.figures import save_figure
from massl.reports.run_reader import read_run
from massl.reports.runs import Run

Rows = list[dict[str, float]]


@pytest.fixture
def run_of(make_run: Callable[..., Path]) -> Callable[..., Run]:
    return lambda *given, **named: read_run(make_run(*given, **named), strict=True)


def labels_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[1].texts]


def test_one_line_a_run_against_minutes_and_against_epochs(run_of: Callable[..., Run]) -> None:
    runs = [run_of("a"), run_of("b", world_size=3)]
    by_cost, by_epoch = comparison_figure(runs).axes
    for number, run in enumerate(runs):
        assert list(by_cost.lines[number].get_xdata()) == [point.gpu_minutes for point in run.probes]
        assert list(by_epoch.lines[number].get_xdata()) == [point.epoch for point in run.probes]
        for axes in (by_cost, by_epoch):
            assert list(axes.lines[number].get_ydata()) == [20.0, 40.0, 55.0, 50.0]
    assert by_cost.get_xlabel().startswith("GPU-minutes")
    assert by_epoch.get_xlabel() == "epochs"
    assert "%" in by_cost.get_ylabel()


def test_each_line_is_named_with_its_last_accuracy_where_it_ends(run_of: Callable[..., Run], rows: Rows) -> None:
    figure = comparison_figure([run_of("massl"), run_of("dino", rows=rows[:3])])
    assert labels_of(figure) == ["massl  50.0", "dino  40.0"]
    assert [text.xy for text in figure.axes[1].texts] == [(2.0, 50.0), (1.0, 40.0)]


def test_the_figure_says_in_what_the_runs_are_not_alike(run_of: Callable[..., Run]) -> None:
    figure = comparison_figure([run_of("a"), run_of("b", {"trainer.batch_size": 30})])
    assert "not at equal cost: trainer.batch_size is 60 (a), 30 (b)" in figure.get_supxlabel()
    assert figure.get_suptitle() == "vit_tiny_patch16_224 on photos, 1 x NVIDIA H200"
    assert comparison_figure([run_of("c")]).get_supxlabel() == ""


def test_lines_differ_in_more_than_colour(run_of: Callable[..., Run]) -> None:
    run = run_of("a")
    lines = comparison_figure([replace(run, label=str(number)) for number in range(16)]).axes[0].lines
    looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines]
    assert len(set(looks)) == 16
    assert len({colour for colour, _, _ in looks}) == len({marker for _, marker, _ in looks}) == 8


def test_each_of_the_methods_has_a_colour_of_its_own(run_of: Callable[..., Run]) -> None:
    run = run_of("a")
    lines = comparison_figure([replace(run, label=method) for method in METHODS]).axes[0].lines
    assert len({line.get_color() for line in lines}) == len(METHODS)
    assert {line.get_linestyle() for line in lines} == {"-"}


@pytest.mark.parametrize("num_runs", [2, 30])
def test_names_do_not_lie_upon_each_other_and_stay_in_the_picture(run_of: Callable[..., Run], num_runs: int) -> None:
    run = run_of("a")  # all end at the same accuracy
    figure = comparison_figure([replace(run, label=f"run-{number}") for number in range(num_runs)])
    figure.draw_without_rendering()
    boxes = sorted((Text.get_window_extent(text) for text in figure.axes[1].texts), key=lambda extent: extent.y0)
    assert all(upper.y0 >= lower.y0 + 0.9 * lower.height for lower, upper in pairwise(boxes))
    assert all(figure.bbox.x0 <= extent.x0 and extent.x1 <= figure.bbox.x1 for extent in boxes)
    assert all(figure.bbox.y0 <= extent.y0 and extent.y1 <= figure.bbox.y1 for extent in boxes)


def test_long_names_keep_both_ends_and_signs_stay_as_they_are(run_of: Callable[..., Run]) -> None:
    run = run_of("a")
    named = [replace(run, label="runs/2024-07-21/massl-with-a-long-name"), replace(run, label="cost_$x$_and_$y$")]
    figure = comparison_figure(named)
    assert labels_of(figure) == ["runs/2024-07-...h-a-long-name  50.0", "cost_$x$_and_$y$  50.0"]
    assert not any(text.get_parse_math() for text in figure.axes[1].texts)


def test_a_run_with_one_probe_is_a_point(run_of: Callable[..., Run], rows: Rows) -> None:
    (line,) = comparison_figure([run_of("a", rows=rows[:1])]).axes[0].lines
    assert list(line.get_xdata()) == [0.0]
    assert line.get_marker() == "o"


def test_without_labels_the_most_telling_metric_is_drawn_and_runs_without_it_are_named(
    run_of: Callable[..., Run], rows: Rows
) -> None:
    for row in rows:
        del row["images_per_second"]
        row |= {"images_per_second": 15.0, "effective_rank": 5.0 + row["step"]}
        row.pop("knn_top1", None)
    old = run_of("old", rows=rows)
    new = run_of("new", rows=[{**row, "other_view_top1": 2.0 * row["step"]} for row in rows])
    alone = comparison_figure([old])
    assert list(alone.axes[0].lines[0].get_ydata()) == [5.0, 10.0, 15.0, 20.0, 25.0]
    assert "rank" in alone.axes[0].get_ylabel()
    both = comparison_figure([old, new])
    assert labels_of(both) == ["new  40.0"]
    assert "other view" in both.axes[0].get_ylabel()
    assert "not drawn, without this metric: old" in both.get_supxlabel()


def test_names_that_no_font_shows_are_escaped(run_of: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "_system_fonts", lambda: ())
    figure = comparison_figure([replace(run_of("a"), label="\u72ac-1")])
    assert labels_of(figure) == ["\\u72ac-1  50.0"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Matplotlib warns of a glyph that it draws as a box
        figure.draw_without_rendering()


def test_png_and_svg_are_written_and_the_svg_is_the_same_each_time(run_of: Callable[..., Run], tmp_path: Path) -> None:
    runs = [run_of("massl"), run_of("dino")]
    png, svg = save_figure(comparison_figure(runs), tmp_path / "v1.2")
    assert (png.name, svg.name) == ("v1.2.png", "v1.2.svg")
    with Image.open(png) as picture:
        assert picture.width == 1500
    first = svg.read_bytes()
    assert b"massl" in first
    save_figure(comparison_figure(runs), tmp_path / "v1.2")
    assert svg.read_bytes() == first


@given(st.lists(st.floats(0, 1), max_size=15))
def test_labels_keep_their_order_their_distance_and_the_panel(wanted: list[float]) -> None:
    places = spread(wanted, step=0.05)
    order = sorted(range(len(wanted)), key=lambda number: wanted[number])
    assert all(places[upper] - places[lower] >= 0.05 - 1e-9 for lower, upper in pairwise(order))
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)


def test_labels_with_room_stay_where_they_are() -> None:
    assert spread([0.5, 0.1, 0.9], step=0.05) == [0.5, 0.1, 0.9]
