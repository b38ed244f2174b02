import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from torch import Tensor

from massl.data.sources.base import DataError
from massl.evaluations.base import EvaluationData
from massl.evaluations.features import ExtractionSettings, Extractor
from massl.evaluations.measurement import EvaluationError
from massl.evaluations.protocols.backgrounds import (
    CLASSES_OF_GROUPS,
    BackgroundsSettings,
    group_of_classes,
    measure_backgrounds,
)
from massl.nn.backbone import Backbone
from massl.weights.models import LoadedModel

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FOLDERS = [f"{number:02d}_{name}" for number, name in enumerate(CLASSES_OF_GROUPS)]
SIZE = 16


@pytest.fixture(scope="module")
def model() -> Any:
    arguments: dict[str, Any] = {
        "img_size": SIZE,
        "patch_size": 8,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 2,
        "num_classes": 0,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", **arguments).eval()
    return Backbone(model, timm_arguments={"model_name": "vit_tiny_patch16_224", **arguments})


@pytest.fixture
def extractor(model: Any) -> Extractor:
    loaded = LoadedModel(
        backbone=model, name="tiny", origin="random", fingerprint="weights of tiny", image_size=SIZE, mean=MEAN, std=STD
    )
    settings = ExtractionSettings(batch_size=10, num_workers=0)
    return Extractor(model=loaded, settings=settings, device=torch.device("cpu"), cache=None)


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """Three variants of 2 images in each of 9 groups."""
    generator = np.random.default_rng(0)
    for variant in ("original", "mixed_same", "mixed_rand"):
        for folder in FOLDERS:
            (tmp_path / "in9" / variant / "val" / folder).mkdir(parents=True)
            for number in range(2):
                pixels = generator.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "in9" / variant / "val" / folder / f"{number}.JPEG", quality=95)
    return tmp_path / "in9"


def save_head(
    path: Path,
    *,
    num_classes: int = 1000,
    feature: str = "cls",
    backbone: str = "weights of tiny",
    view_size: int = SIZE,
    remark: str = "",
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(num_classes, 24, generator=generator), torch.randn(num_classes, generator=generator)
    bias[group_of_classes()[:num_classes] < 0] -= 5.0  # most classes that are chosen belong to a group
    class_names = json.dumps([str(number) for number in range(num_classes)])
    metadata = {
        "feature": feature,
        "class_names": class_names,
        "backbone": backbone,
        "view_size": str(view_size),
        "remark": remark,
    }
    safetensors.torch.save_file({"weight": weight, "bias": bias}, path, metadata=metadata)
    return weight, bias


def data_of(release: Path) -> EvaluationData:
    return EvaluationData(name="ImageNet-9", folder=release, output=release.parent)


def test_the_groups_are_those_of_imagenet_9() -> None:
    groups = group_of_classes().tolist()
    assert len(groups) == 1000
    assert Counter(groups) == {0: 116, 1: 52, 2: 42, 3: 36, 4: 35, 5: 27, 6: 26, 7: 20, 8: 16, -1: 630}
    # Great white shark, robin, box turtle, chihuahua, Mexican hairless, grey wolf, monarch, orangutan, ambulance,
    # accordion.
    assert [groups[index] for index in (2, 15, 37, 151, 268, 269, 323, 365, 407, 401)] == [8, 1, 3, 0, 0, 4, 5, 7, 2, 6]
    # Axolotl, trilobite, tabby cat, crane (the machine), teddy bear, toilet tissue.
    assert {groups[index] for index in (29, 69, 281, 517, 850, 999)} == {-1}


def test_an_image_is_right_when_the_best_of_all_classes_lies_in_its_group(extractor: Extractor, release: Path) -> None:
    weight, bias = save_head(release.parent / "linear_head.safetensors")
    found = {
        str(measurement.setting): measurement
        for measurement in measure_backgrounds(extractor, data_of(release), BackgroundsSettings())
    }
    assert list(found) == ["original", "mixed_same", "mixed_rand", "BG-GAP"]
    members = {
        name: {
            number for part in ranges.split() for number in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)
        }
        for name, ranges in CLASSES_OF_GROUPS.items()
    }
    for variant in ("original", "mixed_same", "mixed_rand"):
        num_right = 0
        for folder, name in zip(FOLDERS, CLASSES_OF_GROUPS, strict=True):
            for file in (release / variant / "val" / folder).iterdir():
                image = torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) / 255
                normalised = (image - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
                with torch.inference_mode():
                    feature = extractor.model.backbone.model(normalised[None])[0]
                num_right += int(torch.argmax(weight @ feature + bias)) in members[name]
        assert found[variant].value == pytest.approx(100 * num_right / 18)
        assert (found[variant].num_samples, found[variant].metric, found[variant].data) == (18, "top1", "ImageNet-9")
    assert any(found[variant].value > 0 for variant in found)
    assert found["BG-GAP"].value == found["mixed_same"].value - found["mixed_rand"].value


def test_a_head_elsewhere_can_be_named(extractor: Extractor, release: Path) -> None:
    save_head(release.parent / "other.safetensors")
    settings = BackgroundsSettings(head=str(release.parent / "other.safetensors"))
    assert len(list(measure_backgrounds(extractor, data_of(release), settings))) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_classes": 10}, "10 classes.*1000"),
        (
            {"backbone": "others"},
            "another model than tiny",
        ),
        ({"view_size": 448}, "448 px.*--image_size"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    changes: dict[str, Any], message: str, extractor: Extractor, release: Path
) -> None:
    save_head(release.parent / "linear_head.safetensors", **changes)
    with pytest.raises(EvaluationError, match=message):
        list(measure_backgrounds(extractor, data_of(release), BackgroundsSettings()))


def test_what_was_not_as_published_in_the_training_of_the_head_stands_in_every_result(
    extractor: Extractor, release: Path
) -> None:
    save_head(release.parent / "linear_head.safetensors", remark=", epochs 2")
    found = list(measure_backgrounds(extractor, data_of(release), BackgroundsSettings()))
    assert found
    assert all(str(measurement.setting).endswith(", epochs 2") for measurement in found)


def test_another_feature_than_that_of_the_head_is_refused(extractor: Extractor, release: Path) -> None:
    save_head(release.parent / "linear_head.safetensors")
    other = replace(extractor, feature="cls_mean")
    with pytest.raises(EvaluationError, match="was trained on the feature cls; leave --feature cls_mean out"):
        list(measure_backgrounds(other, data_of(release), BackgroundsSettings()))


def test_without_a_head_the_advice_is_to_train_one(extractor: Extractor, release: Path) -> None:
    with pytest.raises(EvaluationError, match="there is no linear head at"):
        list(measure_backgrounds(extractor, data_of(release), BackgroundsSettings()))


def test_folders_that_are_not_the_release_are_refused(extractor: Extractor, release: Path) -> None:
    save_head(release.parent / "linear_head.safetensors")
    with pytest.raises(DataError, match="holds no variant of ImageNet-9; expected original, only_fg, mixed_same"):
        list(
            measure_backgrounds(
                extractor,
                EvaluationData(name="", folder=release / "original", output=release.parent),
                BackgroundsSettings(),
            )
        )
    for file in (release / "original" / "val" / FOLDERS[4]).iterdir():
        file.unlink()
    with pytest.raises(DataError, match="has 8 class folders with images instead of 9"):
        list(measure_backgrounds(extractor, data_of(release), BackgroundsSettings()))
