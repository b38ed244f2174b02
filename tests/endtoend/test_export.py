"""Exports are opened by their libraries in a fresh process that has no massl, and give the same features."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import massl
from massl.config import MasslError
from massl.nn.backbone import BackboneSettings, build_backbone
from massl.weights.io import backbone_bytes
from massl.weights.models import open_model
from tests.unit.weights.foreign_states import dinov2, resnet

SIZES = [(32, 32), (40, 40), (24, 40)]  # the training size, another one, not square
TINY = {"embed_dim": 48, "depth": 2, "num_heads": 3}
OTHERS = {
    "layer scale": {"init_values": 0.3},
    "registers": {"init_values": 0.3, "reg_tokens": 3},
    "registers without positions": {"reg_tokens": 2, "no_embed_class": True},
}
# Runs without massl: opens every folder, and executes the code of its model card.
OUTSIDE = """
import importlib.abc, json, re, sys
class NoMassl(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "massl":
            raise ImportError("massl is not here")
sys.meta_path.insert(0, NoMassl())
try:
    import massl
except ImportError:
    pass
else:
    sys.exit("massl can be imported")
import numpy as np
import torch

torch.set_num_threads(1)
images = {name: torch.from_numpy(found) for name, found in np.load("images.npz").items()}
saved = {}
for folder, kind, size in json.loads(sys.argv[1]):
    code = re.search("```python\\n(.*?)```", open(folder + "/README.md").read(), re.S)[1]
    names = {}
    exec(code, names)
    assert kind == "onnx" or not names["model"].training, folder
    if "features" in names:
        saved[folder + " card"] = np.asarray(names["features"])
    for shape in [size] if size else list(images):
        with torch.no_grad():
            if kind == "onnx":
                found = names["session"].run(["features"], {"images": images[shape].numpy()})[0]
            else:
                found = names["model"](images[shape])
                found = found.pooler_output if kind == "transformers" else found
        saved[folder + " " + shape] = np.asarray(found)
assert not any(name.partition(".")[0] == "massl" for name in sys.modules)
np.savez("features.npz", **saved)
"""


def write_backbone(path: Path, options: dict[str, Any], name: str = "vit_tiny_patch16_224") -> Path:
    is_vit = name.startswith("vit")
    shape = {"image_size": 32, "patch_size": 8} if is_vit else {}
    chosen = BackboneSettings(name=name, timm_options=options, **shape)
    model = build_backbone(chosen, seed=0).model
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    facts = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.25, 0.3), "image_size": 32}
    path.write_bytes(backbone_bytes(model, timm_arguments=chosen.timm_arguments(), **facts))
    return path


def name_of(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def features_outside(work: Path, folders: list[tuple[str, str, str]]) -> dict[str, np.ndarray]:
    """For each (folder, library, size or "" for all): features of the images, and those of the card's own code."""
    generator = torch.Generator().manual_seed(2)
    images = {name_of(size): torch.randn(2, 3, *size, generator=generator) for size in SIZES}
    np.savez(work / "images.npz", **{name: tensor.numpy() for name, tensor in images.items()})
    noise = np.random.default_rng(0).integers(0, 256, (60, 90, 3)).astype(np.uint8)
    Image.fromarray(noise).resize((120, 90)).save(work / "photo.jpg", quality=95)
    command = [sys.executable, "-I", "-c", OUTSIDE, json.dumps(folders)]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    with np.load(work / "features.npz") as found:
        return dict(found)


def compare(work: Path, file: Path, found: dict[str, np.ndarray], *, tolerance: float) -> None:
    images = {name: torch.from_numpy(tensor) for name, tensor in np.load(work / "images.npz").items()}
    backbone = open_model(file).backbone
    assert found
    for name, features in found.items():
        folder, _, shape = name.rpartition(" ")
        if shape == "card":
            size = json.loads((work / folder / "export.size").read_text())
            if size[0] != size[1]:
                continue
            model, transform = massl.load_backbone(file, image_size=size[0])
            with torch.no_grad():
                expected = model(transform(work / "photo.jpg")[None])
            relative = np.linalg.norm(features - expected.numpy()) / np.linalg.norm(expected.numpy())
            assert relative < 0.02, name  # pixels are rounded to 8 bits
            continue
        expected = backbone(images[shape]).pooled
        assert np.abs(features - expected.numpy()).max() <= tolerance, name


def exported(file: Path, to: Any, work: Path, name: str, size: tuple[int, int]) -> str:
    folder = massl.export(file, to=to, output=work / name, image_size=size)
    (folder / "export.size").write_text(json.dumps(size))
    return name


@pytest.mark.parametrize("side", [32, 64])
def test_the_code_on_the_card_of_a_plain_folder_takes_images_of_the_size_it_names(
    side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_backbone(tmp_path / "b.safetensors", TINY)  # of 32 px
    exported(file, "safetensors", tmp_path, "vit", (side, side))
    card, names = (tmp_path / "vit" / "README.md").read_text(), dict[str, Any]()
    assert f"| image size | {side} x {side} px |" in card
    found = re.search("```python\n(.*?)```", card, re.DOTALL)
    assert found is not None
    monkeypatch.chdir(tmp_path)
    exec(found[1], names)
    images = torch.zeros(1, 3, side, side)
    torch.testing.assert_close(names["model"](images), open_model(file).backbone(images).pooled)
    with pytest.raises(MasslError, match="one number as its size; give a square one"):
        exported(file, "safetensors", tmp_path, "wide", (32, 64))


def test_the_folder_of_a_weights_file_keeps_its_size_and_where_it_came_from(tmp_path: Path) -> None:
    torch.save(resnet(), tmp_path / "weights.pth")
    imported = massl.import_weights(tmp_path / "weights.pth", output=tmp_path / "imported")
    exported(imported, "safetensors", tmp_path, "square", (96, 96))
    exported(imported, "safetensors", tmp_path, "wide", (64, 96))
    square, wide, before = (open_model(tmp_path / name) for name in ("square", "wide", "imported"))
    assert square.image_size == 96
    assert wide.image_size == before.image_size  # one number cannot say it
    assert square.origin == before.origin


def test_timm_and_torch_hub_open_exports_without_massl(tmp_path: Path) -> None:
    file = write_backbone(tmp_path / "b.safetensors", TINY)
    folders = [
        (exported(file, "timm", tmp_path, f"t{at}", size), "timm", name_of(size)) for at, size in enumerate(SIZES)
    ]
    folders.append((exported(file, "torchhub", tmp_path, "hub", SIZES[0]), "torchhub", ""))
    folders.append((exported(file, "safetensors", tmp_path, "plain", SIZES[0]), "safetensors", name_of(SIZES[0])))
    found = features_outside(tmp_path, folders)
    assert len(found) == 3 + 3 + 1 + 3 + 1  # with the features of the cards of timm and torch.hub
    compare(tmp_path, file, found, tolerance=1e-5)


@pytest.mark.slow
def test_transformers_opens_exports_without_massl(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = write_backbone(tmp_path / "b.safetensors", TINY)
    folders = [
        (exported(file, "transformers", tmp_path, f"t{at}", size), "transformers", name_of(size))
        for at, size in enumerate(SIZES)
    ]
    others = {name: write_backbone(tmp_path / f"{name}.safetensors", TINY | more) for name, more in OTHERS.items()}
    for name, other in others.items():
        folders.append((exported(other, "transformers", tmp_path, name, SIZES[1]), "transformers", name_of(SIZES[1])))
    # through timm: another kind of network, and a shape that transformers' DINOv2 does not take
    others["resnet"] = write_backbone(tmp_path / "resnet.safetensors", {}, "resnet10t")
    others["wide"] = others["registers"]
    for name, size in (("resnet", SIZES[1]), ("wide", SIZES[2])):
        folders.append((exported(others[name], "transformers", tmp_path, name, size), "transformers", name_of(size)))
        assert json.loads((tmp_path / name / "config.json").read_text())["model_type"] == "timm_wrapper"
    found = features_outside(tmp_path, folders)
    assert len(found) == 2 * 8
    for name, other in [("t", file), *others.items()]:
        own = {key: value for key, value in found.items() if re.match(rf"{name}(\d)? [^ ]+$", key)}
        compare(tmp_path, other, own, tolerance=1e-5)


@pytest.mark.slow
def test_onnx_runtime_opens_exports_of_any_size_without_massl(tmp_path: Path) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    file = write_backbone(tmp_path / "b.safetensors", TINY)
    folders = [(exported(file, "onnx", tmp_path, "graph", SIZES[0]), "onnx", "")]
    compare(tmp_path, file, found := features_outside(tmp_path, folders), tolerance=1e-4)
    assert len(found) == 4
    import onnx

    graph = onnx.load(tmp_path / "graph" / "model.onnx")
    assert graph.opset_import[0].version >= 18
    dimensions = [dimension.dim_param for dimension in graph.graph.input[0].type.tensor_type.shape.dim]
    assert dimensions == ["batch", "", "height", "width"]
    torch.save(dinov2(num_registers=4), tmp_path / "dinov2.pth")
    imported = massl.import_weights(tmp_path / "dinov2.pth", output=tmp_path / "dinov2", overrides={"num_heads": 2})
    exported(imported, "onnx", tmp_path, "other size", (42, 42))  # one size, because of timm's rule of its positions
    with torch.inference_mode():  # the process can go on with that size
        assert open_model(imported).backbone(torch.zeros(1, 3, 42, 42)).pooled.isfinite().all()
    content = (tmp_path / "graph" / "model.onnx").read_bytes()
    assert b"site-packages" not in content  # the exporter notes where each node comes from
    assert str(Path(massl.__file__).parent).encode() not in content
