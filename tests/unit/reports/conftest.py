import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from massl.commands.recipe import PretrainRecipe
from massl.config import merge

RECIPE: dict[str, Any] = {
    "data": {"source": "photos"},
    "views": {"num_global": 2, "num_local": 4},
    "backbone": {"name": "vit_tiny_patch16_224", "timm_options": {}},
    "method": {"name": "massl", "memory": {"num_rows": 2048}},
    "optimizer": {"learning_rate": 1e-3},
    "trainer": {"seed": 0, "epochs": 2, "max_steps": None, "batch_size": 60},
    "probes": {"queries": "", "num_neighbours": 20},
}
# 10 steps an epoch of 60 images each: 60, 20 and 20 s of training until the probes at steps 10, 15 and 20.
ROWS: list[dict[str, float]] = [
    {"step": 0, "epoch": 0, "images_per_second": 0.0, "knn_top1": 20.0},
    {"step": 5, "epoch": 0, "images_per_second": 6.0},
    {"step": 10, "epoch": 1, "images_per_second": 30.0, "knn_top1": 40.0},
    {"step": 15, "epoch": 1, "images_per_second": 15.0, "knn_top1": 55.0},
    {"step": 20, "epoch": 2, "images_per_second": 15.0, "knn_top1": 50.0},
]


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """make_run("a", {"trainer.epochs": 3}, rows=[...], world_size=2): a run folder as massl pretrain leaves it."""

    def make(
        name: str,
        changes: Mapping[str, Any] | None = None,
        *,
        rows: Iterable[Mapping[str, float]] = ROWS,
        device: str = "NVIDIA H200",
        world_size: int = 1,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(merge(RECIPE, changes or {}, PretrainRecipe)))
        environment = {
            "device": device,
            "world_size": world_size,
            "packages": {"massl": "0.1.0", "torch": "2.11.0"},
            "massl_commit": "c0ffee",
        }
        (folder / "environment.json").write_text(json.dumps(environment))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return make


@pytest.fixture
def rows() -> list[dict[str, float]]:
    """The rows of such a run, to be changed."""
    return [dict(row) for row in ROWS]
