"""A terminal that is closed while a run shows its progress there."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from massl import interrupts


def _take_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored, if the tests themselves run under nohup
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_saves_and_stops(recipe: Path, make_folder: Any, tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    command = [sys.executable, "-m", "massl", "pretrain", "--recipe", recipe, "--data", make_folder("photos", 48)]
    run = tmp_path / "run"
    process = subprocess.Popen(
        [*command, "--output", run, "--trainer.epochs", "10000", "--trainer.checkpoint_every_steps", "100000"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=_take_terminal,
        env=os.environ | {"PYTHONPATH": str(Path(interrupts.__file__).parents[1])},
    )
    os.close(terminal)

    def read() -> None:
        with suppress(OSError):
            while os.read(master, 4096):
                pass

    threading.Thread(target=read, daemon=True).start()
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not (run / "metrics.jsonl").exists():
        time.sleep(0.05)
    while time.monotonic() < deadline and (run / "metrics.jsonl").read_bytes().count(b"\n") < 4:
        time.sleep(0.05)
    os.close(master)
    try:
        assert process.wait(timeout=900) == 129
    finally:
        process.kill()
        process.wait()
    assert list((run / "checkpoints").glob("step_*.pt"))
