import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from massl.data.evaluation.ground_truth import QueryTruth, RetrievalTruth
from massl.data.sources.base import DataError
from massl.evaluations.base import EvaluationData
from massl.evaluations.features import ExtractionSettings, Extractor
from massl.evaluations.measurement import EvaluationError, Measurement
from massl.evaluations.protocols.retrieval import LandmarkView, RetrievalSettings, measure_retrieval, retrieval_scores
from massl.nn.backbone import Backbone
from massl.ops.image_ops import RaggedImages
from massl.weights.models import LoadedModel

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
OPTIONS = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 0}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = timm.create_model("vit_tiny_patch16_224", **OPTIONS).eval()
        # larger weights: the class token of a fresh network hardly depends on the image
        for parameter in network.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    backbone = Backbone(network, timm_arguments={"model_name": "vit_tiny_patch16_224", **OPTIONS})
    return LoadedModel(
        backbone=backbone, name="tiny", origin="random weights", fingerprint="0", image_size=32, mean=MEAN, std=STD
    )


@pytest.fixture
def extractor(model: LoadedModel, tmp_path: Path) -> Extractor:
    settings = ExtractionSettings(batch_size=4, num_workers=0)
    return Extractor(model=model, settings=settings, device=torch.device("cpu"), cache=tmp_path / "cache")


def photograph(width: int, height: int, *, seed: int) -> Image.Image:
    """Coarse random colours: what JPEG and shrinking leave intact."""
    cells = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize((width, height), Image.Resampling.BICUBIC)


def save(folder: Path, name: str, picture: Image.Image) -> None:
    (folder / "jpg").mkdir(parents=True, exist_ok=True)
    picture.save(folder / "jpg" / f"{name}.jpg", quality=95)


def write_truth(
    folder: Path, *, dataset: str, database: list[str], queries: list[str], gnd: list[dict[str, Any]]
) -> None:
    content = {"imlist": database, "qimlist": queries, "gnd": gnd}
    (folder / f"gnd_{dataset}.pkl").write_bytes(pickle.dumps(content, protocol=2))


def entry(box: list[float], *, easy: list[int], hard: list[int], junk: list[int]) -> dict[str, Any]:
    return {"bbx": np.array(box), "easy": np.array(easy), "hard": np.array(hard), "junk": np.array(junk)}


SIZES = [(100, 75), (60, 91), (33, 47), (73, 73), (120, 50), (64, 64), (90, 61)]
GND = [
    entry([0, 0, 50, 40], easy=[0, 3], hard=[5], junk=[1]),
    entry([5, 5, 40, 60], easy=[], hard=[2, 6], junk=[]),
    entry([1, 1, 30, 30], easy=[4], hard=[], junk=[0, 5]),
]


@pytest.fixture
def roxford(tmp_path: Path) -> Path:
    folder = tmp_path / "roxford5k"
    for number, size in enumerate(SIZES):
        save(folder, f"image_{number}", photograph(*size, seed=number))
    for number in range(3):
        save(folder, f"query_{number}", photograph(81, 64, seed=100 + number))
    names = [f"image_{number}" for number in range(len(SIZES))]
    write_truth(
        folder, dataset="roxford5k", database=names, queries=[f"query_{number}" for number in range(3)], gnd=GND
    )
    return folder


def measure(
    extractor: Extractor, folder: Path, *, name: str | None = None, **settings: Any
) -> dict[tuple[str, str], Measurement]:
    data = EvaluationData(name=folder.name if name is None else name, folder=folder, output=folder)
    measured = list(measure_retrieval(extractor, data, RetrievalSettings(**settings)))
    found = {(str(measurement.setting), measurement.metric): measurement for measurement in measured}
    assert len(found) == len(measured)
    return found


# ---- an independent pipeline -----------------------------------------------------------------------------------------


def features_by_hand(
    model: LoadedModel, picture: Image.Image, *, max_side: int, scales: tuple[float, ...]
) -> NDArray[Any]:
    shrunk = picture.convert("RGB")
    shrunk.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
    values = (np.asarray(shrunk).astype(np.float32) / 255 - np.float32(MEAN)) / np.float32(STD)
    image = torch.from_numpy(values).permute(2, 0, 1)[None]
    tokens = []
    with torch.no_grad():
        for scale in scales:
            scaled = (
                image if scale == 1 else interpolate(image, scale_factor=scale, mode="bilinear", align_corners=False)
            )
            tokens.append(model.backbone(scaled).pooled[0].double().numpy())
    feature: NDArray[Any] = np.mean(tokens, axis=0)
    return feature / np.linalg.norm(feature)


def average_precision_by_hand(ranking: list[int], positives: set[int], junk: set[int]) -> float:
    judged = [image for image in ranking if image not in junk]
    area, num_found = 0.0, 0
    for num_read, image in enumerate(judged):
        if image in positives:
            before = num_found / num_read if num_read else 1.0
            num_found += 1
            area += (before + num_found / (num_read + 1)) / 2
    return area / len(positives)


def mean_average_precision_by_hand(
    database: NDArray[Any], queries: NDArray[Any], *, positive: list[str], junk: list[str]
) -> float:
    scores = []
    for query, answer in zip(queries, GND, strict=True):
        positives, left_out = (
            {int(image) for field in fields for image in answer[field]} for fields in (positive, junk)
        )
        if positives:
            scores.append(average_precision_by_hand(np.argsort(-(database @ query)).tolist(), positives, left_out))
    return 100 * float(np.mean(scores))


@pytest.mark.parametrize(("multi_scale", "scales"), [(True, (1.0, 2**-0.5, 0.5)), (False, (1.0,))])
def test_scores_are_those_of_pillow_and_a_plain_loop(
    extractor: Extractor, roxford: Path, multi_scale: bool, scales: tuple[float, ...]
) -> None:
    measured = measure(extractor, roxford, multi_scale=multi_scale, crop_queries=True)
    max_side = 73  # 512 * 32 / 224

    def features(name: str, box: tuple[float, ...] | None = None) -> NDArray[Any]:
        picture = Image.open(roxford / "jpg" / f"{name}.jpg")
        return features_by_hand(
            extractor.model, picture if box is None else picture.crop(box), max_side=max_side, scales=scales
        )  # type: ignore[arg-type]

    database = np.stack([features(f"image_{number}") for number in range(len(SIZES))])
    whole = np.stack([features(f"query_{number}") for number in range(3)])
    cropped = np.stack([features(f"query_{number}", tuple(GND[number]["bbx"])) for number in range(3)])
    for suffix, queries in (("", whole), (" (queries cropped)", cropped)):
        for difficulty, positive, junk, num_queries in (
            ("easy", ["easy"], ["junk", "hard"], 2),
            ("medium", ["easy", "hard"], ["junk"], 3),
            ("hard", ["hard"], ["junk", "easy"], 2),
        ):
            found = measured[difficulty + suffix, "mAP"]
            assert found.value == pytest.approx(
                mean_average_precision_by_hand(database, queries, positive=positive, junk=junk)
            )
            assert found.num_samples == num_queries
            assert 0 < found.value < 100
    assert measured["medium", "mAP"].value != measured["medium (queries cropped)", "mAP"].value


def test_as_published_queries_are_whole_and_the_set_has_its_published_name(extractor: Extractor, roxford: Path) -> None:
    measured = measure(extractor, roxford)
    assert list(measured) == [
        (difficulty, metric) for difficulty in ("easy", "medium", "hard") for metric in ("mAP", "mP@1", "mP@5", "mP@10")
    ]
    assert {measurement.data for measurement in measured.values()} == {"ROxford5k"}


def test_a_folder_of_another_name_is_told_by_its_only_ground_truth(extractor: Extractor, roxford: Path) -> None:
    renamed = roxford.rename(roxford.with_name("buildings"))
    (renamed / "gnd_roxford5k.pkl").rename(renamed / "gnd_rparis6k.pkl")
    assert measure(extractor, renamed)["medium", "mAP"].data == "RParis6k"
    (renamed / "gnd_rparis6k.pkl").rename(renamed / "gnd_own.pkl")
    assert measure(extractor, renamed)["medium", "mAP"].data == "buildings"


def test_a_name_that_the_user_gives_is_kept(extractor: Extractor, roxford: Path) -> None:
    assert measure(extractor, roxford, name="my buildings")["medium", "mAP"].data == "my buildings"


def test_a_query_finds_what_its_box_shows_only_when_it_is_cropped(extractor: Extractor, tmp_path: Path) -> None:
    folder = tmp_path / "rparis6k"
    landmark = photograph(60, 50, seed=3)
    surroundings = photograph(140, 120, seed=4)
    save(folder, "landmark", landmark)
    save(folder, "surroundings", surroundings.copy())
    surroundings.paste(landmark, (20, 30))
    save(folder, "query", surroundings)
    gnd = [entry([20.4, 29.6, 79.7, 80.2], easy=[], hard=[0], junk=[])]
    write_truth(folder, dataset="rparis6k", database=["landmark", "surroundings"], queries=["query"], gnd=gnd)
    measured = measure(extractor, folder, crop_queries=True)
    assert measured["hard (queries cropped)", "mAP"].value == 100.0
    assert measured["hard", "mAP"].value == 25.0
    assert ("easy", "mAP") not in measured, "no query has easy answers"


# ---- the view --------------------------------------------------------------------------------------------------------


def ragged(*pictures: Image.Image) -> RaggedImages:
    return RaggedImages.from_list([torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in pictures])


def pixels(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255


def test_the_view_crops_and_shrinks_as_pillow_does() -> None:
    pictures = [photograph(100, 75, seed=1), photograph(61, 90, seed=2), photograph(20, 16, seed=3)]
    boxes = ((10.5, 3.4, 99.0, 75.0), (0.0, 11.5, 60.7, 88.2), (0.0, 0.0, 20.0, 16.0))
    view = LandmarkView(max_side=48, min_side=1, boxes=boxes)
    # boxes follow the numbers, not the places
    views = view.apply(ragged(*pictures[1:], pictures[0]), torch.tensor([1, 2, 0]))
    for number, found in zip((1, 2, 0), views, strict=True):
        expected = pictures[number].crop(boxes[number])
        expected.thumbnail((48, 48), Image.Resampling.LANCZOS)
        torch.testing.assert_close(found[0], pixels(expected), rtol=0, atol=0)
    assert views[1].shape == (1, 3, 16, 20), "small images are not enlarged"


def test_a_box_that_reaches_beyond_its_image_is_cut_off_and_one_outside_is_refused() -> None:
    picture = photograph(40, 30, seed=1)
    (found,) = LandmarkView(max_side=40, min_side=1, boxes=((-5.0, -1.0, 50.0, 20.0),)).apply(
        ragged(picture), torch.tensor([0])
    )
    torch.testing.assert_close(found[0], pixels(picture.crop((0, 0, 40, 20))), rtol=0, atol=0)
    for outside in ((50.0, 0.0, 60.0, 20.0), (-20.0, 0.0, -5.0, 20.0)):
        with pytest.raises(DataError, match=r"query 0 .* 40 x 30 image"):
            LandmarkView(max_side=40, min_side=1, boxes=(outside,)).apply(ragged(picture), torch.tensor([0]))


def test_an_image_that_is_too_narrow_for_the_network_is_refused(extractor: Extractor, roxford: Path) -> None:
    # 73 x 11 after shrinking; at half the scale less than a patch
    save(roxford, "image_2", photograph(200, 30, seed=1))
    with pytest.raises(DataError, match=r"image 2 .* 73 x 11 pixels .* 16"):
        measure(extractor, roxford)
    assert measure(extractor, roxford, max_side=128)
    assert measure(extractor, roxford, multi_scale=False)


def test_a_largest_side_below_what_the_network_needs_is_refused(extractor: Extractor, roxford: Path) -> None:
    with pytest.raises(EvaluationError, match=r"max_side 15 is less than the 16 pixels"):
        measure(extractor, roxford, max_side=15)


# ---- scores and errors -----------------------------------------------------------------------------------------------


def test_precision_at_k_leaves_out_junk_and_stops_at_the_last_answer() -> None:
    def indices(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64)

    answer = QueryTruth(box=(0, 0, 1, 1), easy=indices(4), hard=indices(2), junk=indices(0))
    truth = RetrievalTruth(database=tuple("abcdef"), queries=("q",), answers=(answer,))
    scores = {score[:2]: score[2] for score in retrieval_scores(torch.tensor([[0, 4, 1, 2, 3, 5]]), truth)}
    assert scores["medium", "mP@1"] == 100.0  # 4 1 2 3 5: right, wrong, right ...
    assert scores["medium", "mP@5"] == scores["medium", "mP@10"] == pytest.approx(100 * 2 / 3)
    assert scores["hard", "mP@1"] == 0.0  # 1 2 3 5
    assert scores["hard", "mP@5"] == 50.0
    assert scores["easy", "mP@10"] == 100.0
    scores = {score[:2]: score[2] for score in retrieval_scores(torch.tensor([[0, 2, 4, 1, 3, 5]]), truth)}
    assert scores["easy", "mAP"] == scores["easy", "mP@1"] == 100.0  # 4 1 3 5: hard answers are junk among easy ones


def test_missing_images_are_named(extractor: Extractor, roxford: Path) -> None:
    (roxford / "jpg" / "image_4.jpg").unlink()
    with pytest.raises(DataError, match=r"database of ROxford5k: 1 of 7 .*image_4\.jpg"):
        measure(extractor, roxford)


def test_a_folder_without_or_with_several_ground_truths_is_refused_with_advice(
    extractor: Extractor, roxford: Path
) -> None:
    renamed = roxford.rename(roxford.with_name("buildings"))
    (renamed / "gnd_other.pkl").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"holds several \(gnd_other\.pkl, gnd_roxford5k\.pkl\); give the folder roxford5k"
    ):
        measure(extractor, renamed)
    for file in renamed.glob("*.pkl"):
        file.unlink()
    with pytest.raises(DataError, match="holds none; give the folder roxford5k or rparis6k"):
        measure(extractor, renamed)


def test_features_of_networks_without_patches_can_be_asked_for(extractor: Extractor, roxford: Path) -> None:
    assert measure(replace(extractor, feature="pooled"), roxford) != measure(extractor, roxford)
