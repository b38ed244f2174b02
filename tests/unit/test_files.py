from pathlib import Path

import pytest

from massl.files import is_leftover, replacing, write_atomically


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


def test_files_with_other_names_are_no_leftovers(tmp_path: Path) -> None:
    assert not any(is_leftover(tmp_path / name) for name in (".lock", "a.partial", ".hidden", "recipe.yaml"))
