from pathlib import Path

import pytest
from PIL import Image

from massl.data.sources import open_source
from massl.data.sources.base import DataError, split_query


def test_a_plain_path_is_a_folder_and_the_home_folder_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (2, 2)).save(tmp_path / "photos/x.png")
    assert [
        len(open_source(uri)) for uri in ("~/photos", "folder:~/photos", tmp_path / "photos", str(tmp_path / "photos"))
    ] == [1] * 4
    assert open_source("~/photos").name == "~/photos"
    assert open_source("folder:~/photos").name == "folder:~/photos"


def test_a_path_may_hold_a_colon_or_question_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a:b?c=d").mkdir()
    Image.new("RGB", (2, 2)).save(tmp_path / "a:b?c=d/x.png")
    assert len(open_source(str(tmp_path / "a:b?c=d"))) == 1
    monkeypatch.chdir(tmp_path.parent)
    assert len(open_source(f"{tmp_path.name}/a:b?c=d")) == 1


def test_an_unknown_scheme_lists_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"'torchvison'.*Did you mean 'torchvision'.*folder:, demo:, torchvision:"):
        open_source("torchvison:CIFAR10")


def test_an_empty_uri_says_which_setting_to_give() -> None:
    with pytest.raises(DataError, match="--data"):
        open_source("")


def test_parameters_follow_the_last_question_mark() -> None:
    assert split_query("a?b/c?labels=none&x=1=2") == ("a?b/c", {"labels": "none", "x": "1=2"})
    assert split_query("plain") == ("plain", {})


@pytest.mark.parametrize("uri", ["a" * 5000, "folder:" + "a" * 300, "b" * 300 + ".npz"])
def test_a_name_too_long_for_the_system_is_an_error_of_ours(uri: str) -> None:
    with pytest.raises(DataError, match="too long"):
        open_source(uri)
