from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from massl.commands import visualize as command
from massl.commands.visualize import visualize
from massl.config import MasslError, RecipeError
from massl.data.sources.base import DataError
from massl.nn.backbone import BackboneSettings, build_backbone
from massl.reports.pictures.sheets import GREEN, GREY, RED, sheet
from massl.weights.io import backbone_bytes

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a transformer with two heads and patches of 4 px, for images of 16 px."""
    options: dict[str, int | float | bool | str] = {"embed_dim": 16, "depth": 2, "num_heads": 2}
    settings = BackboneSettings(name="vit_tiny_patch16_224", image_size=16, patch_size=4, timm_options=options)
    backbone = build_backbone(settings, seed=0)
    path = tmp_path_factory.mktemp("model") / "backbone.safetensors"
    path.write_bytes(
        backbone_bytes(backbone.model, timm_arguments=backbone.timm_arguments, mean=MEAN, std=STD, image_size=16)
    )
    return path


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 images of 24 x 18 px in two classes: bright ones and dark ones."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 100, (20, 24, 18, 3)).astype(np.uint8)
    labels = np.arange(20) % 2
    pixels[labels == 1] += 150
    path = tmp_path_factory.mktemp("images") / "images.npz"
    np.savez(path, images=pixels, labels=labels)
    return path


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as picture:
        return picture.size


def has_colour(path: Path, colour: tuple[int, int, int]) -> bool:
    with Image.open(path) as picture:
        return bool((np.array(picture) == colour).all(axis=2).any())


def test_attention_is_drawn_for_each_image_and_on_a_sheet(model: Path, images: Path, tmp_path: Path) -> None:
    files = visualize(model, "attention", data=images, output=tmp_path, num_images=3, device="cpu")
    assert files == [tmp_path / "attention.png", *(tmp_path / f"attention/{number:03d}.png" for number in range(3))]
    width, height = size_of(files[0])
    assert width >= 4 * 160  # image, all heads, two heads
    assert height > 3 * 160
    assert size_of(files[1])[0] == width


def test_components_are_drawn_beside_each_image_and_the_size_is_said(
    model: Path, images: Path, tmp_path: Path, massl_here: Callable[..., Any]
) -> None:
    answer = massl_here("visualize", model, "pca", "--data", images, "--output", tmp_path, "--num_images", 4)
    assert answer.status == 0, answer.text
    assert "drawn at 36 x 36 px, 9 x 9 patches: whole images, resized to squares" in answer.text
    files = [Path(file) for file in answer.output.split()]
    assert files == [tmp_path / "pca.png", *(tmp_path / f"pca/{number:03d}.png" for number in range(4))]
    with Image.open(files[1]) as opened:
        picture = np.array(opened)
    side = 180  # 36 px, enlarged
    map_of_patches = picture[16 : 16 + side, 16 + side + 8 : 16 + 2 * side + 8]
    patches = map_of_patches.reshape(9, 20, 9, 20, 3)
    assert (patches == patches[:, :1, :, :1]).all()  # sharp squares, one for each patch
    assert len(np.unique(patches[:, 0, :, 0].reshape(-1, 3), axis=0)) > 40
    (again, *_) = visualize(model, "pca", data=images, output=tmp_path / "again", num_images=4, device="cpu")
    assert again.read_bytes() == files[0].read_bytes()
    options = {"threshold": 0.6}
    (some, *_) = visualize(
        model, "pca", data=images, output=tmp_path / "some", num_images=4, device="cpu", overrides=options
    )
    assert has_colour(some, (0, 0, 0))
    assert not has_colour(again, (0, 0, 0))


def test_names_of_classes_and_files_stand_below_neighbours(
    model: Path, tmp_path: Path, make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(command, "sheet", lambda rows, **options: shown.extend(rows) or Image.new("RGB", (1, 1)))
    options: Any = {"output": tmp_path, "num_images": 2, "num_neighbours": 1, "device": "cpu"}
    visualize(model, "neighbours", data=make_folder("labelled", 4, classes=2), **options)
    (query, near), _ = shown
    assert query.captions == ("class0", "000.png")
    assert near.captions[1].startswith("class")
    assert near.captions[2] in ("001.png", "002.png", "003.png")
    shown.clear()
    photos = make_folder("photos", 2)
    (photos / "001.png").rename(photos / "x\n\x1b[2J.png")
    visualize(model, "neighbours", data=photos, **options)
    assert {tile.captions[-1] for row in shown for tile in row} == {"000.png", "percent:x%0A%1B[2J.png"}


def test_more_images_than_fit_a_sheet_go_on_the_next(
    model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("massl.commands.picture_files._ROWS_PER_SHEET", 2)
    files = visualize(model, "neighbours", data=images, output=tmp_path, num_images=5, num_neighbours=2, device="cpu")
    assert [path.name for path in files] == ["neighbours.png", "neighbours_2.png", "neighbours_3.png"]
    first, second, third = (size_of(path) for path in files)
    assert first == second
    assert third[1] < first[1]


def test_correspondence_is_drawn_for_views_of_an_image_and_images_of_a_class(
    model: Path, images: Path, tmp_path: Path
) -> None:
    files = visualize(
        model, "correspondence", data=images, output=tmp_path, num_images=2, device="cpu", overrides={"cosine": True}
    )
    names = [str(path.relative_to(tmp_path)) for path in files]
    assert names[:2] == ["correspondence_instance.png", "correspondence_class.png"]
    assert names[2:] == [
        f"correspondence/{kind}_{number:03d}.png" for kind in ("instance", "class") for number in range(2)
    ]
    assert all(size_of(path) == (324, 160) for path in files[2:])
    assert all(has_colour(path, (255, 225, 25)) for path in files)  # of the first line


def test_neighbours_of_the_same_class_are_framed_green_and_others_red(
    model: Path, images: Path, tmp_path: Path
) -> None:
    (file,) = visualize(
        model, "neighbours", data=images, output=tmp_path, num_images=1, num_neighbours=19, device="cpu"
    )
    assert has_colour(file, GREEN)
    assert has_colour(file, RED)  # 19 neighbours are all there are, so those of the other class too


def test_an_image_is_not_its_own_neighbour_but_its_copy_elsewhere_is(
    model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(command, "sheet", lambda rows, **options: shown.extend(rows) or Image.new("RGB", (1, 1)))
    visualize(model, "neighbours", data=images, output=tmp_path, num_images=20, num_neighbours=19, device="cpu")
    stored = np.load(images)["images"]
    for number, (query, *found) in enumerate(shown):
        assert np.array_equal(query.picture, stored[number])
        numbers = [int(np.nonzero((stored == tile.picture).all(axis=(1, 2, 3)))[0][0]) for tile in found]
        assert sorted(numbers) == [other for other in range(20) if other != number]
        values = [float(tile.captions[0]) for tile in found]
        assert values == sorted(values, reverse=True)
    shown.clear()
    copy = images.with_name("copy.npz")
    copy.write_bytes(images.read_bytes())
    visualize(
        model, "neighbours", data=images, database=copy, output=tmp_path, num_images=3, num_neighbours=1, device="cpu"
    )
    assert [tile.captions[0] for _, tile in shown] == ["1.000"] * 3
    assert all(np.array_equal(query.picture, tile.picture) for query, tile in shown)


def test_without_labels_frames_are_grey_and_the_title_says_nothing_of_classes(
    model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []

    def kept(*given: Any, title: str, **named: Any) -> Image.Image:
        titles.append(title)
        return sheet(*given, title=title, **named)

    monkeypatch.setattr("massl.commands.visualize.sheet", kept)
    unlabelled = tmp_path / "unlabelled.npz"
    np.savez(unlabelled, images=np.load(images)["images"])
    (file,) = visualize(
        model, "neighbours", data=unlabelled, output=tmp_path, num_images=2, num_neighbours=2, device="cpu"
    )
    assert has_colour(file, GREY)
    assert not has_colour(file, GREEN)
    assert not has_colour(file, RED)
    assert "class" not in titles[0].replace(str(tmp_path), "")
    visualize(model, "neighbours", data=images, output=tmp_path, num_images=2, num_neighbours=2, device="cpu")
    assert "Green: same class" in titles[1]


def test_the_command_prints_the_files_it_wrote(
    model: Path, images: Path, tmp_path: Path, massl_here: Callable[..., Any]
) -> None:
    answer = massl_here(
        "visualize", model, "attention", "--data", images, "--output", tmp_path, "--num_images", 1, "--image_size", 32
    )
    assert answer.status == 0
    files = answer.output.split()
    assert files == [str(tmp_path / "attention.png"), str(tmp_path / "attention/000.png")]
    assert all(Path(file).is_file() for file in files)


@pytest.mark.parametrize("kind", ["attention", "pca", "correspondence", "neighbours"])
def test_sizes_of_broken_patches_are_refused_with_advice(kind: Any, model: Path, images: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="image_size 30"):
        visualize(model, kind, data=images, output=tmp_path / "none", image_size=30, device="cpu")
    assert not list((tmp_path / "none").rglob("*.png"))


def test_unknown_kinds_and_lonely_images_are_refused(model: Path, images: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="kind"):
        visualize(model, "atention", data=images, output=tmp_path)  # type: ignore[arg-type]
    alone = tmp_path / "alone.npz"
    np.savez(alone, images=np.zeros((1, 20, 20), dtype=np.uint8))
    with pytest.raises(DataError, match=r"alone\.npz"):
        visualize(model, "neighbours", data=alone, output=tmp_path, device="cpu")


def test_an_output_that_is_a_file_is_refused_before_the_work(model: Path, images: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(MasslError, match="--output"):
        visualize(model, "attention", data=images, output=tmp_path / "file", device="cpu")
    assert (tmp_path / "file").read_text() == "mine"
