"""The small world of tests that run whole commands: a recipe, images, and the comparison of two runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from massl.training.checkpoint import CheckpointStore, load_checkpoint
from massl.training.metrics_log import TIMING_KEYS, read_metrics

TINY_RECIPE: dict[str, Any] = {
    "data": {"num_workers": 2, "max_side": 64},
    "views": {"num_local": 2, "global_size": 16, "local_size": 8},
    "backbone": {
        "name": "vit_tiny_patch16_224",
        "image_size": 16,
        "patch_size": 4,
        "drop_path_rate": 0.1,
        "timm_options": {"embed_dim": 32, "depth": 2, "num_heads": 2},
    },
    "method": {
        "teacher": {"momentum": 0.9, "temperature_warmup_epochs": 1},
        "head": {"hidden_dim": 32, "out_dim": 16},
        "memory": {"num_rows": 32, "block_size": 8},
    },
    "optimizer": {"learning_rate": 1e-2},
    "trainer": {
        "epochs": 4,
        "batch_size": 8,
        "precision": "fp32",
        "device": "cpu",
        "log_every_steps": 1,
        "checkpoint_every_steps": 4,
    },
    "probes": {"every_epochs": 1, "max_queries": 16, "num_neighbours": 3},
}


def tiny_images(num_images: int) -> np.ndarray:  # [N, 20, 24, 3]
    """Four kinds of stripes, in noise."""
    generator = np.random.default_rng(0)
    kinds = np.arange(num_images) % 4
    waves = np.sin(np.arange(24)[None, None, :] * (0.4 + 0.5 * kinds[:, None, None]) + np.zeros((1, 20, 1)))
    images = 128 + 80 * waves[..., None] + generator.normal(0, 15, (num_images, 20, 24, 3))
    return images.clip(0, 255).astype(np.uint8)


def newest_checkpoint(run: Path) -> dict[str, Any]:
    store = CheckpointStore(run / "checkpoints", keep_last=1)
    return load_checkpoint(store.path(store.steps()[-1]))


def difference(left: Any, right: Any, where: str) -> str | None:
    """The first place where two nested states differ in a single bit."""
    if isinstance(left, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
        return None if same else where
    if isinstance(left, dict):
        if left.keys() != right.keys():
            return f"{where}: keys"
        return next((found for key in left if (found := difference(left[key], right[key], f"{where}.{key}"))), None)
    if isinstance(left, Sequence) and not isinstance(left, str):
        if len(left) != len(right):
            return f"{where}: length"
        pairs = enumerate(zip(left, right, strict=True))
        return next((found for number, pair in pairs if (found := difference(*pair, f"{where}[{number}]"))), None)
    return None if left == right else where


def rows_without_time(run: Path) -> list[dict[str, float]]:
    return [
        {key: value for key, value in row.items() if key not in TIMING_KEYS}
        for row in read_metrics(run / "metrics.jsonl")
    ]


@dataclass(frozen=True)
class RunReader:
    """What a run left in its folder, and whether two runs left the same."""

    def difference(self, left: Any, right: Any) -> str | None:
        """The first place where two nested states differ in a single bit."""
        return difference(left, right, "")

    def state(self, run: Path) -> dict[str, Any]:
        return newest_checkpoint(run)

    def backbone(self, run: Path) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = safetensors.torch.load_file(run / "backbone.safetensors")
        return weights

    def rows(self, run: Path) -> list[dict[str, float]]:
        return rows_without_time(run)

    def assert_bitwise_equal(self, run: Path, reference: Path) -> None:
        found, expected = newest_checkpoint(run), newest_checkpoint(reference)
        assert {"student", "teacher", "memory"} == {name.partition(".")[0] for name in expected["method"]}
        assert {"memory.rows", "memory.cursor"} <= expected["method"].keys()
        assert expected["optimizer"]["state"]
        assert difference(found, expected, "checkpoint") is None
        assert rows_without_time(run) == rows_without_time(reference)
        assert difference(self.backbone(run), self.backbone(reference), "backbone") is None
        best, expected_best = (folder / "best.safetensors" for folder in (run, reference))
        assert best.exists() == expected_best.exists()
        assert not best.exists() or best.read_bytes() == expected_best.read_bytes(), "best.safetensors"


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
