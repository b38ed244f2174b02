"""Contrastive methods on two processes: statistics, negatives and memory are those of the whole batch."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from massl.commands.recipe import load_recipe
from massl.methods import build_method

NUM_STEPS = 4
HEADS = {"projector": {"hidden_dim": 24, "out_dim": 8}, "predictor": {"hidden_dim": 24}}
SETTINGS: dict[str, dict[str, Any]] = {
    "mocov3": {**HEADS, "teacher": {"momentum": 0.9}},
    "nnclr": {**HEADS, "memory": {"num_rows": 40}},  # goes round in the third step
}
# AdamW blows up what rounding leaves of gradients that are exactly zero: the bias of the keys, and that of the
# backbone's last norm, which the projector's batch norm takes away again. The latter is part of features.
NOISE = ("qkv.bias", "model.norm.bias")
OF_FEATURES = {"effective_rank", "feature_spread", "knn_top1", "other_view_top1"}


@pytest.fixture(params=sorted(SETTINGS))
def options(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Pre-training on small pictures, with probes before and after."""
    recipe = {
        "data": {"source": "demo:test", "num_workers": 1},
        "views": {"num_local": 0, "global_size": 16, "global_scale": [0.5, 1.0]},
        "backbone": {
            "name": "vit_tiny_patch16_224",
            "image_size": 16,
            "patch_size": 8,
            "drop_path_rate": 0.2,
            "timm_options": {"embed_dim": 16, "depth": 2, "num_heads": 2},
        },
        "method": {"name": request.param, **SETTINGS[request.param]},
        "optimizer": {"learning_rate": 0.02, "decayed": "all", "clip_norm": 0.0},
        "trainer": {
            "batch_size": 16,
            "precision": "fp32",
            "device": "cpu",
            "log_every_steps": 1,
            "max_steps": NUM_STEPS,
        },
        "probes": {"every_epochs": 1, "max_database": 61, "max_queries": 31},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return lambda output: ["pretrain", "--recipe", tmp_path / "recipe.yaml", "--output", output]


def test_two_ranks_train_and_probe_as_one_process(
    start_ranks: Any, massl_here: Any, options: Any, runs: Any, tmp_path: Path
) -> None:
    processes = start_ranks(2, *options(tmp_path / "two"))
    alone = massl_here(*options(tmp_path / "one"))
    assert alone.status == 0, alone.text
    for answer in [process.wait() for process in processes]:
        assert answer.status == 0, answer.text
        assert "Warning" not in answer.text
    rows, expected = runs.rows(tmp_path / "two"), runs.rows(tmp_path / "one")
    assert len(rows) == len(expected) == NUM_STEPS + 1
    assert "embedding_rank" in rows[-1]
    for row, expected_row in zip(rows, expected, strict=True):
        assert row.keys() == expected_row.keys()
        for key in row.keys() - OF_FEATURES - {"contrastive_top1"}:  # which jumps where two keys are nearly equal
            assert row[key] == pytest.approx(expected_row[key], rel=1e-3, abs=1e-4), (row["step"], key)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    start = build_method(recipe.method, recipe.backbone, seed=0).state_dict()
    two, one = (runs.state(tmp_path / name)["method"] for name in ("two", "one"))
    assert two.keys() == one.keys() == start.keys()
    kept = [key for key in start if not key.endswith(NOISE)]
    # The first steps of AdamW hardly depend on the size of a gradient, so where it is nearly zero its rounding shows.
    difference, movement = (
        sum(float((one[key] - other[key]).double().square().sum()) for key in kept) for other in (two, start)
    )
    assert movement > 1e-4
    assert difference < 0.02**2 * movement
