import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from massl.data.loading.decode import decode
from massl.data.sources import formats, open_source, remarks_of
from massl.data.sources.base import DataError, EncodedImage
from massl.data.sources.formats import has_avif, has_heif, pillow_formats, readable_suffixes

CACHED = (has_heif, has_avif, readable_suffixes, pillow_formats)


@pytest.fixture
def forgetful() -> Iterator[None]:
    """What can be read is found out anew, before and after the test."""
    for function in CACHED:
        function.cache_clear()
    yield
    for function in CACHED:
        function.cache_clear()


@pytest.fixture
def without_heif(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: None)


@pytest.mark.usefixtures("without_heif")
def test_files_in_formats_that_cannot_be_read_are_counted_and_named(tmp_path: Path) -> None:
    for name in ("a.jpg", "b.HEIC", "deep/c.HEIC", "d.heic", "e.CR2", "notes.txt", ".hidden.heic"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    source = open_source(tmp_path)
    assert len(source) == 1
    ignored = [remark for remark in remarks_of(source) if "ignored" in remark]
    assert len(ignored) == 2
    assert "ignored 1 .CR2 (convert" in ignored[0]
    assert "ignored 3 .heic (pip install pillow-heif" in ignored[1].replace(".HEIC", ".heic")


@pytest.mark.usefixtures("without_heif")
def test_a_folder_of_such_files_only_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "a.HEIC").write_bytes(b"")
    with pytest.raises(DataError, match=r"holds no images.*ignored 1 \.HEIC \(pip install pillow-heif"):
        open_source(tmp_path)


class _Heif(ImageFile.ImageFile):
    """Stands in for pillow-heif: 2 x 3 pixels of raw RGB after four letters."""

    format = "HEIF"

    def _open(self) -> None:
        assert self.fp is not None
        if self.fp.read(4) != b"heic":
            raise SyntaxError("not this format")
        self._mode, self._size = "RGB", (3, 2)
        self.tile = [ImageFile._Tile("raw", (0, 0, 3, 2), 4, "RGB")]


@pytest.mark.usefixtures("forgetful")
def test_heic_is_read_if_pillow_heif_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("pillow_heif")
    module.register_heif_opener = lambda: Image.register_open("HEIF", _Heif)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pillow_heif", module)
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: module)
    Image.init()  # now: what is registered below is forgotten afterwards
    monkeypatch.setattr(Image, "ID", [*Image.ID])
    monkeypatch.setattr(Image, "OPEN", dict(Image.OPEN))
    pixels = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)
    (tmp_path / "a.HEIC").write_bytes(b"heic" + pixels.tobytes())
    source = open_source(tmp_path)
    assert remarks_of(source) == []
    decoded = decode(source.read(0), max_side=64)
    assert torch.equal(decoded, torch.from_numpy(pixels).permute(2, 0, 1))


@pytest.mark.skipif(not has_avif(), reason="this Pillow has no AVIF")
def test_avif_is_read_where_pillow_reads_it(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (20, 10), (200, 30, 30)).save(buffer, "AVIF")
    (tmp_path / "a.avif").write_bytes(buffer.getvalue())
    source = open_source(tmp_path)
    assert source.key_of(0) == "a.avif"
    image = source.read(0)
    assert isinstance(image, EncodedImage)
    assert decode(image, max_side=64).shape == (3, 10, 20)


def test_a_link_to_itself_and_a_link_to_a_parent_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.jpg").write_bytes(b"")
    (tmp_path / "a" / "up").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "own.jpg").symlink_to(tmp_path / "own.jpg")
    assert [open_source(tmp_path).key_of(0)] == ["a/x.jpg"]
    assert len(open_source(tmp_path)) == 1


def test_listing_reports_the_number_of_files_seen(tmp_path: Path) -> None:
    for number in range(2100):
        (tmp_path / f"{number}.{'jpg' if number % 2 else 'txt'}").touch()
    seen: list[int] = []
    open_source(tmp_path, on_listing=seen.append)
    assert seen == [1000, 2000]
