import math

import pytest
import torch
from torch.nn.functional import normalize

from massl.commands.recipe import load_recipe
from massl.data.views import ViewSettings
from massl.methods.base import TrainingPlan
from massl.methods.dino import DINOSettings
from massl.methods.ibot import IBOTSettings
from massl.methods.self_distillation import SelfDistillationSettings, caution_on_prototypes, prototype_collapse_signs
from massl.ops.scoring.feature_health import prototype_use

HEALTHY = {"teacher_entropy": 3.0, "prototype_entropy": 5.0, "embedding_spread": 0.9}


def plan(num_images: int) -> TrainingPlan:
    return TrainingPlan(num_images=num_images, batch_size=8, num_parts=1, views=ViewSettings())


def test_a_healthy_run_shows_no_sign_of_collapse_and_each_kind_of_collapse_is_named() -> None:
    assert prototype_collapse_signs(HEALTHY, num_prototypes=4096) == []
    for change, message in [
        (
            {"teacher_entropy": 0.999 * math.log(4096)},
            "all prototypes the same share (entropy 8.309 of ln 4,096 = 8.318 nats)",
        ),
        ({"prototype_entropy": 0.01}, "one prototype for all images"),
        ({"embedding_spread": 0.001}, "nearly the same vector"),
    ]:
        (sign,) = prototype_collapse_signs(HEALTHY | change, num_prototypes=4096)
        assert message in sign


def test_an_untrained_network_is_not_taken_for_a_collapsed_one_that_cannot_choose() -> None:
    embeddings, prototypes = normalize(torch.randn(20, 256), dim=-1), normalize(torch.randn(2000, 256), dim=-1)
    use = prototype_use(embeddings, prototypes, torch.zeros(2000), temperature=0.04)
    metrics = HEALTHY | {"teacher_entropy": use.entropy, "prototype_entropy": use.entropy_of_mean}
    assert prototype_collapse_signs(metrics, num_prototypes=2000) == []


def test_more_prototypes_than_images_are_cautioned_against() -> None:
    assert caution_on_prototypes(plan(1000), 1000) == []
    (caution,) = caution_on_prototypes(plan(999), 1000)
    assert "method.prototypes.num_prototypes = 1,000) than images (999)" in caution


@pytest.mark.parametrize(
    ("name", "epochs", "peak", "smallest", "clip", "smallest_global", "prototypes", "unit_length", "frozen", "warmup"),
    [
        ("dino-vits16", 800, 2e-3, 1e-5, 0.0, 0.25, 65_536, False, 1, 30),
        ("dino-vitb16", 400, 3e-3, 2e-6, 0.3, 0.25, 65_536, True, 3, 50),
        ("ibot-vits16", 800, 2e-3, 1e-6, 3.0, 0.25, 8192, False, 1, 30),
        ("ibot-vitb16", 400, 3e-3, 2e-6, 0.3, 0.32, 8192, True, 3, 50),
    ],
)
def test_the_recipes_for_imagenet_hold_the_authors_values(
    name: str,
    epochs: int,
    peak: float,
    smallest: float,
    clip: float,
    smallest_global: float,
    prototypes: int,
    unit_length: bool,
    frozen: int,
    warmup: int,
) -> None:
    recipe = load_recipe(name)
    assert (recipe.trainer.epochs, recipe.trainer.batch_size) == (epochs, 1024)
    optimizer = recipe.optimizer
    assert optimizer.peak_learning_rate(1024) == pytest.approx(peak, rel=1e-12)
    assert (optimizer.min_learning_rate, optimizer.warmup_epochs, optimizer.clip_norm) == (smallest, 10, clip)
    assert (optimizer.weight_decay, optimizer.weight_decay_end) == (0.04, 0.4)
    views = recipe.views
    assert (views.num_global, views.num_local) == (2, 10)
    assert (views.global_scale, views.local_scale) == ((smallest_global, 1.0), (0.05, smallest_global))
    method = recipe.method
    assert isinstance(method, SelfDistillationSettings)
    assert (method.student_temperature, method.teacher.momentum, method.prototypes.centre_momentum) == (0.1, 0.996, 0.9)
    assert (method.teacher.temperature_start, method.teacher.temperature, method.teacher.temperature_warmup_epochs) == (
        0.04,
        0.07,
        warmup,
    )
    assert (method.head.num_layers, method.head.hidden_dim, method.head.out_dim) == (3, 2048, 256)
    assert (method.prototypes.num_prototypes, method.prototypes.unit_length, method.prototypes.frozen_epochs) == (
        prototypes,
        unit_length,
        frozen,
    )
    if isinstance(method, IBOTSettings):
        assert (method.masks.ratios, method.masks.ratio_variances) == ((0.0, 0.3), (0.0, 0.2))


@pytest.mark.parametrize(("size", "num_local_of_massl"), [("cifar", 6), ("tiny", 0), ("imagenette", 0)])
@pytest.mark.parametrize("method", ["dino", "ibot"])
def test_the_recipes_for_small_images_differ_from_those_of_massl_in_the_method_and_local_views(
    method: str, size: str, num_local_of_massl: int
) -> None:
    recipe, reference = load_recipe(f"{method}-{size}"), load_recipe(f"massl-{size}")
    assert recipe.method.name == method
    assert (recipe.views.num_local, reference.views.num_local) == (6, num_local_of_massl)
    views = recipe.views.model_copy(update={"num_local": num_local_of_massl})
    same = recipe.model_copy(update={"method": reference.method, "views": views})
    if size == "tiny":  # massl-tiny has half the batch, which was chosen on held-out images
        assert (recipe.trainer.batch_size, reference.trainer.batch_size) == (256, 128)
        assert (recipe.optimizer.learning_rate, recipe.optimizer.warmup_epochs) == (5e-4, 2)
        same = same.model_copy(update={"optimizer": reference.optimizer, "trainer": reference.trainer})
    assert same == reference


@pytest.mark.parametrize("name", ["dino-tiny", "ibot-tiny"])
def test_dino_and_ibot_for_small_photographs_have_the_teacher_that_was_measured(name: str) -> None:
    method = load_recipe(name).method
    assert isinstance(method, SelfDistillationSettings)
    teacher = method.teacher
    assert (teacher.momentum, teacher.temperature_start, teacher.temperature) == (0.99, 0.04, 0.04)


def test_a_setting_given_alone_leaves_the_others_at_the_methods_own_values() -> None:
    dino = DINOSettings.model_validate({"teacher": {"temperature": 0.05}})
    assert dino.teacher.momentum == 0.996
    ibot = IBOTSettings.model_validate({"prototypes": {"unit_length": False}})
    assert ibot.prototypes.num_prototypes == 8192
