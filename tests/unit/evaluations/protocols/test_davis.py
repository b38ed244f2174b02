from collections.abc import Callable
from dataclasses import replace
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
from massl.evaluations.protocols.davis import DavisSettings, FrameView, measure_davis
from massl.nn.backbone import Backbone
from massl.nn.token_readout import UnsuitableModel
from massl.ops.image_ops import RaggedImages
from massl.weights.models import LoadedModel

OPTIONS = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 0}
HEIGHT, WIDTH, PATCH, NUM_FRAMES = 72, 104, 8, 6  # 480 px of a 224 px model are 72 px of one of 32
Mask = NDArray[np.uint8]


def loaded(network: torch.nn.Module, name: str) -> LoadedModel:
    return LoadedModel(
        backbone=Backbone(network, timm_arguments={"model_name": name}),
        name="tiny",
        origin="random weights",
        fingerprint="0",
        image_size=32,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
    )


@pytest.fixture(scope="module")
def extractor() -> Extractor:
    """A transformer whose patch tokens depend on their own patch alone: its blocks add nothing, and places have no
    embedding.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = timm.create_model("vit_tiny_patch16_224", **OPTIONS).eval()
    for name, parameter in network.named_parameters():
        if name == "pos_embed" or name.endswith(("attn.proj.weight", "mlp.fc2.weight")):
            parameter.data.zero_()
    settings = ExtractionSettings(batch_size=8, num_workers=0)
    return Extractor(
        model=loaded(network, "vit_tiny_patch16_224"), settings=settings, device=torch.device("cpu"), cache=None
    )


def write_video(root: Path, name: str, mask_at: Callable[[int], Mask], *, num_frames: int = NUM_FRAMES) -> None:
    """Each object in a colour of its own, on grey."""
    colours = np.array([[128, 128, 128], [230, 30, 30], [30, 30, 230]], dtype=np.uint8)
    for frame in range(num_frames):
        mask = mask_at(frame)
        image, annotation = (root / folder / "480p" / name for folder in ("JPEGImages", "Annotations"))
        for folder in (image, annotation):
            folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(colours[np.where(mask == 255, 0, mask)]).save(
            image / f"{frame:05d}.jpg", quality=98, subsampling=0
        )
        picture = Image.fromarray(mask)
        picture.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0])
        picture.save(annotation / f"{frame:05d}.png")


def list_videos(root: Path, *names: str) -> None:
    (root / "ImageSets" / "2017").mkdir(parents=True, exist_ok=True)
    (root / "ImageSets" / "2017" / "val.txt").write_text("\n".join(names) + "\n")


def band(frame: int) -> Mask:
    """Three patches wide, from top to bottom, one patch further to the right in each frame."""
    mask = np.zeros((HEIGHT, WIDTH), dtype=np.uint8)
    mask[:, PATCH * (1 + frame) : PATCH * (4 + frame)] = 1
    return mask


def square(frame: int) -> Mask:
    mask = np.zeros((HEIGHT, WIDTH), dtype=np.uint8)
    mask[PATCH * 2 : PATCH * 6, PATCH * (1 + frame) : PATCH * (5 + frame)] = 1
    return mask


def two_bands(frame: int) -> Mask:
    return band(frame) + 2 * np.roll(band(0), PATCH * 8, axis=1)


def measure(extractor: Extractor, folder: Path, **settings: Any) -> dict[str, float]:
    data = EvaluationData(name=folder.name, folder=folder, output=folder / "output")
    measured = list(measure_davis(extractor, data, DavisSettings(**settings)))
    assert [str(measurement.setting) for measurement in measured] == ["val"] * 3
    return {measurement.metric: measurement.value for measurement in measured}


def test_a_moving_band_is_followed_to_the_pixel(extractor: Extractor, tmp_path: Path) -> None:
    write_video(tmp_path, "band", band)
    list_videos(tmp_path, "band")
    assert measure(extractor, tmp_path) == {"J&F": 100.0, "J": 100.0, "F": 100.0}


def test_a_moving_square_loses_no_more_than_its_corners(extractor: Extractor, tmp_path: Path) -> None:
    write_video(tmp_path, "square", square)
    list_videos(tmp_path, "square")
    measured = measure(extractor, tmp_path)
    # Bilinear enlarging rounds corners off. In the outer half patch the label falls to 0.9375, 0.8125, 0.6875 and
    # 0.5625 along either axis; of the products of two of them six are below one half, so each of the four corners of 32
    # x 32 pixels loses six.
    assert measured["J"] == pytest.approx(100 * (32 * 32 - 4 * 6) / (32 * 32))
    assert measured["J&F"] == pytest.approx((measured["J"] + measured["F"]) / 2)


def test_each_object_counts_once_whatever_video_it_is_in(extractor: Extractor, tmp_path: Path) -> None:
    folder = tmp_path / "DAVIS"
    write_video(folder, "two", two_bands, num_frames=4)
    write_video(folder, "lost", lambda frame: np.zeros_like(band(0)) if frame else band(0), num_frames=4)
    # The annotation has no object after the first frame, but the pictures still show it: it is followed, and counts as
    # wrong.
    write_video(folder, "shown", band, num_frames=4)
    for path in sorted((folder / "JPEGImages" / "480p" / "shown").iterdir()):
        path.replace(folder / "JPEGImages" / "480p" / "lost" / path.name)
    list_videos(folder, "two", "lost")
    data = EvaluationData(name="DAVIS", folder=folder, output=tmp_path)
    measured = list(measure_davis(extractor, data, DavisSettings()))
    assert {measurement.num_samples for measurement in measured} == {3}
    assert {measurement.data for measurement in measured} == {"DAVIS-2017"}
    assert measured[1].value == pytest.approx(100 * 2 / 3)


def test_the_first_and_the_last_frame_are_not_judged(extractor: Extractor, tmp_path: Path) -> None:
    write_video(tmp_path, "band", band)
    list_videos(tmp_path, "band")
    last = tmp_path / "Annotations" / "480p" / "band" / f"{NUM_FRAMES - 1:05d}.png"
    Image.fromarray(1 - band(NUM_FRAMES - 1)).save(last)
    assert measure(extractor, tmp_path)["J"] == 100.0
    last.unlink()
    (tmp_path / "JPEGImages" / "480p" / "band" / f"{NUM_FRAMES - 1:05d}.jpg").unlink()
    Image.fromarray(1 - band(NUM_FRAMES - 3)).save(last.with_name(f"{NUM_FRAMES - 3:05d}.png"))
    assert measure(extractor, tmp_path)["J"] == pytest.approx(100 * 2 / 3), (
        "one of the frames 1, 2 and 3 is judged wrong"
    )


def test_void_pixels_are_not_judged(extractor: Extractor, tmp_path: Path) -> None:
    def with_void(frame: int) -> Mask:
        mask = band(frame)
        if frame == 0:
            mask[:, -PATCH:] = 255
        else:
            mask[:, : PATCH * (2 + frame)] = 255  # the left edge of the band and all left of it
        return mask

    write_video(tmp_path, "band", band)
    for frame in range(NUM_FRAMES):
        Image.fromarray(with_void(frame)).save(tmp_path / "Annotations" / "480p" / "band" / f"{frame:05d}.png")
    list_videos(tmp_path, "band")
    measured = list(
        measure_davis(extractor, EvaluationData(name="x", folder=tmp_path, output=tmp_path), DavisSettings())
    )
    assert [measurement.value for measurement in measured] == [100.0] * 3
    assert {measurement.num_samples for measurement in measured} == {1}, "255 is no object's number"


def test_labels_come_from_the_frames_before_as_well_as_from_the_first(extractor: Extractor, tmp_path: Path) -> None:
    write_video(tmp_path, "band", band)
    list_videos(tmp_path, "band")
    assert measure(extractor, tmp_path, radius=2, num_context=1)["J"] == 100.0
    assert measure(extractor, tmp_path, radius=2, num_context=0)["J"] < 100.0


def test_an_object_that_was_hidden_is_recognised_from_the_first_frame(extractor: Extractor, tmp_path: Path) -> None:
    write_video(tmp_path, "band", lambda frame: np.zeros_like(band(0)) if frame in (1, 2) else band(0))
    list_videos(tmp_path, "band")
    assert measure(extractor, tmp_path, num_context=1)["J"] == 100.0


def test_an_object_is_lost_when_it_moves_further_than_labels_may(extractor: Extractor, tmp_path: Path) -> None:
    write_video(tmp_path, "band", lambda frame: np.roll(band(0), PATCH * 4 * (frame % 2), axis=1))
    list_videos(tmp_path, "band")
    assert measure(extractor, tmp_path)["J"] == 100.0
    assert measure(extractor, tmp_path, radius=1, num_context=1)["J"] < 60.0


def test_masks_are_saved_in_the_colours_of_the_annotation(extractor: Extractor, tmp_path: Path) -> None:
    write_video(tmp_path, "two", two_bands, num_frames=4)
    list_videos(tmp_path, "two")
    measure(extractor, tmp_path)
    assert not (tmp_path / "output").exists()
    measure(extractor, tmp_path, save_masks=True)
    for frame in range(4):
        with Image.open(tmp_path / "output" / "davis" / "two" / f"{frame:05d}.png") as saved:
            assert saved.mode == "P"
            assert saved.getpalette()[3:9] == [128, 0, 0, 0, 128, 0]  # type: ignore[index]
            np.testing.assert_array_equal(np.asarray(saved), two_bands(frame))


# ---- the view --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [(480, 854, (480, 832)), (480, 910, (480, 896)), (854, 480, (832, 480)), (480, 480, (480, 448))],
)
def test_frames_are_as_large_as_published(height: int, width: int, expected: tuple[int, int]) -> None:
    assert FrameView(short_side=480, multiple=64).size_of(height, width) == expected


def test_frames_are_resized_between_pixel_centres_without_smoothing_and_rounded() -> None:
    frame = np.random.default_rng(0).integers(0, 256, (3, 10, 23), dtype=np.uint8)
    (views,) = FrameView(short_side=8, multiple=4).apply(
        RaggedImages.from_list([torch.from_numpy(frame)] * 2), torch.arange(2)
    )
    assert views.shape == (2, 3, 8, 16)
    for y in range(8):
        for x in range(16):
            place_y, place_x = (y + 0.5) * 10 / 8 - 0.5, (x + 0.5) * 23 / 16 - 0.5
            top, left = int(place_y), int(place_x)
            weight_y, weight_x = place_y - top, place_x - left
            corners = frame[:, top : top + 2, left : left + 2].astype(float)
            value = np.einsum("cyx,y,x->c", corners, [1 - weight_y, weight_y], [1 - weight_x, weight_x])
            assert np.abs(views[1, :, y, x].numpy() * 255 - value).max() <= 0.5 + 1e-3
    assert torch.equal(views * 255, (views * 255).round())


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_named(extractor: Extractor, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"val\.txt does not exist"):
        measure(extractor, tmp_path)
    list_videos(tmp_path)
    with pytest.raises(DataError, match="names no video"):
        measure(extractor, tmp_path)
    list_videos(tmp_path, "band")
    with pytest.raises(DataError, match="holds 0 frames"):
        measure(extractor, tmp_path)
    write_video(tmp_path, "band", band)
    (tmp_path / "Annotations" / "480p" / "band" / "00002.png").unlink()
    with pytest.raises(DataError, match=r"00002\.png cannot be read .* unpack DAVIS-2017 again"):
        measure(extractor, tmp_path)


def test_wrong_annotations_are_refused(extractor: Extractor, tmp_path: Path) -> None:
    write_video(tmp_path, "band", band)
    list_videos(tmp_path, "band")
    annotations = tmp_path / "Annotations" / "480p" / "band"
    Image.fromarray(band(2)[:, ::2].copy()).save(annotations / "00002.png")
    with pytest.raises(DataError, match="annotations of band differ in size"):
        measure(extractor, tmp_path)
    Image.new("RGB", (WIDTH, HEIGHT)).save(annotations / "00001.png")
    with pytest.raises(DataError, match="is of mode RGB"):
        measure(extractor, tmp_path)
    Image.fromarray(np.zeros_like(band(0))).save(annotations / "00000.png")
    with pytest.raises(DataError, match="marks no object"):
        measure(extractor, tmp_path)


@pytest.mark.parametrize("batch_size", [4, 64])  # frames in batches of one, and all at once
def test_frames_of_several_sizes_are_refused(extractor: Extractor, tmp_path: Path, batch_size: int) -> None:
    write_video(tmp_path, "band", band, num_frames=3)
    list_videos(tmp_path, "band")
    Image.new("RGB", (WIDTH, HEIGHT + 8)).save(tmp_path / "JPEGImages" / "480p" / "band" / "00001.jpg")
    with pytest.raises(DataError, match="frames of band differ in size"):
        measure(replace(extractor, settings=ExtractionSettings(batch_size=batch_size, num_workers=0)), tmp_path)


def test_a_short_side_of_broken_patches_and_a_network_without_patches_are_refused(
    extractor: Extractor, tmp_path: Path
) -> None:
    write_video(tmp_path, "band", band, num_frames=3)
    list_videos(tmp_path, "band")
    with pytest.raises(DataError, match=r"--davis\.short_side 70 is no multiple"):
        measure(extractor, tmp_path, short_side=70)
    assert measure(extractor, tmp_path, short_side=144)["J"] == 100.0
    convolutions = loaded(timm.create_model("resnet10t", num_classes=0).eval(), "resnet10t")
    without_patches = Extractor(model=convolutions, settings=extractor.settings, device=extractor.device, cache=None)
    with pytest.raises(UnsuitableModel, match="video segmentation needs patch tokens"):
        measure(without_patches, tmp_path)
