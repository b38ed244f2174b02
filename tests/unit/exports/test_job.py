import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.transforms_factory import create_transform

from massl.data.sources.base import DataError
from massl.exports.job import ExportError, ExportJob, Preparation, check_features, chosen_size
from massl.weights.models import open_model
from massl.weights.transform import ImageTransform

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


@pytest.mark.parametrize("size", [32, 64, 96, 112, 224])
@pytest.mark.parametrize("ratio", [224 / 256, 0.9, 1.0])
def test_timm_resizes_to_the_same_side_as_massl(size: int, ratio: float) -> None:
    resized = round(size / ratio)
    config = Preparation(size=(size, size), resized=resized, mean=MEAN, std=STD).for_timm()
    assert math.floor(size / config["crop_pct"]) == resized


@pytest.mark.parametrize("shape", [(90, 120), (131, 77)])
def test_timm_prepares_an_image_as_massl_but_for_rounding(shape: tuple[int, int]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (*shape, 3)).astype(np.uint8)
    ours = ImageTransform(image_size=48, crop_ratio=224 / 256, mean=MEAN, std=STD)(noise)
    config = Preparation(size=(48, 48), resized=round(48 / (224 / 256)), mean=MEAN, std=STD).for_timm()
    theirs = create_transform(**config)(Image.fromarray(noise))
    assert (ours - theirs).abs().max() <= 1.01 / 255 / min(STD)


@pytest.mark.parametrize(
    ("given", "expected"), [("", (32, 32)), ("96", (96, 96)), ("96x160", (96, 160)), ("8X8", (8, 8))]
)
def test_sizes_are_read(tiny_run: Path, given: str, expected: tuple[int, int]) -> None:
    assert chosen_size(open_model(tiny_run), given) == expected


@pytest.mark.parametrize("given", ["0", "-8", "axb", "8x8x8", "x8", "9000", "8.0", "²"])
def test_other_sizes_are_refused(tiny_run: Path, given: str) -> None:
    with pytest.raises(ExportError, match="--image_size"):
        chosen_size(open_model(tiny_run), given)


def test_sizes_are_whole_patches(tiny_run: Path) -> None:
    with pytest.raises(DataError, match="choose 88 or 96"):
        chosen_size(open_model(tiny_run), "90")


def test_other_features_are_an_error(tiny_run: Path) -> None:
    model = open_model(tiny_run)
    job = ExportJob(model=model, size=(32, 32))
    same = check_features(job, lambda images: model.backbone(images).pooled, [(32, 32), (16, 40)], tolerance=1e-5)
    assert same == 0.0
    for wrong in (lambda found: found + 1e-3, lambda found: found[:, :-1], lambda found: found * torch.nan):
        with pytest.raises(ExportError, match="nothing was written"):
            check_features(
                job, lambda images, wrong=wrong: wrong(model.backbone(images).pooled), [(32, 32)], tolerance=1e-5
            )
