import os
import pty
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from massl import distributed
from massl.interrupts import SAME_SIGNAL_SECONDS
from massl.training import stop_request
from massl.training.stop_request import StepAbandoned, StopRequest


def ignore() -> None:
    pass


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """A test runner may have its own, or be a background job."""
    before = {number: signal.getsignal(number) for number in StopRequest.SIGNALS}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_is_remembered_instead_of_ending_the_process(number: signal.Signals) -> None:
    with StopRequest(ignore) as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert stop.received is number
        assert stop.agreed() == number


def test_afterwards_the_handlers_of_before_are_back() -> None:
    before = {number: signal.getsignal(number) for number in StopRequest.SIGNALS}
    with StopRequest(ignore):
        assert all(signal.getsignal(number) != before[number] for number in before)
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_a_signal_that_is_ignored_or_handled_by_others_stays_so(number: signal.Signals, handler: Any) -> None:
    signal.signal(number, handler)  # as nohup or a job launcher does
    with StopRequest(ignore) as stop:
        os.kill(os.getpid(), number)
        assert stop.received is None


def test_a_second_signal_ends_the_process_at_once() -> None:
    with StopRequest(ignore) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        stop._received_at -= 2 * SAME_SIGNAL_SECONDS  # as if that was a while ago
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.received is signal.SIGTERM


def test_a_signal_that_a_launcher_passes_on_as_well_counts_once() -> None:
    with StopRequest(ignore) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received is signal.SIGINT


def test_the_handlers_are_back_after_an_error_too() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), StopRequest(ignore):
        _ = 1 / 0
    assert signal.getsignal(signal.SIGTERM) == before


def test_in_a_thread_that_owns_no_signals_nothing_is_changed() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), list[object]()

    def work() -> None:
        with StopRequest(ignore) as stop:
            seen.extend([stop.received, signal.getsignal(signal.SIGTERM)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None, before]


def test_a_signal_is_acknowledged_at_once() -> None:
    acknowledged = []
    with StopRequest(lambda: acknowledged.append("stopping")):
        os.kill(os.getpid(), signal.SIGTERM)
        assert acknowledged == ["stopping"]


def test_where_printing_is_refused_the_signal_is_still_acknowledged(capfd: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise RuntimeError("reentrant call")

    with StopRequest(refuse) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received is signal.SIGTERM
    assert "stopping" in capfd.readouterr().err


def test_once_the_terminal_is_gone_printing_fails_no_more() -> None:
    master, terminal = pty.openpty()
    before = [os.dup(1), os.dup(2)]
    os.dup2(terminal, 1)
    os.dup2(terminal, 2)
    try:
        os.close(terminal)
        os.close(master)
        with pytest.raises(OSError, match="Input/output"):
            os.write(2, b"x")
        with StopRequest(ignore) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.received is signal.SIGHUP
            assert os.write(2, b"x") == os.write(1, b"x") == 1
    finally:
        for number, saved in enumerate(before, start=1):
            os.dup2(saved, number)
            os.close(saved)


def test_a_signal_while_a_step_waits_for_its_images_abandons_the_step() -> None:
    with StopRequest(ignore) as stop, pytest.raises(StepAbandoned) as raised, stop.waiting_for_images(7):
        os.kill(os.getpid(), signal.SIGTERM)
    assert (raised.value.step, raised.value.signal_number) == (7, signal.SIGTERM)


def test_a_signal_just_before_the_wait_abandons_it_too() -> None:
    with StopRequest(ignore) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StepAbandoned), stop.waiting_for_images(7):
            raise AssertionError("still waiting")


class Ranks:
    """Ranks that call in turn; an exchange gives all of them the largest numbers of this round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds_per_call: Callable[[int, int], float]) -> None:
        self.clock, self.call, self.rank = 0.0, 0, 0
        self.stops = [StopRequest(ignore) for _ in range(2)]
        self.sent: dict[int, dict[int, tuple[int, ...]]] = {}  # call -> rank -> numbers
        self._seconds_per_call = seconds_per_call
        monkeypatch.setattr(distributed, "world_size", lambda: 2)
        monkeypatch.setattr(distributed, "start_largest", self._start)
        monkeypatch.setattr(stop_request.time, "perf_counter", lambda: self.clock)
        for stop in self.stops:
            stop._ranks._called_at = 0.0

    def _start(self, numbers: tuple[int, ...], device: object) -> Callable[[], list[int]]:
        round_ = self.sent.setdefault(self.call, {})
        round_[self.rank] = numbers
        return lambda: [max(values) for values in zip(*round_.values(), strict=True)]

    def run(self, num_calls: int, *, signal_at: int) -> list[list[int]]:
        """What each rank is answered in each call; rank 1 receives a signal before call `signal_at`."""
        answers: list[list[int]] = [[], []]
        for self.call in range(num_calls):
            self.clock += max(self._seconds_per_call(rank, self.call) for rank in range(2))
            if self.call == signal_at:
                self.stops[1].received = signal.SIGTERM
            for self.rank in (1, 0):  # rank 1 first, so that rank 0 sees its numbers
                answers[self.rank].append(self.stops[self.rank].agreed())
        return answers


@pytest.mark.parametrize("seconds", [0.001, 0.05, 0.3, 1.0, 20.0])
def test_ranks_exchange_in_the_same_calls_and_at_least_every_two_seconds(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch, lambda rank, call: seconds)
    answers = ranks.run(60, signal_at=31)
    assert all(len(round_) == 2 for round_ in ranks.sent.values())
    first = answers[0].index(signal.SIGTERM)
    assert (first - 31) * seconds <= 2.0
    between = [later - earlier for earlier, later in zip([*ranks.sent][:-1], [*ranks.sent][1:], strict=True)]
    assert max(between) == {0.001: 8, 0.05: 8, 0.3: 3, 1.0: 1, 20.0: 1}[seconds]


def test_after_one_slow_step_ranks_exchange_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, lambda rank, call: 5.0 if call > 20 else 0.01)
    ranks.run(60, signal_at=99)
    assert [*ranks.sent][-20:] == list(range(40, 60))


def test_work_of_seconds_exchanges_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, lambda rank, call: 0.01)
    ranks.run(3, signal_at=99)
    ranks.call, ranks.rank = 3, 0
    ranks.stops[0].received = signal.SIGUSR1
    assert ranks.stops[0].agreed() == 0
    assert ranks.stops[0].agreed(now=True) == signal.SIGUSR1
