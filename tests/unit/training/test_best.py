import pytest

from massl.training.best import Chooser, ended_early, fall_below, is_best, judged
from massl.training.settings import TrainerSettings


def rows_of(scores: list[float], *, has_start: bool = False, knn: list[float] | None = None) -> list[dict[str, float]]:
    """Rows of a run's probes at steps 0, 10, 20 ... as training writes them."""
    rows: list[dict[str, float]] = []
    for number, score in enumerate(scores):
        row = {"step": 10.0 * number, "other_view_top1": score, **({} if knn is None else {"knn_top1": knn[number]})}
        rows.append(row | judged(row, rows, has_start=has_start, num_queries=2000))
    return rows


def test_the_newest_probe_is_the_best_unless_its_score_fell_by_more_than_three_tenths() -> None:
    assert [row["best_step"] for row in rows_of([50, 20, 30, 22, 20, 31])[1:]] == [10, 20, 30, 30, 50]
    assert is_best({"other_view_top1": 70.0}, [100.0])
    assert not is_best({"other_view_top1": 69.0}, [100.0, 20.0])


def test_random_weights_are_never_the_best_but_weights_that_a_run_started_from_may_be() -> None:
    fallen = [80.0, 10.0, 12.0]
    assert [row.get("best_step") for row in rows_of(fallen)] == [None, 10, 20]
    assert [row.get("best_step") for row in rows_of(fallen, has_start=True)] == [0, 0, 0]


def test_a_probe_of_which_the_guard_speaks_is_not_the_best() -> None:
    rows = rows_of([50] * 4, has_start=True, knn=[60, 50, 58, 40])
    assert [row["best_step"] for row in rows] == [0, 0, 20, 20]
    assert [row["best_step"] for row in rows_of([50] * 4, knn=[60, 50, 58, 40])[1:]] == [10, 20, 30]


def test_flat_probes_count_since_the_score_last_rose() -> None:
    assert [row["flat_probes"] for row in rows_of([9, 1, 2, 2, 1, 3, 3])[1:]] == [0, 0, 1, 2, 0, 1]


def test_rows_of_older_versions_are_continued_with_the_first_new_probe_as_the_best() -> None:
    old = [{"step": 0.0, "effective_rank": 3.0}, {"step": 10.0, "other_view_top1": 90.0}]
    row = {"step": 20.0, "other_view_top1": 10.0}
    assert judged(row, old, has_start=False, num_queries=100) == {"best_step": 20.0, "flat_probes": 1}
    assert judged({"step": 20.0}, old, has_start=False, num_queries=100) == {}


def test_the_guard_allows_three_points_of_knn_and_more_where_chance_is_larger() -> None:
    start = {"knn_top1": 60.0}
    assert fall_below({"knn_top1": 57.0}, start, num_queries=2000) == ""
    assert fall_below({"knn_top1": 56.9}, start, num_queries=2000) == "k-NN is 56.9 %, 60.0 % at the start"
    assert fall_below({"knn_top1": 56.9}, start, num_queries=100) == ""  # two standard errors are 9.8 points
    assert "50.0 % at the start" in fall_below({"other_view_top1": 34.0}, {"other_view_top1": 50.0}, num_queries=100)
    assert fall_below({"other_view_top1": 36.0}, {"other_view_top1": 50.0}, num_queries=100) == ""


def chooser(*, has_start: bool = True, **settings: object) -> tuple[Chooser, list[int]]:
    kept: list[int] = []
    return Chooser(TrainerSettings(**settings), has_start=lambda: has_start, keep=lambda: kept.append(1)), kept


def test_the_guard_warns_once_per_fall() -> None:
    rows = rows_of([9] * 6, has_start=True, knn=[60, 50, 50, 60, 50, 61])
    judge, _ = chooser()
    said = [bool(judge.warning(row, rows[:number], num_queries=2000)) for number, row in enumerate(rows)]
    assert said == [False, True, False, False, True, False]
    off, _ = chooser(guard="off")
    assert not any(off.warning(row, rows[:number], num_queries=2000) for number, row in enumerate(rows))


@pytest.mark.parametrize(
    ("has_start", "setting", "found"),
    [(True, "auto", "warn"), (False, "auto", "off"), (True, "stop", "stop"), (False, "warn", "warn")],
)
def test_the_guard_is_on_by_default_where_a_run_started_from_trained_weights(
    has_start: bool, setting: str, found: str
) -> None:
    assert chooser(has_start=has_start, guard=setting)[0].guard == found


def test_the_best_weights_are_kept_when_a_probe_is_the_best_and_not_otherwise() -> None:
    judge, kept = chooser(has_start=False)
    rows: list[dict[str, float]] = []
    for step, score in enumerate([50.0, 20.0, 5.0, 30.0]):
        row = {"step": float(step), "other_view_top1": score}
        rows.append(row | judge.judge(row, rows, num_queries=10))
    assert len(kept) == 2


def test_a_run_ends_early_only_where_it_was_asked_for() -> None:
    row = {"flat_probes": 3.0, "fell_below_start": 1.0}
    assert ended_early(row, stop_when_flat=0, guard="warn") == ""
    assert ended_early(row, stop_when_flat=4, guard="warn") == ""
    assert "for 3 probes (trainer.stop_when_flat 3)" in ended_early(row, stop_when_flat=3, guard="warn")
    assert "trainer.guard stop" in ended_early(row, stop_when_flat=0, guard="stop")
    assert chooser(stop_when_flat=3)[0].ended(row)
    assert not chooser()[0].ended(row)
    assert chooser(stop_when_flat=3)[0].ended(None) == ""
