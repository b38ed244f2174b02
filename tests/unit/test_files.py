import errno
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from massl.files import (
    is_leftover,
    make_folder,
    making_folder,
    open_in_place,
    read_limited,
    remove_leftovers,
    replacing,
    write_atomically,
)


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    write_atomically(path, b"new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_while_writing_keeps_the_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def write_half() -> None:
        with replacing(path) as partial:
            partial.write_text("ne")
            assert is_leftover(partial)
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_names_as_long_as_the_system_allows_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250 + ".html")
    write_atomically(path, "page")
    assert path.read_text() == "page"


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "made"

    def write_half() -> None:
        with making_folder(path) as partial:
            (partial / "a").write_text("half")
            assert not path.exists()
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()
    assert list(tmp_path.iterdir()) == []
    with making_folder(path) as partial:
        (partial / "a").write_text("whole")
    assert (path / "a").read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]

    def write_again() -> None:
        with making_folder(path) as partial:
            (partial / "a").write_text("other")

    with pytest.raises(OSError, match="not empty"):
        write_again()
    assert (path / "a").read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]


def test_files_with_other_names_are_no_leftovers(tmp_path: Path) -> None:
    assert not any(is_leftover(tmp_path / name) for name in (".lock", "a.partial", ".hidden", "recipe.yaml"))


@pytest.mark.parametrize("name", ["日" * 80 + ".html", os.fsdecode(b"\xff\xfe" * 100) + ".html"])
def test_long_names_of_any_bytes_can_be_written(tmp_path: Path, name: str) -> None:
    write_atomically(tmp_path / name, "page")
    assert (tmp_path / name).read_text() == "page"


def test_two_threads_that_write_the_same_file_do_not_meet(tmp_path: Path) -> None:
    """Each writes its own temporary file; the file is one of the two, whole."""
    path, both_have_begun, failures = tmp_path / "a.json", threading.Barrier(2), list[BaseException]()

    def write(text: str) -> None:
        try:
            with replacing(path) as partial:
                partial.write_text(text)
                both_have_begun.wait(120)
                assert partial.read_text() == text
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(letter * 1000,)) for letter in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert path.read_text() in ("a" * 1000, "b" * 1000)
    assert list(tmp_path.iterdir()) == [path]


def test_new_folders_are_flushed_to_the_disk_from_the_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed, fsync = list[int](), os.fsync

    def spy(descriptor: int) -> None:
        assert stat.S_ISDIR(os.fstat(descriptor).st_mode)
        flushed.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    make_folder(tmp_path / "a" / "b")
    assert flushed == [tmp_path.stat().st_ino, (tmp_path / "a").stat().st_ino]
    make_folder(tmp_path / "a" / "b")  # exists: nothing to do
    assert len(flushed) == 2


@pytest.mark.parametrize(("number", "is_raised"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_only_a_disk_that_fails_stops_a_write_at_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_raised: bool
) -> None:
    """Some network file systems cannot flush folders."""
    fsync = os.fsync

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    if is_raised:
        with pytest.raises(OSError, match="Input/output"):
            write_atomically(tmp_path / "a", "new")
    else:
        write_atomically(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"


def test_leftovers_of_killed_processes_are_removed_but_not_what_is_being_written(tmp_path: Path) -> None:
    old, new, other = tmp_path / ".a.host-1-1.partial", tmp_path / ".a.host-2-2.partial", tmp_path / "a"
    for path in (old, new, other):
        path.write_text("half")
    for path in (old, other):
        os.utime(path, (time.time() - 7200,) * 2)
    remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == [new, other]


def test_a_limited_read_refuses_large_files_and_what_is_no_file(tmp_path: Path) -> None:
    file, fifo = tmp_path / "file", tmp_path / "fifo"
    file.write_bytes(b"12345")
    assert read_limited(file, max_bytes=5) == b"12345"
    with pytest.raises(OSError, match="allowed"):
        read_limited(file, max_bytes=4)
    os.mkfifo(fifo)
    with pytest.raises(OSError, match="not a file"):
        read_limited(fifo, max_bytes=4)


@pytest.mark.parametrize("flags", [os.O_APPEND, 0])
def test_a_file_opened_in_place_is_no_link_to_another(tmp_path: Path, flags: int) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    with open_in_place(own, flags) as file:
        file.write(b"1")
    with open_in_place(own, flags | os.O_APPEND) as file:
        file.write(b"2")
    assert own.read_bytes() == b"12"
    own.unlink()
    own.symlink_to(other)  # to nothing yet
    with pytest.raises(OSError, match="own"):
        open_in_place(own, flags)
    assert not other.exists()
