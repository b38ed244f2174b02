import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from massl.evaluations.measurement import AS_PUBLISHED, Setting, Statistic, _split_at_commas

# text, then name, k, note, remarks and statistic
EXAMPLES: list[tuple[str, str, int | None, str, tuple[str, ...], Statistic]] = [
    ("k=20", "", 20, "", (), ""),
    ("k=200 (all 50 images)", "", 200, "all 50 images", (), ""),
    ("best k (k=20)", "best k", None, "k=20", (), ""),
    ("1% (drawn) knn k=20", "1% (drawn) knn", 20, "", (), ""),
    ("1% (drawn) logreg lambda=0.1 (not converged)", "1% (drawn) logreg lambda=0.1", None, "not converged", (), ""),
    ("best over rates and epochs (as published)", "best over rates and epochs", None, AS_PUBLISHED, (), ""),
    ("best over rates and epochs, many, 2 epochs", "best over rates and epochs", None, "", ("many", "2 epochs"), ""),
    ("5 per class linear, crop ratio 1, 16 px mean", "5 per class linear", None, "", ("crop ratio 1", "16 px"), "mean"),
    ("2 per class logreg (not converged) deviation", "2 per class logreg", None, "not converged", (), "deviation"),
    ("strong (all ranks, whitened), 16 px", "strong", None, "all ranks, whitened", ("16 px",), ""),
    ("instance, dot product", "instance", None, "", ("dot product",), ""),
    ("mean of heads", "mean of heads", None, "", (), ""),
]


@pytest.mark.parametrize(("text", "name", "k", "note", "remarks", "statistic"), EXAMPLES)
def test_a_setting_is_written_as_text_and_read_back(
    text: str, name: str, k: int | None, note: str, remarks: tuple[str, ...], statistic: Statistic
) -> None:
    setting = Setting(name=name, k=k, note=note, remarks=remarks, statistic=statistic)
    assert str(setting) == text
    assert vars(Setting.parse(text)) == vars(setting)


@given(st.text(alphabet="k=012 ,()mean") | st.text())
def test_any_text_that_is_read_is_written_as_it_was(text: str) -> None:
    assert str(Setting.parse(text)) == text


@given(st.text(alphabet="a ,()"))
def test_remarks_are_parted_at_commas_outside_parentheses(text: str) -> None:
    """As by the expression that states it, whose time is quadratic."""
    assert _split_at_commas(text) == re.split(r", (?![^()]*\))", text)


def test_a_long_text_of_many_commas_is_read_in_linear_time() -> None:
    text = "a, " * 350_000 + ")"
    assert str(Setting.parse(text)) == text


def test_settings_are_equal_when_their_texts_are() -> None:
    assert Setting(name="last epoch, best over rates") == Setting.parse("last epoch, best over rates")
    assert len({Setting(k=20), Setting.parse("k=20"), Setting(name="k=20")}) == 1
    assert Setting(k=20) != Setting(k=10)
    assert Setting(k=20) != "k=20"


def test_remarks_are_added_once_and_replace_the_words_as_published() -> None:
    setting = Setting(name="best", note=AS_PUBLISHED, statistic="mean")
    assert str(setting.with_remarks([])) == "best (as published) mean"
    remarked = setting.with_remarks(["feature cls", "16 px"])
    assert str(remarked) == "best, feature cls, 16 px mean"
    assert str(remarked.with_remarks(["16 px", "seed 1"])) == "best, feature cls, 16 px, seed 1 mean"
    assert (
        str(Setting(k=47, note="as published for ViTs").with_remarks(["16 px"]))
        == "k=47 (as published for ViTs), 16 px"
    )
