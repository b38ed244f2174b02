import io
import json
import math
import statistics
from collections.abc import Mapping
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from massl.commands.console import print_table
from massl.reports.ablation.documents import ablation_document, ablation_values
from massl.reports.ablation.plots import ablation_figure
from massl.reports.ablation.records import (
    ABLATIONS,
    AblationName,
    AblationReport,
    RunOutcome,
    paper_points,
    ratio_text,
    report_of,
    scaled,
    table_of,
)
from massl.reports.ablation.trends import noise_of, sentences_of, trend_in_words, turning_points


def outcome(value: int, accuracy: float | None = 50.0, **changes: Any) -> RunOutcome:
    known: dict[str, Any] = {
        "strategy": "random",
        "num_rows": 16384,
        "block_size": value,
        "seed": 0,
        "folder": f"runs/N_b-{value}",
        "state": "finished",
        "knn_start": 31.4,
        "knn_last": accuracy,
        "effective_rank": 40.0,
        "images_per_second": 21_333.0,
    }
    return RunOutcome(value=value, **{**known, **changes})


def report(
    accuracies: Mapping[int, float | None],
    *,
    kind: AblationName = "block-size",
    blockwise: Mapping[int, float] | None = None,
    default: int = 4096,
) -> AblationReport:
    """One run a value, of the default 4,096; None stands for a run that failed."""
    runs = [
        outcome(
            value, accuracy, **({"state": "failed", "error": "the loss of step 3 is nan"} if accuracy is None else {})
        )
        for value, accuracy in accuracies.items()
    ]
    runs += [outcome(value, accuracy, strategy="blockwise") for value, accuracy in (blockwise or {}).items()]
    return report_of(kind, runs, default=default, measured="last probe, k=20", num_classes=10)


def repeated(accuracies: Mapping[int, tuple[float, ...]], **changes: Any) -> AblationReport:
    """Several seeds a value."""
    runs = [
        outcome(value, each, seed=seed, **changes)
        for value, several in accuracies.items()
        for seed, each in enumerate(several)
    ]
    return report_of("block-size", runs, default=4096, measured="last probe, k=20", num_classes=10)


def column(shown: AblationReport, heading: str) -> list[str]:
    table = table_of(shown)
    return [line[table.columns.index(heading)] for line in table.lines]


# ---- the paper's figures ---------------------------------------------------------------------------------------------


def test_the_papers_tables_are_read_as_curves() -> None:
    sizes = {point.value: point.figure.value for point in paper_points("memory-size")}
    assert sizes == {8192: 67.824, 16384: 69.872, 32768: 70.529, 65536: 71.862, 131072: 71.924}
    assert [point.value for point in paper_points("block-size")] == [512, 1024, 2048, 4096, 8192, 16384, 32768]
    sampling = [(point.strategy, point.value, point.figure.value) for point in paper_points("block-sampling")]
    assert sampling[:4] == [
        ("random", 512, 67.8),
        ("random", 1024, 68.5),
        ("random", 2048, 70.0),
        ("random", 4096, 71.2),
    ]
    assert sampling[4:] == [("blockwise", size, 0.1) for size in (512, 1024, 2048, 4096)]


@pytest.mark.parametrize("kind", ABLATIONS)
def test_the_papers_default_lies_among_or_beside_its_values(kind: AblationName) -> None:
    values = [point.value for point in paper_points(kind)]
    default = ABLATIONS[kind].paper_default
    assert default in values or kind == "block-sampling"
    assert scaled(default, default=4096, paper_default=default) == 4096


def test_ratios_are_kept_in_whole_rows() -> None:
    assert scaled(8192, default=16384, paper_default=65536) == 2048
    assert scaled(512, default=2500, paper_default=16384) == 78  # 78.125
    assert [ratio_text(value, 16) for value in (2, 16, 32, 12)] == ["1/8", "1", "2", "0.75"]


# ---- runs beside them ------------------------------------------------------------------------------------------------


def test_the_papers_figure_stands_beside_the_value_of_its_ratio() -> None:
    shown = report({128: 50.0, 4096: 60.0, 3000: 55.0})
    assert column(shown, "N_b") == ["128", "3,000", "4,096"]
    assert column(shown, "paper's N_b") == ["512", "", "16,384"]
    assert column(shown, "paper's k-NN") == ["67.8", "", "71.9 [1]"]
    assert column(shown, "× default") == ["1/32", "0.732", "1"]
    assert table_of(shown).footnotes == (
        "[1] at 100 epochs the ablations have 71.862, the table of time and memory 72.7: two settings, not told apart",
    )


def test_a_figure_of_the_other_strategy_is_not_taken() -> None:
    shown = report({128: 50.0}, kind="block-sampling", blockwise={128: 10.0})
    assert column(shown, "blocks") == ["random", "blockwise"]
    assert column(shown, "paper's k-NN") == ["67.8", "0.1"]


def test_seeds_become_mean_and_sample_deviation() -> None:
    shown = repeated({128: (50.0, 52.0, 57.0), 256: (60.0, 60.0, 60.0)})
    assert column(shown, "k-NN") == [f"53.00 ± {statistics.stdev([50, 52, 57]):.2f}", "60.00 ± 0.00"]
    assert "seeds 3;" in table_of(shown).title
    assert "seeds" not in table_of(report({128: 50.0})).title
    assert column(report({128: 50.0}), "k-NN") == ["50.00"]


def test_half_a_run_has_no_accuracy() -> None:
    half = outcome(128, 40.0, state="unfinished", evaluated={20: 41.0})
    assert half.accuracy is None
    assert half.best is None
    shown = report_of("block-size", [half, outcome(256)], default=4096, measured="last probe", num_classes=10)
    assert column(shown, "k-NN") == ["--", "50.00"]
    assert column(shown, "state") == ["unfinished", ""]


def test_the_protocols_number_counts_where_it_was_measured() -> None:
    measured = outcome(128, 40.0, evaluated={10: 44.0, 20: 43.0, 100: 44.0})
    assert measured.accuracy == 43.0
    assert measured.best == (10, 44.0)
    assert outcome(128, 40.0, evaluated={10: 44.0}).accuracy == 44.0  # of ten images there are no twenty neighbours
    shown = report_of(
        "block-size",
        [measured, outcome(128, evaluated={10: 40.0, 20: 46.0}, seed=1)],
        default=4096,
        measured="knn",
        num_classes=10,
    )
    assert column(shown, "best k") == ["45.00 (k=10, 20)"]
    assert "best k" not in table_of(report({128: 50.0})).columns


def test_states_are_counted_where_there_are_several_runs() -> None:
    runs = [
        outcome(128, seed=0, collapse_signs=("rank 1",)),
        outcome(128, None, seed=1, state="failed", error="the loss is nan"),
        outcome(128, None, seed=2, state="failed", error="out of memory"),
    ]
    shown = report_of("block-size", runs, default=4096, measured="last probe", num_classes=10)
    assert column(shown, "state") == ["2 of 3 failed, 1 of 3 collapsed"]
    assert table_of(shown).footnotes == ("runs/N_b-128: the loss is nan", "runs/N_b-128: out of memory")
    assert column(shown, "k-NN") == ["50.00"]
    assert "state" not in table_of(report({128: 50.0})).columns


def test_the_other_size_stands_beside_the_one_that_varies() -> None:
    runs = [outcome(2048, num_rows=2048, block_size=1024), outcome(4096, num_rows=4096, block_size=1024)]
    memory = report_of("memory-size", runs, default=16384, measured="last probe", num_classes=10)
    assert column(memory, "K") == ["2,048", "4,096"]
    assert table_of(memory).title == "Size K of the memory (last probe; N_b 1,024; untrained 31.4)"
    assert column(memory, "paper's K") == ["8,192", "16,384"]
    assert (
        table_of(report({128: 50.0})).title == "Size N_b of a memory block (last probe, k=20; K 16,384; untrained 31.4)"
    )


def test_what_differs_between_lines_stays_a_column() -> None:
    runs = [outcome(128, knn_start=30.0), outcome(256, knn_start=31.0), outcome(256, knn_start=32.0, seed=1)]
    shown = report_of("block-size", runs, default=4096, measured="last probe", num_classes=10)
    assert column(shown, "untrained") == ["30.0", "31.5"]
    assert column(shown, "seeds") == ["", "2"]


def test_the_table_fits_a_terminal_of_ninety_columns_without_losing_a_number() -> None:
    shown = table_of(report({128: 50.0, 8192: None}, kind="block-sampling", blockwise={128: 10.0}))
    screen = io.StringIO()
    print_table(Console(file=screen, width=90, color_system=None), shown)
    words = screen.getvalue().split()
    assert all(word in words for line in shown.lines for cell in line for word in cell.split())


# ---- what the numbers say --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "noise", "turns"),
    [
        ([1.0, 2.0, 3.0], 0.0, [0, 2]),
        ([3.0, 2.0, 1.0], 0.0, [0, 2]),
        ([1.0, 3.0, 2.0], 0.0, [0, 1, 2]),
        ([3.0, 1.0, 2.0, 0.0], 0.0, [0, 1, 2, 3]),
        ([1.0, 3.0, 2.6], 0.5, [0, 1]),  # the fall is noise
        ([1.0, 3.0, 2.6, 2.2], 0.5, [0, 1, 3]),  # both falls together are not
        ([2.0, 2.3, 1.9], 0.5, [0]),
        ([2.0, 2.3, 1.7], 0.5, [0, 2]),
        ([1.0, 2.0, 2.0, 2.0], 0.0, [0, 1]),
        ([1.0, 1.0], 0.0, [0]),
        ([5.0, 4.9, 6.0], 0.5, [0, 2]),
    ],
)
def test_a_curve_turns_where_it_leaves_an_extreme_by_more_than_noise(
    values: list[float], noise: float, turns: list[int]
) -> None:
    assert turning_points(values, noise=noise) == turns


@pytest.mark.parametrize(
    ("accuracies", "noise", "words"),
    [
        ([50.0, 55.0, 60.0], 0.0, "rises from K=1,024 (50.0 %) to K=4,096 (60.0 %)"),
        ([60.0, 55.0, 50.0], 0.0, "falls from K=1,024 (60.0 %) to K=4,096 (50.0 %)"),
        ([50.0, 60.0, 55.0], 0.0, "rises from K=1,024 (50.0 %) to K=2,048 (60.0 %) and falls to K=4,096 (55.0 %)"),
        (
            [50.0, 60.0, 55.0, 57.0],
            0.0,
            "rises from K=1,024 (50.0 %) to K=2,048 (60.0 %), falls to K=4,096 (55.0 %) and rises to K=8,192 (57.0 %)",
        ),
        (
            [50.0, 60.0, 59.5],
            1.0,
            "rises from K=1,024 (50.0 %) to K=2,048 (60.0 %) and stays level up to K=4,096 (59.5 %)",
        ),
        ([50.0, 50.5, 50.2], 1.0, "stays level from K=1,024 (50.0 %) to K=4,096 (50.2 %)"),
        ([50.0], 0.0, "is 50.0 % at K=1,024, the only value so far"),
    ],
)
def test_a_trend_is_told_from_the_numbers(accuracies: list[float], noise: float, words: str) -> None:
    points = [(1024 << number, accuracy) for number, accuracy in enumerate(accuracies)]
    assert trend_in_words(points, symbol="K", noise=noise) == words


def test_ours_and_the_papers_trend_stand_one_after_the_other() -> None:
    said = sentences_of(report({1024: 60.0, 4096: 65.0, 8192: 64.0}))
    assert (
        said[0]
        == "Ours: k-NN accuracy rises from N_b=1,024 (60.0 %) to N_b=4,096 (65.0 %) and falls to N_b=8,192 (64.0 %)."
    )
    assert (
        said[1] == "The paper: it rises from N_b=512 (67.8 %) to N_b=16,384 (71.9 %) and falls to N_b=32,768 (70.6 %)."
    )


@pytest.mark.parametrize(
    ("accuracies", "num_same"),
    [
        ({128: 50.0, 256: 55.0, 4096: 60.0}, 3),
        ({128: 60.0, 256: 55.0, 4096: 50.0}, 0),
        ({128: 50.0, 256: 60.0, 4096: 55.0}, 2),
    ],
)
def test_pairs_in_the_papers_order_are_counted(accuracies: dict[int, float], num_same: int) -> None:
    said = sentences_of(report({**accuracies, 3000: 70.0}))  # which the paper has not
    assert any(f"in the paper's order: {num_same} of the 3" in sentence for sentence in said)


def test_pairs_that_the_paper_does_not_tell_apart_do_not_count() -> None:
    said = sentences_of(report({128: 50.0, 256: 51.0}, kind="block-sampling", blockwise={128: 11.0, 256: 10.0}))
    assert any("in the paper's order: 5 of the 5" in sentence for sentence in said)


def test_where_each_is_best_is_told_relative_to_the_default() -> None:
    assert "Best of ours: N_b=128 (1/32 × the default); of the paper's: N_b=16,384 (the default)." in sentences_of(
        report({128: 60.0, 256: 55.0})
    )


def test_blockwise_is_compared_with_random_at_equal_sizes() -> None:
    shown = report({128: 50.0, 256: 55.0, 512: 60.0}, kind="block-sampling", blockwise={128: 10.0, 256: 56.0})
    assert (
        "Blockwise is below random blocks at 1 of 2 sizes; random minus blockwise: -1.0 to +40.0 points."
        in sentences_of(shown)
    )


def test_collapse_is_told_with_its_signs_and_so_is_its_absence() -> None:
    well = outcome(128)
    runs = [
        well,
        outcome(128, 10.0, strategy="blockwise", collapse_signs=("rank 1.0", "no spread")),
        outcome(256, strategy="blockwise"),
    ]

    def said(outcomes: list[RunOutcome]) -> list[str]:
        return sentences_of(report_of("block-sampling", outcomes, default=4096, measured="last probe", num_classes=10))

    assert "Blockwise blocks: 1 of 2 runs show signs of collapse, for example N_b=128: rank 1.0; no spread." in said(
        runs
    )
    assert "Blockwise blocks: 0 of 1 runs show signs of collapse; in the paper all collapse." in said([well, runs[2]])
    assert not [sentence for sentence in sentences_of(report({128: 50.0})) if "collapse" in sentence]


def test_chance_is_judged_by_the_spread_of_seeds() -> None:
    shown = repeated({128: (50.0, 52.0), 256: (50.5, 52.5), 512: (60.0, 62.0)})
    noise = 2 * math.sqrt(2 * 2.0 / 2)  # the variance of two seeds that differ by 2 is 2
    assert noise_of(shown) == pytest.approx(noise)
    said = sentences_of(shown)
    assert f"Differences of up to {noise:.1f} points may be chance (two standard errors, 2 seeds a value)." in said
    assert said[0] == "Ours: k-NN accuracy rises from N_b=128 (51.0 %) to N_b=512 (61.0 %)."
    level = repeated({128: (50.0, 52.0), 256: (50.5, 52.5)})
    assert sentences_of(level)[0] == "Ours: k-NN accuracy stays level from N_b=128 (51.0 %) to N_b=256 (51.5 %)."


def test_collapsed_runs_do_not_make_seeds_look_alike() -> None:
    runs = [outcome(128, 50.0 + seed, seed=seed) for seed in (0, 2)]
    collapsed = [outcome(256, 10.0, seed=seed, collapse_signs=("rank 1.0",)) for seed in (0, 2)]
    shown = report_of("block-size", runs + collapsed, default=4096, measured="last probe", num_classes=10)
    assert noise_of(shown) == pytest.approx(2 * math.sqrt(2 * 2.0 / 2))


def test_one_seed_cannot_tell_chance_and_says_so() -> None:
    assert noise_of(report({128: 50.0, 256: 55.0})) is None
    assert "--seeds 0 1 2" in sentences_of(report({128: 50.0}))[-1]


def test_a_grid_without_any_number_says_only_what_the_paper_has() -> None:
    assert sentences_of(report({128: None, 256: None})) == [
        "The paper: it rises from N_b=512 (67.8 %) to N_b=16,384 (71.9 %) and falls to N_b=32,768 (70.6 %)."
    ]


# ---- files -----------------------------------------------------------------------------------------------------------


def test_the_page_holds_command_table_picture_sentences_and_cautions() -> None:
    shown = report({128: 50.0, 256: 55.0})
    page = ablation_document(
        shown, command="massl ablate block-size", ours="demo on 8 images", cautions=["mind the gap"], picture="a.png"
    )
    assert page.startswith(
        "# Size N_b of a memory block\n\n```bash\nmassl ablate block-size\n```\n\nOurs: demo on 8 images."
    )
    assert "| 256 | 1/16 | 55.00 |" in page
    assert "(a.png)" in page
    assert all(f"- {sentence}\n" in page for sentence in sentences_of(shown))
    assert page.endswith("- mind the gap.\n")
    without = ablation_document(shown, command="c", ours="o", cautions=[], picture="a.png")
    assert "Cautions" not in without


def test_plain_values_survive_json() -> None:
    shown = report({128: 50.0, 256: None, 3000: 51.0})
    plain = json.loads(json.dumps(ablation_values(shown, command="massl ablate", ours="demo", cautions=("mind",))))
    assert [
        (point["value"], point["mean"], point["paper_value"], point["paper_knn_top1"]) for point in plain["points"]
    ] == [
        (128, 50.0, 512, 67.804),
        (256, None, 1024, 68.521),
        (3000, 51.0, None, None),
    ]
    assert plain["points"][1]["runs"][0]["error"] == "the loss of step 3 is nan"
    assert plain["points"][0]["runs"][0]["accuracy"] == 50.0
    assert (plain["chance"], plain["default"], plain["paper_default"], plain["noise_points"]) == (
        10.0,
        4096,
        16384,
        None,
    )
    assert plain["sentences"] == sentences_of(shown)
    assert len(plain["paper"]) == 7


# ---- the figure ------------------------------------------------------------------------------------------------------


def panels(shown: AblationReport) -> tuple[Axes, Axes]:
    figure = ablation_figure(shown, ours="demo")
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()
    left, right = figure.axes
    return left, right


def curve_in(axes: Axes, number: int = 0) -> list[tuple[float, float]]:
    lines = [line for line in axes.get_lines() if line.get_linestyle() == "-" and line.get_marker() in ("None", "")]
    return [(float(x), float(y)) for x, y in lines[number].get_xydata()]


def test_both_panels_show_their_curve_over_the_same_ratios_and_as_many_points() -> None:
    left, right = panels(report({128: 50.0, 512: 51.0, 4096: 53.0}))
    assert curve_in(left) == [(128, 50.0), (512, 51.0), (4096, 53.0)]
    assert curve_in(right) == [(point.value, point.figure.value) for point in paper_points("block-size")]
    assert (left.get_xscale(), right.get_xscale()) == ("log", "log")
    for mine, theirs in zip(left.get_xlim(), right.get_xlim(), strict=True):
        assert mine / 4096 == pytest.approx(theirs / 16384)
    heights = [high - low for low, high in (left.get_ylim(), right.get_ylim())]
    assert heights[0] == pytest.approx(heights[1])
    assert [label.get_text() for label in left.get_xticklabels()] == ["128", "512", "4,096"]
    for axes in (left, right):
        for (low, high), shown in zip(
            (axes.get_xlim(), axes.get_ylim()), zip(*curve_in(axes), strict=True), strict=True
        ):
            assert low < min(shown)
            assert max(shown) < high


def test_two_strategies_have_two_curves_that_differ_in_colour_and_marker() -> None:
    left, right = panels(report({128: 50.0, 256: 55.0}, kind="block-sampling", blockwise={128: 10.0, 256: 11.0}))
    assert curve_in(left, 0) == [(128, 50.0), (256, 55.0)]
    assert curve_in(left, 1) == [(128, 10.0), (256, 11.0)]
    assert [y for _, y in curve_in(right, 1)] == [0.1] * 4
    points = [line for line in left.get_lines() if line.get_marker() in ("o", "s") and len(line.get_xydata())]
    assert len({(line.get_marker(), str(line.get_color())) for line in points}) == 2
    legend = left.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "random blocks",
        "blockwise blocks",
        "chance, 10 classes",
    ]
    assert left.get_ylim()[0] > -10


def test_numbers_stand_above_their_points_and_below_where_another_curve_is_close_above() -> None:
    left, _ = panels(
        report({128: 50.0, 256: 55.0, 512: 40.0}, kind="block-sampling", blockwise={128: 49.0, 256: 10.0, 512: 41.0})
    )
    is_above = {text.get_text(): text.get_position()[1] > 0 for text in left.texts if text.get_text()[0].isdigit()}
    assert is_above == {"50.0": True, "55.0": True, "40.0": False, "49.0": False, "10.0": True, "41.0": True}


def test_collapsed_points_are_hollow() -> None:
    runs = [outcome(128), outcome(256, 10.0, collapse_signs=("rank 1.0",))]
    left, _ = panels(report_of("block-size", runs, default=4096, measured="last probe", num_classes=10))
    hollow = [line for line in left.get_lines() if line.get_markerfacecolor() == "white"]
    assert [[tuple(place) for place in line.get_xydata()] for line in hollow] == [[(256, 10.0)]]


def test_values_without_a_number_are_marked_on_the_axis() -> None:
    left, _ = panels(report({128: 50.0, 8192: None}))
    crosses = [line for line in left.get_lines() if line.get_marker() == "x"]
    assert [tuple(line.get_xydata()[0]) for line in crosses] == [(8192, left.get_ylim()[0])]
    assert "failed" in [text.get_text() for text in left.texts]
    assert "8,192" in [label.get_text() for label in left.get_xticklabels()]


def test_a_grid_of_which_nothing_is_there_yet_can_be_drawn() -> None:
    left, right = panels(report({128: None}))
    assert not [line for line in left.get_lines() if line.get_linestyle() == "-" and line.get_marker() in ("None", "")]
    assert curve_in(right)


def test_seeds_show_as_error_bars() -> None:
    left, _ = panels(repeated({128: (50.0, 52.0), 256: (55.0, 59.0)}))
    (container,) = left.containers
    (_, _, bars) = container.lines
    heights = [float(segment[1][1] - segment[0][1]) for segment in bars[0].get_segments()]
    assert heights == pytest.approx([2 * statistics.stdev([50, 52]), 2 * statistics.stdev([55, 59])])
