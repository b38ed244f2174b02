import io
import os
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import massl.data.loading.decode as decode_module
from massl.data.loading.decode import UnreadableImage, decode, image_size
from massl.data.sources import open_source
from massl.data.sources.base import EncodedImage
from massl.data.sources.rules import ReadRules, read_file


def encoded(image: Image.Image, file_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def decoded(data: bytes, rules: ReadRules = ReadRules()) -> np.ndarray:  # noqa: B008
    return decode(EncodedImage(data=data, label=None, key="x", rules=rules), max_side=1024).numpy()


def directory(num_entries: int, num_bytes: int, *, kind: int = 1) -> bytes:
    """A TIFF directory whose entries all point at the same bytes."""
    entries = b"".join(struct.pack("<HHII", tag, kind, num_bytes, 8) for tag in range(1, num_entries + 1))
    return b"II*\0" + struct.pack("<I", 8 + num_bytes) + bytes(num_bytes) + struct.pack("<H", num_entries) + entries


def png_with(*chunks: tuple[bytes, bytes]) -> bytes:
    plain = encoded(Image.new("RGB", (8, 8), "red"), "PNG")
    added = b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    )
    return plain[:33] + added + plain[33:]  # after the header


def jpeg_with(segments: bytes) -> bytes:
    plain = encoded(Image.new("RGB", (8, 8), "red"), "JPEG")
    return plain[:2] + segments + plain[2:]


def many_scans(num_scans: int) -> bytes:
    plain = encoded(Image.new("RGB", (64, 64)), "JPEG", progressive=True)
    return plain[:-2] + plain[plain.rindex(b"\xff\xda") : -2] * num_scans + plain[-2:]


def exif_segments(content: bytes) -> bytes:
    parts = [content[start : start + 65_000] for start in range(0, len(content), 65_000)]
    return b"".join(b"\xff\xe1" + struct.pack(">H", 8 + len(part)) + b"Exif\0\0" + part for part in parts)


GIF = encoded(Image.new("P", (8, 8)), "GIF")
IMAGE = GIF.index(b",", 13)  # of the GIF, after its palette


def gif_with_comment(num_blocks: int) -> bytes:
    return GIF[:IMAGE] + b"\x21\xfe" + (b"\xff" + bytes(255)) * num_blocks + b"\0" + GIF[IMAGE:]


def long_exif() -> bytes:
    exif = Image.Exif()
    exif[270] = "x" * 100_000
    return exif.tobytes().removeprefix(b"Exif\0\0")


STRANGE = {
    "scans": many_scans(5_000),
    "segments": jpeg_with(b"\xff\xfe\0\2" * 300_000),
    "fill bytes": jpeg_with(b"\xff" * 1_000_000),
    "joined exif": jpeg_with(exif_segments(directory(60_000, 1_000_000))),
    "tiff directory": directory(60_000, 5_000_000),
    "tiff strips": directory(1, 8_000_000, kind=4),
    "png chunks": png_with(*[(b"prIv", b"")] * 300_000),
    "png text": png_with((b"zTXt", b"c\0\0" + zlib.compress(bytes(100_000_000)))),
    "gif comment": gif_with_comment(20_000),
    "gif bytes": GIF[:6] + struct.pack("<HHBBB", 8, 8, 0, 0, 0) + b"\x01" * 1_000_000,
    "plain ppm": b"P3 4000 4000 255\n" + b"1 " * 8_000_000,
    "ppm comments": b"P3 400 400 255\n" + b"#\n" * 500_000,
    "ppm header": b"P6 #" + b"a" * 50_000_000 + b"\n2 2 255\n" + bytes(12),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_a_file_made_to_take_long_is_refused_with_a_reason(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("decoded"))
    with pytest.raises(UnreadableImage, match=r"\w+"):
        decoded(STRANGE[kind])


@pytest.mark.parametrize(
    "data",
    [
        png_with((b"eXIf", directory(60_000, 1_000_000))),
        png_with(
            (
                b"zTXt",
                b"Raw profile type exif\0\0" + zlib.compress(b"\nexif\n9\n" + directory(9_000, 200_000).hex().encode()),
            )
        ),
    ],
)
def test_a_png_whose_exif_is_such_a_directory_is_read_without_it(data: bytes) -> None:
    assert decoded(data)[:, 0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize(
    "data",
    [
        many_scans(60),
        jpeg_with(b"\xff\xfe\0\2" * 500),
        jpeg_with(exif_segments(long_exif())),
        png_with(*[(b"prIv", b"x")] * 500),
        gif_with_comment(100),
        encoded(Image.new("RGB", (300, 300)), "TIFF", tiffinfo={270: "x" * 100_000}),
        b"P3 # a comment\n2 1 255\n1 2 3 4 5 6\n",
        b"P6 " + b"# lines\n" * 50 + b"200 200 255\n" + bytes(120_000),
    ],
)
def test_unusual_but_bounded_files_are_read(data: bytes) -> None:
    assert decoded(data).shape[0] == 3


def test_pixels_are_limited_by_the_rules_and_a_panorama_passes() -> None:
    panorama = encoded(Image.new("L", (12_000, 6_000)), "JPEG")
    assert decoded(panorama).shape == (3, 512, 1024)
    with pytest.raises(UnreadableImage, match=r"12000 x 6000.*max_megapixels"):
        decoded(panorama, ReadRules(max_megapixels=71))
    small = ReadRules(max_megapixels=71)
    with pytest.raises(UnreadableImage, match="max_megapixels"):  # massl plan looks at headers only
        image_size(EncodedImage(data=panorama, label=None, key="x", rules=small))
    assert image_size(EncodedImage(data=panorama, label=None, key="x", rules=ReadRules())) == (6_000, 12_000)


def test_pillows_own_limit_does_not_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000)  # an error at twice as many
    assert decoded(encoded(Image.new("1", (100, 100)), "PNG")).shape == (3, 100, 100)


def test_a_sparse_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "huge.jpg").open("wb") as file:
        file.truncate(6 * 2**30)
    (tmp_path / "small.jpg").write_bytes(b"x" * 3 * 2**20)
    source = open_source(tmp_path)
    with pytest.raises(OSError, match=r"6,144 MiB.*max_file_mib"):
        source.read(0)
    assert len(source.read(1).data) == 3 * 2**20
    with pytest.raises(OSError, match="max_file_mib"):
        open_source(tmp_path, rules=ReadRules(max_file_mib=2)).read(1)


def test_a_file_that_became_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.jpg")
    start = time.monotonic()
    with pytest.raises(OSError, match="not a file"):
        read_file(tmp_path / "x.jpg", ReadRules())
    assert time.monotonic() >= start


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "PA"])
def test_large_images_with_transparency_are_composed_in_strips_to_the_same_pixels(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    picture = Image.fromarray(random.integers(0, 256, (61, 47, 4), dtype=np.uint8))
    picture = picture.convert(mode) if mode != "P" else picture.convert("RGB").quantize(16)
    options = {"transparency": 3} if mode == "P" else {}
    data = encoded(picture, "TIFF" if mode == "PA" else "PNG", **options) if mode != "PA" else None
    whole = decode_module._as_rgb(Image.open(io.BytesIO(data)) if data else picture)
    monkeypatch.setattr(decode_module, "_STRIP_PIXELS", 47 * 7)
    assert decode_module._as_rgb(Image.open(io.BytesIO(data)) if data else picture).tobytes() == whole.tobytes()
