"""Which probe of a run is the best, whether a run is flat and whether it fell below its start: from metrics.jsonl.

The best is chosen without labels, so it is the same with and without them; but in a run from trained weights never a
probe of which the guard speaks. The rule and its numbers are measured in docs/results/choosing-checkpoints.md.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from massl import distributed
from massl.training.probes import chance_margin
from massl.training.settings import TrainerSettings

SCORE = "other_view_top1"
MAY_FALL = 0.3  # of the highest score of a run: a probe that is lower by more is not the best
MAX_KNN_FALL = 3.0  # points below the start, from which on the guard speaks

Row = Mapping[str, Any]


def is_best(row: Row, scores_before: Sequence[float]) -> bool:
    """The newest probe is the best, unless its score is far below the highest so far."""
    score: float = row[SCORE]
    return score >= (1 - MAY_FALL) * max([score, *scores_before])


def judged(row: Row, before: Sequence[Row], *, has_start: bool, num_queries: int) -> dict[str, float]:
    """What a probe adds to its row: the best step so far, and for how many probes the score has not risen.

    `before`: the rows of earlier probes, with what this function added to them. `has_start`: the run started from
    trained weights, so step 0 counts and is what later probes are compared with.
    """
    found: dict[str, float] = {}
    if has_start and (start := next((other for other in before if other["step"] == 0), None)) is not None:
        found["fell_below_start"] = float(bool(fall_below(row, start, num_queries=num_queries)))
    if SCORE not in row or (row["step"] == 0 and not has_start):
        return found
    counted = [other for other in before if SCORE in other and (other["step"] > 0 or has_start)]
    scores = [other[SCORE] for other in counted]
    kept = next((other["best_step"] for other in reversed(counted) if "best_step" in other), None)
    is_chosen = is_best(row, scores) and not found.get("fell_below_start")
    found["best_step"] = row["step"] if kept is None or is_chosen else kept
    is_higher = row[SCORE] > max(scores, default=-1.0)
    found["flat_probes"] = 0 if is_higher else counted[-1].get("flat_probes", 0) + 1
    return found


def fall_below(row: Row, start: Row, *, num_queries: int) -> str:
    """By how much a probe is below that of the start, in words; "" if by no more than the guard allows.

    k-NN may fall by 3 points, or by what may be chance on few images. Without labels the score may fall as far as the
    best may be below the highest: in the runs it is calibrated on, smaller falls came with k-NN that rose or stayed.
    """
    if "knn_top1" in row and "knn_top1" in start:
        before, now = start["knn_top1"], row["knn_top1"]
        allowed = max(MAX_KNN_FALL, chance_margin(before, num_queries=num_queries))
        return f"k-NN is {now:.1f} %, {before:.1f} % at the start" if before - now > allowed else ""
    if SCORE in row and SCORE in start and row[SCORE] < (1 - MAY_FALL) * start[SCORE]:
        return f"another view finds its image in {row[SCORE]:.1f} %, {start[SCORE]:.1f} % at the start"
    return ""


def ended_early(row: Row, *, stop_when_flat: int, guard: str) -> str:
    """Why a run ends with this probe before its schedule does, in words; "" if it does not."""
    if 0 < stop_when_flat <= row.get("flat_probes", 0):
        num_probes = f"{row['flat_probes']:.0f} probe{'' if row['flat_probes'] == 1 else 's'}"
        return f"{SCORE} has not risen for {num_probes} (trainer.stop_when_flat {stop_when_flat})"
    if guard == "stop" and row.get("fell_below_start", 0) > 0:
        return "the features fell below those it started from (trainer.guard stop)"
    return ""


class Chooser:
    """Judges each probe of a run, keeps the weights of the best one, and says when the run ends early."""

    def __init__(
        self,
        settings: TrainerSettings,
        *,
        has_start: Callable[[], bool],  # asked when a probe is judged: the start is recorded just before training
        keep: Callable[[], None],
    ) -> None:
        self._settings, self._has_start, self._keep = settings, has_start, keep

    @property
    def guard(self) -> str:
        return ("warn" if self._has_start() else "off") if self._settings.guard == "auto" else self._settings.guard

    def judge(self, row: Row, before: Sequence[Row], *, num_queries: int) -> dict[str, float]:
        """Called by the writing process only; the weights are written before the row that names them."""
        found = judged(row, before, has_start=self._has_start(), num_queries=num_queries)
        if found.get("best_step") == row["step"]:
            self._keep()
        return found

    def warning(self, row: Row, before: Sequence[Row], *, num_queries: int) -> str:
        """A sentence when the run falls below its start, once until it recovers; else ""."""
        has_fallen, had_fallen = row.get("fell_below_start", 0), before[-1].get("fell_below_start", 0) if before else 0
        if self.guard == "off" or not has_fallen or had_fallen:
            return ""
        fall = fall_below(row, before[0], num_queries=num_queries)
        return (
            f"training makes the features worse than those it started from: {fall}. best.safetensors keeps the best "
            "so far. See docs/troubleshooting.md."
        )

    def ended(self, last_probe: Row | None) -> str:
        """Why the run ends now; all processes take the answer of the one that writes."""
        flat, guard = self._settings.stop_when_flat, self._settings.guard
        if not flat and guard != "stop":
            return ""
        why = last_probe and ended_early(last_probe, stop_when_flat=flat, guard=guard)
        return str(distributed.gather_objects(why or "")[0])
