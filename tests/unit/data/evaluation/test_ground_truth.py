import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from massl.data.evaluation import ground_truth
from massl.data.evaluation.ground_truth import read_ground_truth
from massl.data.sources.base import DataError


def content() -> dict[str, Any]:
    """Three database images and two queries, as the benchmark stores them."""
    return {
        "imlist": ["all_souls_1", "bodleian_2", "keble_3"],
        "qimlist": ["query_1", "query_2"],
        "gnd": [
            {
                "bbx": np.array([1.5, 2.0, 30.25, 40.0]),
                "easy": np.array([2, 0]),
                "hard": np.array([]),
                "junk": np.array([1], dtype=np.uint8),
            },
            {
                "bbx": [0, 0, 10, 20.5],
                "easy": [],
                "hard": np.array([[1]], dtype=">i4"),
                "junk": [np.int32(0), np.float64(2.0)],
            },
        ],
    }


def write(path: Path, value: Any, *, protocol: int = 2) -> Path:
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    return path


def assert_is_the_content(path: Path) -> None:
    truth = read_ground_truth(path)
    assert truth.database == ("all_souls_1", "bodleian_2", "keble_3")
    assert truth.queries == ("query_1", "query_2")
    first, second = truth.answers
    assert first.box == (1.5, 2.0, 30.25, 40.0)
    assert second.box == (0.0, 0.0, 10.0, 20.5)
    assert [indices.tolist() for indices in (first.easy, first.hard, first.junk)] == [[2, 0], [], [1]]
    assert [indices.tolist() for indices in (second.easy, second.hard, second.junk)] == [[], [1], [0, 2]]


@pytest.mark.parametrize("protocol", range(6))
def test_every_pickle_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    assert_is_the_content(write(tmp_path / "gnd_x.pkl", content(), protocol=protocol))


@pytest.mark.parametrize(("old", "new"), [(b"numpy._core.", b"numpy.core."), (b"numpy.core.", b"numpy._core.")])
def test_files_of_numpy_1_and_2_are_read(tmp_path: Path, old: bytes, new: bytes) -> None:
    path = tmp_path / "gnd_x.pkl"
    # names end at a line feed: any length will do
    path.write_bytes(pickle.dumps(content(), protocol=2).replace(old, new))
    assert_is_the_content(path)


class Python2Pickler(pickle._Pickler):  # type: ignore[misc,name-defined]
    """Writes text and bytes as Python 2 wrote its strings: 8-bit SHORT_BINSTRING and BINSTRING."""

    def save_python_2_string(self, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        length = len(data).to_bytes(1 if len(data) < 256 else 4, "little")
        self.write((pickle.SHORT_BINSTRING if len(data) < 256 else pickle.BINSTRING) + length + data)
        self.memoize(value)

    dispatch: ClassVar = {**pickle._Pickler.dispatch, str: save_python_2_string, bytes: save_python_2_string}  # type: ignore[attr-defined]


def test_a_file_written_by_python_2_is_read(tmp_path: Path) -> None:
    path = tmp_path / "gnd_x.pkl"
    with path.open("wb") as file:
        Python2Pickler(file, protocol=2).dump(content())
    assert pickle.SHORT_BINSTRING + b"\x06imlist" in path.read_bytes()
    assert b"_codecs" not in path.read_bytes()
    assert_is_the_content(path)


def test_names_may_be_an_array(tmp_path: Path) -> None:
    for dtype in (np.str_, np.bytes_, object):
        changed = {**content(), "imlist": np.array(content()["imlist"], dtype=dtype)}
        assert_is_the_content(write(tmp_path / "gnd_x.pkl", changed))


# ---- damaged and malicious files -------------------------------------------------------------------------------------


class RunsProgram:
    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_would_run_a_program_is_refused_and_does_not_run_it(tmp_path: Path, protocol: int) -> None:
    witness = tmp_path / "was here"
    attack = write(
        tmp_path / "gnd_x.pkl", {**content(), "gnd": RunsProgram(os.system, f"touch '{witness}'")}, protocol=protocol
    )
    with pytest.raises(DataError, match=r"asks for posix\.system.*revisitop"):
        read_ground_truth(attack)
    assert not witness.exists()
    pickle.loads(attack.read_bytes())  # what an ordinary reader would have done
    assert witness.exists()


@pytest.mark.parametrize(
    "value",
    [
        RunsProgram(eval, "1"),
        RunsProgram(getattr, "x", "upper"),
        RunsProgram(np.load, "x"),
        OrderedDict(),
        np.float64,
        Path("x"),
    ],
)
def test_nothing_but_the_few_names_of_arrays_is_looked_up(tmp_path: Path, value: Any) -> None:
    with pytest.raises(DataError, match="asks for"):
        read_ground_truth(write(tmp_path / "gnd_x.pkl", {**content(), "more": value}))


def test_the_bytes_of_an_array_are_not_decoded_by_a_codec_that_the_file_chooses(tmp_path: Path) -> None:
    path = write(tmp_path / "gnd_x.pkl", content())
    path.write_bytes(path.read_bytes().replace(b"\x06\x00\x00\x00latin1", b"\x05\x00\x00\x00rot13"))
    with pytest.raises(DataError, match=r"codec .*rot13"):
        read_ground_truth(path)


@pytest.mark.parametrize(
    "value",
    [
        RunsProgram(np.zeros(1).__reduce__()[0], RunsProgram(os.system, "true"), (0,), b"b"),
        RunsProgram(np.dtype, RunsProgram(eval, "'f8'")),
        [[{"deep": (RunsProgram(exec, "1"),)}]],
        {RunsProgram(eval, "'key'"): 1},
    ],
)
def test_a_program_inside_an_accepted_call_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(DataError, match="asks for"):
        read_ground_truth(write(tmp_path / "gnd_x.pkl", {**content(), "more": value}))


@pytest.mark.parametrize(
    ("name", "state"),
    [
        (b"c_codecs\nencode\n", b"(N}X\x0c\x00\x00\x00__defaults__N\x86t"),  # the state (None, {...}) sets attributes
        (b"cnumpy\ndtype\n", b"}X\x08\x00\x00\x00elementsNs"),
        (b"cnumpy\nndarray\n", b"}X\x0c\x00\x00\x00__setstate__Ns"),
    ],
)
def test_an_accepted_function_cannot_be_changed(tmp_path: Path, name: bytes, state: bytes) -> None:
    path = tmp_path / "gnd_x.pkl"
    path.write_bytes(pickle.PROTO + b"\x02" + name + state + pickle.BUILD + pickle.STOP)
    with pytest.raises(DataError):
        read_ground_truth(path)
    assert_is_the_content(write(path, content()))


@pytest.mark.parametrize(
    "body",
    [
        b"Pposix.system\n",  # a persistent id
        b"\x82\x01",  # an extension code
        b"cbuiltins\ngetattr\n(cnumpy\ndtype\nX\x08\x00\x00\x00__init__tR",
        b"\x8c\x05numpy\x8c\x0edtype.__init__\x93",  # a dotted name
        b"\x8c\x05numpy\x8c\x0fdtype.__class__\x93",
        b"cnumpy\ndtype.__class__\n",
        b"(inumpy.core.multiarray\nscalar\n",  # calls without arguments
        b"cnumpy\ndtype\n)\x81",  # __new__ of what is no class
        b"N)R",  # calls None
    ],
)
def test_other_ways_to_call_something_are_refused(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "gnd_x.pkl"
    path.write_bytes(pickle.PROTO + b"\x04" + body + pickle.STOP)
    with pytest.raises(DataError):
        read_ground_truth(path)


def test_a_larger_file_than_any_ground_truth_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "gnd_x.pkl", content())
    monkeypatch.setattr(ground_truth, "_MAX_BYTES", 100)
    with pytest.raises(DataError, match="more than 100 bytes"):
        read_ground_truth(path)


def test_arrays_of_other_types_are_refused(tmp_path: Path) -> None:
    changed = content()
    changed["gnd"][0]["easy"] = np.array(["2020-01-01"], dtype="datetime64[D]")
    with pytest.raises(DataError, match="datetime64"):
        read_ground_truth(write(tmp_path / "gnd_x.pkl", changed))


def test_a_small_file_cannot_ask_for_all_memory(tmp_path: Path) -> None:
    path = tmp_path / "gnd_x.pkl"
    path.write_bytes(
        pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + pickle.LONG_BINPUT + b"\xff\xff\xff\xef" + pickle.STOP
    )
    with pytest.raises(DataError, match="a file of 9 bytes remembers value number 4026531839"):
        read_ground_truth(path)


def test_a_file_cut_off_anywhere_is_refused_with_advice(tmp_path: Path) -> None:
    whole = pickle.dumps(content(), protocol=2)
    path = tmp_path / "gnd_x.pkl"
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"gnd_x\.pkl .*damaged.* revisitop"):
            read_ground_truth(path)


@given(st.data())
@settings(max_examples=150)
def test_a_file_with_wrong_bytes_is_read_or_refused_but_never_crashes(tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(pickle.dumps(content(), protocol=data.draw(st.sampled_from([0, 2, 4, 5]))))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "gnd_x.pkl"
    path.write_bytes(damaged)
    try:
        truth = read_ground_truth(path)
    except DataError:
        return
    assert len(truth.answers) == len(truth.queries)


@pytest.mark.parametrize("text", ["", "<html>not found</html>", "version https://git-lfs.github.com/spec/v1"])
def test_a_web_page_or_a_pointer_in_its_place_is_refused_with_advice(tmp_path: Path, text: str) -> None:
    path = tmp_path / "gnd_x.pkl"
    path.write_text(text)
    with pytest.raises(DataError, match=r"is no pickle, or a damaged one .* revisitop"):
        read_ground_truth(path)


def test_a_missing_file_is_named_with_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gnd_x\.pkl cannot be read \(No such file.* revisitop"):
        read_ground_truth(tmp_path / "gnd_x.pkl")


# ---- wrong fields ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("imlist", [], "imlist is empty"),
        ("imlist", "abc", "imlist is of type str"),
        ("imlist", ["a", "b", 3], "type int"),
        ("imlist", ["a", "b", "../../secret"], r"imlist .*'\.\./\.\./secret'"),
        ("imlist", ["a", "b", ""], "imlist holds ''"),
        ("qimlist", ["only_one"], "gnd has 2 entries; expected one for each of the 1 names in qimlist"),
        ("gnd", [], "gnd has 0 entries"),
        ("gnd", {}, "gnd .*dict"),
        ("gnd", [1, 2], "gnd of query_1 .*bbx, easy, hard, junk"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_expected(tmp_path: Path, field: str, value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        read_ground_truth(write(tmp_path / "gnd_x.pkl", {**content(), field: value}))
    assert "gnd_x.pkl" in str(raised.value)
    assert "revisitop" in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("bbx", [1, 2, 3], "bbx .*left, top, right"),
        ("bbx", [5, 0, 5, 9], "bbx .*left, top, right"),
        ("bbx", [0, 9, 5, 9], "bbx .*left, top, right"),
        ("bbx", [0, 0, 5, float("nan")], "holds nan; expected numbers"),
        ("bbx", None, "bbx in gnd of query_2 .*NoneType"),
        ("easy", [3], "easy in gnd of query_2 holds 3"),
        ("hard", np.array([-1]), "hard in gnd of query_2 holds -1"),
        ("junk", [0.5], "holds 0.5"),
        ("junk", [10**400], "expected numbers"),
        ("junk", ["0"], "junk .*'0'; expected numbers"),
        ("junk", 0, "junk in gnd of query_2 .*int"),
    ],
)
def test_a_wrong_field_of_a_query_is_named_with_what_was_expected(
    tmp_path: Path, field: str, value: Any, message: str
) -> None:
    changed = content()
    changed["gnd"][1][field] = value
    with pytest.raises(DataError, match=message):
        read_ground_truth(write(tmp_path / "gnd_x.pkl", changed))


@pytest.mark.parametrize("value", [[1, 2], "text", 5, {"imlist": []}, np.arange(3)])
def test_something_else_than_a_ground_truth_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(DataError, match="expected a dictionary of imlist, qimlist, gnd"):
        read_ground_truth(write(tmp_path / "gnd_x.pkl", value))


def test_a_query_without_its_fields_is_refused(tmp_path: Path) -> None:
    changed = content()
    del changed["gnd"][0]["junk"]
    with pytest.raises(DataError, match="gnd of query_1 has no junk"):
        read_ground_truth(write(tmp_path / "gnd_x.pkl", changed))


def test_a_ground_truth_without_any_answer_is_refused(tmp_path: Path) -> None:
    changed = content()
    for entry in changed["gnd"]:
        entry.update(easy=[], hard=[])
    with pytest.raises(DataError, match="nothing to measure"):
        read_ground_truth(write(tmp_path / "gnd_x.pkl", changed))
