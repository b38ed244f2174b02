import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from massl.reports.run_reader import read_run
from massl.reports.verdict import Kind, Verdict, verdict

Judge = Callable[..., Verdict]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def judge(make_run: Callable[..., Path]) -> Judge:
    """judge([20, 40], raw_pixel_knn=30): the verdict on a finished run of one probe an epoch."""
    num_runs = 0

    def judged(
        knn: Sequence[float | None],
        settings: Mapping[str, Any] | None = None,
        *,
        steps_per_epoch: int = 2000,
        effective_rank: float = 20.0,
        warning: str = "",
        has_start: bool = False,
        **baseline: float,
    ) -> Verdict:
        nonlocal num_runs
        num_runs += 1
        rows = [
            {
                "step": steps_per_epoch * epoch,
                "epoch": epoch,
                "images_per_second": 10.0,
                "loss": 6.0 - 0.1 * epoch,
                "effective_rank": effective_rank,
                **({"other_view_top1": 50.0 + epoch} if accuracy is None else {"knn_top1": accuracy}),
            }
            for epoch, accuracy in enumerate(knn)
        ]
        folder = make_run(f"run{num_runs}", {"trainer.epochs": len(knn) - 1, **(settings or {})}, rows=rows)
        (folder / "baseline.json").write_text(json.dumps({"num_queries": 2000, **baseline}))
        if has_start:
            (folder / "start.json").write_text("{}")
        if warning:
            (folder / "warnings.jsonl").write_text(json.dumps({"step": rows[-1]["step"], "warning": warning}) + "\n")
        return verdict(read_run(folder))

    return judged


def words(found: Verdict) -> str:
    return " ".join((found.headline, *found.reasons))


def option(found: Verdict, name: str) -> str:
    command = shlex.split(found.next_step.command)
    return command[command.index(name) + 1]


def test_a_run_that_gained_and_is_level_has_learnt(judge: Judge) -> None:
    found = judge([20, 40, 50, 50.1, 50.0, 50.1], raw_pixel_knn=30)
    assert (found.kind, found.headline) == ("learnt", "learnt")
    assert "20.0 % with random weights, 50.1 % at the end (+30.1 points)" in words(found)
    assert "Raw pixels reach 30.0 %" in words(found)
    assert found.next_step.command.startswith("massl embed ")


def test_a_run_that_rises_at_its_end_should_train_longer(judge: Judge) -> None:
    found = judge([20, 30, 40, 45, 50, 55], raw_pixel_knn=30)
    assert found.kind == "still rising"
    assert option(found, "--trainer.epochs") == "10"
    assert option(found, "--output").endswith("-longer")


def test_a_run_that_max_steps_ended_is_continued_in_its_folder(judge: Judge) -> None:
    found = judge([20, 30, 40, 45], {"trainer.epochs": 50, "trainer.max_steps": 6000})
    assert found.kind == "still rising"
    assert option(found, "--trainer.max_steps") == "None"
    assert option(found, "--output").endswith("run1")


def test_an_unfinished_run_is_judged_so_far(judge: Judge) -> None:
    found = judge([20, 40, 40, 40], {"trainer.epochs": 50})
    assert found.headline == "learnt so far"
    assert option(found, "--output").endswith("run1")


def test_a_gain_counts_from_two_standard_errors_on(judge: Judge) -> None:
    assert judge([50, 51.5, 51.5]).kind == "not improved"
    assert judge([50, 51.5, 51.5], num_queries=20_000).kind == "learnt"


def test_the_number_of_queries_of_an_old_run_is_the_recipe_s(judge: Judge) -> None:
    old = {"num_queries": None}
    assert judge([50, 51.5, 51.5], {"probes.max_queries": 20_000}, **old).kind == "learnt"
    assert judge([50, 51.5, 51.5], {"probes.max_queries": "many"}, **old).kind == "not improved"


def test_a_run_whose_best_probe_is_the_first_is_commented(judge: Judge) -> None:
    found = judge([50, 40, 38, 36])
    assert (found.kind, found.headline) == ("not improved", "worse than random weights")
    assert "50.0 % before training" in words(found)
    assert found.next_step.command.startswith("massl report ")  # long enough: look, rather than train on


def test_a_run_that_spoiled_the_weights_it_started_from_is_not_told_to_train_on(judge: Judge) -> None:
    found = judge([50, 40, 40], steps_per_epoch=10, has_start=True)
    assert (found.kind, found.headline) == ("worse than its start", "worse than the weights it started from")
    assert found.next_step.command.startswith("massl report ")
    assert judge([50, 50, 50], steps_per_epoch=10, has_start=True).kind == "not improved"


def test_a_short_run_that_gained_nothing_should_first_train_longer(judge: Judge) -> None:
    assert option(judge([50, 49, 50], steps_per_epoch=100), "--output").endswith("-longer")


def test_a_run_that_fell_and_rises_again_says_so(judge: Judge) -> None:
    found = judge([50, 30, 35, 40, 45])
    assert found.kind == "not improved"
    assert found.headline.endswith("still rising")


def test_raw_pixels_that_are_better_are_told(judge: Judge) -> None:
    found = judge([65.5, 75, 77, 77.5, 77.4, 77.5], raw_pixel_knn=80.7)
    assert (found.kind, found.headline) == ("below raw pixels", "learnt, but below raw pixels")
    assert "80.7 %" in words(found)
    assert judge([65.5, 75, 80, 80, 80, 80], raw_pixel_knn=80.7).kind == "learnt"  # within chance


def test_a_better_probe_in_the_middle_is_named(judge: Judge) -> None:
    assert "60.0 % at epoch 2" in words(judge([20, 40, 60, 50, 50, 50]))


def test_collapse_comes_before_all_else_but_a_rise(judge: Judge) -> None:
    found = judge([20, 40, 21], effective_rank=1.2)
    assert found.kind == "collapsed"
    assert "effective rank 1.20" in words(found)
    assert "21.0 %" in words(found)
    warning = "training may have collapsed: all rows look alike. See docs/troubleshooting.md."
    own = judge([20, 40, 21], warning=warning)
    assert own.kind == "collapsed"
    assert own.reasons[0] == "All rows look alike."
    assert judge([20, 40, 50], warning="training may hardly progress: slow.").kind == "learnt"
    assert judge([20, 40, 50], effective_rank=1.2, warning=warning).kind == "learnt"


def test_without_labels_the_verdict_says_that_accuracy_is_unknown(judge: Judge) -> None:
    found = judge([None, None, None])
    assert found.kind == "no labels"
    assert "unknown" in found.headline
    assert "50.0 with random weights, 52.0 at the end" in words(found)
    assert found.headline.startswith("images are found again as often as with random weights")
    assert "neighbours" in found.next_step.command
    assert judge([None, None], effective_rank=1.0).kind == "collapsed"


def test_on_few_images_a_few_more_found_again_are_chance(judge: Judge) -> None:
    rise = [None] * 16  # 50 to 65 %
    assert judge(rise).headline.startswith("images are found again more often than with random weights")
    found = judge(rise, num_queries=40)
    assert found.headline.startswith("images are found again as often as with random weights")
    assert "Differences of images found below 15.1 points may be chance on 40 images." in found.reasons


def test_before_a_probe_in_training_it_is_too_early(judge: Judge) -> None:
    assert judge([20], {"trainer.epochs": 5}).kind == "too early"


def test_a_finished_run_without_probes_is_not_told_to_train_on(make_run: Callable[..., Path]) -> None:
    rows = [{"step": step, "epoch": step, "images_per_second": 1.0, "loss": 1.0} for step in (0, 1, 2)]
    found = verdict(read_run(make_run("run", {"probes.every_epochs": 0}, rows=rows)))
    assert "probes.every_epochs" in words(found)
    assert "neighbours" in found.next_step.command


def test_a_probe_without_effective_rank_is_judged_too(make_run: Callable[..., Path]) -> None:
    assert verdict(read_run(make_run("old"))).kind == "learnt"  # the rows of conftest have k-NN alone


@pytest.mark.parametrize("kind", get_args(Kind))
def test_the_page_of_the_docs_has_the_section(kind: Kind) -> None:
    found = Verdict(kind=kind, headline="", reasons=(), next_step=("", ""))  # type: ignore[arg-type]
    page, _, anchor = found.page.partition("#")
    headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
