"""`massl embed --feature patches`: a folder of files that safetensors reads, continued where it was stopped."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

import massl
from massl.commands import patches as command
from massl.config import MasslError
from massl.evaluations.patch_files import write_shard
from massl.nn.backbone import BackboneSettings, build_backbone
from massl.weights.io import backbone_bytes

NUM_IMAGES, SIDE, DIM = 25, 16, 256
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer for images of 16 px with patches of one: a MiB holds the features of 8 images."""
    options: dict[str, int | float | bool | str] = {"embed_dim": DIM, "depth": 1, "num_heads": 2, "reg_tokens": 2}
    settings = BackboneSettings(name="vit_tiny_patch16_224", image_size=SIDE, patch_size=1, timm_options=options)
    backbone = build_backbone(settings, seed=0)
    path = tmp_path_factory.mktemp("model") / "backbone.safetensors"
    content = backbone_bytes(backbone.model, timm_arguments=backbone.timm_arguments, mean=MEAN, std=STD, image_size=16)
    path.write_bytes(content)
    return path


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:  # [N, 16, 16, 3]
    return np.random.default_rng(0).integers(0, 256, (NUM_IMAGES, SIDE, SIDE, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory, pixels: np.ndarray) -> Path:
    path = tmp_path_factory.mktemp("images") / "small.npz"
    np.savez(path, images=pixels, labels=np.arange(NUM_IMAGES) % 3)
    return path


@pytest.fixture
def embed(massl_here: Any, model: Path, images: Path) -> Callable[..., Any]:
    def run(out: Path, *more: str | Path, data: str | Path = images) -> Any:
        options = ("--crop_ratio", "1", "--batch_size", "3", "--file_mib", "1", "--device", "cpu", "--num_workers", "1")
        return massl_here("embed", model, "--data", data, "--feature", "patches", "--output", out, *options, *more)

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def read(folder: Path) -> tuple[list[str], list[int], np.ndarray]:
    """As the documents show it: json and safetensors alone."""
    files = json.loads((folder / "index.json").read_text())["files"]
    found = [safetensors.numpy.load_file(folder / entry["file"])["patches"] for entry in files]
    keys = [key for entry in files for key in entry["keys"]]
    return keys, [label for entry in files for label in entry["labels"]], np.concatenate(found)


def test_the_files_hold_the_patch_tokens_of_timm_s_model(
    embed: Any, model: Path, images: Path, pixels: np.ndarray, tmp_path: Path
) -> None:
    answer = embed(tmp_path / "new" / "patches")
    assert answer.status == 0, answer.text
    assert "patches of 25 images, each 16 x 16 of 256 dimensions, in 4 files" in answer.text
    folder = tmp_path / "new" / "patches"
    assert [*contents(folder)] == ["index.json", *(f"patches-{number:05d}.safetensors" for number in range(4))]
    keys, labels, found = read(folder)
    assert keys == [f"small/{number}" for number in range(NUM_IMAGES)]
    assert labels == [number % 3 for number in range(NUM_IMAGES)]
    assert (found.dtype, found.shape) == (np.float16, (NUM_IMAGES, 16, 16, DIM))
    network = massl.load_backbone(model).model
    normalised = (pixels / 255.0 - np.array(MEAN)) / np.array(STD)
    with torch.inference_mode():
        truth = network.forward_features(torch.from_numpy(normalised).permute(0, 3, 1, 2).float())[:, 3:]
    np.testing.assert_allclose(found.reshape(NUM_IMAGES, 256, DIM), truth.numpy(), rtol=1e-3, atol=1e-3)
    index = json.loads((folder / "index.json").read_text())
    assert (index["shape"], index["num_images"], index["classes"]) == ([16, 16, DIM], NUM_IMAGES, ["0", "1", "2"])
    assert (index["model"], index["data"]) == (str(model), str(images))
    assert index["preprocessing"]["mean"] == list(MEAN)
    assert all(path.stat().st_size < 2**20 + 8192 for path in folder.iterdir())


def test_a_stopped_command_continues_and_damaged_files_are_computed_again(
    embed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert embed(tmp_path / "whole").status == 0
    whole, folder, written = contents(tmp_path / "whole"), tmp_path / "patches", list[str]()

    def counted(path: Path, *given: Any, **named: Any) -> list[int]:
        if len(written) == num_allowed:
            raise MasslError("stopped")
        written.append(path.name)
        return write_shard(path, *given, **named)

    num_allowed = 2
    monkeypatch.setattr(command, "write_shard", counted)
    assert embed(folder).status == 1
    assert [*contents(folder)] == written == ["patches-00000.safetensors", "patches-00001.safetensors"]
    damaged = bytearray(whole[written[0]])
    damaged[-1000] ^= 1
    (folder / written[0]).write_bytes(damaged)
    written.clear()
    num_allowed = 99
    answer = embed(folder)
    assert answer.status == 0, answer.text
    assert written == [f"patches-{number:05d}.safetensors" for number in (0, 2, 3)]
    assert "patches-00000.safetensors: it is damaged" in answer.text
    assert "1 of 4 files are whole; it continues" in answer.text
    assert contents(folder) == whole
    written.clear()
    assert embed(folder).status == 0  # whole: nothing to do
    assert not written
    (folder / "index.json").unlink()
    assert embed(folder).status == 0
    assert contents(folder) == whole
    assert not written


def test_files_made_with_other_settings_stay_as_they_are(embed: Any, tmp_path: Path) -> None:
    assert embed(tmp_path / "patches").status == 0
    before = contents(tmp_path / "patches")
    for option, value, said in (
        ("--crop_ratio", "0.5", "made with crop ratio '1.0', not '0.5'"),
        ("--file_mib", "2", "made with images per file '8', not '16'"),
        ("--precision", "bf16", "made with precision 'fp32', not 'bf16'"),
    ):
        answer = embed(tmp_path / "patches", option, value)
        assert answer.status == 1
        assert said in answer.text
        assert "Traceback" not in answer.text
        assert contents(tmp_path / "patches") == before


def test_folders_with_files_of_others_are_refused(embed: Any, tmp_path: Path) -> None:
    for name in ("mine.txt", "index.json", "patches-00099.safetensors"):
        folder = tmp_path / name / "folder"
        folder.mkdir(parents=True)
        (folder / name).write_text("mine")
        answer = embed(folder)
        assert answer.status == 1
        assert f"holds {name}, which this command would not write" in answer.text
        assert [path.name for path in folder.iterdir()] == [name]
        assert (folder / name).read_text() == "mine"


def test_unreadable_images_are_left_out_and_named_also_when_it_continues(
    embed: Any, make_folder: Any, tmp_path: Path
) -> None:
    photos = make_folder("photos", 25)
    (photos / "010.png").write_bytes(b"no image")
    for _ in range(2):
        answer = embed(tmp_path / "patches", data=photos)
        assert answer.status == 0, answer.text
        assert "skipped an unreadable image: 010.png" in answer.text
        assert "patches of 24 images" in answer.text
        keys, labels, found = read(tmp_path / "patches")
        assert keys == [f"{number:03d}.png" for number in range(25) if number != 10]
        assert (labels, len(found)) == ([None] * 24, 24)
    for number in (11, 20):
        (photos / f"{number:03d}.png").write_bytes(b"no image")
    answer = embed(tmp_path / "other", data=photos)
    assert answer.status == 1
    assert "cannot be read, more than 5%" in answer.text.replace(" %", "%")


def test_networks_without_patches_endings_of_files_and_python_without_a_folder_are_refused(
    embed: Any, massl_here: Any, model: Path, images: Path, tmp_path: Path
) -> None:
    out = tmp_path / "patches"
    answer = massl_here("embed", "resnet18", "--data", images, "--feature", "patches", "--output", out)
    assert "the feature 'patches' needs patch tokens, which resnet18 does not have" in answer.text
    assert "are written to a folder" in embed(tmp_path / "a.npz").text
    answer = massl_here("embed", model, "--data", images, "--feature", "patchs", "--output", tmp_path / "a.npz")
    assert "there is no feature 'patchs'. Did you mean 'patches'?" in answer.text
    with pytest.raises(MasslError, match="patches are written to a folder; give one as output"):
        massl.embed(model, data=images, feature="patches")


def test_other_names_of_features_are_stored_under_one_name(model: Path, images: Path, tmp_path: Path) -> None:
    options = {"device": "cpu", "crop_ratio": 1.0}
    path = massl.embed(model, data=images, output=tmp_path / "a.npz", feature="cls_patch_mean", overrides=options)
    rows = massl.embed(model, data=images, feature="cls_mean", overrides=options)
    with np.load(path) as archive:
        assert np.array_equal(archive["features"], rows.features)
        assert json.loads(str(archive["about"]))["feature"] == "cls_mean"
