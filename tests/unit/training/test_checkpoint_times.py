import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from massl import distributed
from massl.training import checkpoint_times, exchange
from massl.training.checkpoint_times import CheckpointTimes
from massl.training.settings import TrainerSettings


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        fake = SimpleNamespace(monotonic=lambda: self.seconds, perf_counter=lambda: self.seconds)
        monkeypatch.setattr(checkpoint_times, "time", fake)
        monkeypatch.setattr(exchange, "time", fake)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def times(**settings: float) -> CheckpointTimes:
    values = {"checkpoint_every_steps": 1000, **settings}
    return CheckpointTimes(TrainerSettings.model_validate(values), steps_per_epoch=7, device=torch.device("cpu"))


def saved_steps(times: CheckpointTimes, clock: Clock, *, num_steps: int, minutes_a_step: float) -> list[int]:
    saved = []
    for done in range(1, num_steps + 1):
        clock.seconds += 60 * minutes_a_step
        if times.is_due(done):
            saved.append(done)
            times.restart()
    return saved


def test_a_slow_run_saves_by_minutes(clock: Clock) -> None:
    assert saved_steps(times(), clock, num_steps=9, minutes_a_step=4) == [3, 6, 9]  # 10 minutes by default
    assert saved_steps(times(checkpoint_every_minutes=30), clock, num_steps=9, minutes_a_step=4) == [8]
    assert saved_steps(times(checkpoint_every_minutes=0), clock, num_steps=9, minutes_a_step=400) == []


def test_minutes_count_from_the_last_checkpoint_whatever_its_reason(clock: Clock) -> None:
    by_steps = times(checkpoint_every_steps=5)
    assert saved_steps(by_steps, clock, num_steps=13, minutes_a_step=4) == [3, 5, 8, 10, 13]
    milestones = times(milestone_every_epochs=1, checkpoint_every_minutes=0)
    assert saved_steps(milestones, clock, num_steps=20, minutes_a_step=4) == [7, 14]


@pytest.mark.parametrize("seconds_a_step", [0.01, 0.3, 5.0, 400.0])
def test_ranks_save_at_the_same_steps_though_their_clocks_differ(
    seconds_a_step: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 started to count 3 seconds before rank 0."""
    sent: dict[int, tuple[int, ...]] = {}

    def start(numbers: tuple[int, ...], device: object) -> Callable[[], list[int]]:
        sent[rank] = numbers
        return lambda: [max(values) for values in zip(*sent.values(), strict=True)]

    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "start_largest", start)
    ranks = [times(checkpoint_every_steps=10**9, checkpoint_every_minutes=1) for _ in range(2)]
    ranks[1]._since = -3.0
    saved: list[list[int]] = [[], []]
    done = 0
    while len(saved[0]) < 3:
        done += 1
        clock.seconds += seconds_a_step
        sent.clear()
        for rank in (1, 0):  # rank 1 first, so that rank 0 sees its number
            if ranks[rank].is_due(done):
                saved[rank].append(done)
                ranks[rank].restart()
    assert saved[0] == saved[1]
    steps = math.ceil(57 / seconds_a_step)
    assert steps <= saved[0][0] <= steps + 8  # ranks exchange at least every eighth step
    steps = math.ceil(60 / seconds_a_step)
    assert steps <= saved[0][1] - saved[0][0] <= steps + 8
