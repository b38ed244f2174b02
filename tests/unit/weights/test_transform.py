from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from massl.config import MasslError
from massl.weights.transform import ImageTransform

MEAN, STD = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
TRANSFORM = ImageTransform(image_size=16, crop_ratio=0.8, mean=MEAN, std=STD)
PIXELS = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)


def test_an_image_is_resized_cropped_and_normalised() -> None:
    resized = Image.fromarray(PIXELS).resize((26, 20), Image.Resampling.BICUBIC).crop((5, 2, 21, 18))
    expected = (np.asarray(resized) / 255 - MEAN) / STD
    found = TRANSFORM(PIXELS)
    assert (found.shape, found.dtype) == ((3, 16, 16), torch.float32)
    # Pillow rounds to whole grey levels, after each axis
    np.testing.assert_allclose(found.permute(1, 2, 0).numpy(), expected, atol=1.5 / 255 / 0.4)


def test_arrays_pictures_and_files_of_an_image_give_the_same(tmp_path: Path) -> None:
    picture = Image.fromarray(PIXELS)
    picture.save(tmp_path / "a.png")
    for image in (picture, tmp_path / "a.png", str(tmp_path / "a.png"), Image.open(tmp_path / "a.png")):
        assert torch.equal(TRANSFORM(image), TRANSFORM(PIXELS))


def test_a_picture_is_turned_upright_as_its_file_is(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(PIXELS).save(tmp_path / "turned.jpg", exif=exif)
    from_file = TRANSFORM(tmp_path / "turned.jpg")
    assert torch.equal(TRANSFORM(Image.open(tmp_path / "turned.jpg")), from_file)
    assert not torch.equal(
        TRANSFORM(np.asarray(Image.open(tmp_path / "turned.jpg"))), from_file
    )  # an array has no EXIF


def test_transparent_parts_are_white() -> None:
    clear = Image.new("RGBA", (20, 20), (255, 0, 0, 0))
    assert torch.equal(TRANSFORM(clear), TRANSFORM(Image.new("RGB", (20, 20), "white")))


@pytest.mark.parametrize("image", [3.0, PIXELS / 255, PIXELS[None], "nowhere.png", torch.zeros(3, 8, 8)], ids=str)
def test_what_is_no_image_is_refused(image: object) -> None:
    with pytest.raises(MasslError):
        TRANSFORM(image)  # type: ignore[arg-type]


def test_a_stated_range_scales_images_of_more_than_8_bits(tmp_path: Path) -> None:
    values = (np.arange(32 * 32).reshape(32, 32) * 4).astype(np.uint16)  # to 4092
    Image.fromarray(values).save(tmp_path / "deep.png")
    Image.fromarray(np.rint(values * (255 / 4095)).astype(np.uint8)).save(tmp_path / "plain.png")
    stated = replace(TRANSFORM, pixel_range=(0, 4095))
    assert torch.equal(stated(tmp_path / "deep.png"), TRANSFORM(tmp_path / "plain.png"))
    assert not torch.equal(stated(tmp_path / "deep.png"), TRANSFORM(tmp_path / "deep.png"))
