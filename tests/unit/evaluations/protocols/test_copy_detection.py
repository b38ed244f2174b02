from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from numpy.typing import NDArray
from PIL import Image

from massl.data.sources.base import DataError
from massl.evaluations.base import EvaluationData
from massl.evaluations.features import ExtractionSettings, Extractor
from massl.evaluations.protocols import copy_detection
from massl.evaluations.protocols.copy_detection import (
    CopyDetectionSettings,
    fit_whitening,
    measure_copy_detection,
    original_of_copies,
)
from massl.nn.backbone import Backbone
from massl.weights.models import LoadedModel

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
OPTIONS = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 0}
NUM_SCENES = 24


@pytest.fixture(scope="module")
def extractor() -> Extractor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = timm.create_model("vit_tiny_patch16_224", **OPTIONS).eval()
        # larger weights: the class token of a fresh network hardly depends on the image
        for parameter in network.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    backbone = Backbone(network, timm_arguments={"model_name": "vit_tiny_patch16_224", **OPTIONS})
    model = LoadedModel(
        backbone=backbone, name="tiny", origin="random weights", fingerprint="0", image_size=32, mean=MEAN, std=STD
    )
    return Extractor(
        model=model, settings=ExtractionSettings(batch_size=16, num_workers=0), device=torch.device("cpu"), cache=None
    )


def photograph(*, seed: int, width: int = 32, height: int = 32) -> Image.Image:
    cells = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize((width, height), Image.Resampling.BICUBIC)


def save(path: Path, picture: Image.Image) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, quality=95)


@pytest.fixture(scope="module")
def copydays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenes with one or two copies each, so far from the originals that some are found late; sizes stay, so that
    nothing is resampled.
    """
    folder = tmp_path_factory.mktemp("data") / "copydays"
    for scene in range(NUM_SCENES):
        original = photograph(seed=scene)
        save(folder / "original" / f"{2000 + scene}00.jpg", original)
        for number in range(1, 2 + scene % 2):
            noise = photograph(seed=1000 * number + scene)
            save(folder / "strong" / f"{2000 + scene}{number:02d}.jpg", Image.blend(original, noise, 0.55))
    for number in range(40):
        save(folder.parent / "whitening" / f"{number}.jpg", photograph(seed=5000 + number))
    return folder


def measure(extractor: Extractor, folder: Path, **settings: Any) -> dict[str, float]:
    data = EvaluationData(name=folder.name, folder=folder, output=folder)
    measured = list(measure_copy_detection(extractor, data, CopyDetectionSettings(**settings)))
    assert {measurement.metric for measurement in measured} == {"mAP"}
    assert {measurement.num_samples for measurement in measured} == {len(list((folder / "strong").glob("*.jpg")))}
    assert {measurement.data for measurement in measured} == {"Copydays" if folder.name == "copydays" else folder.name}
    return {str(measurement.setting): measurement.value for measurement in measured}


# ---- an independent pipeline -----------------------------------------------------------------------------------------


def features_by_hand(extractor: Extractor, folder: Path) -> dict[str, NDArray[np.float64]]:
    """File name -> class token and GeM of patch tokens, in float64 after the network."""
    features = {}
    for path in sorted(folder.glob("*.jpg")):
        values = (np.asarray(Image.open(path)).astype(np.float32) / 255 - np.float32(MEAN)) / np.float32(STD)
        with torch.no_grad():
            tokens = extractor.model.backbone(torch.from_numpy(values).permute(2, 0, 1)[None])
        patches = np.maximum(tokens.patches[0].double().numpy(), 1e-6)
        features[path.name] = np.concatenate([tokens.pooled[0].double().numpy(), np.mean(patches**4, axis=0) ** 0.25])
    return features


def ranks_by_hand(originals: dict[str, NDArray[np.float64]], copies: dict[str, NDArray[np.float64]]) -> list[int]:
    """For each copy, how many originals of other scenes are more similar than its own."""
    ranks = []
    for name, feature in copies.items():
        cosine = {
            other[:4]: float(feature @ value) / float(np.linalg.norm(feature) * np.linalg.norm(value))
            for other, value in originals.items()
        }
        ranks.append(sum(value > cosine[name[:4]] for value in cosine.values()))
    return ranks


def score_by_hand(ranks: list[int], *, num_ranks: int) -> float:
    return 100 * float(
        np.mean([0 if rank >= num_ranks else 1 if rank == 0 else 1 / (2 * (rank + 1)) for rank in ranks])
    )


def test_scores_are_those_of_pillow_and_a_plain_loop(extractor: Extractor, copydays: Path) -> None:
    ranks = ranks_by_hand(
        features_by_hand(extractor, copydays / "original"), features_by_hand(extractor, copydays / "strong")
    )
    assert len(ranks) == NUM_SCENES * 3 // 2
    assert min(ranks) == 0
    assert max(ranks) >= 20, "else both scores are the same"
    measured = measure(extractor, copydays)
    assert list(measured) == ["strong", "strong (all ranks)"]
    assert measured["strong"] == pytest.approx(score_by_hand(ranks, num_ranks=20))
    assert measured["strong (all ranks)"] == pytest.approx(score_by_hand(ranks, num_ranks=NUM_SCENES))
    assert measured["strong"] < measured["strong (all ranks)"]


def whiten_by_hand(rows: NDArray[np.float64]) -> Any:
    """Mean and matrix of the published rule, by a singular value decomposition instead of eigenvectors."""
    _, singular_values, directions = np.linalg.svd(rows / np.sqrt(len(rows)), full_matrices=True)
    eigenvalues = np.zeros(rows.shape[1])
    eigenvalues[: len(singular_values)] = singular_values**2
    matrix = directions / np.sqrt(np.maximum(eigenvalues, 1e-5 * eigenvalues.max()))[:, None]
    return lambda row: matrix @ (row - rows.mean(axis=0))


@pytest.mark.parametrize("num_rows", [40, 7])  # fewer rows than dimensions: the smallest eigenvalues are raised
def test_whitening_is_that_of_numpy_in_float64(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    monkeypatch.setattr(copy_detection, "_CHUNK_ROWS", 16)
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(num_rows, 12)) * np.geomspace(1, 1e-4, 12) + 0.3
    tested = generator.normal(size=(5, 12))
    whitened = fit_whitening(torch.from_numpy(rows), device=torch.device("cpu")).apply(torch.from_numpy(tested)).numpy()
    truth = np.stack([whiten_by_hand(rows)(row) for row in tested])
    # The sign of a direction is free, and so is the choice among directions of equal eigenvalue; no angle or length
    # depends on them.
    np.testing.assert_allclose(whitened @ whitened.T, truth @ truth.T, rtol=1e-6)


def test_second_moments_keep_the_mean(extractor: Extractor) -> None:
    """Along a common offset the second moment is large though the variance is small, so whitening shrinks that
    direction.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 3, generator=generator, dtype=torch.float64) * 0.1 + torch.tensor([5.0, 0.0, 0.0])
    whitening = fit_whitening(rows, device=extractor.device)
    steps = whitening.apply(rows.mean(dim=0) + 0.1 * torch.eye(3, dtype=torch.float64)).norm(dim=1)
    assert steps[0] == pytest.approx(0.1 / 5.0, rel=0.05)
    assert steps[1:].tolist() == pytest.approx([1.0, 1.0], rel=0.1)


def test_whitened_features_are_scored_under_a_label_of_their_own(extractor: Extractor, copydays: Path) -> None:
    white = whiten_by_hand(np.stack(list(features_by_hand(extractor, copydays.parent / "whitening").values())))
    originals, copies = (
        {name: white(row) for name, row in features_by_hand(extractor, copydays / block).items()}
        for block in ("original", "strong")
    )
    ranks = ranks_by_hand(originals, copies)
    measured = measure(extractor, copydays, whitening=str(copydays.parent / "whitening"))
    assert list(measured) == ["strong (whitened)", "strong (all ranks, whitened)"]
    assert measured["strong (whitened)"] == pytest.approx(score_by_hand(ranks, num_ranks=20))
    assert measured["strong (all ranks, whitened)"] == pytest.approx(score_by_hand(ranks, num_ranks=NUM_SCENES))
    assert measured["strong (whitened)"] != measure(extractor, copydays)["strong"]


# ---- files -----------------------------------------------------------------------------------------------------------


def test_the_original_of_a_copy_shares_its_first_four_characters() -> None:
    positive = original_of_copies(
        ["200000.jpg", "200100.jpg", "210000.jpg"], ["200101.jpg", "200102.jpg", "210001.jpg"]
    )
    assert positive.tolist() == [[False, True, False], [False, True, False], [False, False, True]]


def test_a_copy_without_an_original_is_named() -> None:
    with pytest.raises(DataError, match=r"strong/200101\.jpg has no original"):
        original_of_copies(["200000.jpg"], ["200001.jpg", "200101.jpg"])


def test_two_originals_of_a_scene_are_refused() -> None:
    with pytest.raises(DataError, match="several images of scene 2000"):
        original_of_copies(["200000.jpg", "200001.jpg"], ["200002.jpg"])


def test_only_jpg_files_that_are_not_hidden_count(extractor: Extractor, tmp_path: Path) -> None:
    for scene in (2000, 2001):
        save(tmp_path / "original" / f"{scene}00.jpg", photograph(seed=scene))
        save(tmp_path / "strong" / f"{scene}01.jpg", photograph(seed=scene, width=50, height=20))
    save(tmp_path / "original" / "200200.png", photograph(seed=1))
    (tmp_path / "original" / "._200000.jpg").write_bytes(b"what some systems leave beside a file")
    (tmp_path / "strong" / "notes.txt").write_text("none")
    assert measure(extractor, tmp_path) == {"strong": 100.0, "strong (all ranks)": 100.0}


def test_missing_and_empty_folders_are_refused_with_advice(extractor: Extractor, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"original does not exist"):
        measure(extractor, tmp_path)
    save(tmp_path / "original" / "200000.jpg", photograph(seed=0))
    (tmp_path / "strong").mkdir()
    with pytest.raises(DataError, match=r"strong holds no \.jpg images"):
        measure(extractor, tmp_path)


def test_a_size_of_broken_patches_is_refused(extractor: Extractor, copydays: Path) -> None:
    with pytest.raises(DataError, match=r"--copy-detection\.size 30 is no multiple .* choose 24 or 32"):
        measure(extractor, copydays, size=30)
    assert measure(extractor, copydays, size=48) != measure(extractor, copydays)
