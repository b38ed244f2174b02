import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from massl import cli, interrupts

SOURCE = Path(interrupts.__file__).parents[1]


def run(script: str, *, first: str = "import os, signal, time") -> subprocess.CompletedProcess[str]:
    """A Python process that imports no torch."""
    prepare = f"{first}\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in background jobs
    command = [sys.executable, "-c", prepare + textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env={"PYTHONPATH": str(SOURCE)})


def test_sigint_while_a_command_starts_is_answered_in_one_line() -> None:
    ended = run("""
        from massl.interrupts import Interrupts
        with Interrupts():
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)
            except BaseException:  # as modules do that are half imported
                print("swallowed")
    """)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr.count("\n") == 1
    assert "interrupted" in ended.stderr


def test_sigint_while_modules_are_imported_ends_any_command_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text(
        "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    )
    for command in cli.COMMANDS:
        ended = run(f"""
            import sys
            sys.path.insert(0, {str(tmp_path)!r})
            from massl.cli import main
            sys.argv = ["massl", {command!r}]
            sys.exit(main())
        """)
        assert ended.returncode == 130, command
        assert ended.stderr.count("\n") == 1, ended.stderr


def test_once_started_sigint_is_an_exception_so_that_files_are_closed() -> None:
    ended = run("""
        from massl.interrupts import Interrupts
        with Interrupts() as interrupts:
            interrupts.started()
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)
            except KeyboardInterrupt:
                print("files are closed")
    """)
    assert (ended.returncode, ended.stdout) == (0, "files are closed\n")


def test_sigint_that_python_drops_because_a_destructor_ran_comes_again() -> None:
    ended = run("""
        import weakref
        from massl.interrupts import Interrupts
        class Thing:
            pass
        def callback(reference):
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass
            print("not interrupted")
        with Interrupts() as interrupts:
            interrupts.started()
            thing = Thing()
            reference = weakref.ref(thing, callback)
            try:
                del thing
                time.sleep(60)
            except KeyboardInterrupt:
                print("files are closed")
    """)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "files are closed\n", "")


def test_the_timer_of_a_program_that_calls_massl_goes_on() -> None:
    ended = run("""
        from massl.interrupts import Interrupts
        signal.signal(signal.SIGALRM, lambda number, frame: print("alarm"))
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with Interrupts() as interrupts:
            interrupts.started()
        time.sleep(1)
    """)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "alarm\n", "")


def test_what_else_a_destructor_raises_is_shown() -> None:
    ended = run("""
        from massl.interrupts import Interrupts
        class Thing:
            def __del__(self):
                raise ValueError("a fault")
        with Interrupts() as interrupts:
            interrupts.started()
            Thing()
    """)
    assert ended.returncode == 0
    assert "ValueError: a fault" in ended.stderr


def test_an_error_that_a_library_makes_of_sigint_is_still_an_interruption() -> None:
    ended = run("""
        import sys, types
        from massl import cli
        def main(arguments):
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)
            except KeyboardInterrupt:  # as safetensors does while it reads a tensor
                raise ValueError("could not determine the shape") from None
        sys.modules["fake"] = types.SimpleNamespace(main=main)
        cli.COMMANDS["fake"] = ("", "fake")
        sys.argv = ["massl", "fake"]
        sys.exit(cli.main())
    """)
    assert ended.returncode == 130, ended.stderr
    assert "massl: interrupted" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_second_signal_ends_a_process_that_never_comes_back_to_python(number: signal.Signals) -> None:
    ended = run(f"""
        import ctypes, threading
        from massl.interrupts import Interrupts, SAME_SIGNAL_SECONDS
        def send():  # more than two: on a busy machine the first two may arrive as one
            while True:
                os.kill(os.getpid(), {int(number)})
                time.sleep(2 * SAME_SIGNAL_SECONDS)
        with Interrupts() as interrupts:
            signal.signal({int(number)}, lambda number, frame: print("asked to stop"))
            threading.Thread(target=send).start()
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            ctypes.CDLL(None).sleep(10**6)
    """)
    assert ended.returncode == 128 + number
    assert ended.stderr.count("\n") == 1
    assert "stopped at once" in ended.stderr


def test_a_signal_that_a_launcher_passes_on_counts_once() -> None:
    ended = run("""
        from massl.interrupts import Interrupts, SAME_SIGNAL_SECONDS
        with Interrupts():
            signal.signal(signal.SIGTERM, lambda number, frame: None)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(3 * SAME_SIGNAL_SECONDS)
        print("alive")
    """)
    assert (ended.returncode, ended.stdout) == (0, "alive\n")


def test_what_is_ignored_stays_ignored_and_handlers_come_back() -> None:
    ended = run("""
        from massl.interrupts import Interrupts
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with Interrupts():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert signal.set_wakeup_fd(-1) == -1
        print("alive")
    """)
    assert (ended.returncode, ended.stdout) == (0, "alive\n")


def test_a_signal_while_a_command_ends_shows_no_traceback() -> None:
    code = (
        "import atexit, os, signal, sys, massl.cli as cli\n"
        "atexit.register(lambda: [os.kill(os.getpid(), number) for number in (signal.SIGINT, signal.SIGUSR1)])\n"
        "sys.argv = ['massl', 'recipes', 'demo']\n"
        "sys.exit(cli.main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    assert "Traceback" not in ended.stderr  # on a slow machine it says that it loads PyTorch
