import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError
from torch import Tensor, nn
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor

from massl import distributed
from massl.config import MasslError, RecipeError
from massl.data.evaluation.views import CentreView, SquareView, StoredView, ThumbnailView
from massl.data.sources.array import ArraySource
from massl.data.sources.base import DataError, EncodedImage, ImageSource
from massl.data.sources.folder import FolderSource
from massl.data.sources.rules import ReadRules
from massl.data.sources.subset import UnreadableImages
from massl.evaluations import features
from massl.evaluations.base import LabelledFeatures
from massl.evaluations.features import ExtractionSettings, Extractor
from massl.evaluations.measurement import EvaluationError
from massl.nn.backbone import Backbone
from massl.weights.models import LoadedModel, model_fingerprint

VIEW = CentreView(size=32)
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def tiny_model(*, change: float = 0.0) -> LoadedModel:
    arguments: dict[str, Any] = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 32,
        "depth": 4,
        "num_heads": 2,
        "num_classes": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", **arguments)
    model.blocks[1].attn.proj.weight.data[3, 5] += change
    backbone = Backbone(model, timm_arguments={"model_name": "vit_tiny_patch16_224", **arguments}).eval()
    fingerprint = model_fingerprint(model, arguments=backbone.timm_arguments)
    return LoadedModel(
        backbone=backbone, name="tiny", origin="random", fingerprint=fingerprint, image_size=32, mean=MEAN, std=STD
    )


@pytest.fixture
def extractor() -> Extractor:
    settings = ExtractionSettings(num_workers=0, batch_size=4)
    return Extractor(model=tiny_model(), settings=settings, device=torch.device("cpu"), cache=None)


def array(num_images: int, *, side: int = 40, seed: int = 0) -> ArraySource:
    pixels = np.random.default_rng(seed).integers(0, 256, (num_images, side, side, 3), dtype=np.uint8)
    labels = np.arange(num_images) * 7 % 3 - 1  # -1: unlabelled
    return ArraySource(name="noise", pixels=pixels, labels=labels, class_names=("a", "b"), key_prefix="noise")


def smooth_picture(number: int, height: int, width: int) -> NDArray[np.uint8]:
    """Not noise: Pillow rounds to 8 bits between its two passes, and it is the transform that is compared here."""
    rows, columns = np.mgrid[:height, :width] / 15
    planes = [128 + 100 * np.sin(rows * (1 + number) + channel) * np.cos(columns - number) for channel in range(3)]
    return np.stack(planes, axis=2).round().astype(np.uint8)


def folder_of_pictures(root: Path, sizes: list[tuple[int, int]]) -> Path:
    """PNG files in two class folders, even numbers first."""
    for number, (height, width) in enumerate(sizes):
        folder = root / ("even", "odd")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(smooth_picture(number, height, width)).save(folder / f"{number}.png")
    return root


class Counter:
    """Counts what goes through the backbone, and may stop it."""

    def __init__(self, backbone: Backbone) -> None:
        self.batch_sizes: list[int] = []  # a list, because threads may add to it at once
        self.stop_after: int | None = None
        backbone.model.patch_embed.proj.register_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self.stop_after is not None and self.num_images >= self.stop_after:
            raise KeyboardInterrupt
        self.batch_sizes.append(len(inputs[0]))

    @property
    def num_images(self) -> int:
        return sum(self.batch_sizes)


def forbid(backbone: Backbone) -> None:
    def refuse(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise AssertionError("the backbone was asked, though the features are kept")

    backbone.model.patch_embed.proj.register_forward_pre_hook(refuse)


def by_hand(extractor: Extractor, root: Path, keys: list[str]) -> Tensor:
    """Class tokens of the plain timm model on images as torchvision prepares them."""
    # 32 / 0.875 = 36.6
    transform = Compose([Resize(37, InterpolationMode.BICUBIC), CenterCrop(32), ToTensor(), Normalize(MEAN, STD)])
    with torch.inference_mode():
        images = torch.stack([transform(Image.open(root / key)) for key in keys])
        return extractor.model.backbone.model(images)


# ---- the features ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3, 256])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_features_are_those_of_the_plain_model_on_torchvision_transforms(
    extractor: Extractor, tmp_path: Path, batch_size: int, num_workers: int
) -> None:
    root = folder_of_pictures(tmp_path, [(40, 60), (64, 48), (50, 50), (90, 44), (37, 38), (33, 70), (128, 100)])
    extractor = replace(extractor, settings=ExtractionSettings(batch_size=batch_size, num_workers=num_workers))
    found = extractor.features(FolderSource(root, name="pictures"), view=VIEW, feature="cls")
    expected = by_hand(
        extractor,
        root,
        [*(f"even/{number}.png" for number in (0, 2, 4, 6)), *(f"odd/{number}.png" for number in (1, 3, 5))],
    )
    assert found.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert found.name == "pictures"
    assert found.rows.dtype == torch.float32
    assert float(torch.pdist(expected).min()) > 0.1, "the features must differ for their order to be seen"
    torch.testing.assert_close(found.rows, expected, rtol=0, atol=0.01)  # Pillow rounds to 8 bits, twice


def test_features_of_an_array_stand_in_its_order_and_unlabelled_images_are_marked(extractor: Extractor) -> None:
    source = array(7, side=32)
    found = extractor.features(source, view=CentreView(size=32, crop_ratio=1.0), feature="cls")
    pixels = torch.from_numpy(source.pixels).permute(0, 3, 1, 2).float() / 255
    normalised = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    with torch.inference_mode():
        expected = extractor.model.backbone.model(normalised)
    torch.testing.assert_close(found.rows, expected, rtol=1e-4, atol=1e-4)
    assert found.labels.tolist() == [-1, 0, 1, -1, 0, 1, -1]
    assert found.labels.dtype == torch.int64
    assert len(found) == 7


def test_images_that_keep_their_own_sizes_come_out_in_order(extractor: Extractor, tmp_path: Path) -> None:
    root = folder_of_pictures(tmp_path, [(40, 64), (32, 32), (48, 40), (32, 32)])
    source = FolderSource(root, name="pictures")
    for view in (StoredView(), ThumbnailView(max_side=48)):
        together = extractor.features(source, view=view, feature="cls").rows
        alone = (
            replace(extractor, settings=ExtractionSettings(num_workers=0, batch_size=1))
            .features(source, view=view, feature="cls")
            .rows
        )
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_the_evaluation_view_is_of_the_models_size_and_the_chosen_ratio(extractor: Extractor) -> None:
    assert extractor.centre_view() == CentreView(size=32, crop_ratio=0.875, filter="bicubic")
    assert replace(extractor, crop_ratio=1.0).centre_view(filter="bilinear") == CentreView(
        size=32, crop_ratio=1.0, filter="bilinear"
    )


def test_narrow_numbers_are_computed_where_they_are_asked_for(extractor: Extractor) -> None:
    narrow = replace(extractor, settings=ExtractionSettings(num_workers=0, precision="bf16"))
    first, second = (each.features(array(3), view=VIEW, feature="cls").rows for each in (extractor, narrow))
    assert not torch.equal(first, second)
    assert float(torch.cosine_similarity(first, second).min()) > 0.99


def test_an_unknown_feature_is_refused_with_a_suggestion(extractor: Extractor) -> None:
    with pytest.raises(
        EvaluationError,
        match=r"there is no feature 'cls_last'. Did you mean 'cls_last4'\? Known: cls, pooled, cls_last4",
    ):
        replace(extractor, feature="cls_last").features(array(1), view=VIEW, feature="cls")


def test_the_users_feature_is_read_instead_of_the_protocols(extractor: Extractor) -> None:
    chosen = replace(extractor, feature="cls_mean")
    assert (extractor.chosen_feature("cls"), chosen.chosen_feature("cls")) == ("cls", "cls_mean")
    found, expected = (
        chosen.features(array(2), view=VIEW, feature="cls"),
        extractor.features(array(2), view=VIEW, feature="cls_mean"),
    )
    assert found.rows.shape == (2, 64)
    assert torch.equal(found.rows, expected.rows)


def test_an_unreadable_image_stops_the_work_and_is_named(extractor: Extractor, tmp_path: Path) -> None:
    root = folder_of_pictures(tmp_path, [(40, 40)] * 4)
    (root / "odd" / "3.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"1 of 4 .*odd/3\.png") as raised:
        extractor.features(FolderSource(root, name="pictures"), view=VIEW, feature="cls")
    assert not isinstance(raised.value, UnreadableImages)  # too many of four to go on without them


@pytest.mark.parametrize("has_cache", [False, True])
def test_features_of_the_readable_images_are_kept_and_not_computed_again(
    extractor: Extractor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_cache: bool
) -> None:
    monkeypatch.setattr(features, "_PART_SIZE", 60)
    extractor = replace(extractor, cache=tmp_path / "cache" if has_cache else None)
    whole = array(150, side=32)
    damaged = _without_array(_Damaged(unreadable=(5, 149), **{**vars(whole), "name": "set"}))
    with pytest.raises(UnreadableImages, match=r"an image of set cannot be read: .*/5: .*; repair or remove") as raised:
        extractor.features(damaged, view=VIEW, feature="cls")
    assert len(raised.value.messages) == 2
    num_read = damaged.num_read
    readable = raised.value.without(damaged)
    found = extractor.features(readable, view=VIEW, feature="cls")
    assert damaged.num_read == num_read
    kept = [index for index in range(150) if index not in (5, 149)]
    assert [readable.key_of(index) for index in range(len(readable))] == [whole.key_of(index) for index in kept]
    expected = replace(extractor, cache=None).features(whole, view=VIEW, feature="cls")
    torch.testing.assert_close(found.rows, expected.rows[kept])
    assert torch.equal(found.labels, expected.labels[kept])
    if has_cache:  # the next command does not try them again
        with pytest.raises(UnreadableImages) as again:
            extractor.features(damaged, view=VIEW, feature="cls")
        assert again.value.messages == raised.value.messages
        assert damaged.num_read == num_read


def test_images_read_one_by_one_are_never_replaced_by_others(extractor: Extractor) -> None:
    damaged = _without_array(_Damaged(unreadable=(5,), **vars(array(150, side=32))))
    chunks = list(torch.split(torch.arange(8), 4))
    batches = extractor.images(damaged, chunks)
    assert next(batches).indices.tolist() == [0, 1, 2, 3]
    with pytest.raises(UnreadableImages, match="/5: "):
        next(batches)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Damaged(ArraySource):
    unreadable: tuple[int, ...]

    def read(self, index: int) -> EncodedImage:
        image = super().read(index)
        return replace(image, data=b"no image") if index in self.unreadable else image


def _without_array(source: ImageSource) -> Any:
    """The source with its images to be read one by one."""

    class OneByOne:
        pixels = None
        num_read = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(source, name)

        def __len__(self) -> int:
            return len(source)

        def read(self, index: int) -> EncodedImage:
            self.num_read += 1
            return source.read(index)

    return OneByOne()


def test_reading_ahead_does_not_read_the_set_again(extractor: Extractor) -> None:
    source = _without_array(array(20))
    extractor = replace(extractor, settings=ExtractionSettings(num_workers=1, batch_size=20))
    extractor.features(source, view=VIEW, feature="cls")
    assert 20 <= source.num_read <= 23


def test_features_that_are_not_finite_are_refused_and_not_kept(tmp_path: Path) -> None:
    settings = ExtractionSettings(num_workers=0)
    broken = Extractor(
        model=tiny_model(change=float("nan")), settings=settings, device=torch.device("cpu"), cache=tmp_path
    )
    with pytest.raises(EvaluationError, match="features of 3 of 3 images of noise are not finite"):
        broken.features(array(3), view=VIEW, feature="cls")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_decoding_on_a_gpu_by_processes_is_refused() -> None:
    with pytest.raises(ValidationError, match="worker_kind processes and decoder gpu do not go together"):
        ExtractionSettings(worker_kind="processes", decoder="gpu")


def test_decoding_on_a_gpu_that_is_not_there_is_refused(extractor: Extractor) -> None:
    with pytest.raises(RecipeError, match="decoder is gpu, but the device is cpu"):
        replace(extractor, settings=ExtractionSettings(decoder="gpu")).features(array(1), view=VIEW, feature="cls")


# ---- progress --------------------------------------------------------------------------------------------------------


def test_progress_is_told_after_each_batch_and_ends_at_the_total(
    extractor: Extractor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "_PART_SIZE", 6)
    told: list[tuple[str, int, int]] = []
    replace(extractor, progress=lambda *news: told.append(news)).features(array(11), view=VIEW, feature="cls")
    assert told == [("features of noise", done, 11) for done in (4, 6, 10, 11)]


# ---- the cache -------------------------------------------------------------------------------------------------------


def kept_files(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def test_a_second_call_reads_what_the_first_has_kept(extractor: Extractor, tmp_path: Path) -> None:
    extractor = replace(extractor, cache=tmp_path / "not" / "yet")
    first = extractor.features(array(7), view=VIEW, feature="cls")
    forbid(extractor.model.backbone)
    again = extractor.features(array(7), view=VIEW, feature="cls")
    assert torch.equal(first.rows, again.rows)
    assert torch.equal(first.labels, again.labels)
    with pytest.raises(AssertionError, match="the backbone was asked"):
        extractor.features(array(7, seed=1), view=VIEW, feature="cls")


def test_without_a_cache_nothing_is_kept(extractor: Extractor) -> None:
    counter = Counter(extractor.model.backbone)
    for _ in range(2):
        extractor.features(array(3), view=VIEW, feature="cls")
    assert counter.num_images == 6


def test_whatever_decides_a_feature_is_part_of_its_key(extractor: Extractor) -> None:
    def key(
        *,
        extractor: Extractor = extractor,
        source: ImageSource | None = None,
        view: Any = VIEW,
        feature: str = "cls",
        **settings: Any,
    ) -> str:
        changed = replace(extractor, settings=ExtractionSettings(**settings))
        return changed.cache_key(source or array(4), view, feature)

    def model(**changes: Any) -> Extractor:
        return replace(extractor, model=replace(extractor.model, **changes))

    other_pixel, other_label, grey = array(4), array(4), array(4)
    other_pixel.pixels[2, 10, 11, 1] ^= 1
    assert other_label.labels is not None
    other_label.labels[0] = 1
    grey = replace(grey, pixels=grey.pixels[..., 0])
    keys = [
        key(),
        key(extractor=replace(extractor, model=tiny_model(change=1e-6))),
        key(extractor=model(mean=(0.4, 0.5, 0.61))),
        key(extractor=model(std=(0.2, 0.25, 0.31))),
        key(source=other_pixel),
        key(source=other_label),
        key(source=grey),
        key(source=array(5)),
        key(view=CentreView(size=40)),
        key(view=CentreView(size=32, filter="bilinear")),
        key(view=CentreView(size=32, crop_ratio=1.0)),
        key(view=SquareView(size=32)),
        key(feature="pooled"),
        key(precision="bf16"),
        key(decoder="gpu"),
    ]
    assert len(set(keys)) == len(keys)
    assert key(extractor=replace(extractor, model=tiny_model()), source=array(4), view=CentreView(size=32)) == keys[0]
    assert key(batch_size=7, num_workers=3, worker_kind="processes") == keys[0], (
        "how images are read decides no feature"
    )


def test_a_rewritten_file_of_the_same_size_and_time_is_extracted_anew(extractor: Extractor, tmp_path: Path) -> None:
    root = tmp_path / "pictures"
    for name, colour in (("a", (10, 20, 30)), ("b", (40, 50, 60))):
        (root / name).mkdir(parents=True)
        Image.new("RGB", (32, 32), colour).save(root / name / "0.bmp")
    extractor = replace(extractor, cache=tmp_path / "cache")
    before = extractor.features(FolderSource(root, name="pictures"), view=VIEW, feature="cls")
    file = root / "b" / "0.bmp"
    status = file.stat()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x80  # in the middle of the image
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    after = extractor.features(FolderSource(root, name="pictures"), view=VIEW, feature="cls")
    assert torch.equal(before.rows[0], after.rows[0])
    assert not torch.equal(before.rows[1], after.rows[1])


def test_an_extraction_that_was_stopped_goes_on_after_the_parts_that_are_done(
    extractor: Extractor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = extractor.features(array(11), view=VIEW, feature="cls")
    monkeypatch.setattr(features, "_PART_SIZE", 4)
    extractor = replace(extractor, cache=tmp_path, settings=ExtractionSettings(num_workers=0, batch_size=2))
    counter = Counter(extractor.model.backbone)
    counter.stop_after = 6  # in the middle of the second part
    with pytest.raises(KeyboardInterrupt):
        extractor.features(array(11), view=VIEW, feature="cls")
    assert [path.name for path in kept_files(tmp_path)] == ["000000000.safetensors"]
    counter.batch_sizes, counter.stop_after = [], None
    continued = extractor.features(array(11), view=VIEW, feature="cls")
    assert counter.num_images == 7
    torch.testing.assert_close(continued.rows, whole.rows, rtol=1e-4, atol=1e-5)
    assert [path.name for path in kept_files(tmp_path)] == [f"{begin:09d}.safetensors" for begin in (0, 4, 8)]
    counter.stop_after = 0
    assert torch.equal(extractor.features(array(11), view=VIEW, feature="cls").rows, continued.rows)


def test_what_was_written_by_half_is_never_read(
    extractor: Extractor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extractor = replace(extractor, cache=tmp_path)
    save_file = safetensors.torch.save_file

    def stopped(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, path, metadata)
        path.write_bytes(path.read_bytes()[:-20])
        assert [other.suffix for other in kept_files(tmp_path)] == [".partial"]
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors.torch, "save_file", stopped)
    with pytest.raises(KeyboardInterrupt):
        extractor.features(array(5), view=VIEW, feature="cls")
    assert kept_files(tmp_path) == []
    monkeypatch.undo()
    folder = tmp_path / extractor.cache_key(array(5), VIEW, "cls")
    # of processes that had no time to clean up
    for name in ("000000000.unfinished", "000000000.elsewhere-7.unfinished"):
        (folder / name).write_bytes(b"half")
    counter = Counter(extractor.model.backbone)
    expected = replace(extractor, cache=None).features(array(5), view=VIEW, feature="cls")
    assert torch.equal(extractor.features(array(5), view=VIEW, feature="cls").rows, expected.rows)
    assert torch.equal(extractor.features(array(5), view=VIEW, feature="cls").rows, expected.rows)
    assert counter.num_images == 10


def test_two_evaluations_that_keep_the_same_features_write_different_files(
    extractor: Extractor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one could rename the file that the other has just begun to write."""
    written: list[Path] = []
    save_file = safetensors.torch.save_file
    monkeypatch.setattr(
        safetensors.torch,
        "save_file",
        lambda tensors, path, about: (written.append(path), save_file(tensors, path, about)),
    )
    for cache, process in (("first", 1), ("second", 2)):
        monkeypatch.setattr(os, "getpid", lambda number=process: number)
        replace(extractor, cache=tmp_path / cache).features(array(2), view=VIEW, feature="cls")
    assert len({path.name for path in written}) == 2


def flipped(data: bytes, at: int, bits: int) -> bytes:
    return data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda data: data[:-10],
    "empty": lambda data: b"",
    "garbage": lambda data: b"\xff" * len(data),
    "a flipped bit": lambda data: flipped(data, len(data) - 5, 1),
    "NaN": lambda data: data[:-4] + b"\0\0\xc0\x7f",
    "a page of zeros": lambda data: data[:-64] + bytes(64),
    "no features": lambda data: safetensors.torch.save({"other": torch.zeros(5, 32)}),
    "too few": lambda data: safetensors.torch.save({"rows": torch.zeros(4, 32)}),
    "other numbers": lambda data: safetensors.torch.save({"rows": torch.zeros(5, 32, dtype=torch.int64)}),
    "NaN, without a digest": lambda data: safetensors.torch.save({"rows": torch.full((5, 32), torch.nan)}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_computed_again_and_says_so(extractor: Extractor, tmp_path: Path, damage: str) -> None:
    lines: list[str] = []
    extractor = replace(extractor, cache=tmp_path, say=lines.append)
    expected = extractor.features(array(5), view=VIEW, feature="cls").rows
    (file,) = kept_files(tmp_path)
    content = file.read_bytes()
    file.write_bytes(DAMAGES[damage](content))
    assert torch.equal(extractor.features(array(5), view=VIEW, feature="cls").rows, expected)
    assert len(lines) == 1
    assert f"{file} is damaged" in lines[0]
    assert file.read_bytes() == content
    extractor.features(array(5), view=VIEW, feature="cls")
    assert len(lines) == 1


def test_features_under_the_name_of_others_are_not_taken(extractor: Extractor, tmp_path: Path) -> None:
    lines: list[str] = []
    extractor = replace(extractor, cache=tmp_path, say=lines.append)
    expected = extractor.features(array(5), view=VIEW, feature="cls").rows
    extractor.features(array(5, seed=1), view=VIEW, feature="cls")
    own, other = (
        tmp_path / extractor.cache_key(array(5, seed=seed), VIEW, "cls") / "000000000.safetensors" for seed in (0, 1)
    )
    own.write_bytes(other.read_bytes())
    assert torch.equal(extractor.features(array(5), view=VIEW, feature="cls").rows, expected)
    assert "is a copy of" in lines[0]


def test_files_of_older_versions_without_a_digest_are_read(extractor: Extractor, tmp_path: Path) -> None:
    extractor = replace(extractor, cache=tmp_path, say=pytest.fail)
    expected = extractor.features(array(5), view=VIEW, feature="cls").rows
    (file,) = kept_files(tmp_path)
    safetensors.torch.save_file({"rows": expected + 1.0}, file)
    assert torch.equal(extractor.features(array(5), view=VIEW, feature="cls").rows, expected + 1.0)


@pytest.mark.parametrize(
    "content", [b"{", b"[1]", b"3", b"\xff", b'{"x": "y"}', b'{"reasons": {"0": "a"}, "digest": "b"}']
)
def test_a_damaged_list_of_unreadable_images_is_made_again(
    extractor: Extractor, tmp_path: Path, content: bytes
) -> None:
    lines: list[str] = []
    extractor = replace(extractor, cache=tmp_path / "cache", say=lines.append)
    root = folder_of_pictures(tmp_path / "images", [(30, 30)] * 25)
    sorted(root.rglob("*.png"))[0].write_bytes(b"no image")
    source = FolderSource(root, name="pictures")
    reasons = []
    for _ in range(2):
        with pytest.raises(UnreadableImages) as raised:
            extractor.features(source, view=VIEW, feature="cls")
        reasons.append(str(raised.value))
        (file,) = (tmp_path / "cache").rglob("unreadable.json")
        file.write_bytes(content)
    assert reasons[0] == reasons[1]
    assert len(lines) == 1
    assert str(file) in lines[0]


def test_a_list_of_unreadable_images_of_an_older_version_is_read(extractor: Extractor, tmp_path: Path) -> None:
    extractor = replace(extractor, cache=tmp_path, say=pytest.fail)
    folder = tmp_path / extractor.cache_key(array(5), VIEW, "cls")
    folder.mkdir()
    (folder / "unreadable.json").write_text('{"3": "broken"}')
    with pytest.raises(UnreadableImages, match="broken"):
        extractor.features(array(5), view=VIEW, feature="cls")


def test_other_limits_on_images_are_not_answered_from_the_cache(extractor: Extractor, tmp_path: Path) -> None:
    extractor = replace(extractor, cache=tmp_path / "cache")
    root = folder_of_pictures(tmp_path / "images", [(30, 30)] * 24 + [(1200, 1000)])

    def num_features(**limits: int) -> int | str:
        source = FolderSource(root, name="pictures", rules=ReadRules(**limits))
        try:
            return len(extractor.features(source, view=VIEW, feature="cls").rows)
        except UnreadableImages as error:
            return error.messages[0]

    assert num_features() == 25
    assert "max_megapixels" in str(num_features(max_megapixels=1))
    assert num_features() == 25
    assert num_features(max_megapixels=2) == 25
    default = FolderSource(root, name="pictures").fingerprint()
    assert FolderSource(root, name="pictures", rules=ReadRules(max_file_mib=1)).fingerprint() != default


def test_a_list_of_images_beyond_unstated_limits_is_made_again(extractor: Extractor, tmp_path: Path) -> None:
    """Older versions kept the list under the same key whatever the limits."""
    extractor = replace(extractor, cache=tmp_path)
    folder = tmp_path / extractor.cache_key(array(5), VIEW, "cls")
    folder.mkdir()
    (folder / "unreadable.json").write_text('{"3": "40 x 40 pixels are more; the option max_megapixels sets that"}')
    assert len(extractor.features(array(5), view=VIEW, feature="cls").rows) == 5


def test_images_called_unreadable_are_tried_once_more_when_asked(extractor: Extractor, tmp_path: Path) -> None:
    extractor = replace(extractor, cache=tmp_path)
    damaged = _without_array(_Damaged(unreadable=(5,), **vars(array(150, side=32))))
    for tries, is_read in ((False, True), (False, False), (True, True), (True, True)):
        before = damaged.num_read
        asking = replace(extractor, tries_unreadable=tries, _tried=set())
        for _ in range(2):
            with pytest.raises(UnreadableImages):
                asking.features(damaged, view=VIEW, feature="cls")
        assert (damaged.num_read > before) is is_read
        assert damaged.num_read - before <= 151  # once for each command


def test_a_cache_that_cannot_be_written_is_refused_with_advice(extractor: Extractor, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(EvaluationError, match=r"cannot write features to .*; make room"):
        replace(extractor, cache=tmp_path / "file").features(array(2), view=VIEW, feature="cls")


# ---- several processes -----------------------------------------------------------------------------------------------


@dataclass
class Ranks:
    """Processes as threads of this one: each has its rank, and all meet in gather_rows."""

    world_size: int
    own: threading.local = field(default_factory=threading.local)
    brought: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.meeting = threading.Barrier(self.world_size, timeout=120)

    def gather(self, item: Any) -> list[Any]:
        self.brought[self.own.rank] = item
        self.meeting.wait()
        items = [self.brought[rank] for rank in range(self.world_size)]
        self.meeting.wait()
        return items

    def gather_rows(self, rows: Tensor) -> Tensor:
        parts = self.gather(rows)
        assert len({part.shape for part in parts}) == 1, "every rank must bring the same number"
        return torch.cat(parts)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(distributed, "rank", lambda: self.own.rank)
        monkeypatch.setattr(distributed, "world_size", lambda: self.world_size)
        monkeypatch.setattr(distributed, "gather_rows", self.gather_rows)
        monkeypatch.setattr(distributed, "largest_over_ranks", lambda number, device: max(self.gather(number)))
        monkeypatch.setattr(distributed, "barrier", lambda: self.gather(None))

    def run(self, work: Callable[[int], LabelledFeatures]) -> list[LabelledFeatures | MasslError]:
        results: dict[int, LabelledFeatures | MasslError] = {}

        def as_rank(rank: int) -> None:
            self.own.rank = rank
            try:
                results[rank] = work(rank)
            except MasslError as error:
                results[rank] = error

        threads = [threading.Thread(target=as_rank, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[rank] for rank in range(self.world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_images", [1, 7, 10])
def test_several_processes_join_the_rows_of_a_single_one(
    extractor: Extractor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, world_size: int, num_images: int
) -> None:
    expected = extractor.features(array(num_images), view=VIEW, feature="cls")
    monkeypatch.setattr(features, "_PART_SIZE", 6)
    ranks = Ranks(world_size)
    ranks.install(monkeypatch)
    told: dict[int, list[int]] = {rank: [] for rank in range(world_size)}

    def work(rank: int) -> LabelledFeatures:
        own = replace(extractor, cache=tmp_path, progress=lambda what, done, total: told[rank].append(done))
        return own.features(array(num_images), view=VIEW, feature="cls")

    counter = Counter(extractor.model.backbone)
    for result in ranks.run(work):
        assert isinstance(result, LabelledFeatures)
        torch.testing.assert_close(result.rows, expected.rows, rtol=1e-4, atol=1e-5)
        assert torch.equal(result.labels, expected.labels)
    num_repeated = sum(-part % world_size for part in (min(6, num_images), max(0, num_images - 6)))
    assert counter.num_images == num_images + num_repeated, "each process takes its share and no more"
    for news in told.values():
        assert news == sorted(news)
        assert news[-1] == num_images
    counter.stop_after = 0
    assert all(isinstance(result, LabelledFeatures) for result in ranks.run(work)), "all read what the first has kept"


def test_what_stops_one_process_stops_all_with_its_reason(
    extractor: Extractor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = folder_of_pictures(tmp_path / "pictures", [(40, 40)] * 6)
    (root / "odd" / "5.png").write_bytes(b"no image")  # in the share of the last
    ranks = Ranks(3)
    ranks.install(monkeypatch)
    source = FolderSource(root, name="pictures")
    results = ranks.run(lambda rank: extractor.features(source, view=VIEW, feature="cls"))
    assert all(isinstance(result, MasslError) and "odd/5.png" in str(result) for result in results), results
    assert isinstance(results[2], DataError)


@pytest.mark.parametrize("has_cache", [False, True])
def test_all_processes_leave_out_what_one_of_them_cannot_read(
    extractor: Extractor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_cache: bool
) -> None:
    whole = array(41)
    ranks = Ranks(3)
    ranks.install(monkeypatch)

    def work(rank: int) -> LabelledFeatures:
        own = replace(extractor, cache=tmp_path if has_cache else None, _set_aside={})
        damaged = _without_array(_Damaged(unreadable=(40,), **vars(whole)))  # in the share of the last
        with pytest.raises(UnreadableImages, match="/40: ") as raised:
            own.features(damaged, view=VIEW, feature="cls")
        num_read = damaged.num_read
        found = own.features(raised.value.without(damaged), view=VIEW, feature="cls")
        assert damaged.num_read == num_read
        return found

    results = ranks.run(work)
    assert [len(result) for result in results if isinstance(result, LabelledFeatures)] == [40] * 3, results
    expected = results[0]
    assert isinstance(expected, LabelledFeatures)
    assert all(isinstance(result, LabelledFeatures) and torch.equal(result.rows, expected.rows) for result in results)


@pytest.mark.parametrize("problem", ["damaged for one", "cannot be written"])
def test_trouble_of_one_process_with_the_cache_is_shared_by_all(
    extractor: Extractor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, problem: str
) -> None:
    expected = extractor.features(array(4), view=VIEW, feature="cls").rows
    ranks = Ranks(2)
    ranks.install(monkeypatch)
    caches = [tmp_path / "0", tmp_path / "1"]  # as on machines that share no disk
    if problem == "cannot be written":
        caches[0].write_text("no folder")
    else:
        key = extractor.cache_key(array(4), VIEW, "cls")
        for cache in caches:
            (cache / key).mkdir(parents=True)
            safetensors.torch.save_file({"rows": torch.zeros(4, 32)}, cache / key / "000000000.safetensors")
        (caches[1] / key / "000000000.safetensors").write_bytes(b"")
    results = ranks.run(
        lambda rank: replace(extractor, cache=caches[rank]).features(array(4), view=VIEW, feature="cls")
    )
    if problem == "cannot be written":
        assert all(isinstance(result, EvaluationError) and "cannot write" in str(result) for result in results), results
    else:  # computed again by all; the zeros of the intact file are not taken by one alone
        for result in results:
            assert isinstance(result, LabelledFeatures)
            torch.testing.assert_close(result.rows, expected, rtol=1e-4, atol=1e-5)


def test_only_the_main_process_writes_and_what_one_lacks_all_compute(
    extractor: Extractor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = Ranks(2)
    ranks.install(monkeypatch)
    caches = [tmp_path / "0", tmp_path / "1"]  # as on machines that share no disk
    counter = Counter(extractor.model.backbone)
    for num_images in (4, 8):
        results = ranks.run(
            lambda rank: replace(extractor, cache=caches[rank]).features(array(4), view=VIEW, feature="cls")
        )
        assert all(isinstance(result, LabelledFeatures) for result in results)
        assert counter.num_images == num_images
    assert [len(kept_files(cache)) for cache in caches] == [1, 0]
