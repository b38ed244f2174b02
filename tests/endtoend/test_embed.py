"""`massl embed`: files that other libraries read, with the features that the model gives."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import safetensors
import safetensors.numpy
import torch

import massl
from massl.commands import embed as command
from massl.config import MasslError
from massl.digests import check_digest
from massl.nn.backbone import BackboneSettings, build_backbone
from massl.weights.io import backbone_bytes

NUM_IMAGES, SIDE, DIM = 11, 16, 24
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
LABELS = np.array([2, 0, 1, -1, 2, 0, 1, 2, 0, -1, 1])  # two images have none


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a transformer for images of 16 px."""
    options: dict[str, int | float | bool | str] = {"embed_dim": DIM, "depth": 2, "num_heads": 2}
    settings = BackboneSettings(name="vit_tiny_patch16_224", image_size=SIDE, patch_size=4, timm_options=options)
    backbone = build_backbone(settings, seed=0)
    folder = tmp_path_factory.mktemp("run")
    content = backbone_bytes(backbone.model, timm_arguments=backbone.timm_arguments, mean=MEAN, std=STD, image_size=16)
    (folder / "backbone.safetensors").write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:  # [N, 16, 16, 3]
    return np.random.default_rng(0).integers(0, 256, (NUM_IMAGES, SIDE, SIDE, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory, pixels: np.ndarray) -> Path:
    path = tmp_path_factory.mktemp("images") / "small.npz"
    np.savez(path, images=pixels, labels=LABELS)
    return path


@pytest.fixture(scope="module")
def truth(model: Path, pixels: np.ndarray) -> np.ndarray:  # [N, D]
    """What the plain timm model gives for images normalised by hand, one at a time."""
    network, rows = massl.load_backbone(model).model, []
    for picture in pixels:
        normalised = (picture / 255.0 - np.array(MEAN)) / np.array(STD)
        with torch.inference_mode():
            rows.append(network(torch.from_numpy(normalised).permute(2, 0, 1)[None].float())[0].numpy())
    return np.stack(rows)


@pytest.fixture
def embed(massl_here: Any, model: Path, images: Path) -> Callable[..., Any]:
    """embed(path): the images as they are stored, without a smaller crop; in batches that do not divide them."""

    def run(out: Path, *options: str | Path, data: str | Path = images) -> Any:
        return massl_here(
            "embed", model, "--data", data, "--output", out, "--crop_ratio", "1", "--batch_size", "4", *options
        )

    return run


def _assert_refused(answer: Any, *expected: str, status: int = 1) -> None:
    assert answer.status == status, answer.text
    assert "Traceback" not in answer.text
    assert answer.error.splitlines()[-1].startswith("massl: error: ")
    for text in expected:
        assert text in answer.text


def _assert_about(about: dict[str, str], model: Path, images: Path) -> None:
    assert about["model"] == str(model)
    assert about["data"] == str(images)
    assert about["feature"] == "pooled"
    assert len(about["weights"]) == 16


KEYS = [f"small/{number}" for number in range(NUM_IMAGES)]


def test_parquet_is_read_by_pyarrow(embed: Any, model: Path, images: Path, truth: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "features.parquet"
    answer = embed(path)
    assert answer.status == 0, answer.text
    assert str(path) in answer.text
    table = pyarrow.parquet.read_table(path)
    assert table.column("key").to_pylist() == KEYS
    assert table.column("label").to_pylist() == [None if label < 0 else label for label in LABELS]
    np.testing.assert_allclose(np.array(table.column("feature").to_pylist()), truth, atol=1e-5)
    feature_type = table.schema.field("feature").type
    assert (feature_type.list_size, str(feature_type.value_type)) == (DIM, "float")
    _assert_about(json.loads(table.schema.metadata[b"massl"]), model, images)
    assert [file.name for file in path.parent.iterdir()] == ["features.parquet"]


def test_npz_is_read_by_numpy(embed: Any, model: Path, images: Path, truth: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "features.npz"
    assert embed(path).status == 0
    with np.load(path, allow_pickle=False) as archive:
        assert archive["features"].dtype == np.float32
        np.testing.assert_allclose(archive["features"], truth, atol=1e-5)
        assert archive["labels"].tolist() == LABELS.tolist()
        assert archive["keys"].tolist() == KEYS
        _assert_about(json.loads(str(archive["about"])), model, images)


def test_safetensors_are_read_by_safetensors(
    embed: Any, model: Path, images: Path, truth: np.ndarray, tmp_path: Path
) -> None:
    path = tmp_path / "features.safetensors"
    assert embed(path).status == 0
    tensors = safetensors.numpy.load_file(path)
    np.testing.assert_allclose(tensors["features"], truth, atol=1e-5)
    assert tensors["labels"].tolist() == LABELS.tolist()
    assert tensors["keys_utf8_lines"].tobytes().decode().split("\n") == KEYS
    with safetensors.safe_open(path, framework="np") as file:
        _assert_about(file.metadata(), model, images)
    assert check_digest(path)


def test_keys_of_a_folder_are_paths_and_images_without_classes_have_no_label(
    embed: Any, make_folder: Any, tmp_path: Path
) -> None:
    assert embed(tmp_path / "plain.npz", data=make_folder("photos", 3)).status == 0
    with np.load(tmp_path / "plain.npz") as archive:
        assert archive["keys"].tolist() == ["000.png", "001.png", "002.png"]
        assert archive["labels"].tolist() == [-1, -1, -1]
    assert embed(tmp_path / "classes.parquet", data=make_folder("classes", 4, classes=2)).status == 0
    table = pyarrow.parquet.read_table(tmp_path / "classes.parquet")
    assert table.column("key").to_pylist() == ["class0/000.png", "class0/002.png", "class1/001.png", "class1/003.png"]
    assert table.column("label").to_pylist() == [0, 0, 1, 1]


def test_another_feature_is_written_where_asked(embed: Any, truth: np.ndarray, tmp_path: Path) -> None:
    assert embed(tmp_path / "wide.npz", "--feature", "cls_mean").status == 0
    with np.load(tmp_path / "wide.npz") as archive:
        assert archive["features"].shape == (NUM_IMAGES, 2 * DIM)
        np.testing.assert_allclose(archive["features"][:, :DIM], truth, atol=1e-5)
        assert json.loads(str(archive["about"]))["feature"] == "cls_mean"


def test_python_call_gives_the_path(model: Path, images: Path, truth: np.ndarray, tmp_path: Path) -> None:
    path = massl.embed(
        model, data=images, output=tmp_path / "features.npz", overrides={"crop_ratio": 1.0, "device": "cpu"}
    )
    with np.load(path) as archive:
        np.testing.assert_allclose(archive["features"], truth, atol=1e-5)
    with pytest.raises(MasslError, match=r"features\.npz"):
        massl.embed(model, data=images, output=path)


def test_file_that_is_there_is_never_overwritten(embed: Any, tmp_path: Path) -> None:
    path = tmp_path / "features.npz"
    path.write_text("mine")
    _assert_refused(embed(path), str(path))
    assert path.read_text() == "mine"


def test_unknown_ending_is_refused_with_those_that_are_known(embed: Any, tmp_path: Path) -> None:
    _assert_refused(embed(tmp_path / "features.csv"), ".csv", ".parquet, .npz, .safetensors", status=2)
    assert not list(tmp_path.iterdir())


def test_missing_pyarrow_is_named_before_the_work(embed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # its import fails
    answer = embed(tmp_path / "features.parquet", data=tmp_path / "not looked at yet")
    _assert_refused(answer, "massl[parquet]")
    assert embed(tmp_path / "features.npz").status == 0


def test_place_where_nothing_can_be_written_is_refused_before_the_work(embed: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _assert_refused(embed(tmp_path / "file" / "features.npz"), f"{tmp_path}/file", "--output")


def test_damaged_image_leaves_no_file(embed: Any, make_folder: Any, tmp_path: Path) -> None:
    photos = make_folder("photos", 3)
    (photos / "001.png").write_bytes((photos / "001.png").read_bytes()[:100])
    (tmp_path / "out").mkdir()
    _assert_refused(embed(tmp_path / "out" / "features.npz", data=photos), "001.png")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("ending", [".parquet", ".npz", ".safetensors"])
def test_full_disk_leaves_nothing_half_written(
    ending: str, embed: Any, truth: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = command.WRITERS[ending]

    def write_half(path: Path, *content: Any) -> None:
        writer(path, *content)
        path.write_bytes(path.read_bytes()[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(command.WRITERS, ending, write_half)
    _assert_refused(embed(tmp_path / f"features{ending}"), "No space left on device")
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(command.WRITERS, ending, writer)
    assert embed(tmp_path / f"features{ending}").status == 0


@pytest.mark.parametrize("ending", [".parquet", ".npz", ".safetensors"])
def test_writers_that_meet_a_full_disk_say_so_without_a_traceback(
    ending: str, server: Any, model: Path, images: Path, tmp_path: Path
) -> None:
    answer = server.run(
        "embed", model, "--data", images, "--output", tmp_path / f"features{ending}", limit_file_size=[500]
    )
    assert answer.status == 1
    assert "Traceback" not in answer.text
    assert "massl: error: " in answer.text
    assert not list(tmp_path.iterdir())


def test_no_protocol_is_imported() -> None:
    code = "import sys, massl.commands.embed; print([name for name in sys.modules if 'evaluations.protocols' in name])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


CLASSES = ["class0", "class1", "class0", "class1"]


def test_rows_carry_the_names_of_their_classes(
    embed: Any, make_folder: Any, model: Path, images: Path, tmp_path: Path
) -> None:
    folder = make_folder("classes", 4, classes=2)
    for ending in (".parquet", ".npz", ".safetensors"):
        assert embed(tmp_path / f"named{ending}", data=folder).status == 0
    rows = massl.embed(model, data=folder)
    expected = [key.partition("/")[0] for key in rows.keys]
    assert sorted(expected) == sorted(CLASSES)
    assert rows.classes == expected
    assert [sorted(set(CLASSES))[label] for label in rows.labels] == expected
    assert pyarrow.parquet.read_table(tmp_path / "named.parquet").column("class").to_pylist() == expected
    with np.load(tmp_path / "named.npz", allow_pickle=False) as archive:
        assert archive["classes"].tolist() == expected
    lines = safetensors.numpy.load_file(tmp_path / "named.safetensors")["classes_utf8_lines"]
    assert lines.tobytes().decode().split("\n") == expected


def test_images_without_a_class_have_no_name(embed: Any, make_folder: Any, model: Path, tmp_path: Path) -> None:
    folder = make_folder("photos", 3)
    assert massl.embed(model, data=folder).classes == ["", "", ""]
    for ending in (".parquet", ".npz"):
        assert embed(tmp_path / f"plain{ending}", data=folder).status == 0
    assert pyarrow.parquet.read_table(tmp_path / "plain.parquet").column("class").to_pylist() == [None] * 3
    with np.load(tmp_path / "plain.npz", allow_pickle=False) as archive:
        assert archive["classes"].tolist() == ["", "", ""]
