import math
from dataclasses import replace

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from massl.commands.recipe import load_recipe
from massl.data.views import ViewBatch, ViewSettings
from massl.methods.base import StepHyper, TrainingPlan
from massl.methods.mocov3 import MoCoV3, MoCoV3Settings
from massl.nn.backbone import BackboneSettings
from massl.nn.heads import PredictorSettings, ProjectorSettings
from massl.training.optimizers import OptimizerSettings, build_optimizer
from massl.training.step import TrainingStep

HYPER = StepHyper(step=3, epoch=0, learning_rate=0.01, weight_decay=0.1, own={"momentum": 0.75})
HEADS = {"projector": ProjectorSettings(hidden_dim=16, out_dim=8), "predictor": PredictorSettings(hidden_dim=16)}


def backbone_settings(*, drop_path_rate: float = 0.0) -> BackboneSettings:
    options: dict[str, int | float | bool | str] = {"embed_dim": 16, "depth": 2, "num_heads": 2}
    return BackboneSettings(
        name="vit_tiny_patch16_224", image_size=8, patch_size=4, drop_path_rate=drop_path_rate, timm_options=options
    )


def tiny_method(*, seed: int = 0, drop_path_rate: float = 0.0, freeze_patch_embedding: bool = True) -> MoCoV3:
    settings = MoCoV3Settings(freeze_patch_embedding=freeze_patch_embedding, **HEADS)
    method = MoCoV3(settings, backbone_settings(drop_path_rate=drop_path_rate), seed=seed)
    with torch.no_grad():  # as after some training: student and teacher differ
        for position, parameter in enumerate(method.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(position)))
    return method.train()


def views(num_images: int = 6, *, num_global: int = 2) -> ViewBatch:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(1, num_images, 3, 1, 1, generator=generator) + torch.randn(
        num_global, num_images, 3, 8, 8, generator=generator
    )
    return ViewBatch(global_views=pixels, local_views=None, image_indices=torch.arange(100, 100 + num_images))


def plan(*, num_parts: int = 1, num_local: int = 0, num_global: int = 2) -> TrainingPlan:
    shown = ViewSettings(num_local=num_local, num_global=num_global)
    return TrainingPlan(num_images=100, batch_size=8, num_parts=num_parts, views=shown)


def train(method: MoCoV3, num_steps: int, *, bf16: bool = False) -> list[Tensor]:
    optimizer = build_optimizer(method, OptimizerSettings(decayed="all", clip_norm=0.0))
    step = TrainingStep(method=method, parallel=method, optimizer=optimizer, bf16=bf16, device=torch.device("cpu"))
    return [step([views()], replace(HYPER, step=number), num_parts=1).loss.detach() for number in range(num_steps)]


def test_the_loss_compares_queries_of_each_view_with_the_teachers_keys_of_the_other() -> None:
    method, batch = tiny_method(), views()
    with torch.no_grad():
        output = method(batch, HYPER)
        expected, picked = torch.zeros(()), 0
        for one, other in ((0, 1), (1, 0)):
            student = method.student.head(method.student.backbone(batch.global_views[one]).pooled)
            queries = normalize(method.predictor(student), dim=-1)
            keys = normalize(method.teacher.head(method.teacher.backbone(batch.global_views[other]).pooled), dim=-1)
            expected += 2 * 0.2 * cross_entropy(queries @ keys.T / 0.2, torch.arange(6))
            picked += int(((queries @ keys.T).argmax(dim=1) == torch.arange(6)).sum())
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=1e-6)
    assert output.metrics["contrastive_top1"].item() == pytest.approx(100 * picked / 12)
    assert output.metrics["loss_over_guessing"].item() == pytest.approx(
        expected.item() / (4 * 0.2 * math.log(6)), rel=1e-5
    )


def test_only_the_first_two_global_views_count() -> None:
    batch = views(num_global=3)
    two = replace(batch, global_views=batch.global_views[:2])
    for drop_path_rate in (0.0, 0.5):
        method = tiny_method(drop_path_rate=drop_path_rate)
        assert torch.equal(method(batch, HYPER).loss, method(two, HYPER).loss)


def test_the_forward_pass_changes_nothing() -> None:
    method, batch = tiny_method(drop_path_rate=0.3), views()
    before = {key: value.clone() for key, value in method.state_dict().items()}
    assert torch.equal(method(batch, HYPER).loss, method(batch, HYPER).loss)
    assert all(torch.equal(value, before[key]) for key, value in method.state_dict().items())


def test_after_a_step_the_teacher_alone_has_moved_towards_the_student_by_one_minus_momentum() -> None:
    method = tiny_method()
    before = {key: value.clone() for key, value in method.state_dict().items()}
    method.after_step(method(views(), HYPER), HYPER)
    for key, value in method.state_dict().items():
        if key.startswith("teacher."):
            torch.testing.assert_close(value, 0.75 * before[key] + 0.25 * before[key.replace("teacher.", "student.")])
        else:
            assert torch.equal(value, before[key])


def test_gradients_reach_student_and_predictor_but_not_patch_embedding_positions_or_teacher() -> None:
    method = tiny_method()
    method(views(), HYPER).loss.backward()
    untrained = {name for name, parameter in method.student.named_parameters() if parameter.grad is None}
    assert untrained == {
        "backbone.model.pos_embed",
        "backbone.model.patch_embed.proj.weight",
        "backbone.model.patch_embed.proj.bias",
    }
    for name, parameter in [*method.student.named_parameters(), *method.predictor.named_parameters()]:
        # what the projector's batch norm takes away again
        if parameter.grad is not None and not name.endswith("model.norm.bias"):
            assert parameter.grad.abs().max() > 1e-6, name
        assert parameter.requires_grad == (parameter.grad is not None)
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in method.teacher.parameters())


def test_training_leaves_the_frozen_patch_embedding_as_it_was_drawn_unless_told_otherwise() -> None:
    for frozen in (True, False):
        method = tiny_method(freeze_patch_embedding=frozen)
        before = method.student.backbone.model.patch_embed.proj.weight.clone()
        train(method, 2)
        assert torch.equal(method.student.backbone.model.patch_embed.proj.weight, before) == frozen


def test_training_continues_bit_for_bit_from_what_is_saved() -> None:
    whole, first, second = tiny_method(), tiny_method(), tiny_method(seed=5)
    optimizers = {
        method: build_optimizer(method, OptimizerSettings(decayed="all")) for method in (whole, first, second)
    }

    def run(method: MoCoV3, steps: range) -> list[Tensor]:
        step_of = TrainingStep(
            method=method, parallel=method, optimizer=optimizers[method], bf16=False, device=torch.device("cpu")
        )
        return [step_of([views()], replace(HYPER, step=step), num_parts=1).loss.detach() for step in steps]

    expected, losses = run(whole, range(4)), run(first, range(2))
    second.load_state_dict(first.state_dict())
    optimizers[second].load_portable_state(optimizers[first].portable_state())
    assert [*losses, *run(second, range(2, 4))] == expected
    assert all(torch.equal(second.state_dict()[key], value) for key, value in whole.state_dict().items())


def test_the_task_is_learnt() -> None:
    method = tiny_method()
    losses = train(method, 40)
    assert losses[-1] < 0.6 * losses[0]
    assert method(views(), HYPER).metrics["contrastive_top1"].item() == 100.0


def test_student_and_teacher_start_equal_and_the_seed_alone_decides_them() -> None:
    torch.manual_seed(1)
    first = MoCoV3(MoCoV3Settings(**HEADS), backbone_settings(), seed=4)
    torch.manual_seed(2)
    second = MoCoV3(MoCoV3Settings(**HEADS), backbone_settings(), seed=4)
    for key, value in first.student.state_dict().items():
        assert torch.equal(first.teacher.state_dict()[key], value)
    assert all(torch.equal(second.state_dict()[key], value) for key, value in first.state_dict().items())
    other = MoCoV3(MoCoV3Settings(**HEADS), backbone_settings(), seed=5).state_dict()
    for part in (
        "student.backbone.model.blocks.0.mlp.fc1.weight",
        "student.head.layers.0.weight",
        "predictor.layers.0.weight",
    ):
        assert not torch.equal(other[part], first.state_dict()[part])


def test_a_transformer_starts_with_the_weights_of_the_authors_rule() -> None:
    options: dict[str, int | float | bool | str] = {"embed_dim": 64, "depth": 1, "num_heads": 2}
    settings = BackboneSettings(
        name="vit_tiny_patch16_224", image_size=8, patch_size=4, drop_path_rate=0.0, timm_options=options
    )
    model = MoCoV3(MoCoV3Settings(**HEADS), settings, seed=0).student.backbone.model
    assert isinstance(model, VisionTransformer)
    block = model.blocks[0]
    for layer, num_inputs, num_outputs in (
        (block.attn.qkv, 64, 64),  # each of the three on its own
        (block.attn.proj, 64, 64),
        (block.mlp.fc1, 64, 256),
        (block.mlp.fc2, 256, 64),
        (model.patch_embed.proj, 3 * 4 * 4, 64),
    ):
        bound = math.sqrt(6 / (num_inputs + num_outputs))
        assert 0.99 * bound < layer.weight.abs().max().item() <= bound
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
        assert layer.bias.abs().max() == 0
    assert 1e-7 < model.cls_token.std().item() < 1e-5
    assert model.pos_embed[0, 0].abs().max() == 0
    assert model.pos_embed[0, 1:].std() > 0.4
    assert (block.norm1.weight == 1).all()


def test_networks_that_are_no_transformers_are_trained_whole() -> None:
    settings = BackboneSettings(name="resnet10t", drop_path_rate=0.0)
    method = MoCoV3(MoCoV3Settings(**HEADS), settings, seed=0)
    assert all(parameter.requires_grad for parameter in method.student.parameters())


def test_the_trained_backbone_is_the_one_to_evaluate_as_in_the_paper() -> None:
    method = tiny_method()
    assert method.backbone_to_evaluate() is method.student.backbone


def test_drop_path_is_keyed_and_only_in_the_student() -> None:
    method, batch = tiny_method(drop_path_rate=0.5), views()
    assert not torch.equal(method(batch, HYPER).loss, method(batch, replace(HYPER, step=4)).loss)
    assert torch.equal(method.eval()(batch, HYPER).loss, method(batch, replace(HYPER, step=4)).loss)
    assert len(method.teacher.backbone.keep) == 0 or method.teacher.backbone.keep.min() == 1.0


def test_under_bf16_autocast_it_trains_and_the_loss_is_nearly_that_of_float32() -> None:
    method, batch = tiny_method(), views()
    exact = method(batch, HYPER).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = method(batch, HYPER)
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(exact.item(), rel=0.1)
    assert output.loss.item() != exact.item()
    assert all(loss.isfinite() for loss in train(method, 3, bf16=True))


def test_hyper_values_may_be_tensors() -> None:
    numbers, tensors = tiny_method(), tiny_method()
    on_device = replace(HYPER, step=torch.tensor(3), own={"momentum": torch.tensor(0.75, dtype=torch.float64)})
    for method, hyper in ((numbers, HYPER), (tensors, on_device)):
        method.after_step(method(views(), hyper), hyper)
    for key, value in numbers.state_dict().items():
        torch.testing.assert_close(tensors.state_dict()[key], value)


def test_the_momentum_rises_to_one() -> None:
    ramp = MoCoV3Settings().ramps()["momentum"]
    assert (ramp.start, ramp.end, ramp.epochs) == (0.99, 1.0, None)


def test_health_describes_features_and_embeddings_and_each_kind_of_collapse_is_named() -> None:
    method = tiny_method()
    features = torch.randn(30, 16, generator=torch.Generator().manual_seed(0))
    health = method.health(features, HYPER)
    assert health.keys() == {"feature_spread", "embedding_rank"}
    assert 0.8 < health["feature_spread"] <= 1.0
    assert 3.0 < health["embedding_rank"] <= 8.0
    collapsed = method.health(torch.ones(30, 16) + 1e-4 * features, HYPER)
    assert collapsed["feature_spread"] < 1e-3
    healthy = {"loss_over_guessing": 0.7, "feature_spread": 0.9, "embedding_rank": 5.0}
    assert method.collapse_signs(healthy) == []
    for change, message in [
        ({"loss_over_guessing": 0.999}, "no better than by guessing"),
        ({"feature_spread": 0.001}, "nearly the same vector"),
        ({"embedding_rank": 1.2}, "a single direction"),
    ]:
        (sign,) = method.collapse_signs(healthy | change)
        assert message in sign


def test_unused_views_and_batches_in_parts_are_cautioned_against() -> None:
    method = tiny_method()
    assert method.cautions(plan()) == []
    for given, message in [
        (plan(num_local=6), "set views.num_local to 0"),
        (plan(num_global=3), "lower views.num_global"),
        (plan(num_parts=2), "keys and batch statistics"),
    ]:
        (caution,) = method.cautions(given)
        assert message in caution
        assert caution.startswith("MoCo-v3")


@pytest.mark.parametrize("name", ["mocov3-vits16", "mocov3-vitb16"])
def test_the_recipes_hold_the_values_of_the_authors_commands(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.method == MoCoV3Settings()  # the defaults are theirs
    assert (
        recipe.method.projector.num_layers,
        recipe.method.projector.hidden_dim,
        recipe.method.projector.out_dim,
    ) == (3, 4096, 256)
    assert (recipe.method.predictor.num_layers, recipe.method.predictor.hidden_dim) == (2, 4096)
    optimizer, trainer, shown = recipe.optimizer, recipe.trainer, recipe.views
    assert (trainer.epochs, trainer.batch_size, optimizer.warmup_epochs) == (300, 4096, 40)
    assert optimizer.peak_learning_rate(4096) == pytest.approx(2.4e-3)
    assert (optimizer.min_learning_rate, optimizer.weight_decay, optimizer.weight_decay_end) == (0.0, 0.1, 0.1)
    assert (optimizer.decayed, optimizer.clip_norm, recipe.backbone.drop_path_rate) == ("all", 0.0, 0.0)
    assert (shown.num_global, shown.num_local, shown.global_size, shown.global_scale) == (2, 0, 224, (0.08, 1.0))
    assert (shown.first_global_blur_probability, shown.second_global_blur_probability, shown.solarise_probability) == (
        1.0,
        0.1,
        0.2,
    )
    assert (shown.brightness, shown.contrast, shown.saturation, shown.hue, shown.jitter_probability) == (
        0.4,
        0.4,
        0.2,
        0.1,
        0.8,
    )
    assert (shown.grey_probability, shown.flip_probability) == (0.2, 0.5)
    heads = {"mocov3-vits16": {"num_heads": 12}, "mocov3-vitb16": {}}[name]  # a ViT-B has 12 anyway
    assert recipe.backbone.timm_options == heads
