"""The trial on tiny recipes: it measures, and forecasts follow from what it measured."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from massl.commands.recipe import PretrainRecipe
from massl.commands.timing import cached_share, steady_speed
from massl.config import RecipeError
from massl.data.loading import image_reader
from massl.data.sources import open_source
from massl.planning import trial
from massl.planning.costs import Memory, Speed
from massl.planning.trial import measure_speed

TINY: dict[str, Any] = {
    "data": {"num_workers": 1},
    "views": {"num_local": 0, "global_size": 8},
    "backbone": {
        "name": "vit_tiny_patch16_224",
        "image_size": 8,
        "patch_size": 4,
        "timm_options": {"embed_dim": 8, "depth": 1, "num_heads": 1},
    },
    "method": {"head": {"hidden_dim": 16, "out_dim": 8}, "memory": {"num_rows": 32, "block_size": 8}},
    "trainer": {"batch_size": 8, "precision": "fp32", "device": "cpu"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(24):
        Image.fromarray(np.full((12, 12, 3), number * 10, dtype=np.uint8)).save(tmp_path / f"{number:02}.png")
    return tmp_path


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_SECONDS", {"cpu": 0.05})


def recipe(**data: Any) -> PretrainRecipe:
    return PretrainRecipe.model_validate({**TINY, "data": {**TINY["data"], **data}})


def test_first_and_later_passes_are_measured_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding takes long by a clock of its own: only the first pass decodes if the images are cached."""
    decode, seconds = image_reader.decode, 0.0

    def passes(more: float) -> float:
        nonlocal seconds
        seconds += more
        return seconds

    def slowly(*given: Any, **options: Any) -> Any:
        passes(0.02)
        return decode(*given, **options)

    monkeypatch.setattr(image_reader, "decode", slowly)
    monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=lambda: passes(0.001)))
    source = open_source(folder)
    cached = measure_speed(recipe(cache_gib=1.0, num_workers=0), source, torch.device("cpu"), cached_share=1.0)
    assert cached.first_pass == pytest.approx(16 * 0.02 / 24, rel=0.02)  # the clock starts after the first batch of 8
    assert cached.later < 0.001
    assert cached.num_probed == 24
    assert cached.probe > 0
    uncached = measure_speed(recipe(num_workers=0), source, torch.device("cpu"), cached_share=0.0)
    assert uncached.first_pass == uncached.later > 0.01


def test_the_cached_share_is_that_of_the_images_that_fit(folder: Path) -> None:
    source = open_source(folder)
    assert cached_share(recipe(), source) == 0
    assert cached_share(recipe(cache_gib=1.0), source) == 1
    assert cached_share(recipe(cache_gib=12 * 12 * 3 * 6 / 2**30), source) == pytest.approx(0.25)


def test_what_is_wrong_with_a_recipe_shows_in_its_trial(folder: Path) -> None:
    bad = PretrainRecipe.model_validate({**TINY, "method": {**TINY["method"], "teacher": {"entropy": 9.0}}})
    with pytest.raises(RecipeError, match="entropy"):
        steady_speed(bad, open_source(folder))


def test_times_add_up() -> None:
    speed = Speed(first_pass=0.1, later=0.01, probe=0.001, num_probed=1000)
    assert speed.training_seconds(images_per_epoch=100, epochs=11) == pytest.approx(10 + 10)
    assert speed.epochs_in(20, images_per_epoch=100) == pytest.approx(11)
    assert speed.epochs_in(5, images_per_epoch=100) == pytest.approx(0.5)
    assert speed.probe_seconds(epochs=11, every_epochs=5) == pytest.approx(4)  # at 0, 5, 10 and the end
    assert speed.probe_seconds(epochs=10, every_epochs=5) == pytest.approx(3)
    assert speed.probe_seconds(epochs=10, every_epochs=0) == 0


def test_memory_grows_in_a_line_with_the_batch(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    tried: list[int] = []

    def peak(recipe: object, source: object, batch_size: int, device: object) -> Memory:
        tried.append(batch_size)
        return Memory(allocated=1 + batch_size / 8, reserved=2 + batch_size / 8, probe=3.0, probe_extra=0.5)

    monkeypatch.setattr(trial, "_peak", peak)
    values = {**TINY, "trainer": {"batch_size": 64, "accumulation_steps": 2}}
    memory = trial.measure_memory(PretrainRecipe.model_validate(values), open_source(folder), torch.device("cpu"))
    assert tried == [4, 8]
    assert memory.allocated == pytest.approx(1 + 32 / 8)
    assert memory.needed == pytest.approx(2 + 32 / 8 + 0.5)
    assert memory.peak == pytest.approx(5.0)


def test_slow_steps_are_timed_on_a_part_of_the_batch_by_the_same_networks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[object] = []
    build = trial.build_method
    monkeypatch.setattr(trial, "build_method", lambda *given, **named: built.append(given) or build(*given, **named))
    monkeypatch.setattr(trial, "_SLOW_STEP", 0.0)
    sizes: list[int] = []
    update = trial._Steps.__call__

    def counted(self: Any, images: Any, **named: Any) -> Any:
        sizes.append(len(images.indices))
        return update(self, images, **named)

    monkeypatch.setattr(trial._Steps, "__call__", counted)
    wide = PretrainRecipe.model_validate({**TINY, "trainer": {**TINY["trainer"], "batch_size": 24}})
    assert measure_speed(wide, open_source(folder), torch.device("cpu"), cached_share=0.0).later > 0
    assert len(built) == 1
    assert set(sizes) == {8}
