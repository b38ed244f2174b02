import json
from pathlib import Path

import pytest

from massl import failures


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As torchrun gives one to each process."""
    monkeypatch.setattr(failures, "_SECONDS_UNTIL_ENDED", 0.0)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    return tmp_path / "error.json"


def shown_by_torchrun(path: Path) -> str:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    return str(ChildFailedError("massl", {0: failure}))


def test_alone_the_error_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    failures.tell("massl: error: no images")
    failures.tell("massl: error: rank 1 stopped: no images", is_told_elsewhere=True)
    assert capsys.readouterr().err == "massl: error: no images\n"


def test_under_torchrun_its_summary_shows_the_error_and_nothing_else_does(
    error_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failures.tell("massl: error: no images")
    assert capsys.readouterr().err == ""
    assert "traceback : massl: error: no images" in shown_by_torchrun(error_file)


def test_before_a_restart_there_is_no_summary_so_it_is_printed(
    error_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    failures.tell("massl: error: no images")
    assert "no images" in capsys.readouterr().err


def test_an_error_file_that_cannot_be_written_does_not_hide_the_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "nowhere" / "error.json"))
    failures.tell("massl: error: no images")
    assert "no images" in capsys.readouterr().err


def test_a_process_that_torchrun_does_not_end_tells_after_a_while_what_it_knows(error_file: Path) -> None:
    failures.tell("massl: error: rank 1 stopped: no images", is_told_elsewhere=True)
    assert "rank 1 stopped" in json.loads(error_file.read_text())["message"]["message"]


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        ("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:24873", True),
        ("read: Connection reset by peer", True),
        ("NCCL: remote process exited or there was a network error", True),
        ("CUDA out of memory", False),
    ],
)
def test_a_lost_connection_is_known_by_its_words(
    text: str, is_lost: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert failures.is_lost_connection(RuntimeError(text)) == is_lost
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not failures.is_lost_connection(RuntimeError(text))
    failures.tell_lost_connection(RuntimeError(text))
    assert "another process of this run has ended" in capsys.readouterr().err


def test_names_in_an_error_do_not_control_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    failures.tell("massl: error: no file w\x1b]0;OWNED\x07\x1b[2J\u202e.pth\nSee the next line")
    assert capsys.readouterr().err == (
        "massl: error: no file w\\x1b]0;OWNED\\x07\\x1b[2J\\u202e.pth\nSee the next line\n"
    )


def test_names_in_an_error_do_not_control_the_terminal_under_torchrun(error_file: Path) -> None:
    failures.tell("massl: error: \x1b[2J")
    assert "\x1b" not in shown_by_torchrun(error_file)
