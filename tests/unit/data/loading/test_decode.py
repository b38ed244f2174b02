import io
import re
import struct
import warnings
import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, TiffImagePlugin
from torch import Tensor

import massl.data.loading.decode as decode_module
from massl.data.loading.decode import UnreadableImage, decode
from massl.data.sources.base import EncodedImage, Pixels
from massl.data.sources.rules import MAX_MEGAPIXELS, PixelRanges, ReadRules

RED, GREY, WHITE = (255, 0, 0), (128, 128, 128), (255, 255, 255)


def gradient(height: int, width: int) -> Pixels:  # -> [H, W, 3], different at every pixel and under every turn
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 255 // height, columns * 255 // width, (rows + 2 * columns) % 256], axis=2).astype(np.uint8)


def encoded(image: Image.Image, file_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def decoded(data: bytes | Pixels, max_side: int = 1024) -> Tensor:
    return decode(EncodedImage(data=data, label=None, key="x"), max_side=max_side)


def first_pixel(data: bytes) -> tuple[int, ...]:
    return tuple(decoded(data)[:, 0, 0].tolist())


def planes(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image).transpose(2, 0, 1).copy())


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_is_turned_upright(file_format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if file_format == "WEBP" else {}
    data = encoded(Image.fromarray(gradient(24, 16)), file_format, exif=exif, **options)
    with Image.open(io.BytesIO(data)) as reference:
        expected = planes(ImageOps.exif_transpose(reference))
    result = decoded(data)
    assert torch.equal(result, expected)
    assert result.shape == ((3, 16, 24) if orientation >= 5 else (3, 24, 16))


@pytest.mark.parametrize(
    ("file_format", "mode"),
    [("JPEG", "RGB"), ("JPEG", "CMYK"), ("PNG", "RGB"), ("WEBP", "RGB"), ("TIFF", "RGB"), ("TIFF", "CMYK")],
)
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_an_image_wanted_as_stored_is_what_pillow_loads(file_format: str, mode: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(gradient(24, 16)).convert(mode), file_format, exif=exif)
    with Image.open(io.BytesIO(data)) as reference:
        expected = planes(reference.convert("RGB"))
    result = decode(EncodedImage(data=data, label=None, key="x", turn_upright=False), max_side=1024)
    assert torch.equal(result, expected)
    if file_format != "TIFF":  # which Pillow turns by itself
        assert result.shape == (3, 24, 16)


def test_the_fast_path_takes_a_jpeg_that_lies_on_its_side_if_it_is_wanted_so() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(Image.fromarray(gradient(24, 16)), "JPEG", exif=exif)
    fast = decode_module._decode_plain_jpeg(data, 1024, turn_upright=False)
    assert fast is not None
    assert torch.equal(fast, planes(Image.open(io.BytesIO(data))))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")  # as in a user's program, where Pillow's warning stops nothing
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("exif", [b"MM\0\x2a\xff\xff\xff\xff", b"MM\0\x2a\0", b"nonsense"])
def test_damaged_exif_does_not_lose_the_image(file_format: str, exif: bytes) -> None:
    image = Image.fromarray(gradient(8, 8))
    assert torch.equal(
        decoded(encoded(image, file_format, exif=b"Exif\0\0" + exif)), decoded(encoded(image, file_format))
    )


@pytest.mark.parametrize("mode", ["L", "1"])
def test_grey_and_one_bit_images_fill_three_channels(mode: str) -> None:
    image = Image.fromarray(gradient(5, 7)).convert(mode)
    assert torch.equal(decoded(encoded(image, "PNG")), planes(image.convert("RGB")))


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("RGBA", (255, 0, 0, 255), RED),
        ("RGBA", (255, 0, 0, 0), WHITE),
        ("LA", (128, 255), GREY),
        ("LA", (0, 0), WHITE),
        ("RGBA", (0, 0, 0, 127), (128,) * 3),
    ],
)
def test_transparent_parts_lie_on_white(mode: str, colour: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert first_pixel(encoded(Image.new(mode, (3, 2), colour), "PNG")) == expected


def test_a_palette_is_looked_up_and_its_transparent_colour_is_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    for file_format in ("PNG", "GIF"):
        assert decoded(encoded(image, file_format))[:, 0].T.tolist() == [list(RED), [0, 0, 255]]
        assert decoded(encoded(image, file_format, transparency=1))[:, 0].T.tolist() == [list(RED), list(WHITE)]
    by_entry = encoded(image, "PNG", transparency=bytes([0, 255]))  # one alpha for each entry of the palette
    assert decoded(by_entry)[:, 0].T.tolist() == [list(WHITE), [0, 0, 255]]


def test_a_transparent_colour_of_an_rgb_png_is_white() -> None:
    assert first_pixel(encoded(Image.new("RGB", (2, 2), RED), "PNG", transparency=RED)) == WHITE


@pytest.mark.parametrize("file_format", ["JPEG", "TIFF"])
def test_cmyk_shows_the_colour_it_prints(file_format: str) -> None:
    # Pillow stores CMYK JPEGs inverted with an Adobe marker, as Photoshop does; TIFF stores them as they are.
    data = encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), file_format)
    assert (b"Adobe" in data) == (file_format == "JPEG")
    red, green, blue = first_pixel(data)
    assert red > 250
    assert max(green, blue) < 5


@pytest.mark.parametrize("file_format", ["PNG", "TIFF", "PPM"])
def test_sixteen_bit_grey_is_scaled_not_clipped(file_format: str) -> None:
    values = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    assert decoded(encoded(Image.fromarray(values), file_format)).tolist() == [[[0, 1, 128, 255]]] * 3


AS_BEFORE = PixelRanges(of_each_image=True)


def deep(values: np.ndarray, ranges: PixelRanges, file_format: str = "TIFF") -> list[int]:
    data = encoded(Image.fromarray(values), file_format)
    image = EncodedImage(data=data, label=None, key="x", rules=ReadRules(ranges=ranges))
    return decode(image, max_side=1024)[0, 0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("values", "ranges", "expected"),
    [
        (np.array([[0, 65535, 257]], dtype=np.int32), PixelRanges(), [0, 255, 1]),
        (np.array([[0, 4095, 2048]], dtype=np.uint16), PixelRanges(integers=(0, 4095)), [0, 255, 128]),
        (np.array([[0, 4095, 2048]], dtype=np.int32), PixelRanges(integers=(0, 4095)), [0, 255, 128]),
        (np.array([[-1000, 400, 2000]], dtype=np.int32), PixelRanges(stated=(-1000, 400)), [0, 255, 255]),
        (np.array([[0.0, 1.0, 0.6]], dtype=np.float32), PixelRanges(), [0, 255, 153]),
        (np.array([[-0.02, 1.04, 0.6]], dtype=np.float32), PixelRanges(), [0, 255, 153]),
        (np.array([[0.0, 200.0, 40.0]], dtype=np.float32), PixelRanges(floats=(0, 255)), [0, 200, 40]),
        (np.array([[0.0, 0.5, 1.0]], dtype=np.float32), PixelRanges(floats=(0, 255)), [0, 0, 1]),
        (np.array([[np.nan, np.inf, 1.0]], dtype=np.float32), PixelRanges(), [0, 0, 255]),
        # as runs read them that began before
        (np.array([[-100, 50, 100]], dtype=np.int32), AS_BEFORE, [0, 191, 255]),
        (np.array([[0, 1_000_000, 600_000]], dtype=np.int32), AS_BEFORE, [0, 255, 153]),
        (np.array([[0.0, 1000.0, 600.0]], dtype=np.float32), AS_BEFORE, [0, 255, 153]),
        (np.array([[0, 4095, 2048]], dtype=np.uint16), AS_BEFORE, [0, 16, 8]),
    ],
)
def test_wide_integers_and_floats_are_scaled_by_the_range_of_their_source(
    values: np.ndarray, ranges: PixelRanges, expected: list[int]
) -> None:
    assert deep(values, ranges) == expected


@pytest.mark.parametrize(
    ("values", "ranges"),
    [
        (np.array([[0, 70_000]], dtype=np.int32), PixelRanges()),
        (np.array([[-1, 5]], dtype=np.int32), PixelRanges()),
        (np.array([[0, 4096]], dtype=np.uint16), PixelRanges(integers=(0, 4095))),
        (np.array([[0.0, 200.0]], dtype=np.float32), PixelRanges()),
        (np.array([[0.0, 1.2]], dtype=np.float32), PixelRanges(floats=(0, 1))),
    ],
)
def test_an_image_outside_the_range_of_its_source_is_refused_not_guessed(
    values: np.ndarray, ranges: PixelRanges
) -> None:
    with pytest.raises(UnreadableImage, match="pixel_range"):
        deep(values, ranges)


def tiff(values: np.ndarray, **tags: int) -> bytes:
    info = TiffImagePlugin.ImageFileDirectory_v2()
    for number, value in tags.items():
        info[int(number.removeprefix("tag_"))] = value
    return encoded(Image.fromarray(values), "TIFF", tiffinfo=info)


def test_a_file_that_knows_its_bit_depth_is_read_by_it() -> None:
    values = np.array([[0, 4095, 2048]], dtype=np.uint16)
    assert decoded(tiff(values, tag_281=4095))[0, 0].tolist() == [0, 255, 128]
    assert decoded(tiff(values, tag_281=4090))[0, 0].tolist() == [0, 16, 8]  # a statistic, no bit depth
    pgm = b"P5 3 1 4095\n" + values.astype(">u2").tobytes()
    assert decoded(pgm)[0, 0].tolist() == [0, 255, 128]
    packed = bytes.fromhex("000fff8000")  # 0, 4095, 2048 in 12 bits each
    entries = [(256, 3, 3), (257, 3, 1), (258, 3, 12), (259, 3, 1), (262, 3, 1), (273, 4, 200), (277, 3, 1)]
    entries += [(278, 3, 1), (279, 4, 5)]
    directory = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    header = b"II*\0" + struct.pack("<IH", 8, len(entries)) + directory + bytes(4)
    assert decoded(header.ljust(200, b"\0") + packed)[0, 0].tolist() == [0, 255, 128]


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_frame_is_taken(file_format: str) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, WHITE)]
    options = {"lossless": True} if file_format == "WEBP" else {}
    assert first_pixel(encoded(frames[0], file_format, save_all=True, append_images=frames[1:], **options)) == RED


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "BMP", "PPM", "GIF", "WEBP"])
def test_a_single_pixel_is_an_image(file_format: str) -> None:
    assert decoded(encoded(Image.new("RGB", (1, 1), WHITE), file_format)).tolist() == [[[255]]] * 3


@pytest.mark.parametrize("shape", [(1, 1), (5, 4)])
def test_raw_pixels_are_taken_as_they_are_and_not_shared(shape: tuple[int, int]) -> None:
    colour = gradient(*shape)
    colour.setflags(write=False)
    result = decoded(colour)
    assert torch.equal(result, torch.from_numpy(colour.transpose(2, 0, 1).copy()))
    result.fill_(7)
    assert np.array_equal(colour, gradient(*shape))
    grey = colour[:, :, 1]
    assert torch.equal(decoded(grey), torch.from_numpy(grey.copy()).expand(3, *shape))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "raw"])
@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((400, 200), (100, 50)),
        ((90, 300), (30, 100)),
        ((100, 100), (100, 100)),
        ((1000, 1), (100, 1)),
        ((1, 1000), (1, 100)),
    ],
)
def test_a_long_side_is_reduced_to_the_limit(kind: str, size: tuple[int, int], expected: tuple[int, int]) -> None:
    height, width = size
    pixels = gradient(height, width)
    data = pixels if kind == "raw" else encoded(Image.fromarray(pixels), kind)
    assert tuple(decoded(data, max_side=100).shape[1:]) == expected


@pytest.mark.parametrize("file_format", ["JPEG", "PNG"])
def test_a_reduced_image_still_looks_like_itself(file_format: str) -> None:
    smooth = Image.fromarray(gradient(40, 60)[:, :, :2].repeat(2, axis=2)[:, :, :3].copy()).resize(
        (600, 400), Image.Resampling.BICUBIC
    )
    expected = planes(smooth.resize((150, 100), Image.Resampling.LANCZOS)).float()
    difference = (decoded(encoded(smooth, file_format), max_side=150).float() - expected).abs()
    assert difference.mean() < 2


def test_a_turned_image_is_reduced_and_turned() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decoded(encoded(Image.fromarray(gradient(100, 400)), "JPEG", exif=exif), max_side=200).shape == (3, 200, 50)


def test_truncated_foreign_and_empty_files_are_unreadable_with_a_reason() -> None:
    for file_format in ("JPEG", "PNG", "TIFF", "WEBP", "GIF"):
        whole = encoded(Image.fromarray(gradient(64, 64)), file_format)
        with pytest.raises(UnreadableImage, match=r"\w+"):
            decoded(whole[: len(whole) // 2])
    for foreign in (b"", b"no image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n"):
        with pytest.raises(UnreadableImage, match="no image in a known format"):
            decoded(foreign)


def png_claiming(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header claims a size."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("height", [MAX_MEGAPIXELS * 100 + 1, 10_000_000])
def test_a_decompression_bomb_is_refused_from_its_header(height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in a user's program, where Pillow's warning stops nothing
        with pytest.raises(UnreadableImage, match=r"max_megapixels|exceeds limit"):
            decoded(png_claiming(10_000, height))
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # another library may have lifted Pillow's own limit
        with pytest.raises(UnreadableImage, match="max_megapixels"):
            decoded(png_claiming(10_000, height))


def photograph(height: int, width: int) -> Image.Image:
    small = np.random.default_rng(height).integers(0, 256, (height // 6 + 1, width // 6 + 1, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize(
    "options", [{"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}, {"progressive": True}, {"quality": 30}]
)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_the_fast_jpeg_path_gives_pillows_pixels(mode: str, options: dict[str, Any]) -> None:
    for size in ((61, 83), (64, 64), (7, 200), (1, 1)):
        data = encoded(photograph(*size).convert(mode), "JPEG", **options)
        fast = decode_module._decode_plain_jpeg(data, 1024)
        assert fast is not None
        assert torch.equal(fast, decode_module._decode_with_pillow(data, 1024))
        assert torch.equal(fast, planes(Image.open(io.BytesIO(data)).convert("RGB")))


def test_the_fast_path_leaves_what_is_not_plain_to_pillow() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = photograph(40, 60)
    unusual = [encoded(picture, "JPEG", exif=exif), encoded(picture.convert("CMYK"), "JPEG"), encoded(picture, "PNG")]
    assert all(decode_module._decode_plain_jpeg(data, 1024) is None for data in unusual)
    assert decode_module._decode_plain_jpeg(encoded(picture, "JPEG"), 59) is None
    assert decode_module._decode_plain_jpeg(encoded(picture, "JPEG")[:-20], 1024) is None


def test_jpegs_are_decoded_alike_where_the_fast_decoder_is_missing_or_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(photograph(40, 60), "JPEG")
    expected = decoded(data)

    def other_library(file: Tensor, mode: int, turn: bool) -> Tensor:
        return torch.zeros(3, 45, 53, dtype=torch.uint8)

    for operators in (SimpleNamespace(), SimpleNamespace(decode_jpeg=other_library)):
        decode_module._fast_jpeg_decoder.cache_clear()
        monkeypatch.setattr(torch.ops, "image", operators)
        assert decode_module._fast_jpeg_decoder() is None
        assert torch.equal(decoded(data), expected)
        monkeypatch.undo()
    decode_module._fast_jpeg_decoder.cache_clear()
    assert decode_module._fast_jpeg_decoder() is not None


def test_damaged_jpegs_are_judged_by_pillow_alone() -> None:
    rng = np.random.default_rng(0)
    whole = encoded(photograph(33, 47), "JPEG")
    for _ in range(300):
        damaged = bytearray(whole[: rng.integers(len(whole) // 2, len(whole) + 1)] if rng.random() < 0.3 else whole)
        for position in rng.integers(2, len(damaged), 2):
            damaged[position] = rng.integers(256)
        data = bytes(damaged)
        try:
            expected = decode_module._decode_with_pillow(data, 1024)
        except UnreadableImage as reason:
            with pytest.raises(UnreadableImage, match=re.escape(str(reason))):
                decoded(data)
        else:
            assert torch.equal(decoded(data), expected)
