"""A run folder as training leaves it, with a small transformer of known weights and a few hostile names."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from massl.evaluations.measurement import Setting
from massl.evaluations.results import ResultRow, append_rows
from massl.nn.backbone import BackboneSettings, build_backbone
from massl.weights.io import BACKBONE_FILE, backbone_bytes
from massl.weights.models import open_model

TINY = {"embed_dim": 48, "depth": 2, "num_heads": 3}
MakeRun = Callable[..., Path]


def write_backbone(path: Path, name: str, options: Mapping[str, Any], **settings: Any) -> None:
    """A backbone file whose weights are all different from zero and one."""
    chosen = BackboneSettings(name=name, timm_options=dict(options), **settings)
    backbone = build_backbone(chosen, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in backbone.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    content = backbone_bytes(
        backbone.model,
        timm_arguments=chosen.timm_arguments(),
        mean=(0.5, 0.4, 0.3),
        std=(0.2, 0.25, 0.3),
        image_size=chosen.image_size or 64,
    )
    path.write_bytes(content)


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    def make(name: str = "vit_tiny_patch16_224", options: Mapping[str, Any] = TINY, **settings: Any) -> Path:
        folder = tmp_path_factory.mktemp("home") / "jane doe" / "run"
        folder.mkdir(parents=True)
        if name.startswith("vit"):
            settings = {"image_size": 32, "patch_size": 8, **settings}
        write_backbone(folder / BACKBONE_FILE, name, options, **settings)
        recipe = {
            "method": {"name": "massl"},
            "backbone": {"name": name},
            "data": {"source": str(folder.parent / "secret <b>photos</b> | `x`")},
            "trainer": {"epochs": 2, "batch_size": 4, "max_steps": None},
        }
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        rows = [
            {
                "step": step,
                "epoch": step // 5,
                "images_per_second": 10.0,
                "loss": 5.0 - step / 10,
                "knn_top1": 40.0 + step,
            }
            for step in (0, 5, 10)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "environment.json").write_text(
            json.dumps({"device": "cpu", "world_size": 1, "command": [str(folder)]})
        )
        source = recipe["data"]["source"]
        data = {"digest": "0123456789abcdef", "num_images": 1234, "source": source, "changes": [], "as_before": False}
        (folder / "data.json").write_text(json.dumps(data))
        append_rows(
            folder / "results.jsonl", [_row(folder, open_model(folder).fingerprint, 71.25), _row(folder, "0" * 16, 3)]
        )
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_run(make_run: MakeRun) -> Path:
    return make_run()


def _row(folder: Path, weights: str, value: float) -> ResultRow:
    return ResultRow(
        protocol="knn",
        data=str(folder.parent / "test|set"),
        setting=Setting(k=20),
        metric="top1",
        value=value,
        num_samples=50,
        seconds=1.0,
        weights=weights,
        model=str(folder),
        architecture="ViT",
        precision="fp32",
        run="r",
        train=str(folder),
        images="i",
    )
