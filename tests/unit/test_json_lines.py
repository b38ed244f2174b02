from collections.abc import Callable
from pathlib import Path

import pytest

from massl.json_lines import in_words, parse_json_lines, read_json, read_json_lines, rejected_file, set_aside


def rows_in(content: bytes) -> list[dict[str, object] | None]:
    return [line.row for line in parse_json_lines(content)]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"step": 1', "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b"null", "is not a JSON object"),
        (b'{"step": 1, "loss": \xff}', "is not UTF-8"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"step": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b"\x00" * 20, "is not JSON"),
        (b'{"a": "' + b"x" * 2**20 + b'"}', "is longer than"),
    ],
    ids=["torn", "list", "null", "not UTF-8", "deep", "huge number", "zeros", "long"],
)
def test_a_damaged_line_is_named_and_the_lines_around_it_are_read(line: bytes, problem: str) -> None:
    first, bad, last = parse_json_lines(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    assert (first.row, last.row) == ({"a": 1}, {"a": 2})
    assert (bad.number, bad.content, bad.row) == (2, line, None)
    assert bad.problem.startswith(problem)


def test_line_breaks_of_windows_a_mark_of_the_byte_order_and_blank_lines_do_no_harm() -> None:
    assert rows_in(b'\xef\xbb\xbf{"a": 1}\r\n\r\n \n{"a": 2}\r\n') == [{"a": 1}, {"a": 2}]
    assert rows_in(b"") == rows_in(b"\n\n") == rows_in(b"\xef\xbb\xbf") == []


def test_only_a_last_line_without_its_line_break_has_not_ended() -> None:
    assert [line.is_ended for line in parse_json_lines(b'{"a": 1}\n{"a": 2}')] == [True, False]
    assert [line.is_ended for line in parse_json_lines(b'{"a": 1}\n{"a": 2}\n')] == [True, True]


def test_without_a_file_there_are_no_lines_and_a_folder_is_refused(tmp_path: Path) -> None:
    assert list(read_json_lines(tmp_path / "none.jsonl")) == []
    with pytest.raises(OSError, match="directory"):
        read_json_lines(tmp_path)


def test_lines_set_aside_are_kept_byte_for_byte_and_added_to_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    set_aside(path, [])
    assert not rejected_file(path).exists()
    set_aside(path, [b"\xff{", b"x"])
    set_aside(path, [b"y"])
    assert (tmp_path / "metrics.rejected.jsonl").read_bytes() == b"\xff{\nx\ny\n"


def test_a_warning_names_the_first_lines_and_counts_the_others() -> None:
    damaged = [(number, "is not JSON") for number in (2, 5, 7, 9)]
    assert in_words(Path("a/m.jsonl"), damaged[:1]) == "line 2 of m.jsonl is not JSON"
    assert in_words(Path("a/m.jsonl"), damaged).endswith("line 7 of m.jsonl is not JSON; 1 more lines")


# ---- files of strangers ----------------------------------------------------------------------------------------------


def test_lines_are_parsed_one_at_a_time() -> None:
    lines = iter(parse_json_lines(b'{"a": 1}\n\n{"a": 2}\n' + b"{}\n" * 1000))
    assert [next(lines).number, next(lines).number] == [1, 3]


def test_a_fifo_blocks_no_reader_and_a_large_file_is_refused(tmp_path: Path, make_fifo: Callable[[Path], Path]) -> None:
    for read in (read_json_lines, read_json):
        with pytest.raises(OSError, match="not a file"):
            read(make_fifo(tmp_path / read.__name__))
    for name, read in (("lines", read_json_lines), ("object", read_json)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**30)  # takes no room
        with pytest.raises(OSError, match="MiB are more than"):
            read(tmp_path / name)


def test_a_byte_order_mark_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "a.json") == {"a": 1}


@pytest.mark.parametrize("content", [b"{", b"[" * 100_000, b"\xff", b""])
def test_what_is_no_json_is_a_value_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"."):
        read_json(tmp_path / "a.json")


def test_nothing_is_set_aside_through_a_link(tmp_path: Path) -> None:
    own = tmp_path / ".bashrc"
    own.write_text("own")
    path = tmp_path / "metrics.jsonl"
    rejected_file(path).symlink_to(own)
    with pytest.raises(OSError, match=r"metrics.rejected.jsonl"):
        set_aside(path, [b"touch pwned"])
    assert own.read_text() == "own"
    rejected_file(path).unlink()
    set_aside(path, [b"x"])
    assert rejected_file(path).read_bytes() == b"x\n"
