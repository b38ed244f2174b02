import os
import signal
import threading

import pytest

from massl.training.stop_request import StopRequest


def ignore() -> None:
    pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_remembered_instead_of_ending_the_process(number: signal.Signals) -> None:
    with StopRequest(ignore) as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert stop.received is number


def test_afterwards_the_handlers_of_before_are_back() -> None:
    before = {number: signal.getsignal(number) for number in StopRequest.SIGNALS}
    with StopRequest(ignore):
        assert all(signal.getsignal(number) != before[number] for number in before)
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_second_signal_ends_the_process_at_once() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test runner may have another
    with StopRequest(ignore) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.received is signal.SIGTERM
    signal.signal(signal.SIGINT, before)


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
