from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from massl.commands.recipe import load_recipe
from massl.commands.timing import training_images
from massl.data.loading.decode import UnreadableImage, decode
from massl.data.loading.range_sample import settle_ranges
from massl.data.sources import files_of, open_source
from massl.data.sources.base import DataError, ImageSource
from massl.data.sources.rules import DEFAULT_RULES, PixelRanges, ReadRules

RAMP = np.linspace(0, 1, 32 * 32).reshape(32, 32)


def folder_of(root: Path, *images: np.ndarray, suffix: str = "tif") -> Path:
    root.mkdir(exist_ok=True)
    for number, values in enumerate(images):
        Image.fromarray(values).save(root / f"{number}.{suffix}")
    return root


def brightness(source: ImageSource, index: int = 0) -> float:
    return decode(source.read(index), max_side=64).float().mean().item() / 255


@pytest.mark.parametrize(
    ("values", "high", "suffix"),
    [
        ((RAMP * 4095).astype(np.uint16), 4095, "tif"),
        ((RAMP * 4095).astype(np.uint16), 4095, "png"),
        ((RAMP * 1023).astype(np.uint16), 1023, "png"),
        ((RAMP * 16383).astype(np.uint16), 16383, "tif"),
        ((RAMP * 65535).astype(np.uint16), 65535, "png"),
        ((RAMP * 255).astype(np.uint16), 255, "png"),
        ((RAMP * 4095).astype(np.int32), 4095, "tif"),
        ((RAMP * (2**24 - 1)).astype(np.int32), 2**24 - 1, "tif"),
        ((RAMP * (2**31 - 1)).astype(np.int32), 2**32 - 1, "tif"),
        (RAMP.astype(np.float32), 1, "tif"),
        ((RAMP * 1.04 - 0.02).astype(np.float32), 1, "tif"),
        ((RAMP * 255).astype(np.float32), 255, "tif"),
    ],
)
def test_the_range_is_sampled_said_and_used(tmp_path: Path, values: np.ndarray, high: float, suffix: str) -> None:
    dim = (values * 0.01).astype(values.dtype)  # one image alone would be guessed far too bright
    source = open_source(folder_of(tmp_path / "photos", values, dim, suffix=suffix))
    (remark,) = settle_ranges(source)
    assert f"{high:,g}" in remark
    assert "pixel_range" in remark
    trial = training_images(load_recipe("massl-tiny", {"data.source": str(tmp_path / "photos")}))  # of massl plan
    assert [files.rules for files in files_of(trial)] == [files.rules for files in files_of(source)]
    expected = (0.25 if high == 2**32 - 1 else 0.5, 0.005)
    assert [brightness(source, index) for index in range(2)] == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(
    "values",
    [
        (RAMP * 3000 - 1000).astype(np.int32),
        (RAMP * 3000 - 1000).astype(np.float32),
        (RAMP * 4095).astype(np.float32),
        (RAMP * 16).astype(np.float32),
        (RAMP * 1.5).astype(np.float32),
    ],
)
def test_values_without_a_usual_range_need_a_stated_one(tmp_path: Path, values: np.ndarray) -> None:
    path = folder_of(tmp_path / "photos", values)
    with pytest.raises(DataError, match=r"photos.*--data\.pixel_range LOW HIGH"):
        settle_ranges(open_source(path))
    stated = PixelRanges(stated=(float(values.min()), float(values.max())))
    source = open_source(path, rules=ReadRules(ranges=stated))
    assert settle_ranges(source) == []
    assert brightness(source) == pytest.approx(0.5, abs=0.01)


def test_eight_bit_images_are_neither_touched_nor_spoken_of(tmp_path: Path) -> None:
    grey = (RAMP * 255).astype(np.uint8)
    colours = np.stack([grey, grey.T, 255 - grey], axis=2)
    for suffix in ("png", "tif", "jpg"):
        source = open_source(folder_of(tmp_path / suffix, grey, colours, suffix=suffix))
        before = source.fingerprint(), source.contents()
        assert settle_ranges(source) == []
        assert files_of(source)[0].rules is DEFAULT_RULES
        again = open_source(tmp_path / suffix)
        settle_ranges(again)
        assert (again.fingerprint(), again.contents()) == before


def test_no_file_of_a_folder_of_jpegs_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(folder_of(tmp_path / "photos", (RAMP * 255).astype(np.uint8), suffix="jpg"))
    monkeypatch.setattr("massl.data.loading.range_sample.Image.open", lambda *_, **__: pytest.fail("opened"))
    assert settle_ranges(source) == []


def test_a_range_changes_the_fingerprint_and_the_identity(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "photos", (RAMP * 4095).astype(np.uint16))
    ranges = [PixelRanges(), PixelRanges(integers=(0, 4095)), PixelRanges(stated=(0, 4095)), PixelRanges(stated=(0, 1))]
    sources = [open_source(path, rules=ReadRules(ranges=found)) for found in ranges]
    assert len({source.fingerprint() for source in sources}) == 4
    assert len({source.contents().reading for source in sources}) == 4
    before = open_source(path, rules=ReadRules(ranges=PixelRanges(of_each_image=True)))
    assert before.contents() == sources[0].contents()  # runs that began before go on


def test_an_image_beyond_the_sampled_range_is_unreadable_with_its_reason(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "photos", (RAMP * 4095).astype(np.uint16))
    source = open_source(path)
    settle_ranges(source)
    folder_of(path, (RAMP * 5000).astype(np.uint16))
    with pytest.raises(UnreadableImage, match=r"5000.*4095.*pixel_range"):
        brightness(source)


def sixteen_bit_colours(path: Path, scale: int) -> Path:
    """A 16-bit RGB PNG, which Pillow reads but does not write."""
    import struct
    import zlib

    path.mkdir()
    values = (np.stack([RAMP] * 3, axis=2) * scale).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    content = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", 32, 32, 16, 2, 0, 0, 0)
    for name, chunk in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        content += struct.pack(">I", len(chunk)) + name + chunk + struct.pack(">I", zlib.crc32(name + chunk))
    (path / "a.png").write_bytes(content)
    return path


def test_dark_colours_of_sixteen_bits_are_refused_instead_of_read_as_black(tmp_path: Path) -> None:
    bright = open_source(sixteen_bit_colours(tmp_path / "bright", 65535))
    assert settle_ranges(bright) == []
    assert brightness(bright) == pytest.approx(0.5, abs=0.01)
    dark = sixteen_bit_colours(tmp_path / "dark", 4095)
    with pytest.raises(DataError, match=r"dark.*4,095.*pixel_range"):
        settle_ranges(open_source(dark))
    with pytest.raises(DataError, match=r"dark.*0 65535"):
        settle_ranges(open_source(dark, rules=ReadRules(ranges=PixelRanges(stated=(0, 4095)))))
    assert settle_ranges(open_source(dark, rules=ReadRules(ranges=PixelRanges(stated=(0, 65535))))) == []


def test_joined_folders_share_one_range(tmp_path: Path) -> None:
    for name, high in (("a", 4095), ("b", 900)):
        folder_of(tmp_path / name, (RAMP * high).astype(np.uint16))
    source = open_source(f"joined:{tmp_path}/a|{tmp_path}/b")
    settle_ranges(source)
    assert [part.rules.ranges.integers for part in files_of(source)] == [(0, 4095)] * 2


def test_ranges_survive_their_json_form() -> None:
    for ranges in (PixelRanges(), PixelRanges(stated=(-1.5, 2)), PixelRanges(of_each_image=True)):
        assert PixelRanges.from_json(ranges.as_json()) == ranges


def test_a_header_of_countless_chunks_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(np.full((4, 4), 4000, np.uint16)).save(tmp_path / "deep.png")
    content = (tmp_path / "deep.png").read_bytes()
    empty = b"\0\0\0\0teXt" + bytes(4)
    (tmp_path / "chunks.png").write_bytes(content[:33] + empty * 200_000 + content[33:])
    opened = []
    original = Image.open
    monkeypatch.setattr(Image, "open", lambda file, **named: opened.append(file) or original(file, **named))
    settle_ranges(open_source(tmp_path))
    assert len(opened) == 3  # of deep.png alone: its header, its limits, its values
