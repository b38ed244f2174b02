import math
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sklearn.metrics import top_k_accuracy_score
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from massl.data.evaluation.views import CentreView
from massl.data.sources.array import ArraySource
from massl.data.sources.base import DataError
from massl.evaluations.base import EvaluationData
from massl.evaluations.features import ExtractionSettings, Extractor
from massl.evaluations.measurement import Measurement
from massl.evaluations.protocols import knn
from massl.evaluations.protocols.knn import KnnSettings, knn_scores, measure_knn, settings_of_ks, top_accuracy
from massl.nn.backbone import Backbone
from massl.weights.models import LoadedModel


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cosine(first: list[float], second: list[float]) -> float:
    dot = math.fsum(a * b for a, b in zip(first, second, strict=True))
    return dot / math.sqrt(math.fsum(a * a for a in first) * math.fsum(b * b for b in second))


@given(st.integers(1, 20), st.integers(1, 6), st.integers(2, 5), st.integers(0, 1000), st.data())
@settings(max_examples=30)
def test_scores_are_those_of_a_plain_loop(
    num_train: int, num_test: int, num_classes: int, seed: int, data: st.DataObject
) -> None:
    ks = tuple(data.draw(st.lists(st.integers(1, 25), min_size=1, max_size=3, unique=True)))
    train, test = draw(num_train, 4, seed=seed), 3.0 * draw(num_test, 4, seed=seed + 1)
    labels = torch.arange(num_train) * 7 % num_classes
    scores = knn_scores(train, labels, test, num_classes=num_classes, ks=ks, temperature=0.07)
    assert tuple(scores) == ks
    for k in ks:
        for query, row in zip(test.tolist(), scores[k], strict=True):
            similarities = [cosine(query, other) for other in train.tolist()]
            nearest = sorted(range(num_train), key=lambda number: -similarities[number])[:k]
            expected = [0.0] * num_classes
            for number in nearest:
                expected[int(labels[number])] += math.exp((similarities[number] - max(similarities)) / 0.07)
            torch.testing.assert_close(row, torch.tensor(expected), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("k", [1, 5, 20])
def test_guesses_are_those_of_scikit_learn_with_the_same_weights(k: int) -> None:
    train, test = draw(60, 6, seed=1), draw(50, 6, seed=2)
    train_labels, test_labels = torch.arange(60) % 7, torch.arange(50) % 7
    model = KNeighborsClassifier(
        k, metric="cosine", weights=lambda distances: np.exp((1.0 - distances) / 0.07), algorithm="brute"
    )
    model.fit(train.double().numpy(), train_labels.numpy())
    probabilities = model.predict_proba(test.double().numpy())
    scores = knn_scores(train, train_labels, test, num_classes=7, ks=(k,), temperature=0.07)[k]
    torch.testing.assert_close(
        scores / scores.sum(dim=1, keepdim=True), torch.from_numpy(probabilities).float(), rtol=1e-3, atol=1e-5
    )
    truth = 100.0 * float(model.score(test.double().numpy(), test_labels.numpy()))
    assert 0.0 < truth < 100.0
    assert top_accuracy(scores, test_labels, num_best=1) == pytest.approx(truth)


@pytest.mark.parametrize("num_best", [1, 2, 5])
def test_accuracy_among_the_best_is_that_of_scikit_learn(num_best: int) -> None:
    scores, labels = draw(80, 9, seed=3), torch.arange(80) % 9
    truth = 100.0 * float(top_k_accuracy_score(labels.numpy(), scores.numpy(), k=num_best))
    assert top_accuracy(scores, labels, num_best=num_best) == pytest.approx(truth)


def test_of_equal_scores_the_lower_class_number_comes_first() -> None:
    scores = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.5, 0.5, 0.5]])
    assert top_accuracy(scores, torch.tensor([0, 0, 0]), num_best=1) == 100.0
    assert top_accuracy(scores, torch.tensor([1, 1, 1]), num_best=1) == 0.0
    assert top_accuracy(scores, torch.tensor([1, 1, 2]), num_best=2) == pytest.approx(200.0 / 3.0)


def test_among_fewer_classes_than_guesses_every_guess_is_right() -> None:
    assert top_accuracy(draw(10, 3, seed=4), torch.arange(10) % 3, num_best=5) == 100.0


def test_the_memory_for_similarities_is_bounded_and_changes_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    train, test, labels = draw(30, 4, seed=5), draw(17, 4, seed=6), torch.arange(30) % 3
    whole = knn_scores(train, labels, test, num_classes=3, ks=(5,), temperature=0.07)[5]
    chunk_sizes: list[int] = []

    def spying_topk(
        queries: Tensor, database: Tensor, *, num_neighbours: int, chunk_rows: int
    ) -> tuple[Tensor, Tensor]:
        chunk_sizes.append(chunk_rows)
        return knn_topk(queries, database, num_neighbours=num_neighbours, chunk_rows=chunk_rows)

    knn_topk = knn.cosine_topk
    monkeypatch.setattr(knn, "cosine_topk", spying_topk)
    for max_similarities, chunk_rows in ((100, 3), (1, 1), (1 << 40, 4096)):
        monkeypatch.setattr(knn, "_MAX_SIMILARITIES", max_similarities)
        torch.testing.assert_close(knn_scores(train, labels, test, num_classes=3, ks=(5,), temperature=0.07)[5], whole)
        assert chunk_sizes.pop() == chunk_rows


@pytest.mark.parametrize(
    ("ks", "num_train", "expected"),
    [
        ((10, 20, 100, 200), 5000, {10: "k=10", 20: "k=20", 100: "k=100", 200: "k=200"}),
        ((200, 10, 20, 100), 50, {10: "k=10", 20: "k=20", 100: "k=100 (all 50 images)"}),
        ((10, 50, 100), 50, {10: "k=10", 50: "k=50"}),
        ((20, 20, 1), 100, {1: "k=1", 20: "k=20"}),
        ((10, 20), 3, {10: "k=10 (all 3 images)"}),
    ],
)
def test_each_number_of_neighbours_is_measured_once_under_its_name(
    ks: tuple[int, ...], num_train: int, expected: dict[int, str]
) -> None:
    found = settings_of_ks(ks, num_train=num_train)
    assert {k: str(setting) for k, setting in found.items()} == expected
    assert all(setting.k == k for k, setting in found.items())


@pytest.mark.parametrize("ks", [(), (0,), (10, -1)])
def test_impossible_numbers_of_neighbours_are_refused(ks: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError):
        KnnSettings(ks=ks)


# ---- the protocol, from images to numbers ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def extractor() -> Extractor:
    arguments = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", **arguments)
    backbone = Backbone(model, timm_arguments={"model_name": "vit_tiny_patch16_224", **arguments}).eval()
    loaded = LoadedModel(
        backbone=backbone,
        name="tiny",
        origin="random weights",
        fingerprint="0",
        image_size=32,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
    )
    return Extractor(model=loaded, settings=ExtractionSettings(num_workers=0), device=torch.device("cpu"), cache=None)


def images(num_images: int, *, seed: int, labels: list[int] | None = None, num_classes: int = 3) -> ArraySource:
    """Noise of the brightness of its class: even random features tell some of them apart."""
    numbers = np.arange(num_images) % num_classes if labels is None else np.array(labels)
    noise = np.random.default_rng(seed).integers(0, 120, (num_images, 32, 32, 3))
    return ArraySource(
        name=f"set {seed}",
        pixels=(noise + 6 * np.maximum(numbers, 0)[:, None, None, None]).astype(np.uint8),
        labels=numbers,
        class_names=tuple(f"class {number}" for number in range(num_classes)),
        key_prefix=f"set {seed}",
    )


def measure(
    extractor: Extractor, train: ArraySource, test: ArraySource, ks: tuple[int, ...], tmp_path: Path
) -> dict[tuple[str, str], Measurement]:
    data = EvaluationData(name="Demo", train=train, test=test, output=tmp_path)
    found = list(measure_knn(extractor, data, KnnSettings(ks=ks)))
    assert {(m.data, m.num_samples) for m in found} == {("Demo", len(test))}
    by_name = {(str(m.setting), m.metric): m for m in found}
    assert len(by_name) == len(found)
    return by_name


def test_images_that_are_their_own_neighbours_are_all_classified_right(extractor: Extractor, tmp_path: Path) -> None:
    train = images(12, seed=0)
    found = measure(extractor, train, train, (1,), tmp_path)
    assert {name: m.value for name, m in found.items()} == {("k=1", "top1"): 100.0}


def test_numbers_are_those_of_scikit_learn_on_the_same_features(extractor: Extractor, tmp_path: Path) -> None:
    train, test = images(30, seed=1), images(20, seed=2)
    found = measure(extractor, train, test, (1, 4, 100, 200), tmp_path)
    view = CentreView(size=32, crop_ratio=0.875, filter="bicubic")
    train_rows, test_rows = (
        extractor.features(source, view=view, feature="cls").rows.double().numpy() for source in (train, test)
    )
    top1 = {}
    for k, setting in ((1, "k=1"), (4, "k=4"), (30, "k=100 (all 30 images)")):
        model = KNeighborsClassifier(
            k, metric="cosine", weights=lambda distances: np.exp((1.0 - distances) / 0.07), algorithm="brute"
        )
        top1[setting] = 100.0 * float(model.fit(train_rows, train.labels).score(test_rows, test.labels))
        assert found[setting, "top1"].value == pytest.approx(top1[setting])
    best = max(top1, key=lambda setting: top1[setting])
    assert found[f"best k ({best})", "top1"].value == pytest.approx(top1[best])
    assert len(found) == 4
    assert len(set(top1.values())) > 1


def test_with_one_k_there_is_no_best_one(extractor: Extractor, tmp_path: Path) -> None:
    found = measure(extractor, images(9, seed=3), images(6, seed=4), (2, 2), tmp_path)
    assert set(found) == {("k=2", "top1")}


@pytest.mark.parametrize("num_classes", [5, 6])
def test_five_guesses_are_counted_only_where_they_can_miss(
    num_classes: int, extractor: Extractor, tmp_path: Path
) -> None:
    train, test = (images(18, seed=seed, num_classes=num_classes) for seed in (5, 6))
    found = measure(extractor, train, test, (1, 18), tmp_path)
    assert (("k=18", "top5") in found) == (num_classes == 6)
    if num_classes == 6:
        assert found["k=1", "top5"].value == found["k=1", "top1"].value  # one neighbour makes one guess
        assert found["k=18", "top1"].value < found["k=18", "top5"].value < 100.0


def test_images_without_labels_are_refused(extractor: Extractor, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"2 of 4 images of set 5 have no label; this protocol needs class folders or a labelled set"
    ):
        measure(extractor, images(6, seed=6), images(4, seed=5, labels=[0, -1, 2, -1]), (1,), tmp_path)


def test_sets_of_other_classes_are_refused(extractor: Extractor, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="set 7 has 3 classes, set 8 has 4; both must have the same ones"):
        measure(extractor, images(6, seed=7), images(8, seed=8, num_classes=4), (1,), tmp_path)
