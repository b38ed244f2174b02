"""A run that cannot fit is refused before its first step; devices are made up."""

import io

import pytest
import torch
from rich.console import Console

from massl.commands import memory_check
from massl.commands.memory_check import require_memory
from massl.commands.recipe import PretrainRecipe, load_recipe
from massl.config import RecipeError
from massl.data.sources import ImageSource, open_source
from massl.planning.costs import Memory

GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def source() -> ImageSource:
    return open_source("demo:test")


@pytest.fixture
def recipe() -> PretrainRecipe:
    return load_recipe("massl-imagenette")  # about 10 GiB


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO())


def having(monkeypatch: pytest.MonkeyPatch, free: float, *, measured: float | None = None) -> None:
    def measure(recipe: object, source: object, device: object) -> Memory:
        if measured is None:
            raise AssertionError("no trial was expected")
        return Memory(allocated=measured, reserved=measured)

    monkeypatch.setattr(memory_check, "free_memory_gib", lambda device: free)
    monkeypatch.setattr(memory_check, "measure_memory", measure)
    monkeypatch.setattr(memory_check, "release_gpu", lambda device: None)


def test_a_gpu_with_plenty_of_room_is_not_tried(
    recipe: PretrainRecipe, source: ImageSource, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    having(monkeypatch, 80)
    require_memory(recipe, source, GPU, console)


def test_the_advice_is_large_enough(
    recipe: PretrainRecipe, source: ImageSource, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    for needed, parts in ((13, 2), (100, 16), (float("inf"), 8)):
        having(monkeypatch, 12, measured=needed)
        with pytest.raises(RecipeError) as refused:
            require_memory(recipe, source, GPU, console)
        assert f"accumulation_steps {parts} " in str(refused.value)
        assert f"batch_size {256 // parts};" in str(refused.value)


def test_near_the_limit_a_trial_decides(
    recipe: PretrainRecipe, source: ImageSource, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    having(monkeypatch, 12, measured=11)
    require_memory(recipe, source, GPU, console)
    having(monkeypatch, 12, measured=13)
    with pytest.raises(RecipeError, match=r"about 13.0 GiB, but the GPU has 12.0 free") as refused:
        require_memory(recipe, source, GPU, console)
    for option in ("accumulation_steps 2", "activation_checkpointing True", "batch_size 128", "global_size 56"):
        assert option in str(refused.value)


def test_a_trial_that_does_not_fit_itself_is_a_refusal(
    recipe: PretrainRecipe, source: ImageSource, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(recipe: object, source: object, device: object) -> Memory:
        raise torch.OutOfMemoryError("no memory")

    having(monkeypatch, 2)
    monkeypatch.setattr(memory_check, "measure_memory", measure)
    with pytest.raises(RecipeError, match="far more memory than the GPU has"):
        require_memory(recipe, source, GPU, console)


def test_on_a_cpu_the_count_warns(
    recipe: PretrainRecipe, source: ImageSource, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    having(monkeypatch, 4)
    assert "but this machine has 4.0 free" in require_memory(recipe, source, torch.device("cpu"), console)
    having(monkeypatch, 80)
    assert require_memory(recipe, source, torch.device("cpu"), console) == ""


def test_networks_that_cannot_be_counted_are_left_alone(
    source: ImageSource, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    having(monkeypatch, 0.1)
    fixed_size = {"backbone.name": "swin_tiny_patch4_window7_224", "backbone.stem": ""}  # views have 32 px
    require_memory(load_recipe("massl-cifar-resnet18", fixed_size), source, GPU, console)


def test_a_resnet_that_cannot_fit_is_refused(
    source: ImageSource, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    having(monkeypatch, 2, measured=3.2)
    with pytest.raises(RecipeError, match=r"about 3.2 GiB, but the GPU has 2.0 free") as refused:
        require_memory(load_recipe("massl-cifar-resnet18"), source, GPU, console)
    for of_a_vit in ("activation_checkpointing", "backbone.image_size"):
        assert of_a_vit not in str(refused.value)
