import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import massl
from massl.cli import main
from massl.commands.import_weights import ImportSettings, run_import
from massl.config import MasslError, UsageError
from massl.weights.models import open_model
from tests.unit.weights.foreign_states import convnext, dinov2, dinov3, resnet

IMAGES = torch.randn(2, 3, 60, 47, generator=torch.Generator().manual_seed(0))


def imported(folder: Path, state: Any, **options: Any) -> Path:
    file = folder / "weights.pth"
    torch.save(state, file)
    return massl.import_weights(file, output=folder / "model", overrides=options)


def metadata_of(folder: Path) -> dict[str, str]:
    with safe_open(folder / "backbone.safetensors", framework="pt") as file:
        return dict(file.metadata())


@pytest.mark.parametrize(
    ("state", "heads", "rule"),
    [
        (dinov2(), 2, "dino"),
        (dinov2(num_registers=4), 2, "timm"),
        (dinov3(swiglu=True), 2, "dino"),
        (convnext(v2=True), None, "dino"),
        (resnet(), None, "dino"),
    ],
    ids=["DINOv2", "DINOv2 with registers", "DINOv3", "ConvNeXt-V2", "ResNet"],
)
def test_an_imported_folder_opens_with_the_features_of_the_file_at_any_size(
    tmp_path: Path, state: dict[str, Tensor], heads: int | None, rule: str
) -> None:
    folder = imported(tmp_path, state, num_heads=heads)
    original = open_model(tmp_path / "weights.pth", num_heads=heads)
    again = open_model(folder)
    model, transform = massl.load_backbone(folder)
    with torch.inference_mode():
        expected = original.backbone(IMAGES).pooled
        assert torch.equal(again.backbone(IMAGES).pooled, expected)
        torch.testing.assert_close(model(IMAGES), expected, rtol=1e-5, atol=1e-5)
    assert (again.image_size, again.mean, again.std) == (original.image_size, original.mean, original.std)
    assert transform.image_size == original.image_size
    facts = metadata_of(folder)
    assert json.loads(facts["position_resampling"]) == rule
    assert "position_resampling" not in json.loads(facts["timm"])
    assert str(tmp_path) not in facts["origin"]  # the folder may be given away
    assert again.origin == f"imported {facts['origin']}"


def test_the_command_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"teacher": {f"backbone.{key}": value for key, value in dinov2().items()}}, tmp_path / "a.pth")
    given = ["import", str(tmp_path / "a.pth"), "--output", str(tmp_path / "model"), "--num_heads", "2"]
    assert main([*given, "--image_size", "28", "--mean", "0.1", "0.2", "0.3"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "teacher of the checkpoint a.pth (ViT of width 24, patch 14, 2 blocks, 2 heads, 56 px)" in said
    assert "images: 28 px, mean 0.1, 0.2, 0.3, std 0.229, 0.224, 0.225; positions at other sizes: bicubic by" in said
    opened = open_model(tmp_path / "model")
    assert (opened.image_size, opened.mean) == (28, (0.1, 0.2, 0.3))


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {os.environ['MASSL_TEST_MARK']}",)


def test_files_that_cannot_be_imported_leave_no_folder_and_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "ran"
    monkeypatch.setenv("MASSL_TEST_MARK", str(mark))
    good = tmp_path / "good.pth"
    torch.save(dinov3(), good)
    files = {
        "code.pth": pickle.dumps({"model": _Runs()}),
        "cut.pth": good.read_bytes()[:-5000],
        "empty.pth": b"",
        "text.safetensors": b"not a header",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(MasslError, match=name) as caught:
            run_import(ImportSettings(file=str(tmp_path / name), output=str(tmp_path / "model")))
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "model").exists()
    assert not mark.exists()


def test_a_full_disk_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    torch.save(resnet(), tmp_path / "weights.pth")
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(MasslError, match=r"cannot write .*No space left on device.*; make room"):
        massl.import_weights(tmp_path / "weights.pth", output=tmp_path / "models" / "resnet")
    assert list((tmp_path / "models").iterdir()) == []


def test_what_exists_is_not_overwritten_and_what_does_not_is_no_model(tmp_path: Path) -> None:
    folder = imported(tmp_path, resnet())
    before = (folder / "backbone.safetensors").read_bytes()
    with pytest.raises(MasslError, match="exists; move it away or choose another output"):
        imported(tmp_path, dinov2(), num_heads=2)
    assert (folder / "backbone.safetensors").read_bytes() == before
    with pytest.raises(UsageError, match="is no file"):
        run_import(ImportSettings(file=str(tmp_path / "x.pth"), output=str(tmp_path / "new")))
    with pytest.raises(MasslError, match="is a backbone of massl already"):
        run_import(ImportSettings(file=str(folder / "backbone.safetensors"), output=str(tmp_path / "new")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"std": (0.0, 1.0, 1.0)}, "give three numbers above 0"),
        ({"mean": (float("nan"), 1.0, 1.0)}, "finite"),
        ({"num_heads": 5}, "5 attention heads do not divide the width 24"),
        ({"num_heads": 2, "image_size": 30}, "no multiple of the model's patch of 14"),
        ({}, "give num_heads"),
    ],
)
def test_odd_options_are_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, MasslError), match=message):
        imported(tmp_path, dinov2(), **options)
    assert not (tmp_path / "model").exists()
