import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import timm
import torch

import massl
from massl.cli import main
from massl.commands.export import ExportSettings, run_export
from massl.config import MasslError
from massl.exports.job import ExportError
from massl.nn.backbone import BackboneSettings, build_backbone
from massl.weights.io import backbone_bytes
from massl.weights.models import open_model
from tests.unit.weights.foreign_states import resnet


@pytest.fixture
def backbone_file(tmp_path: Path) -> Path:
    return write(tmp_path / "b.safetensors", "vit_tiny_patch16_224", {"embed_dim": 48, "depth": 2, "num_heads": 3})


def write(path: Path, name: str, options: dict[str, Any], *, crop_ratio: float = 0.875, **settings: Any) -> Path:
    is_vit = name.startswith("vit")
    chosen = BackboneSettings(name=name, timm_options=options, image_size=32 if is_vit else None, **settings)
    model = build_backbone(chosen, seed=0).model
    facts = {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2), "image_size": 32}
    content = backbone_bytes(model, timm_arguments=chosen.timm_arguments(), crop_ratio=crop_ratio, **facts)
    path.write_bytes(content)
    return path


class FakeHub:
    def __init__(self, *, fails: bool = False) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fails = fails

    def create_repo(self, name: str, **options: Any) -> Any:
        self.calls.append((name, options))
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, **options: Any) -> None:
        if self.fails:
            raise ConnectionError("no route")
        self.calls.append(("upload", sorted(file.name for file in Path(options["folder_path"]).iterdir())))


def test_the_command_prints_the_folder(backbone_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "made" / "here"
    assert main(["export", str(backbone_file), "--to", "timm", "--output", str(output), "--image_size", "48x64"]) == 0
    assert capsys.readouterr().out.strip() == str(output)
    assert json.loads((output / "config.json").read_text())["model_args"]["img_size"] == [48, 64]
    assert [path.name for path in output.parent.iterdir()] == ["here"]


def test_python_takes_sizes_as_numbers(backbone_file: Path, tmp_path: Path) -> None:
    for number, size in enumerate((48, (48, 64), "48x64", None)):
        folder = massl.export(backbone_file, to="timm", output=tmp_path / str(number), image_size=size)
        expected = {48: [48, 48], None: [32, 32]}.get(size, [48, 64])
        assert json.loads((folder / "config.json").read_text())["pretrained_cfg"]["input_size"] == [3, *expected]


def test_an_existing_output_is_refused_and_kept(backbone_file: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(MasslError, match="exists; move it away or choose another output"):
        massl.export(backbone_file, to="timm", output=tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_failure_leaves_nothing(backbone_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> str:
        raise OSError("disk full")

    monkeypatch.setattr("massl.commands.export.model_card", fail)
    with pytest.raises(MasslError, match="disk full"):
        massl.export(backbone_file, to="timm", output=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["b.safetensors"]


def test_an_export_with_other_features_is_not_written(
    backbone_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("massl.exports.job.model_positions", lambda model, *grid: torch.zeros_like(model.pos_embed))
    with pytest.raises(ExportError, match="other features"):
        massl.export(backbone_file, to="timm", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["timm", "transformers"])
def test_what_a_library_cannot_compute_is_refused_with_another_way(to: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = write(tmp_path / "b.safetensors", "resnet18", {}, stem="small")
    with pytest.raises(ExportError, match="--to torchhub or --to onnx"):
        run_export(ExportSettings(run=str(file), to=to, output=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet10t", {}),
        ("vit_tiny_patch16_224", {"depth": 1, "qk_norm": True}),  # blocks that are not timm's plain ones
        ("vit_tiny_patch16_224", {"depth": 1, "act_layer": "relu"}),  # another MLP
    ],
)
def test_transformers_hands_to_timm_what_its_own_classes_do_not_compute(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = massl.export(write(tmp_path / "b.safetensors", name, options), to="transformers", output=tmp_path / "out")
    opened = transformers.AutoModel.from_pretrained(folder).eval()
    assert type(opened).__name__ == "TimmWrapperModel"
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = open_model(tmp_path / "b.safetensors").backbone(images).pooled
        torch.testing.assert_close(opened(images).pooler_output, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("to", "module", "extra"), [("onnx", "onnxscript", "onnx"), ("transformers", "transformers", "hf")]
)
def test_missing_packages_are_named(
    to: Any, module: str, extra: str, backbone_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == module else object())
    with pytest.raises(ExportError, match=rf"{module}.*massl\[{extra}\]"):
        massl.export(backbone_file, to=to, output=tmp_path / "out")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_weights_of_another_project_are_exported_and_named_as_such(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("method: {name: massl}\n")  # of a run to which the file does not belong
    file, weights = tmp_path / f"theirs{suffix}", resnet()
    (safetensors.torch.save_file if suffix == ".safetensors" else torch.save)(weights, file)
    folder = massl.export(file, to="timm", output=tmp_path / "out")
    card = (folder / "README.md").read_text()
    assert f"of another project, converted by massl (backbone of theirs{suffix} (ResNet" in card
    assert "trained with massl" not in card
    assert "## Training" not in card
    images = torch.randn(1, 3, 64, 64)
    opened = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    torch.testing.assert_close(opened(images), open_model(file).backbone(images).pooled)


def test_what_is_no_network_is_not_exported(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(1)}, tmp_path / "a.pth")
    with pytest.raises(MasslError, match=r"a\.pth holds no known network"):
        massl.export(tmp_path / "a.pth", to="timm", output=tmp_path / "out")
    with pytest.raises(MasslError, match="does not exist"):
        massl.export("vit_tiny_patch16_224", to="timm", output=tmp_path / "out")


def test_what_the_library_itself_cannot_open_is_refused(tmp_path: Path) -> None:
    """timm takes a Swin without classifier for one of its old checkpoints and renames its layers."""
    options = {"embed_dim": 24, "img_size": 56}
    file = write(tmp_path / "b.safetensors", "swin_tiny_patch4_window7_224", options)
    with pytest.raises(ExportError, match="timm does not open this model"):
        massl.export(file, to="timm", output=tmp_path / "out", image_size=56)
    with pytest.raises(ExportError, match="takes no images of 64 x 64 px"):
        massl.export(file, to="torchhub", output=tmp_path / "out", image_size=64)
    massl.export(file, to="torchhub", output=tmp_path / "out", image_size=56)
    assert (tmp_path / "out" / "hubconf.py").is_file()


@pytest.mark.parametrize("to", ["timm", "torchhub", "safetensors"])
def test_a_network_with_a_classifier_is_refused(to: Any, tmp_path: Path) -> None:
    options = {"embed_dim": 48, "depth": 1, "num_heads": 3, "num_classes": 10}
    file = write(tmp_path / "b.safetensors", "vit_tiny_patch16_224", options)
    with pytest.raises(ExportError, match="does not open this model"):
        massl.export(file, to=to, output=tmp_path / "out")


def test_images_are_not_enlarged_without_bound(tmp_path: Path) -> None:
    options = {"embed_dim": 48, "depth": 1, "num_heads": 3}
    file = write(tmp_path / "b.safetensors", "vit_tiny_patch16_224", options, crop_ratio=1e-9)
    with pytest.raises(ExportError, match="crop ratio 1e-09"):
        massl.export(file, to="timm", output=tmp_path / "out")


# ---- the Hub ---------------------------------------------------------------------------------------------------------


def test_nothing_is_sent_unless_asked(backbone_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("massl.commands.export._hub", lambda: pytest.fail("asked for the Hub"))
    massl.export(backbone_file, to="timm", output=tmp_path / "out")


def test_the_folder_is_sent_to_a_private_repository(backbone_file: Path, tmp_path: Path) -> None:
    hub = FakeHub()
    settings = ExportSettings(
        run=str(backbone_file), to="timm", output=str(tmp_path / "out"), push_to_hub="jane/flowers"
    )
    folder = run_export(settings, hub=hub)
    files = ["README.md", "config.json", "model.safetensors"]
    assert hub.calls == [("jane/flowers", {"private": True, "exist_ok": True}), ("upload", files)]
    card = (folder / "README.md").read_text()
    assert 'timm.create_model("hf-hub:jane/flowers", pretrained=True)' in card
    assert "# flowers" in card


def test_a_folder_that_cannot_be_sent_stays(backbone_file: Path, tmp_path: Path) -> None:
    settings = ExportSettings(
        run=str(backbone_file), to="timm", output=str(tmp_path / "out"), push_to_hub="jane/flowers"
    )
    with pytest.raises(MasslError, match=r"is complete, but it could not be sent.*no route"):
        run_export(settings, hub=FakeHub(fails=True))
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["a/b/c", "../x", "jane/fl owers", "jane/", "-x", "a\nb", "a--b"])
def test_other_names_of_repositories_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(MasslError, match="push_to_hub"):
        massl.export("x", to="timm", output=tmp_path / "out", push_to_hub=name)


def test_a_missing_client_is_named(backbone_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MasslError, match=r"massl\[hf\]"):
        massl.export(backbone_file, to="timm", output=tmp_path / "out", push_to_hub="jane/x")
