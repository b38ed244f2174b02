import os
import socket
from pathlib import Path

import pytest

from massl.data.sources.base import DataError
from massl.data.sources.folder import FolderSource
from massl.data.sources.listing import MAX_DEPTH, MAX_VISITS, files_below


def keys(root: Path) -> list[str]:
    source = FolderSource(root, name=str(root))
    return [source.key_of(index) for index in range(len(source))]


def test_links_that_fan_out_end_and_are_said(tmp_path: Path) -> None:
    """Thirty folders, each with two links to the next: a tree of a billion paths."""
    for number in range(30):
        folder = tmp_path / f"{number:02d}"
        folder.mkdir()
        (folder / "x.jpg").write_bytes(b"x")
        for side in "ab":
            (folder / side).symlink_to(tmp_path / f"{number + 1:02d}")
    (tmp_path / "30").mkdir()
    source = FolderSource(tmp_path / "00", name="photos")
    assert 30 <= len(source) <= 30 * MAX_VISITS
    assert any("left out" in remark for remark in source.remarks)
    assert len(list(files_below(tmp_path / "00"))) == len(source)


def test_a_folder_that_a_few_links_lead_to_is_listed_for_each(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/x.jpg").write_bytes(b"x")
    for number in range(3):
        (tmp_path / f"link{number}").symlink_to(tmp_path / "real")
    assert keys(tmp_path) == ["link0/x.jpg", "link1/x.jpg", "link2/x.jpg", "real/x.jpg"]


def test_a_deep_tree_ends_at_a_stated_depth(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_bytes(b"x")
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(MAX_DEPTH + 40):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
        os.close(os.open("x.jpg", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    source = FolderSource(tmp_path, name="photos")
    assert len(source) == MAX_DEPTH + 1
    assert any(str(MAX_DEPTH) in remark for remark in source.remarks)


def test_paths_too_long_for_the_system_are_left_out_and_said(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_bytes(b"x")
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(30):  # 30 * 201 > 4096 characters
        os.mkdir("d" * 200, dir_fd=here)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    source = FolderSource(tmp_path, name="photos")
    assert len(source) == 1
    assert any("too long" in remark for remark in source.remarks)


def test_a_link_to_itself_does_not_hide_the_other_files(tmp_path: Path) -> None:
    for name in ("a.jpg", "b/c.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    for name in ("self", "self.jpg", "b/self"):
        (tmp_path / name).symlink_to(tmp_path / name)
    (tmp_path / "b/up").symlink_to(tmp_path)
    assert keys(tmp_path) == ["a.jpg", "b/c.jpg"]
    assert list(files_below(tmp_path)) == ["a.jpg", "b/c.jpg"]


def test_fifos_sockets_and_devices_are_no_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    (tmp_path / "a.jpg").write_bytes(b"x")
    os.mkfifo(tmp_path / "fifo.jpg")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s.jpg")
        assert keys(tmp_path) == ["a.jpg"]
        assert list(files_below(tmp_path)) == ["a.jpg"]


def test_files_come_in_one_order_whatever_the_file_system_says(tmp_path: Path) -> None:
    for name in ("b.jpg", "a/z", "a.txt", "a/b/c", "a-b", "a0/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert list(files_below(tmp_path)) == ["a/b/c", "a/z", "a-b", "a.txt", "a0/x", "b.jpg"]


def test_links_that_lead_nowhere_are_counted_and_named(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/x.jpg").write_bytes(b"x")
    (tmp_path / "gone.jpg").symlink_to(tmp_path / "unmounted/gone.jpg")
    (tmp_path / "sub/loop.PNG").symlink_to(tmp_path / "sub/loop.PNG")
    (tmp_path / "notes.txt").symlink_to(tmp_path / "unmounted/notes.txt")  # no image
    (tmp_path / "sub/back").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.jpg")
    source = FolderSource(tmp_path, name="photos")
    assert [source.key_of(index) for index in range(len(source))] == ["sub/x.jpg"]
    assert [remark for remark in source.remarks if remark.startswith("left out")] == [
        "left out 1 FIFOs and devices (pipe.jpg)",
        "left out 1 links back to a parent folder (sub/back)",
        "left out 2 links that lead nowhere (gone.jpg, sub/loop.PNG)",
    ]


def test_a_folder_of_links_that_lead_nowhere_says_so(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.jpg").symlink_to(tmp_path / "unmounted" / f"{number}.jpg")
    with pytest.raises(DataError, match=r"5 links that lead nowhere \(.*\.jpg, \.\.\.\)"):
        FolderSource(tmp_path, name="photos")
