import shlex

import torch

from massl.commands.pretrain_arguments import parse_pretrain
from massl.commands.recipe import load_recipe
from massl.commands.run_messages import cpu_caution, seconds_per_step_on_cpu
from massl.methods import build_method

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


def test_a_few_images_get_a_batch_that_fits_them() -> None:
    words = caution("massl-vits16", num_images=266, seconds_per_step=HOUR)
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
