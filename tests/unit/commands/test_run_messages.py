import io
import shlex

import pytest
import torch
from rich.console import Console

from massl.commands.pretrain_arguments import parse_pretrain
from massl.commands.recipe import load_recipe
from massl.commands.run_messages import announce_plan, cpu_caution, idle_options, seconds_per_step_on_cpu
from massl.methods import build_method
from massl.training.schedules import Schedules

HOUR = 3600.0


def caution(recipe: str, *, seconds_per_step: float, num_images: int = 10_000) -> str | None:
    """On a run of 1,000 steps."""
    chosen = load_recipe(recipe, {"data.source": "my photos"})
    return cpu_caution(chosen, num_images, seconds_per_step=seconds_per_step, num_steps=1000)


def test_a_short_run_on_a_cpu_needs_no_caution() -> None:
    assert caution("massl-vits16", seconds_per_step=1.0) is None


def test_a_long_run_on_a_cpu_names_its_hours_and_a_command_that_suits() -> None:
    words = caution("dino-vits16", seconds_per_step=50 * HOUR / 1000)
    assert words is not None
    assert "2 days 2 h" in words
    command = words.partition("massl pretrain ")[2]
    assert "--recipe dino-tiny" in command
    call = parse_pretrain(shlex.split(command))
    assert call.recipe.data.source == "my photos"
    assert call.recipe.backbone.name == "vit_tiny_patch16_224"


def test_a_long_run_of_massl_on_a_cpu_is_left_to_auto() -> None:
    words = caution("massl-vits16", seconds_per_step=50 * HOUR / 1000)
    assert words is not None
    call = parse_pretrain(shlex.split(words.partition("massl pretrain ")[2]))
    assert (call.recipe, call.data) == ("auto", "my photos")


def test_a_few_images_get_a_batch_that_fits_them() -> None:
    words = caution("mocov3-vits16", num_images=266, seconds_per_step=HOUR)
    assert words is not None
    assert "--trainer.batch_size 64" in words


def test_a_run_that_is_small_already_should_take_fewer_epochs() -> None:
    words = caution("massl-tiny", seconds_per_step=30 * HOUR / 1000)
    assert words is not None
    assert "--trainer.epochs 4" in words  # 3 of 30 hours: a tenth of 40


def test_the_guess_leaves_the_network_as_it_was() -> None:
    recipe = load_recipe("demo-vit", {"trainer.batch_size": 1})
    method = build_method(recipe.method, recipe.backbone, seed=0).train()
    before = {name: value.clone() for name, value in method.state_dict().items()}
    assert seconds_per_step_on_cpu(recipe, method.backbone_to_evaluate()) > 0
    assert method.backbone_to_evaluate().training
    assert all(torch.equal(value, before[name]) for name, value in method.state_dict().items())


@pytest.mark.parametrize(("weights", "peak"), [(None, "7e-04"), ("runs/a", "1.4e-04")])
def test_the_peak_learning_rate_that_is_said_is_that_of_training(weights: str | None, peak: str) -> None:
    """A run from weights learns at a fifth of the recipe's rate."""
    init = {"init.weights": weights, "init.learning_rate_factor": 0.2}
    rate = {"optimizer.learning_rate": 7e-4, "trainer.batch_size": 256}
    recipe = load_recipe("massl-tiny", {"data.source": "photos/", **init, **rate})
    schedules = Schedules(
        optimizer=recipe.optimizer,
        ramps=recipe.method.ramps(),
        batch_size=256,
        epochs=recipe.trainer.epochs,
        steps_per_epoch=10,
        init=recipe.init,
    )
    console = Console(file=io.StringIO(), width=300)
    announce_plan(recipe, schedules, 2560, torch.device("cpu"), console)
    assert f"peak learning rate {float(peak):.3g}" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_residual_stream_in_fp32_is_told_to_be_idle_without_fused_kernels() -> None:
    recipe = load_recipe("massl-tiny", {"data.source": "photos/", "trainer.residual": "fp32"})
    (caution,) = idle_options(recipe, has_start=False, networks="plain, because fused ones need a GPU and bf16")
    assert "trainer.residual does nothing" in caution
    assert list(idle_options(recipe, has_start=False, networks="fused, fp32 residual stream")) == []


def test_the_guard_of_a_run_from_weights_is_heeded() -> None:
    recipe = load_recipe("massl-tiny", {"data.source": "photos/", "trainer.guard": "stop"})
    # older versions kept the weights in start.json
    assert list(idle_options(recipe, has_start=True, networks="plain")) == []
    (caution,) = idle_options(recipe, has_start=False, networks="plain")
    assert "trainer.guard does nothing: this run starts from random weights" in caution
