import importlib.util
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn.functional import normalize

from massl.data.evaluation.views import CentreView
from massl.data.sources.array import ArraySource
from massl.data.sources.base import DataError
from massl.evaluations.base import EvaluationData, LabelledFeatures
from massl.evaluations.measurement import EvaluationError
from massl.evaluations.protocols import logreg
from massl.evaluations.protocols.logreg import LogisticSettings, fit_logistic, logistic_scores, measure_logreg


def unit_features(
    num_rows: int, dim: int, num_classes: int, *, seed: int = 0, noise: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Rows of unit length around class centres, with a common direction and a decaying spectrum, as real features."""
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.arange(1, dim + 1) ** -0.7
    labels = torch.randint(num_classes, (num_rows,), generator=generator)
    centres = torch.randn(num_classes, dim, generator=generator)
    rows = 2.0 + centres[labels] + noise * torch.randn(num_rows, dim, generator=generator)
    return normalize(rows * spectrum, dim=1), labels


def plain_objective(weights: Tensor, rows: Tensor, labels: Tensor, penalty: float) -> float:
    """The formula of the protocol, one row at a time."""
    total = 0.0
    for row, label in zip(rows.double().tolist(), labels.tolist(), strict=True):
        logits = [math.fsum(w * x for w, x in zip(weight, row, strict=True)) for weight in weights.tolist()]
        total += math.log(math.fsum(math.exp(logit) for logit in logits)) - logits[label]
    return total / len(rows) + 0.5 * penalty * float(weights.square().sum())


def scikit_weights(rows: Tensor, labels: Tensor, inverse_penalty: float) -> Tensor:
    model = LogisticRegression(C=inverse_penalty, fit_intercept=False, solver="newton-cg", tol=1e-9, max_iter=1000)
    return torch.from_numpy(model.fit(rows.double().numpy(), labels.numpy()).coef_)


@pytest.mark.parametrize("penalty", [1e-2, 2e-6])
@pytest.mark.parametrize("shape", [(150, 12, 5), (40, 60, 4)], ids=["many rows", "more dimensions than rows"])
def test_the_optimum_is_that_of_scikit_learn(shape: tuple[int, int, int], penalty: float) -> None:
    rows, labels = unit_features(*shape)
    fit = fit_logistic(rows, labels, num_classes=shape[2], penalty=penalty)
    truth = scikit_weights(rows, labels, 1.0 / (len(rows) * penalty))
    assert fit.converged
    assert fit.weights.dtype == torch.float64
    assert fit.objective == pytest.approx(plain_objective(truth, rows, labels, penalty), rel=1e-6)
    assert fit.objective == pytest.approx(plain_objective(fit.weights, rows, labels, penalty), rel=1e-9)
    torch.testing.assert_close(fit.weights, truth, rtol=0.0, atol=1e-3 * float(truth.abs().max()))
    unseen = unit_features(100, shape[1], shape[2], seed=1)[0]
    agreement = (
        (logistic_scores(unseen, fit.weights).argmax(dim=1) == (unseen.double() @ truth.T).argmax(dim=1))
        .double()
        .mean()
    )
    assert agreement >= 0.99


def test_two_classes_are_the_softmax_of_two_weight_vectors() -> None:
    rows, labels = unit_features(80, 6, 2)
    fit = fit_logistic(rows, labels, num_classes=2, penalty=1e-3, tolerance=1e-12)
    # its one vector is the difference of ours, penalised half as much
    truth = scikit_weights(rows, labels, 2.0 / (80 * 1e-3))
    torch.testing.assert_close(fit.weights[1:] - fit.weights[:1], truth, rtol=1e-4, atol=1e-4)


_CYANURE = """
import sys
import numpy as np
from cyanure.estimators import Classifier
data = np.load(sys.argv[1])
options = dict(loss="logistic", penalty="l2", lambda_1=float(sys.argv[2]), fit_intercept=False, solver="catalyst-miso")
model = Classifier(tol=1e-7, max_iter=5000, verbose=False, **options)
model.fit(data["rows"], data["labels"])
np.save(sys.argv[3], np.array(model.get_weights()))
"""


def test_cyanure_finds_the_same_optimum_and_accuracy(tmp_path: Path) -> None:
    if importlib.util.find_spec("cyanure") is None:
        pytest.skip("needs cyanure, an extra")
    rows, labels = unit_features(300, 16, 6)
    test_rows, test_labels = unit_features(300, 16, 6, noise=1.5)
    penalty = 2e-6
    # In a process of its own: its OpenMP threads would hold up PyTorch's backward passes for ever afterwards.
    np.savez(tmp_path / "data.npz", rows=rows.double().numpy(), labels=labels.numpy())
    arguments = [str(tmp_path / "data.npz"), str(penalty), str(tmp_path / "weights.npy")]
    subprocess.run([sys.executable, "-c", _CYANURE, *arguments], check=True, capture_output=True, timeout=600)
    truth = torch.from_numpy(np.load(tmp_path / "weights.npy")).reshape(16, 6).T
    fit = fit_logistic(rows, labels, num_classes=6, penalty=penalty)
    assert fit.objective == pytest.approx(plain_objective(truth, rows, labels, penalty), abs=1e-5)
    accuracies = [
        float((logistic_scores(test_rows, weights).argmax(dim=1) == test_labels).double().mean())
        for weights in (fit.weights, truth)
    ]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.005)


def test_under_a_heavy_penalty_the_weights_are_the_centred_class_sums() -> None:
    rows, labels = unit_features(50, 4, 3)
    fit = fit_logistic(rows, labels, num_classes=3, penalty=1e4, tolerance=1e-16)
    one_hot = torch.eye(3, dtype=torch.float64)[labels]
    torch.testing.assert_close(fit.weights * 1e4, (one_hot - 1.0 / 3.0).T @ rows.double() / 50, rtol=1e-3, atol=1e-5)
    assert fit.objective == pytest.approx(math.log(3), abs=1e-5)


def test_weights_of_all_classes_sum_to_zero_also_where_a_class_has_no_images() -> None:
    rows, labels = unit_features(60, 5, 3)
    fit = fit_logistic(rows, labels, num_classes=4, penalty=1e-4)
    assert fit.converged
    torch.testing.assert_close(fit.weights.sum(dim=0), torch.zeros(5, dtype=torch.float64), rtol=0.0, atol=1e-6)
    assert 3 not in logistic_scores(rows, fit.weights).argmax(dim=1)


def test_the_proven_gap_is_never_smaller_than_the_real_one() -> None:
    rows, labels = unit_features(100, 10, 4)
    best = fit_logistic(rows, labels, num_classes=4, penalty=1e-4, tolerance=1e-13).objective
    for tolerance in (0.3, 1e-2, 1e-4):
        fit = fit_logistic(rows, labels, num_classes=4, penalty=1e-4, tolerance=tolerance)
        assert fit.converged
        assert best <= fit.objective <= best + tolerance * fit.objective


def test_the_preconditioner_at_zero_weights_is_the_inverse_of_the_hessian() -> None:
    rows, labels = unit_features(40, 5, 3)
    penalty = 1e-3
    problem = logreg._Problem(rows=rows, labels=labels, num_classes=3, penalty=penalty)

    def objective(weights: Tensor) -> Tensor:
        return (
            torch.nn.functional.cross_entropy(rows.double() @ weights.view(3, 5).T, labels)
            + 0.5 * penalty * weights.square().sum()
        )

    hessian = torch.autograd.functional.hessian(objective, torch.zeros(15, dtype=torch.float64))
    weights = torch.zeros(3, 5, dtype=torch.float64)
    gradient = problem.value_and_gradient(weights)[1]
    expected = torch.linalg.solve(hessian, gradient.flatten()).view(3, 5)
    torch.testing.assert_close(problem.inverse_hessian(weights)(gradient), expected)


def test_few_iterations_are_enough_at_the_published_penalty() -> None:
    rows, labels = unit_features(500, 32, 10)
    fit = fit_logistic(rows, labels, num_classes=10, penalty=2e-6)
    assert fit.converged
    assert fit.num_iterations < 80  # 41; 132 without the preconditioner


def test_a_fit_that_runs_out_of_iterations_says_so() -> None:
    rows, labels = unit_features(100, 10, 4)
    fit = fit_logistic(rows, labels, num_classes=4, penalty=2e-6, max_iterations=2)
    assert (fit.converged, fit.num_iterations) == (False, 2)


def test_chunks_do_not_change_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, labels = unit_features(53, 6, 3)
    whole = fit_logistic(rows, labels, num_classes=3, penalty=1e-4)
    whole_scores = logistic_scores(rows, whole.weights)
    monkeypatch.setattr(logreg, "_CHUNK_ELEMENTS", 60)
    chunked = fit_logistic(rows, labels, num_classes=3, penalty=1e-4)
    torch.testing.assert_close(chunked.weights, whole.weights)
    torch.testing.assert_close(logistic_scores(rows, whole.weights), whole_scores)


def test_a_penalty_of_nothing_is_refused() -> None:
    rows, labels = unit_features(10, 3, 2)
    with pytest.raises(EvaluationError, match=r"penalty.* must be positive"):
        fit_logistic(rows, labels, num_classes=2, penalty=0.0)


@pytest.mark.parametrize(
    ("settings", "label", "penalty"),
    [
        (LogisticSettings(), "lambda=2e-06", 2e-6),
        (LogisticSettings(penalty=0.1, penalty_per_sample=True), "lambda=0.1/n", 0.1 / 50),
        (LogisticSettings(penalty=1e-3, normalise=False), "lambda=0.001 without normalising", 1e-3),
    ],
)
def test_settings_have_a_name_and_a_penalty(settings: LogisticSettings, label: str, penalty: float) -> None:
    assert settings.label == label
    assert settings.penalty_for(50) == pytest.approx(penalty)


# ---- the protocol, on features that are planted instead of extracted -------------------------------------------------


def source(labels: Tensor | None, name: str, *, num_classes: int = 3) -> ArraySource:
    num_images = 4 if labels is None else len(labels)
    return ArraySource(
        name=name,
        pixels=np.zeros((num_images, 2, 2), np.uint8),
        labels=None if labels is None else labels.numpy(),
        class_names=None if labels is None else tuple(f"class {number}" for number in range(num_classes)),
        key_prefix=name,
    )


def planted_extractor(rows: dict[str, Tensor]) -> Any:
    """Gives known features for the view and feature that the protocol names, and for no others."""

    def features(images: ArraySource, *, view: object, feature: str) -> LabelledFeatures:
        assert view == CentreView(size=32, filter="bicubic")
        assert feature == "cls"
        labels = torch.tensor([-1 if label is None else label for label in map(images.label_of, range(len(images)))])
        return LabelledFeatures(rows=rows[images.name], labels=labels, name=images.name)

    return SimpleNamespace(features=features, device=torch.device("cpu"), centre_view=partial(CentreView, size=32))


@pytest.fixture
def world(tmp_path: Path) -> tuple[Any, EvaluationData]:
    train_rows, train_labels = unit_features(60, 8, 3, noise=0.3)
    test_rows, test_labels = unit_features(45, 8, 3, noise=0.8)
    lengths = 10.0 ** torch.linspace(-2.0, 2.0, 60)[:, None]
    data = EvaluationData(
        name="Pets", train=source(train_labels, "train"), test=source(test_labels, "test"), output=tmp_path
    )
    return planted_extractor({"train": lengths * train_rows, "test": test_rows}), data


def test_accuracies_are_those_of_scikit_learn_on_rows_of_unit_length(world: tuple[Any, EvaluationData]) -> None:
    extractor, data = world
    found = list(measure_logreg(extractor, data, LogisticSettings(penalty=1e-3)))
    train_rows, train_labels = unit_features(60, 8, 3, noise=0.3)
    test_rows, test_labels = unit_features(45, 8, 3, noise=0.8)
    guesses = (test_rows.double() @ scikit_weights(train_rows, train_labels, 1.0 / (60 * 1e-3)).T).argmax(dim=1)
    top1 = 100.0 * float((guesses == test_labels).double().mean())
    assert 50.0 < top1 < 100.0
    assert [(m.data, str(m.setting), m.metric, m.num_samples) for m in found] == [
        ("Pets", "lambda=0.001", "top1", 45),  # three classes: the label is always among five
    ]
    assert [m.value for m in found] == pytest.approx([top1])


def test_five_guesses_are_counted_for_six_classes(tmp_path: Path) -> None:
    rows, labels = unit_features(60, 8, 6, noise=1.5)
    train, test = (source(labels, name, num_classes=6) for name in ("train", "test"))
    data = EvaluationData(name="Pets", train=train, test=test, output=tmp_path)
    top1, top5 = measure_logreg(planted_extractor({"train": rows, "test": rows}), data, LogisticSettings(penalty=1.0))
    assert (top1.metric, top5.metric) == ("top1", "top5")
    assert top1.value < top5.value <= 100.0


def test_rows_of_very_different_lengths_matter_only_without_normalising(world: tuple[Any, EvaluationData]) -> None:
    extractor, data = world
    settings = LogisticSettings(penalty=1e-3, normalise=False)
    found = next(measure_logreg(extractor, data, settings))
    assert str(found.setting) == "lambda=0.001 without normalising"
    assert found.value != next(measure_logreg(extractor, data, LogisticSettings(penalty=1e-3))).value


def test_the_penalty_per_sample_reaches_the_fit(
    world: tuple[Any, EvaluationData], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    plain_fit: Callable[..., logreg.LogisticFit] = fit_logistic

    def spying_fit(*positional: Tensor, **named: Any) -> logreg.LogisticFit:
        seen.append(named["penalty"])
        return plain_fit(*positional, **named)

    monkeypatch.setattr(logreg, "fit_logistic", spying_fit)
    list(measure_logreg(*world, LogisticSettings(penalty=0.6, penalty_per_sample=True)))
    assert seen == pytest.approx([0.01])


def test_results_of_a_fit_that_did_not_converge_are_marked(world: tuple[Any, EvaluationData]) -> None:
    settings = {str(m.setting) for m in measure_logreg(*world, LogisticSettings(max_iterations=1))}
    assert settings == {"lambda=2e-06 (not converged)"}


def test_unlabelled_images_are_refused(world: tuple[Any, EvaluationData], tmp_path: Path) -> None:
    extractor, data = world
    with pytest.raises(DataError, match="train has no labels"):
        list(
            measure_logreg(
                extractor,
                EvaluationData(name="x", train=source(None, "train"), test=data.test, output=tmp_path),
                LogisticSettings(),
            )
        )
    labels = torch.arange(60) % 3
    labels[7] = -1
    with pytest.raises(DataError, match="1 of 60 images of train have no label"):
        list(
            measure_logreg(
                extractor,
                EvaluationData(name="x", train=source(labels, "train"), test=data.test, output=tmp_path),
                LogisticSettings(),
            )
        )


@pytest.mark.gpu
def test_a_gpu_finds_the_same_weights() -> None:
    rows, labels = unit_features(200, 16, 5)
    on_cpu = fit_logistic(rows, labels, num_classes=5, penalty=2e-6)
    on_gpu = fit_logistic(rows.cuda(), labels.cuda(), num_classes=5, penalty=2e-6)
    assert on_gpu.weights.is_cuda
    assert on_gpu.objective == pytest.approx(on_cpu.objective, rel=1e-6)
