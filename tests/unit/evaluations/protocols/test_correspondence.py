import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from massl import distributed
from massl.data.sources.array import ArraySource
from massl.data.sources.base import DataError
from massl.evaluations.base import EvaluationData
from massl.evaluations.features import ExtractionSettings, Extractor
from massl.evaluations.protocols import correspondence
from massl.evaluations.protocols.correspondence import (
    CorrespondenceSettings,
    class_pairs,
    instance_pairs,
    measure_correspondence,
    same_class_pairs,
)
from massl.nn.backbone import Backbone, BackboneSettings, Tokens, build_backbone
from massl.nn.token_readout import UnsuitableModel
from massl.ops.scoring.correspondence import _LINE_COLOURS as LINE_COLOURS
from massl.weights.io import backbone_bytes
from massl.weights.models import LoadedModel

MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.3)
GRID, PATCH = 8, 4


def tiny_backbone(*, name: str = "vit_tiny_patch16_224", patch: int = PATCH, seed: int = 0) -> Backbone:
    options: dict[str, int | float | bool | str] = {"embed_dim": 16, "depth": 1, "num_heads": 2}
    return build_backbone(
        BackboneSettings(name=name, image_size=32, patch_size=patch, timm_options=options), seed=seed
    ).eval()


def loaded(backbone: Backbone, *, name: str = "tiny") -> LoadedModel:
    return LoadedModel(backbone=backbone, name=name, origin="test", fingerprint=name, image_size=32, mean=MEAN, std=STD)


def all_knowing() -> LoadedModel:
    """A model whose patch tokens say where in the image a patch comes from, read from the colours of `map_source`.

    Angles on two quarter circles: the dot product is largest where the place is nearest.
    """
    backbone = tiny_backbone()

    def forward(images: Tensor) -> Tokens:
        colours = images * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
        means = torch.nn.functional.avg_pool2d(colours, PATCH).flatten(2).mT  # [B, N, 3]
        angles = means[:, :, :2] * (np.pi / 2)
        return Tokens(pooled=means[:, 0], patches=torch.cat([angles.cos(), angles.sin()], dim=2))

    backbone.forward = forward  # type: ignore[assignment, method-assign]
    return loaded(backbone, name="all-knowing")


@pytest.fixture
def map_source() -> ArraySource:
    """Images that are maps of themselves: red tells the height, green how far right."""
    rows, columns = np.meshgrid(np.linspace(0, 255, 90), np.linspace(0, 255, 120), indexing="ij")
    pixels = np.stack([rows, columns, np.zeros_like(rows)], axis=2).round().astype(np.uint8)
    return ArraySource(
        name="maps",
        pixels=np.stack([pixels] * 12),
        labels=np.arange(12) % 3,
        class_names=("a", "b", "c"),
        key_prefix="map",
    )


@pytest.fixture
def true_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views keep their colours; all else about them stays as published."""
    published = correspondence._view_settings

    def without_jitter(size: int, model: LoadedModel) -> Any:
        return published(size, model).model_copy(update={"jitter_probability": 0.0, "grey_probability": 0.0})

    monkeypatch.setattr(correspondence, "_view_settings", without_jitter)


def extractor_of(model: LoadedModel, batch_size: int = 10) -> Extractor:
    settings = ExtractionSettings(batch_size=batch_size, num_workers=0)
    return Extractor(model=model, settings=settings, device=torch.device("cpu"), cache=None)


def measured(model: LoadedModel, source: ArraySource, output: Path, **settings: Any) -> dict[tuple[str, str], float]:
    data = EvaluationData(name=source.name, test=source, output=output)
    found = list(measure_correspondence(extractor_of(model), data, CorrespondenceSettings.model_validate(settings)))
    return {(str(one.setting).removeprefix("instance, "), one.metric): one.value for one in found}


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("true_colours")
def test_a_model_that_knows_the_place_of_each_patch_matches_all(map_source: ArraySource, tmp_path: Path) -> None:
    found = measured(all_knowing(), map_source, tmp_path, num_figures=0)
    assert list(found) == [
        (way, f"matched within R={radius}") for way in ("dot product", "chance") for radius in (0, 1, 2)
    ]
    # A patch that lies half-way between two is decided by a rounding of its colour; and at the rim of the overlap
    # nothing else is near.
    assert found["dot product", "matched within R=0"] > 90
    assert found["dot product", "matched within R=1"] == 100
    assert found["chance", "matched within R=0"] == pytest.approx(100 / 64)
    assert 100 / 64 * 4 < found["chance", "matched within R=1"] < 100 / 64 * 9
    batch = next(
        instance_pairs(extractor_of(all_knowing(), batch_size=99), map_source, torch.arange(12), size=32, seed=1)
    )
    mirrored = batch.first[:, 1, 0, 0] > batch.first[:, 1, 0, -1]
    assert 0 < int(mirrored.sum()) < 12  # so flips were part of it


@pytest.mark.usefixtures("true_colours")
def test_places_of_other_views_match_nothing(
    map_source: ArraySource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = correspondence.draw_parameters
    monkeypatch.setattr(
        correspondence, "draw_parameters", lambda *given, seed, epoch: published(*given, seed=seed + 1, epoch=epoch)
    )
    assert measured(all_knowing(), map_source, tmp_path, num_figures=0)["dot product", "matched within R=0"] < 50


def test_a_random_network_is_near_chance_and_cosine_is_named(map_source: ArraySource, tmp_path: Path) -> None:
    found = measured(loaded(tiny_backbone()), map_source, tmp_path, num_figures=0, cosine=True, radii=(0,))
    assert set(found) == {("cosine", "matched within R=0"), ("chance", "matched within R=0")}
    assert found["cosine", "matched within R=0"] < 40


def test_numbers_do_not_depend_on_batches_and_fewer_images_may_be_asked_for(
    map_source: ArraySource, tmp_path: Path
) -> None:
    model = loaded(tiny_backbone())
    data = EvaluationData(name="maps", test=map_source, output=tmp_path)
    settings = CorrespondenceSettings(num_images=7, num_figures=0)
    alone, together = (list(measure_correspondence(extractor_of(model, size), data, settings)) for size in (1, 64))
    assert [one.value for one in alone] == pytest.approx([one.value for one in together])
    assert {one.num_samples for one in alone} == {7}


def test_images_whose_views_do_not_overlap_are_left_out(
    map_source: ArraySource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_some(*centres: Any) -> Tensor:
        mask = torch.ones(len(centres[0].rows), GRID * GRID, dtype=torch.bool)
        mask[0] = False
        return mask

    monkeypatch.setattr(correspondence, "overlap_mask", only_some)
    data = EvaluationData(name="maps", test=map_source, output=tmp_path)
    found = list(
        measure_correspondence(extractor_of(loaded(tiny_backbone())), data, CorrespondenceSettings(num_figures=0))
    )
    assert {one.num_samples for one in found} == {12 - 3}  # one of each batch of 5
    assert all(np.isfinite(one.value) for one in found)


# ---- pairs of one class ----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-1, 3), min_size=2, max_size=30), st.integers(1, 20))
def test_class_pairs_are_different_images_of_one_class(labels: list[int], num_pairs: int) -> None:
    pairs = same_class_pairs(torch.tensor(labels), num_pairs=num_pairs, key=(0, "test"))
    assert len(pairs) == min(num_pairs, sum(labels.count(label) // 2 for label in range(4)))
    assert all(labels[first] == labels[second] >= 0 for first, second in pairs.tolist())
    assert len(set(pairs.flatten().tolist())) == 2 * len(pairs)
    assert torch.equal(pairs, same_class_pairs(torch.tensor(labels), num_pairs=num_pairs, key=(0, "test")))


def test_the_views_of_a_class_pair_are_those_of_its_images() -> None:
    greys = np.full((6, 10, 14, 3), 1, dtype=np.uint8) * np.arange(0, 240, 40, dtype=np.uint8)[:, None, None, None]
    source = ArraySource(name="greys", pixels=greys, labels=None, class_names=None, key_prefix="grey")
    pairs = torch.tensor([[3, 0], [1, 5], [4, 2]])
    batches = list(class_pairs(extractor_of(loaded(tiny_backbone()), batch_size=4), source, pairs, size=32))
    assert [len(batch) for batch in batches] == [2, 1]
    assert torch.equal(torch.cat([batch.indices for batch in batches]), pairs)
    for column, views in enumerate(
        [torch.cat([batch.first for batch in batches]), torch.cat([batch.second for batch in batches])]
    ):
        expected = (pairs[:, column] * 40 / 255 - MEAN[0]) / STD[0]
        torch.testing.assert_close(views[:, 0].mean(dim=(1, 2)), expected)
    assert batches[0].overlap is None  # of different images no true match is known


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_figures_show_both_kinds_of_pairs_and_say_who_chose_the_points(map_source: ArraySource, tmp_path: Path) -> None:
    measured(loaded(tiny_backbone()), map_source, tmp_path, num_figures=2)
    folder = tmp_path / "correspondence"
    captions = json.loads((folder / "figures.json").read_text())
    assert [figure["file"] for figure in captions["figures"]] == [
        "instance_000.png",
        "instance_001.png",
        "class_000.png",
        "class_001.png",
    ]
    assert captions["points_chosen_by_attention_of"] == "tiny"
    for figure in captions["figures"]:
        picture = np.array(Image.open(folder / figure["file"]))
        assert picture.shape == (160, 320, 3)  # 32 px enlarged five times
        drawn = (picture[..., None, :] == np.array(LINE_COLOURS)).all(axis=3).any(axis=2)
        assert drawn.any(axis=0).sum() > 50  # columns that lines cross
    instance, _, pair, _ = captions["figures"]
    assert instance["images"][0] == instance["images"][1]
    assert 0 <= instance["matched exactly"] <= instance["overlapping patches"] <= GRID * GRID
    numbers = [int(key.removeprefix("map/")) for key in pair["images"]]
    assert numbers[0] != numbers[1]
    assert numbers[0] % 3 == numbers[1] % 3


def test_without_labels_there_are_instance_pairs_only(map_source: ArraySource, tmp_path: Path) -> None:
    unlabelled = ArraySource(name="maps", pixels=map_source.pixels, labels=None, class_names=None, key_prefix="map")
    measured(loaded(tiny_backbone()), unlabelled, tmp_path, num_figures=1)
    assert sorted(path.name for path in (tmp_path / "correspondence").glob("*.png")) == ["instance_000.png"]


def test_another_model_may_choose_the_points(map_source: ArraySource, tmp_path: Path) -> None:
    other = tiny_backbone(patch=16, seed=3)
    file = tmp_path / "other.safetensors"
    file.write_bytes(
        backbone_bytes(other.model, timm_arguments=other.timm_arguments, mean=MEAN, std=STD, image_size=32)
    )
    measured(loaded(tiny_backbone()), map_source, tmp_path / "a", num_figures=1, points_model=str(file))
    captions = json.loads((tmp_path / "a/correspondence/figures.json").read_text())
    assert captions["points_chosen_by_attention_of"] == str(file)


def test_points_are_chosen_on_views_normalised_for_the_model_that_chooses(
    map_source: ArraySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(tiny_backbone())
    chooser = LoadedModel(
        backbone=tiny_backbone(seed=2),
        name="chooser",
        origin="",
        fingerprint="",
        image_size=32,
        mean=(0.1, 0.2, 0.3),
        std=(0.5, 0.6, 0.7),
    )
    batch = next(instance_pairs(extractor_of(model), map_source, torch.arange(2), size=32, seed=1))
    seen: list[Tensor] = []

    def record(backbone: Backbone, views: Tensor) -> Tensor:
        assert backbone is chooser.backbone
        seen.append(views)
        return torch.ones(len(views), 1, GRID, GRID)

    monkeypatch.setattr(correspondence, "class_attention", record)
    correspondence.pair_pictures(batch, model=model, points_model=chooser, num_points=3)
    raw = batch.first * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
    expected = (raw - torch.tensor(chooser.mean).view(3, 1, 1)) / torch.tensor(chooser.std).view(3, 1, 1)
    torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-5)


def test_only_the_main_process_writes(map_source: ArraySource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_main", lambda: False)
    assert measured(loaded(tiny_backbone()), map_source, tmp_path)
    assert not any(tmp_path.iterdir())


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_size_of_broken_patches_is_refused_with_advice(map_source: ArraySource, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"--correspondence.size 33 is no multiple of the model's patch of 4 px; choose 32 or 36"
    ):
        measured(loaded(tiny_backbone()), map_source, tmp_path, size=33)


def test_a_model_without_class_token_is_measured_but_cannot_choose_points(
    map_source: ArraySource, tmp_path: Path
) -> None:
    model = loaded(tiny_backbone(name="vit_little_patch16_reg4_gap_256"))
    with pytest.raises(UnsuitableModel, match=r"points_model.*num_figures"):
        measured(model, map_source, tmp_path)
    assert len(measured(model, map_source, tmp_path, num_figures=0)) == 6


@pytest.mark.usefixtures("true_colours")
@pytest.mark.gpu
def test_a_gpu_measures_the_same_and_draws(map_source: ArraySource, tmp_path: Path) -> None:
    expected = measured(loaded(tiny_backbone()), map_source, tmp_path / "cpu", num_figures=1)
    model, device = loaded(tiny_backbone()), torch.device("cuda")
    model.backbone.to(device)
    extractor = Extractor(model=model, settings=ExtractionSettings(num_workers=0), device=device, cache=None)
    data = EvaluationData(name="maps", test=map_source, output=tmp_path / "gpu")
    found = [one.value for one in measure_correspondence(extractor, data, CorrespondenceSettings(num_figures=1))]
    assert found == pytest.approx(list(expected.values()), abs=2)  # smooth images: some matches are decided by rounding
    names = [sorted(path.name for path in (tmp_path / name / "correspondence").iterdir()) for name in ("cpu", "gpu")]
    assert names[0] == names[1]
