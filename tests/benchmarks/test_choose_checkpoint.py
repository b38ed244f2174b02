"""The choice of a checkpoint without labels: its program, and that its page shows what the program prints."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from massl.training.best import MAY_FALL, judged

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def programs() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield {name: importlib.import_module(name) for name in ("choose_checkpoint", "checkpoint_runs")}
    sys.path.remove(str(ROOT / "benchmarks"))


def test_the_page_shows_what_the_program_prints(
    programs: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    programs["choose_checkpoint"].main([str(RESULTS)])
    printed = capsys.readouterr().out.strip()
    assert printed.count("\n") > 80
    assert printed in (RESULTS / "choosing-checkpoints.md").read_text()


def test_the_program_judges_the_rule_that_training_uses(programs: dict[str, ModuleType]) -> None:
    program = programs["choose_checkpoint"]
    for run in program.read_runs(RESULTS):
        if (values := run.values("other_view_top1")) is not None:
            rows: list[dict[str, float]] = []
            for row in run.rows:
                rows.append({**row, **judged(row, rows, has_start=True, num_queries=600)})
            assert rows[-1]["best_step"] == run.rows[program.newest_within(values, MAY_FALL)]["step"]


def test_rank_correlation_and_rules_by_hand(programs: dict[str, ModuleType]) -> None:
    program = programs["choose_checkpoint"]
    assert program.spearman([1, 2, 3], [10, 30, 20]) == pytest.approx(0.5)
    assert program.spearman([1, 2, 3], [5, 5, 5]) is None
    assert program.highest([1, 3, 3, 2]) == 2
    assert [program.newest_within([1, 10, 8, 6, 7.5], margin) for margin in (0.0, 0.3, 0.5)] == [1, 4, 4]
    assert program.newest_within([1, 10, 8, 6], 0.3) == 2


def test_a_linear_classifier_tells_apart_what_is_on_two_sides(programs: dict[str, ModuleType]) -> None:
    labels = torch.arange(40) % 2
    features = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)) + 4 * labels[:, None]
    linear = programs["checkpoint_runs"].linear_accuracy
    assert linear(features, labels, features, labels) > 90
    assert linear(features, 1 - labels, features, labels) < 10
