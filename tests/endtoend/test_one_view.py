"""One image size, one crop and one rule for positions: all ways to a run's features agree."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from PIL import Image

import massl
from massl.commands.model import ModelSettings, model_on_device
from massl.nn.backbone import BackboneSettings, build_backbone
from massl.weights.io import BACKBONE_FILE, backbone_bytes

OPTIONS: dict[str, Any] = {"embed_dim": 24, "depth": 2, "num_heads": 2}
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
TRAINED_SIZE, CROP_RATIO = 64, 1.0  # the position embeddings are for 224 px, as timm's


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backbone = build_backbone(BackboneSettings(name="vit_tiny_patch16_224", timm_options=OPTIONS), seed=0)
    backbone.model.pos_embed.data.mul_(20)  # type: ignore[operator, union-attr] # as large as trained ones
    content = backbone_bytes(
        backbone.model,
        timm_arguments=backbone.timm_arguments,
        mean=MEAN,
        std=STD,
        image_size=TRAINED_SIZE,
        crop_ratio=CROP_RATIO,
    )
    folder = tmp_path_factory.mktemp("run")
    (folder / BACKBONE_FILE).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Photographs of different sizes and formats, one of them lying on its side."""
    folder, generator = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    for number, size in enumerate([(5, 7), (9, 6), (8, 8)]):
        rough = Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8))
        picture = rough.resize((60 * size[1], 60 * size[0]), Image.Resampling.BICUBIC)
        picture.save(folder / f"{number}.jpg", exif=exif if number == 1 else b"")
    return sorted(folder.iterdir())


def features_by_model(model: torch.nn.Module, transform: Any, photos: list[Path]) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(torch.stack([transform(photo) for photo in photos]))  # type: ignore[no-any-return]


def difference(features: Any, others: torch.Tensor) -> float:
    """The largest difference, as a share of the features' norm."""
    return float(((torch.as_tensor(features) - others).norm(dim=1) / others.norm(dim=1)).max())


def in_plain_timm(file: Path, size: int) -> torch.nn.Module:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=size, **OPTIONS)
    model.load_state_dict(safetensors.torch.load_file(file), strict=True)
    return model


@pytest.mark.parametrize("size", [64, 96, 224, 336])
def test_embed_load_backbone_and_plain_timm_give_equal_features(
    size: int, run: Path, photos: list[Path], tmp_path: Path
) -> None:
    embedded = massl.embed(run, data=photos[0].parent, overrides={"image_size": size, "device": "cpu"}).features
    model, transform = massl.load_backbone(run, image_size=size)
    exported = features_by_model(model, transform, photos)
    assert difference(embedded, exported) < 1e-4
    # the model for any size
    assert difference(features_by_model(massl.load_backbone(run).model, transform, photos), exported) < 1e-4
    safetensors.torch.save_file(model.state_dict(), tmp_path / "exported.safetensors")
    plain = in_plain_timm(tmp_path / "exported.safetensors", size)
    assert difference(features_by_model(plain, transform, photos), exported) < 1e-4
    if size == 224:  # the size of the backbone: the run's own file
        plain = in_plain_timm(run / BACKBONE_FILE, size)
        assert difference(features_by_model(plain, transform, photos), exported) < 1e-4


def test_timms_own_rule_for_positions_gives_other_features(run: Path, photos: list[Path]) -> None:
    """Otherwise the test above could not tell the rules apart."""
    model, transform = massl.load_backbone(run, image_size=96)
    by_timm = timm.create_model("vit_tiny_patch16_224", num_classes=0, dynamic_img_size=True, **OPTIONS)
    by_timm.load_state_dict(safetensors.torch.load_file(run / BACKBONE_FILE))
    expected = features_by_model(model, transform, photos)
    assert difference(features_by_model(by_timm, transform, photos), expected) > 1e-3


def test_every_way_takes_size_crop_and_colours_from_the_run(run: Path, photos: list[Path]) -> None:
    with model_on_device(ModelSettings(model=str(run), device="cpu"), cache=None) as (extractor, _):
        assert (extractor.centre_view().size, extractor.centre_view().crop_ratio) == (TRAINED_SIZE, CROP_RATIO)
        assert (extractor.model.mean, extractor.model.std) == (MEAN, STD)
    model, transform = massl.load_backbone(run)
    assert (transform.image_size, transform.crop_ratio) == (TRAINED_SIZE, CROP_RATIO)
    embedded = massl.embed(run, data=photos[0].parent, overrides={"device": "cpu"}).features
    assert difference(embedded, features_by_model(model, transform, photos)) < 1e-4
    # timm's transform rounds pixels to 8 bits, but sees the same part of the image
    similar = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    by_timm = features_by_model(model, lambda photo: similar(Image.open(photo).convert("RGB")), photos[:1])
    assert difference(embedded[:1], by_timm) < 0.02


def test_size_and_crop_can_be_chosen(run: Path) -> None:
    settings = ModelSettings(model=str(run), device="cpu", image_size=96, crop_ratio=0.5)
    with model_on_device(settings, cache=None) as (extractor, _):
        assert (extractor.centre_view().size, extractor.centre_view().crop_ratio) == (96, 0.5)


def test_models_of_other_projects_keep_the_published_size_and_crop() -> None:
    settings = ModelSettings(model="vit_tiny_patch16_224", device="cpu")
    with model_on_device(settings, cache=None) as (extractor, _):
        assert (extractor.centre_view().size, extractor.centre_view().crop_ratio) == (224, 224 / 256)


def test_training_stores_its_size_and_crop(recipe: Path, archive: Path, tmp_path: Path) -> None:
    changes = {"trainer.max_steps": 1, "probes.every_epochs": 0, "probes.crop_ratio": 0.75, "views.global_size": 24}
    massl.pretrain(recipe=recipe, data=archive, output=tmp_path / "run", overrides=changes)
    _, transform = massl.load_backbone(tmp_path / "run")
    assert (transform.image_size, transform.crop_ratio) == (24, 0.75)


def test_evaluate_names_the_crop_and_size_of_a_run_as_not_published(run: Path, archive: Path, tmp_path: Path) -> None:
    result = massl.evaluate(
        run, output=tmp_path, protocol="knn", train=archive, test=archive, overrides={"device": "cpu", "knn.ks": [1]}
    )
    assert {str(row.setting) for row in result.rows} == {"k=1, crop ratio 1, 64 px, tested on the training images"}


def test_embed_gives_rows_of_arrays_pictures_and_paths(run: Path, photos: list[Path]) -> None:
    small = {"image_size": 32, "device": "cpu"}
    by_folder = massl.embed(run, data=photos[0].parent, overrides=small)
    assert by_folder.keys == [photo.name for photo in photos]
    assert by_folder.labels.tolist() == [-1, -1, -1]
    by_list = massl.embed(
        run, data=[photos[0], Image.open(photos[1]), np.asarray(Image.open(photos[2]))], overrides=small
    )
    assert by_list.keys == [str(photos[0]), "image/1", "image/2"]
    np.testing.assert_allclose(by_list.features, by_folder.features, rtol=1e-5, atol=1e-6)
    array = np.stack([np.asarray(Image.open(photos[2]))] * 2)
    by_array = massl.embed(run, data=array, overrides=small)
    np.testing.assert_allclose(by_array.features, by_folder.features[[2, 2]], rtol=1e-5, atol=1e-6)


def test_embed_writes_given_images_to_a_file_too(run: Path, photos: list[Path], tmp_path: Path) -> None:
    path = massl.embed(run, data=photos, output=tmp_path / "a.npz", overrides={"device": "cpu"})
    with np.load(path) as archive:
        assert archive["keys"].tolist() == [str(photo) for photo in photos]
