"""The Python that the documents show runs: all blocks of a document, one after the other, in one namespace.

What a reader brings along is small here: `photos/` holds six images, `cat.jpg` and `dog.jpg` are further ones,
`runs/photos` an untrained ViT-S/16, `images` two random ones. Two functions would train for long: `massl.pretrain`
resolves its recipe and returns without training, `massl.ablate` stops each run after two steps.
"""

import inspect
import pydoc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import massl
from massl.commands.pretrain import PretrainResult
from massl.commands.pretrain_arguments import resolve_recipe
from massl.data.views import ViewBatch
from massl.methods.base import StepHyper
from massl.nn.backbone import BackboneSettings
from massl.nn.timm_models import create_timm_model
from massl.weights.io import BACKBONE_FILE, backbone_bytes

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def vit_small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    arguments = BackboneSettings(name="vit_small_patch16_224").timm_arguments()
    path = tmp_path_factory.mktemp("weights") / BACKBONE_FILE
    path.write_bytes(
        backbone_bytes(create_timm_model(arguments), timm_arguments=arguments, mean=_MEAN, std=_STD, image_size=224)
    )
    return path


@pytest.fixture
def readers_folder(tmp_path: Path, vit_small_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the reader of a document has: images and a run."""
    for number in range(6):
        folder = tmp_path / "photos" / ("train" if number < 4 else "val") / ("cat" if number % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    for name in ("cat.jpg", "dog.jpg"):
        Image.fromarray(np.random.default_rng(9).integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(tmp_path / name)
    run = tmp_path / "runs" / "photos"
    run.mkdir(parents=True)
    (run / BACKBONE_FILE).symlink_to(vit_small_file)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def quick_training(monkeypatch: pytest.MonkeyPatch) -> None:
    real_pretrain, real_ablate = massl.pretrain, massl.ablate

    def pretrain(*arguments: Any, **options: Any) -> PretrainResult:
        given = inspect.signature(real_pretrain).bind(*arguments, **options).arguments
        recipe, data = (given["recipe"], given.get("data")) if "recipe" in given else ("massl-vits16", "photos/")
        resolve_recipe(recipe, data, given.get("overrides") or {})
        return PretrainResult(
            folder=Path(given["output"]), step=1, finished=True, signal_number=None, metrics=[{"loss": 1.0}]
        )

    def ablate(*arguments: Any, **options: Any) -> Any:
        short = {"trainer.max_steps": 2, "trainer.batch_size": 8, "probes.max_queries": 20, "probes.max_database": 50}
        return real_ablate(*arguments, **{**options, "overrides": {**options["overrides"], **short}})

    monkeypatch.setattr(massl, "pretrain", pretrain)
    monkeypatch.setattr(massl, "ablate", ablate)


def run_blocks(document: Any) -> dict[str, Any]:
    world: dict[str, Any] = {"__name__": "shown", "images": torch.rand(2, 3, 224, 224), "massl": massl}
    for block in document.blocks:
        if block.language == "python":
            code = "\n" * block.line + block.text  # so that an error names the line of the document
            exec(compile(code, block.document.name, "exec"), world)
    return world


def check_readme(world: dict[str, Any]) -> None:
    assert world["features"].shape == (1, 384)


def check_loop_with_memory_loss(world: dict[str, Any]) -> None:
    """It fills its memory."""
    assert world["step"] == 19
    assert world["loss"].isfinite()
    assert int(world["memory"].cursor) == 20 * 16 % 256
    assert any(parameter.grad.abs().sum() > 0 for parameter in world["student"].parameters())


def check_method_of_your_own(world: dict[str, Any]) -> None:
    """It takes a step."""
    options: dict[str, int | float | str | bool] = {"embed_dim": 32, "depth": 1, "num_heads": 2}
    backbone = BackboneSettings(
        name="vit_tiny_patch16_224", image_size=16, patch_size=8, drop_path_rate=0.0, timm_options=options
    )
    method = world["Mine"](world["MySettings"](), backbone, seed=0)
    views = ViewBatch(
        global_views=torch.rand(2, 3, 3, 16, 16),
        local_views=None,
        image_indices=torch.arange(3),
        labels=torch.zeros(3).long(),
    )
    hyper = StepHyper(step=0, epoch=0, learning_rate=0.1, weight_decay=0.0, own={})
    output = method(views, hyper)
    output.loss.backward()
    method.after_step(output, hyper)
    assert output.loss > 0
    assert method.backbone_to_evaluate() is method.backbone


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "README.md": check_readme,
    "docs/memory-loss.md": check_loop_with_memory_loss,
    "docs/methods.md": check_method_of_your_own,
}


def test_the_python_blocks_of_a_document_run(
    document_with_python: Any, readers_folder: Path, quick_training: None
) -> None:
    world = run_blocks(document_with_python)
    assert len(world) > 3
    if check := CHECKS.get(document_with_python.name):
        check(world)


def test_every_document_with_a_check_of_its_own_shows_python(documents: list[Any]) -> None:
    with_python = {
        document.name for document in documents if any(block.language == "python" for block in document.blocks)
    }
    assert CHECKS.keys() <= with_python


def test_every_dotted_name_in_running_text_exists(document: Any) -> None:
    for name in re.findall(r"`(massl(?:\.[A-Za-z_]\w*)+)", document.prose):
        assert pydoc.locate(name) is not None, name
