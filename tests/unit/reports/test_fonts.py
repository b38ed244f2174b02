from pathlib import Path

import numpy as np
import pytest

from massl.reports import fonts
from massl.reports.fonts import drawable, font_for
from massl.reports.pictures.sheets import Tile, sheet

DOG = "\u72ac"  # a Chinese and Japanese character


@pytest.fixture
def without_system_fonts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "_system_fonts", lambda: ())


def test_plain_names_use_the_default_font_and_stay_as_they_are() -> None:
    assert font_for("cat_01.jpg") is None
    assert drawable("cat_01.jpg") == "cat_01.jpg"


@pytest.mark.usefixtures("without_system_fonts")
@pytest.mark.parametrize(
    "name", ["\u03c3\u03ba\u03cd\u03bb\u03bf\u03c2", "\u043f\u0451\u0441", "chi\u00eft", "\u2713 cat"]
)
def test_greek_cyrillic_accents_and_signs_are_always_drawn(name: str) -> None:
    file = font_for(name)
    assert file is not None
    assert file.name == "DejaVuSans.ttf"
    assert drawable(name) == name


@pytest.mark.usefixtures("without_system_fonts")
def test_without_a_font_a_character_is_escaped_and_never_a_box() -> None:
    assert drawable(f"{DOG}/1.jpg") == "\\u72ac/1.jpg"
    assert drawable("not \udcff utf-8") == "not \\udcff utf-8"


def test_the_font_that_shows_the_name_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    files = Path("/fonts/Other.ttf"), Path("/fonts/NotoSansCJK-Regular.ttc")
    has = {files[0]: frozenset("a"), files[1]: frozenset(DOG), fonts._dejavu(): frozenset("\u00e9")}
    monkeypatch.setattr(fonts, "_system_fonts", lambda: files)
    monkeypatch.setattr(fonts, "_characters", has.__getitem__)
    assert font_for(f"{DOG} a") == files[1]
    assert drawable(f"{DOG} a") == f"{DOG} a"
    assert font_for("\u00e9") == fonts._dejavu()
    assert drawable(f"{DOG}\u0416") == f"{DOG}\\u0416"


def test_fonts_for_chinese_japanese_and_korean_are_tried_first_and_upright() -> None:
    names = ["Arial.ttf", "NotoSansCJK-Bold.ttc", "NotoSansCJK-Regular.ttc", "Arial-Italic.ttf", "wqy-zenhei.ttc"]
    ordered = [path.name for path in sorted(map(Path, names), key=fonts._rank)]
    assert ordered == [
        "NotoSansCJK-Regular.ttc",
        "wqy-zenhei.ttc",
        "NotoSansCJK-Bold.ttc",
        "Arial.ttf",
        "Arial-Italic.ttf",
    ]


@pytest.mark.usefixtures("without_system_fonts")
def test_two_names_without_a_font_look_different_on_a_sheet() -> None:
    photo = np.zeros((200, 200, 3), dtype=np.uint8)
    first, second = (
        np.array(sheet([[Tile(picture=photo, captions=(name,))]], box=(200, 200), title=name))
        for name in (DOG, "\u732b")
    )
    assert not np.array_equal(first, second)  # boxes would be equal
