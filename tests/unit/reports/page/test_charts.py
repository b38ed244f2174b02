import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from massl.reports.page.charts import dash_of, static_chart, tick_text, ticks
from massl.reports.page.series import (
    MOST_POINTS,
    Chart,
    Level,
    Metric,
    Point,
    Series,
    charts_of,
    default_axis,
    plain,
    thinned,
)
from massl.reports.run_reader import read_run

MakeRun = Callable[..., Path]


def points(values: list[float]) -> list[Point]:
    return [Point(step, step / 10, step / 100, value) for step, value in enumerate(values)]


def test_long_curves_keep_their_ends_and_spikes() -> None:
    values = [random.Random(0).random() for _ in range(50_000)]
    values[12_345], values[40_000] = 99.0, -99.0
    kept = thinned(points(values))
    assert len(kept) <= MOST_POINTS
    assert (kept[0].step, kept[-1].step) == (0, 49_999)
    assert {99.0, -99.0} <= {point.value for point in kept}
    assert [point.step for point in kept] == sorted({point.step for point in kept})


@pytest.mark.parametrize("number", [1, 2, 599, 600])
def test_short_curves_stay_as_they_are(number: int) -> None:
    whole = points([float(value % 7) for value in range(number)])
    assert thinned(whole) == tuple(whole)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (31.4, 65.0, [30, 40, 50, 60, 70]),
        (0, 0.001, [0, 0.0002, 0.0004, 0.0006, 0.0008, 0.001]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (5, 5, [4.4, 4.6, 4.8, 5.0, 5.2, 5.4, 5.6]),
        (0, 0, [-1, -0.5, 0, 0.5, 1]),
        (0.03999999999999998, 0.04, [0.036, 0.038, 0.04, 0.042, 0.044]),
        (0, 5e-324, [-1, -0.5, 0, 0.5, 1]),
        (-1e100, 1e100, [-1e100, -5e99, 0, 5e99, 1e100]),
    ],
)
def test_ticks_are_round_and_enclose_the_data(low: float, high: float, expected: list[float]) -> None:
    found = ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    assert found == expected


def test_ticks_are_written_alike_along_an_axis() -> None:
    assert [tick_text(tick, [0, 8e-4, 1e-3]) for tick in (0, 8e-4, 1e-3)] == ["0", "8e-4", "1e-3"]
    assert [tick_text(tick, [0.25, 12_500]) for tick in (0.25, 12_500)] == ["0.25", "12,500"]
    assert tick_text(-5e99, [-5e99, 0]) == "-5e99"


def test_charts_are_of_what_the_rows_hold(make_run: MakeRun, rows: list[dict[str, float]]) -> None:
    for row in rows:
        row["loss"], row["patch_loss"], row["weight_decay"] = 3.0, 1.0, 0.04
    runs = [read_run(make_run(name, rows=rows), label=name) for name in "ab"]
    main, further = charts_of(runs)
    assert [chart.id for chart in main] == ["loss", "knn_top1", "knn_by_minutes", "images_per_second"]
    assert [chart.id for chart in further] == ["patch_loss", "weight_decay"]
    assert further[0].metric.title == "Patch loss"
    assert [one.run for one in main[0].series] == [0, 1]
    assert main[2].axis == "minutes"
    assert [point.step for point in main[3].series[0].points] == [5, 10, 15, 20]  # at step 0 nothing has a speed


def test_a_run_without_a_metric_has_no_line_in_its_chart(make_run: MakeRun, rows: list[dict[str, float]]) -> None:
    bare = [{key: value for key, value in row.items() if key != "knn_top1"} for row in rows]
    runs = [read_run(make_run("a", rows=bare), label="a"), read_run(make_run("b"), label="b")]
    (accuracy,) = [chart for chart in charts_of(runs)[0] if chart.id == "knn_top1"]
    assert [one.run for one in accuracy.series] == [1]
    assert charts_of([read_run(make_run("c", rows=[]), label="c")]) == ([], [])


def test_within_the_first_epoch_steps_are_the_axis(make_run: MakeRun, rows: list[dict[str, float]]) -> None:
    begun, whole = read_run(make_run("a", rows=rows[:2]), label="a"), read_run(make_run("b"), label="b")
    assert default_axis([whole]) == "epoch"
    assert default_axis([whole, begun]) == "step"


def test_data_for_the_scripts_are_short_numbers(make_run: MakeRun, rows: list[dict[str, float]]) -> None:
    rows[0]["loss"] = 1 / 3
    runs = [read_run(make_run("a", rows=rows), label="a")]
    data = plain(charts_of(runs)[0], runs, device="GPU")
    assert data["axes"] == {"step": "step", "epoch": "epoch", "minutes": "GPU-minutes"}
    charts = data["charts"]
    assert isinstance(charts, dict)
    assert charts["loss"]["series"] == [{"run": 0, "points": [[0.0, 0.0, 0.0, 0.333333]]}]


def test_a_static_chart_draws_lines_points_and_names() -> None:
    lone = Series(run=1, points=(Point(5, 0.5, 0.1, 2.0),))
    line = Series(run=7, points=tuple(points([1.0, 3.0, 2.0])))
    svg = str(
        static_chart(Chart(id="x", metric=Metric("Loss <1>"), series=(lone, line)), axis="step", axis_title="step")
    )
    assert svg.count("<polyline") == 1
    assert svg.count("<circle") == 1
    assert 'stroke="var(--run-1)" stroke-dasharray="6 4"' in svg
    assert 'fill="var(--run-1)"' in svg
    assert 'aria-label="Loss &lt;1&gt; by step"' in svg
    (corners,) = [part.split('"')[1] for part in svg.split("<polyline")[1:] for part in [part.partition("points=")[2]]]
    xs, ys = zip(*(map(float, corner.split(",")) for corner in corners.split()), strict=True)
    assert list(xs) == sorted(xs)
    assert ys[1] < ys[2] < ys[0]  # SVG counts downwards


def test_a_run_of_one_row_has_an_axis_too() -> None:
    chart = Chart(id="x", metric=Metric("Loss"), series=(Series(run=0, points=(Point(0, 0.0, 0.0, 2.0),)),))
    svg = str(static_chart(chart, axis="minutes", axis_title="GPU-minutes"))
    assert ">1</text>" in svg
    assert "nan" not in svg


def test_runs_that_share_a_colour_differ_in_their_dashes() -> None:
    assert len({dash_of(run) for run in (0, 6, 12)}) == 3
    assert dash_of(5) == dash_of(0)


def test_a_level_is_drawn_within_the_chart() -> None:
    series = (Series(run=0, points=tuple(points([40.0, 50.0]))),)
    svg = str(
        static_chart(
            Chart(id="x", metric=Metric("k-NN"), series=series, level=Level(31.0, "raw pixels")),
            axis="step",
            axis_title="step",
        )
    )
    y = float(svg.partition('class="level"')[2].partition('y1="')[2].partition('"')[0])
    assert 10 < y < 210
    assert ">raw pixels</text>" in svg


@pytest.mark.parametrize("values", [[30.0, 90.0], [90.0, 30.0], [30.9, 31.1], [31.0] * 40, [0.0, 100.0, 0.0, 100.0]])
def test_no_word_of_a_chart_lies_on_its_plot(values: list[float]) -> None:
    """Curves stay within the plot, so that words outside it never meet one."""
    chart = Chart(
        id="x",
        metric=Metric("k-NN"),
        series=(Series(run=0, points=tuple(points(values))),),
        level=Level(31.0, "raw pixels 31.0 %"),
    )
    svg = ElementTree.fromstring(str(static_chart(chart, axis="step", axis_title="step")))
    corners = [tuple(map(float, pair.split(","))) for pair in svg.find("polyline").get("points").split()]  # type: ignore[union-attr]
    left, right, top, bottom = (edge(corner[place] for corner in corners) for place in (0, 1) for edge in (min, max))
    (level,) = [line for line in svg.iter("line") if line.get("class") == "level"]
    top, bottom = min(top, float(level.get("y1", 0))), max(bottom, float(level.get("y1", 0)))
    for word in svg.iter("text"):
        x, y, length = float(word.get("x", 0)), float(word.get("y", 0)), 7 * len(word.text or "")  # 11 px letters
        begin = {"end": x - length, "middle": x - length / 2}.get(word.get("text-anchor", ""), x)
        is_beside = begin > right + 4 or begin + length < left - 4
        assert is_beside or y < top - 4 or y - 9 > bottom + 4, word.text
