import threading
from collections.abc import Iterator

import pytest

from massl.data.loading.threads import DaemonThreads


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """Set after the test, so that stuck threads end."""
    event = threading.Event()
    yield event
    event.set()


def test_tasks_are_done_by_the_threads_and_their_errors_reach_the_caller() -> None:
    with DaemonThreads(2, thread_name_prefix="test") as threads:
        assert list(threads.map(lambda number: number**2, range(20))) == [number**2 for number in range(20)]
        assert threads.submit(lambda: threading.current_thread().name).result().startswith("test_")
        with pytest.raises(ZeroDivisionError):
            threads.submit(lambda: 1 // 0).result()


def test_each_thread_is_prepared_before_its_first_task() -> None:
    prepared = threading.local()
    with DaemonThreads(
        2, thread_name_prefix="test", initializer=lambda: setattr(prepared, "is_ready", True)
    ) as threads:
        assert all(threads.map(lambda _: prepared.is_ready, range(8)))


def test_after_closing_nothing_more_is_accepted_and_the_threads_have_ended() -> None:
    threads = DaemonThreads(3, thread_name_prefix="test-closing")
    list(threads.map(abs, range(3)))
    threads.shutdown()
    threads.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        threads.submit(abs, 1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-closing")]


def test_a_stuck_task_delays_neither_closing_nor_the_end_of_python(never: threading.Event) -> None:
    threads = DaemonThreads(1, thread_name_prefix="test-stuck")
    stuck, waiting = threads.submit(never.wait), threads.submit(abs, 1)
    threads.shutdown(cancel_futures=True)
    assert waiting.cancelled()
    assert not stuck.done()
    left = [thread for thread in threading.enumerate() if thread.name.startswith("test-stuck")]
    assert len(left) == 1
    assert left[0].daemon


def test_an_interrupt_while_a_thread_starts_does_not_hide_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with (
        pytest.raises(KeyboardInterrupt),
        DaemonThreads(1, thread_name_prefix="test-starting") as threads,
    ):
        threads.submit(abs, 1)
