import os
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from massl.data.keys import original_key, stored_key
from massl.failures import printable


@pytest.mark.parametrize(
    "key", ["a.jpg", "dir/ü ber 100%.jpg", "comma, 'quote' \"double\".jpg", "back\\slash", "日本.png", "%0A"]
)
def test_ordinary_names_stay_as_they_are(key: str) -> None:
    assert stored_key(key) == key
    assert original_key(key) == key


@pytest.mark.parametrize(
    "name", [b"a\nb.jpg", b"a\tb", b"\xff\xfe.jpg", b"a\r\x1b[2J", b"percent:x", "\u2028\u202e".encode()]
)
def test_other_names_are_escaped_on_one_line_and_come_back(name: bytes) -> None:
    stored = stored_key(os.fsdecode(name))
    assert stored.startswith("percent:")
    assert stored.encode().decode().isprintable()
    assert os.fsencode(original_key(stored)) == name
    assert unquote_to_bytes(stored.removeprefix("percent:")) == name


@given(st.binary(min_size=1, max_size=40).filter(lambda name: b"\0" not in name))
def test_every_name_of_a_file_comes_back(name: bytes) -> None:
    key = os.fsdecode(name)
    stored = stored_key(key)
    assert original_key(stored) == key
    assert "\n" not in stored
    assert len(stored.splitlines()) == 1
    stored.encode()


def test_messages_keep_their_lines_but_move_no_cursor() -> None:
    assert printable("a\n\tb\x1b[2J\r\udcff") == "a\n\tb\\x1b[2J\\r\\udcff"
