from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch.nn.functional import normalize

from massl.data.evaluation.subsets import balanced_choice, fraction_choice
from massl.data.evaluation.views import CentreView
from massl.data.sources.array import ArraySource
from massl.data.sources.base import DataError, ImageSource
from massl.data.sources.subset import SubsetSource
from massl.evaluations.base import EvaluationData
from massl.evaluations.features import ExtractionSettings, Extractor
from massl.evaluations.measurement import Setting
from massl.evaluations.protocols import low_shot
from massl.evaluations.protocols.knn import KnnSettings
from massl.evaluations.protocols.linear import LinearSettings, prepare_probe, train_heads
from massl.evaluations.protocols.logreg import LogisticSettings
from massl.evaluations.protocols.low_shot import LowShotSettings, measure_low_shot, share_name
from massl.nn.backbone import Backbone
from massl.weights.models import LoadedModel

NUM_CLASSES = 3
LINEAR = LinearSettings(epochs=2, batch_size=8, base_rates=(0.01, 1.0), crops="centre", held_out=0.2)
REMARK = ", centre crops, 2 epochs"
BEST = "best over rates and epochs"


def pictures(num_images: int, *, seed: int) -> ArraySource:
    """Image i is, under much noise, mostly red, green or blue, which is its label."""
    pixels = np.random.default_rng(seed).normal(60, 300, size=(num_images, 16, 16, 3))
    labels = np.arange(num_images) % NUM_CLASSES
    pixels[np.arange(num_images), :, :, labels] += 90
    names = ("red", "green", "blue")
    return ArraySource(
        name="pictures",
        pixels=pixels.clip(0, 255).astype(np.uint8),
        labels=labels,
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
    settings = ExtractionSettings(batch_size=50, num_workers=0)
    return Extractor(model=loaded, settings=settings, device=torch.device("cpu"), cache=None)


@pytest.fixture
def data(tmp_path: Path) -> EvaluationData:
    return EvaluationData(name="Pictures", train=pictures(60, seed=1), test=pictures(45, seed=2), output=tmp_path)


def measured(extractor: Extractor, data: EvaluationData, settings: LowShotSettings) -> dict[str, float]:
    measurements = list(measure_low_shot(extractor, data, settings))
    assert {(measurement.data, measurement.metric, measurement.num_samples) for measurement in measurements} == {
        ("Pictures", "top1", 45)
    }
    return {str(measurement.setting): measurement.value for measurement in measurements}


def class_tokens(extractor: Extractor, source: ImageSource) -> tuple[NDArray[Any], NDArray[Any]]:
    features = extractor.features(source, view=CentreView(size=16), feature="cls")
    return normalize(features.rows, dim=1).double().numpy(), features.labels.numpy()


def test_shares_are_scored_as_scikit_learn_scores_them(extractor: Extractor, data: EvaluationData) -> None:
    settings = LowShotSettings(
        fractions=(0.25, 0.5),
        scorers=("knn", "logreg"),
        per_class=(),
        knn=KnnSettings(ks=(5, 1000)),
        logreg=LogisticSettings(penalty=1e-3),
    )
    found = measured(extractor, data, settings)
    assert data.train is not None
    assert data.test is not None
    test, test_labels = class_tokens(extractor, data.test)
    for fraction, name in ((0.25, "25% (drawn)"), (0.5, "50% (drawn)")):
        indices = fraction_choice(torch.arange(60) % NUM_CLASSES, fraction=fraction, key=(0, "share"))
        rows, labels = class_tokens(extractor, SubsetSource(data.train, indices, name="share"))
        assert len(rows) == 60 * fraction
        for k, label in ((5, "k=5"), (len(rows), f"k=1000 (all {len(rows)} images)")):
            vote = KNeighborsClassifier(k, weights=lambda distances: np.exp((1 - distances**2 / 2) / 0.07)).fit(
                rows, labels
            )
            assert found[f"{name} knn {label}"] == pytest.approx(100 * vote.score(test, test_labels))
        assert found[f"{name} knn best k"] == max(
            found[f"{name} knn k=5"], found[f"{name} knn k=1000 (all {len(rows)} images)"]
        )
        regression = LogisticRegression(C=1 / (len(rows) * 1e-3), fit_intercept=False, tol=1e-8, max_iter=10_000).fit(
            rows, labels
        )
        assert found[f"{name} logreg lambda=0.001"] == pytest.approx(100 * regression.score(test, test_labels))
    assert len(found) == 2 * 4


def test_the_linear_score_of_a_share_is_that_of_the_linear_probe_on_it(
    extractor: Extractor, data: EvaluationData
) -> None:
    found = measured(
        extractor, data, LowShotSettings(fractions=(0.5,), scorers=("linear",), per_class=(), linear=LINEAR)
    )
    assert data.train is not None
    indices = fraction_choice(torch.arange(60) % NUM_CLASSES, fraction=0.5, key=(0, "share"))
    subset = SubsetSource(data.train, indices, name="half")
    trained = train_heads(prepare_probe(extractor, data, LINEAR), subset, held_out=None)
    assert found[f"50% (drawn) linear {BEST}{REMARK}"] == float(trained.test_top1.max())
    assert f"50% (drawn) linear rate chosen on held-out images{REMARK}" in found


def test_lists_replace_drawn_shares(extractor: Extractor, data: EvaluationData, tmp_path: Path) -> None:
    chosen = [3, 4, 5, 12, 13, 14, 33]
    (tmp_path / "10percent.txt").write_text("\n".join(map(str, chosen)))  # image 3 is picture/3
    settings = LowShotSettings(
        lists=(str(tmp_path / "10percent.txt"),), scorers=("knn",), per_class=(), knn=KnnSettings(ks=(1,))
    )
    found = measured(extractor, data, settings)
    assert list(found) == ["10% knn k=1", "10% knn best k"]
    assert data.train is not None
    assert data.test is not None
    rows, labels = class_tokens(extractor, SubsetSource(data.train, torch.tensor(chosen), name="listed"))
    nearest = KNeighborsClassifier(1).fit(rows, labels)
    assert found["10% knn k=1"] == pytest.approx(100 * nearest.score(*class_tokens(extractor, data.test)))


@pytest.mark.parametrize(("file", "name"), [("1percent.txt", "1%"), ("a/0.5percent.txt", "0.5%"), ("mine.txt", "mine")])
def test_shares_are_named_after_their_lists(file: str, name: str) -> None:
    assert share_name(Path(file)) == name


def test_a_few_images_per_class_are_scored_by_mean_and_sample_deviation_over_draws(
    extractor: Extractor, data: EvaluationData
) -> None:
    settings = LowShotSettings(fractions=(), per_class=(1, 2), draws=3, linear=LINEAR)
    found = measured(extractor, data, settings)
    assert len(found) == 2 * 4 * 2
    assert list(data.output.iterdir()) == []  # nothing is left of the trainings
    assert data.train is not None
    probe = prepare_probe(extractor, data, LINEAR)
    for num_per_class in (1, 2):
        best, last = [], []
        for draw in range(3):
            labels = torch.arange(60) % NUM_CLASSES
            indices = balanced_choice(labels, num_per_class=num_per_class, key=(0, "few per class", draw))
            trained = train_heads(probe, SubsetSource(data.train, indices, name="few"), held_out=None)
            best.append(float(trained.test_top1.max()))
            last.append(float(trained.test_top1[-1].max()))
        assert len(set(best)) > 1
        name = f"{num_per_class} per class linear"
        assert found[f"{name}{REMARK} mean"] == pytest.approx(sum(best) / 3)
        mean = sum(best) / 3
        assert found[f"{name}{REMARK} deviation"] == pytest.approx(
            (sum((value - mean) ** 2 for value in best) / 2) ** 0.5
        )
        assert found[f"{name} last epoch, best over rates{REMARK} mean"] == pytest.approx(sum(last) / 3)
        for selection in ("rate chosen on other training images", "last epoch, rate chosen on other training images"):
            assert found[f"{name} {selection}{REMARK} mean"] <= mean


def test_images_that_choose_a_rate_for_few_images_per_class_are_in_no_draw(
    extractor: Extractor, data: EvaluationData, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out: list[set[str]] = []
    learned: list[set[str]] = []
    given, trained = low_shot.held_out_images, low_shot.train_heads

    def keys(source: ImageSource) -> set[str]:
        return {source.key_of(index) for index in range(len(source))}

    monkeypatch.setattr(low_shot, "held_out_images", lambda *a, **k: held_out.append(keys(a[1])) or given(*a, **k))
    monkeypatch.setattr(low_shot, "train_heads", lambda *a, **k: learned.append(keys(a[1])) or trained(*a, **k))
    measured(extractor, data, LowShotSettings(fractions=(), per_class=(1, 4), draws=2, linear=LINEAR))
    assert [len(few) for few in learned] == [3, 3, 12, 12]
    assert learned[0] != learned[1]
    assert learned[0] < learned[2]
    assert [len(images) for images in held_out] == [12]  # a fifth of 60
    assert not held_out[0] & set().union(*learned)


def test_validation_images_choose_the_rate_for_few_images_per_class(
    extractor: Extractor, data: EvaluationData, tmp_path: Path
) -> None:
    with_validation = EvaluationData(
        name="Pictures", train=data.train, test=data.test, validation=pictures(30, seed=3), output=tmp_path
    )
    found = measured(extractor, with_validation, LowShotSettings(fractions=(), per_class=(1,), draws=2, linear=LINEAR))
    assert f"1 per class linear rate chosen on held-out images{REMARK} mean" in found
    assert not any("other training images" in name for name in found)


def test_where_all_images_are_drawn_only_the_published_choices_are_left(extractor: Extractor, tmp_path: Path) -> None:
    small = EvaluationData(name="Pictures", train=pictures(6, seed=1), test=pictures(45, seed=2), output=tmp_path)
    found = measured(extractor, small, LowShotSettings(fractions=(), per_class=(2,), draws=1, linear=LINEAR))
    assert list(found) == [
        f"2 per class linear{REMARK} mean",
        f"2 per class linear last epoch, best over rates{REMARK} mean",
    ]


def test_all_scorers_can_be_asked_for_few_images_per_class(extractor: Extractor, data: EvaluationData) -> None:
    settings = LowShotSettings(
        fractions=(), per_class=(2,), draws=2, per_class_scorers=("knn", "logreg"), scorers=(), knn=KnnSettings(ks=(1,))
    )
    names = ["knn k=1", "knn best k", "logreg lambda=2e-06"]
    assert list(measured(extractor, data, settings)) == [
        f"2 per class {name} {what}" for name in names for what in ("mean", "deviation")
    ]


def test_a_fit_that_did_not_converge_in_one_draw_is_remarked_of_all() -> None:
    Score = low_shot.Score
    setting = Setting(name="logreg")
    draws = [[Score(setting, 10.0)], [Score(replace(setting, note="not converged"), 20.0)]]
    (mean, deviation) = low_shot._over_draws(draws)
    assert (str(mean.setting), mean.top1) == ("logreg (not converged) mean", 15.0)
    assert str(deviation.setting) == "logreg (not converged) deviation"
    assert deviation.top1 == pytest.approx(50**0.5)


def test_too_few_images_are_refused_before_any_work(extractor: Extractor, data: EvaluationData) -> None:
    with pytest.raises(DataError, match="classes have fewer images than requested"):
        next(measure_low_shot(extractor, data, LowShotSettings(per_class=(21,), linear=LINEAR)))
