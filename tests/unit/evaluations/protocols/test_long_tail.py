from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch

from massl.data.evaluation.subsets import long_tail_choice, long_tail_counts
from massl.data.sources.array import ArraySource
from massl.data.sources.base import DataError
from massl.data.sources.subset import SubsetSource
from massl.evaluations.base import EvaluationData
from massl.evaluations.features import ExtractionSettings, Extractor
from massl.evaluations.measurement import Measurement
from massl.evaluations.protocols.linear import LinearSettings, held_out_of, prepare_probe, train_heads
from massl.evaluations.protocols.linear_training import PUBLISHED
from massl.evaluations.protocols.long_tail import LongTailSettings, accuracy_by_group, measure_long_tail
from massl.nn.backbone import Backbone
from massl.weights.models import LoadedModel

NUM_CLASSES = 3
LINEAR = LinearSettings(epochs=2, batch_size=32, base_rates=(0.01, 1.0), crops="centre", held_out=0.2)
REMARK = ", centre crops, 2 epochs"
BEST, HONEST = "best over rates and epochs", "rate chosen on held-out images"


def pictures(labels: list[int], *, seed: int) -> ArraySource:
    """An image is, under much noise, mostly red, green or blue, which is its label."""
    pixels = np.random.default_rng(seed).normal(60, 300, size=(len(labels), 16, 16, 3))
    pixels[np.arange(len(labels)), :, :, labels] += 90
    names = ("red", "green", "blue")
    return ArraySource(
        name="pictures",
        pixels=pixels.clip(0, 255).astype(np.uint8),
        labels=np.array(labels),
        class_names=names,
        key_prefix="picture",
    )


@pytest.fixture
def extractor() -> Extractor:
    arguments: dict[str, Any] = {
        "img_size": 16,
        "patch_size": 8,
        "embed_dim": 24,
        "depth": 4,
        "num_heads": 2,
        "num_classes": 0,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", **arguments).eval()
    loaded = LoadedModel(
        backbone=Backbone(model, timm_arguments={"model_name": "vit_tiny_patch16_224", **arguments}),
        name="tiny",
        origin="random weights",
        fingerprint="tiny",
        image_size=16,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
    )
    settings = ExtractionSettings(batch_size=200, num_workers=0)
    return Extractor(model=loaded, settings=settings, device=torch.device("cpu"), cache=None)


def test_classes_are_grouped_by_their_training_images_at_the_published_bounds() -> None:
    num_train_images = torch.tensor([101, 100, 20, 19, 5])
    labels = torch.tensor([0, 0, 1, 1, 2, 3, 3, 4, 4, 4])
    predicted = torch.tensor([0, 1, 1, 1, 0, 3, 0, 4, 4, 0])
    scores = accuracy_by_group(predicted, labels, num_train_images)
    assert scores == {"many": (50.0, 2), "medium": (pytest.approx(200 / 3), 3), "few": (60.0, 5)}
    assert list(accuracy_by_group(predicted[:2], labels[:2], num_train_images)) == ["many"]


def test_a_long_tailed_set_is_scored_whole_and_by_groups(extractor: Extractor, tmp_path: Path) -> None:
    train = pictures([0] * 105 + [1] * 30 + [2] * 12, seed=1)
    test = pictures([0, 1, 2] * 15, seed=2)
    data = EvaluationData(name="Pictures-LT", train=train, test=test, output=tmp_path)
    measurements = list(measure_long_tail(extractor, data, LongTailSettings(linear=LINEAR)))
    assert {(found.data, found.metric) for found in measurements} == {("Pictures-LT", "top1")}
    by_setting: dict[str, Measurement] = {str(found.setting): found for found in measurements}
    groups = [", many", ", medium", ", few"]
    last = [f"last epoch, best over rates{REMARK}", f"last epoch, rate chosen on held-out images{REMARK}"]
    assert set(by_setting) == {f"{name}{group}{REMARK}" for name in (BEST, HONEST) for group in ("", *groups)} | set(
        last
    )
    probe = prepare_probe(extractor, data, LINEAR)
    trained = train_heads(probe, train, held_out=held_out_of(probe, train))
    assert by_setting[BEST + REMARK].value == float(trained.test_top1.max())
    assert by_setting[last[0]].value == float(trained.test_top1[-1].max())
    for name in (BEST, HONEST):
        assert by_setting[name + REMARK].num_samples == 45
        head = trained.chosen[PUBLISHED if name == BEST else name]
        predicted = (probe.test.rows @ head.weights.T + head.bias).argmax(dim=1)
        for label, group in enumerate(groups):  # each class is a group of its own
            found = by_setting[f"{name}{group}{REMARK}"]
            assert found.num_samples == 15
            assert found.value == pytest.approx(100 * float((predicted[label::3] == label).double().mean()))
    assert len({by_setting[BEST + group + REMARK].value for group in groups}) > 1


def test_a_long_tail_is_cut_from_a_balanced_set_and_said_so(extractor: Extractor, tmp_path: Path) -> None:
    train = pictures([0, 1, 2] * 30, seed=1)
    data = EvaluationData(name="Pictures", train=train, test=pictures([0, 1, 2] * 15, seed=2), output=tmp_path)
    settings = LongTailSettings(make=True, largest=30, smallest=4, linear=LINEAR)
    found = {
        str(measurement.setting): measurement.value for measurement in measure_long_tail(extractor, data, settings)
    }
    made = ", 30 to 4 images per class"
    counts = long_tail_counts(NUM_CLASSES, largest=30, smallest=4)
    assert counts[0] == 30
    assert counts[-1] == 4
    indices = long_tail_choice(torch.tensor([0, 1, 2] * 30), counts, key=(0, "long tail"))
    trained = train_heads(
        prepare_probe(extractor, data, LINEAR), SubsetSource(train, indices, name="tail"), held_out=None
    )
    assert found[BEST + made + REMARK] == float(trained.test_top1.max())
    assert f"{BEST}, medium{made}{REMARK}" in found
    assert not any("many" in setting for setting in found)


def test_a_tail_that_the_set_is_too_small_for_is_refused(extractor: Extractor, tmp_path: Path) -> None:
    data = EvaluationData(
        name="Pictures", train=pictures([0, 1, 2] * 5, seed=1), test=pictures([0, 1, 2], seed=2), output=tmp_path
    )
    with pytest.raises(DataError, match="fewer images than requested"):
        list(measure_long_tail(extractor, data, LongTailSettings(make=True, linear=LINEAR)))
