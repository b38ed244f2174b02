"""Every method learns: on stripes in noise its features come to tell directions apart, and its own loss falls."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import massl
from massl.commands.methods import METHODS

SIDE, NUM_DIRECTIONS, NUM_STEPS = 16, 6, 120
# Of each method's demo settings only sizes change: 4 x 4 patches in two narrow blocks, two views of 64 images a step.
SMALL: dict[str, Any] = {
    "views.num_local": 0,
    "views.global_size": SIDE,
    "backbone.image_size": SIDE,
    "backbone.patch_size": 4,
    "backbone.timm_options": {"embed_dim": 48, "depth": 2, "num_heads": 3, "weight_init": "jax"},
    "optimizer.learning_rate": 4e-3,
    "trainer.batch_size": 64,
    "trainer.epochs": 6,
    "trainer.log_every_steps": NUM_STEPS,
    "trainer.device": "cpu",
    "probes.every_epochs": 6,
    "probes.num_neighbours": 1,
}


def stripes(num_images: int, *, seed: int) -> dict[str, np.ndarray]:
    """Grey images of six directions, as many of each; phase and width of the stripes are free, and noise lies over them."""
    generator = np.random.default_rng(seed)
    labels = np.arange(num_images) % NUM_DIRECTIONS
    angles, phases, widths = (
        values[:, None, None]
        for values in (
            labels * np.pi / NUM_DIRECTIONS,
            generator.uniform(0, 2 * np.pi, num_images),
            generator.uniform(0.9, 1.5, num_images),
        )
    )
    rows, columns = np.mgrid[:SIDE, :SIDE]
    waves = np.sin(widths * (np.cos(angles) * columns + np.sin(angles) * rows) + phases)
    images = 128 + 60 * waves + generator.normal(0, 25, waves.shape)
    return {"images": images.clip(0, 255).astype(np.uint8), "labels": labels}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Images to learn from, and for the k-NN probe five examples of each direction: too few for features that heed the phase."""
    folder = tmp_path_factory.mktemp("stripes")
    paths = {}
    for seed, (key, num_images) in enumerate({"data.source": 1280, "probes.queries": 480, "probes.database": 30}.items()):
        paths[key] = str(folder / f"{num_images}.npz")
        np.savez(paths[key], **stripes(num_images, seed=seed))  # type: ignore[arg-type]
    return paths


@pytest.mark.parametrize("name", METHODS)
def test_a_method_learns_what_the_images_have_in_common(
    name: str, sources: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = massl.pretrain(recipe="demo", output=tmp_path / "run", overrides=SMALL | sources | {"method.name": name})
    start, end = (row for row in result.metrics if "knn_top1" in row)
    assert (start["step"], end["step"]) == (0, NUM_STEPS)
    # Measured with three seeds: 10 to 13 points for mae, 15 to 40 for the others; 0 where nothing is learnt.
    assert end["knn_top1"] >= start["knn_top1"] + 6.0
    # A wrong sign may well give good features (a predictor can undo it), but not this: no loss here can be negative, and each falls.
    assert 0.0 < end["loss"] < start["loss"]
    assert "collapsed" not in capfd.readouterr().err
