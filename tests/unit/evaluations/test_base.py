from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from massl.data.sources.array import ArraySource
from massl.data.sources.base import DataError
from massl.data.sources.folder import FolderSource
from massl.evaluations.base import (
    EvaluationData,
    labels_of_images,
    require_finite,
    require_same_classes,
    required_labels,
)
from massl.evaluations.features import ExtractionSettings, Extractor
from massl.evaluations.measurement import EvaluationError
from massl.evaluations.protocols import PROTOCOLS
from massl.nn.backbone import Backbone
from massl.weights.models import LoadedModel


def array(
    labels: list[int] | None, *, name: str = "set", class_names: tuple[str, ...] | None = ("ant", "bee", "cat")
) -> ArraySource:
    num_images = 2 if labels is None else len(labels)
    numbers = None if labels is None else np.array(labels)
    return ArraySource(
        name=name,
        pixels=np.zeros((num_images, 16, 16), np.uint8),
        labels=numbers,
        class_names=class_names,
        key_prefix=name,
    )


def folder(root: Path, *classes: str, empty: tuple[str, ...] = ()) -> FolderSource:
    for name in (*classes, *empty):
        (root / name).mkdir(parents=True)
    for name in classes:
        Image.new("RGB", (4, 4)).save(root / name / "0.png")
    return FolderSource(root, name=root.name)


# ---- classes ---------------------------------------------------------------------------------------------------------


def test_the_number_of_classes_is_that_of_both_sources() -> None:
    assert require_same_classes(array([0, 1, 2, 2]), array([1, 0, 2])) == 3


def test_a_class_without_test_images_is_no_obstacle() -> None:
    assert require_same_classes(array([0, 1, 2]), array([0, 2])) == 3


def test_sources_without_labels_are_refused() -> None:
    unlabelled = array(None, name="photos", class_names=None)
    for train, test in ((unlabelled, array([0, 1, 2])), (array([0, 1, 2]), unlabelled)):
        with pytest.raises(DataError, match="photos has no labels"):
            require_same_classes(train, test)


def test_single_images_without_labels_are_counted() -> None:
    with pytest.raises(DataError, match="2 of 5 images of some have no label"):
        require_same_classes(array([0, 1, -1, 2, -1], name="some"), array([0, 1, 2]))
    with pytest.raises(DataError, match="1 of 2 images of others have no label"):
        require_same_classes(array([0, 1, 2]), array([0, -1], name="others"))


def test_classes_of_other_names_are_refused() -> None:
    with pytest.raises(DataError, match=r"class names of one and two differ: 'bee' and 'bat'$"):
        require_same_classes(
            array([0, 1, 2], name="one"), array([0, 1, 2], name="two", class_names=("ant", "bat", "cat"))
        )


def test_another_number_of_classes_is_refused() -> None:
    with pytest.raises(DataError, match=r"one has 3 classes, two has 2; both must have the same ones$"):
        require_same_classes(array([0, 1, 2], name="one"), array([0, 1], name="two", class_names=("ant", "bee")))


@pytest.mark.parametrize("empty_side", ["train", "test"])
def test_a_class_folder_without_images_on_one_side_is_named(tmp_path: Path, empty_side: str) -> None:
    full, short = (
        folder(tmp_path / "full", "ant", "bee", "cat"),
        folder(tmp_path / "short", "ant", "cat", empty=("bee",)),
    )
    train, test = (short, full) if empty_side == "train" else (full, short)
    with pytest.raises(DataError, match=r"has . classes, .* of short hold no images: bee;"):
        require_same_classes(train, test)


def test_class_folders_without_images_on_both_sides_are_named(tmp_path: Path) -> None:
    train, test = (
        folder(tmp_path / "train", "ant", "bee", empty=("cat",)),
        folder(tmp_path / "test", "ant", "cat", empty=("bee",)),
    )
    expected = r"'bee' and 'cat'.* of train hold no images: cat; .* of test hold no images: bee;"
    with pytest.raises(DataError, match=expected):
        require_same_classes(train, test)


def test_of_many_empty_folders_the_first_few_are_named(tmp_path: Path) -> None:
    classes = tuple("abcdefgh")
    with pytest.raises(DataError, match=r"hold no images: c, d, e, f, g \.\.\.;"):
        require_same_classes(
            folder(tmp_path / "train", "a", "b", empty=classes[2:]), folder(tmp_path / "test", *classes)
        )


def test_a_folder_that_is_empty_on_both_sides_is_no_class(tmp_path: Path) -> None:
    train, test = (folder(tmp_path / part, "ant", "bee", empty=("lost+found",)) for part in ("train", "test"))
    assert require_same_classes(train, test) == 2


def test_a_class_without_training_images_is_named() -> None:
    with pytest.raises(DataError, match=r"few has no image of 1 of its 3 classes \(bee\)"):
        require_same_classes(array([0, 2, 2], name="few"), array([0, 1, 2]))


def test_of_many_classes_without_training_images_the_first_few_are_named() -> None:
    names = tuple("abcdefghij")
    with pytest.raises(DataError, match=r"few has no image of 8 of its 10 classes \(b, c, d, e, f \.\.\.\)"):
        require_same_classes(array([0, 9], name="few", class_names=names), array([0], class_names=names))


@pytest.mark.parametrize("protocol", ["knn", "logreg", "linear", "low-shot", "long-tail"])
@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        ([0, 2, 0, 2], r"few has no image of 1 of its 3 classes \(bee\)|class 1 has 0 of 1"),
        ([0, 1, 2, -1], "1 of 4 images of few have no label"),
    ],
)
def test_protocols_refuse_training_images_that_lack_a_class_before_they_read_any(
    protocol: str, labels: list[int], problem: str, tmp_path: Path
) -> None:
    entry = PROTOCOLS[protocol]
    data = EvaluationData(name="Insects", train=array(labels, name="few"), test=array([0, 1, 2]), output=tmp_path)
    with pytest.raises(DataError, match=problem):
        list(entry.measure(_extractor_that_must_not_read(), data, entry.settings_type()))


def _extractor_that_must_not_read() -> Extractor:
    arguments: dict[str, Any] = {
        "img_size": 16,
        "patch_size": 8,
        "embed_dim": 16,
        "depth": 4,
        "num_heads": 2,
        "num_classes": 0,
    }
    backbone = Backbone(
        timm.create_model("vit_tiny_patch16_224", **arguments), timm_arguments={"model_name": "tiny", **arguments}
    )
    model = LoadedModel(
        backbone=backbone,
        name="tiny",
        origin="random",
        fingerprint="0",
        image_size=16,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )

    def fail(what: str, done: int, total: int) -> None:
        raise AssertionError(f"{what} were read before the labels were looked at")

    return Extractor(
        model=model, settings=ExtractionSettings(num_workers=0), device=torch.device("cpu"), cache=None, progress=fail
    )


# ---- labels and numbers ----------------------------------------------------------------------------------------------


def test_labels_of_images_are_read_without_the_images(tmp_path: Path) -> None:
    labels = labels_of_images(array([2, -1, 0]))
    assert labels.tolist() == [2, -1, 0]
    assert labels.dtype == torch.int64
    assert labels_of_images(array(None)).tolist() == [-1, -1]
    source = folder(tmp_path / "set", "ant", "bee")
    (tmp_path / "set" / "bee" / "0.png").unlink()
    assert labels_of_images(source).tolist() == [0, 1]


def test_required_labels_are_those_of_all_images() -> None:
    assert required_labels(array([0, 2, 1])).tolist() == [0, 2, 1]
    with pytest.raises(DataError, match="1 of 2 images of set have no label"):
        required_labels(array([0, -1]))
    with pytest.raises(DataError, match="photos has no labels"):
        required_labels(array(None, name="photos", class_names=None))


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("shape", [(3,), (2, 5), (2, 3, 3)])
def test_rows_that_are_not_finite_are_counted(broken: float, shape: tuple[int, ...]) -> None:
    rows = torch.ones(4, *shape)
    require_finite(rows, name="set")
    rows[1, 0] = rows[3, 0] = rows[3, 1] = broken
    with pytest.raises(EvaluationError, match="features of 2 of 4 images of set are not finite"):
        require_finite(rows, name="set")
