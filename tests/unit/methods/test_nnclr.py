import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from massl.data.views import ViewBatch, ViewSettings
from massl.methods.base import StepHyper, TrainingPlan
from massl.methods.nnclr import NNCLR, NNCLRProjectorSettings, NNCLRSettings, SupportSetSettings
from massl.nn.backbone import BackboneSettings
from massl.nn.heads import PredictorSettings
from massl.training.optimizers import OptimizerSettings, build_optimizer
from massl.training.step import TrainingStep

HYPER = StepHyper(step=3, epoch=0, learning_rate=0.01, weight_decay=0.1, own={})
SETTINGS = NNCLRSettings(
    projector=NNCLRProjectorSettings(hidden_dim=16, out_dim=8),
    predictor=PredictorSettings(hidden_dim=16),
    memory=SupportSetSettings(num_rows=20),
)
OPTIONS: dict[str, int | float | bool | str] = {"embed_dim": 16, "depth": 2, "num_heads": 2}
BACKBONE = BackboneSettings(
    name="vit_tiny_patch16_224", image_size=8, patch_size=4, drop_path_rate=0.0, timm_options=OPTIONS
)


def tiny_method(*, seed: int = 0, drop_path_rate: float = 0.0) -> NNCLR:
    method = NNCLR(SETTINGS, BACKBONE.model_copy(update={"drop_path_rate": drop_path_rate}), seed=seed)
    with torch.no_grad():
        for position, parameter in enumerate(method.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(position)))
    return method.train()


def views(num_images: int = 6, *, num_global: int = 2) -> ViewBatch:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(1, num_images, 3, 1, 1, generator=generator) + torch.randn(
        num_global, num_images, 3, 8, 8, generator=generator
    )
    return ViewBatch(global_views=pixels, local_views=None, image_indices=torch.arange(100, 100 + num_images))


def plan(*, num_images: int = 100, num_parts: int = 1, num_local: int = 0, num_global: int = 2) -> TrainingPlan:
    shown = ViewSettings(num_local=num_local, num_global=num_global)
    return TrainingPlan(num_images=num_images, batch_size=8, num_parts=num_parts, views=shown)


def embeddings(method: NNCLR, view: Tensor) -> Tensor:
    return method.student.head(method.student.backbone(view).pooled)  # type: ignore[no-any-return]


def test_the_loss_compares_neighbours_of_each_view_with_predictions_of_the_other() -> None:
    method, batch = tiny_method(), views()
    with torch.no_grad():
        output = method(batch, HYPER)
        expected, nearest = torch.zeros(()), []
        for one, other in ((0, 1), (1, 0)):
            similarities = normalize(embeddings(method, batch.global_views[one]), dim=-1) @ method.memory.rows.T
            nearest.append(similarities.max(dim=1).values)
            predictions = normalize(method.predictor(embeddings(method, batch.global_views[other])), dim=-1)
            friends = method.memory.rows[similarities.argmax(dim=1)]
            expected += cross_entropy(friends @ predictions.T / 0.1, torch.arange(6)) / 2
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=1e-6)
    assert output.metrics["neighbour_similarity"].item() == pytest.approx(torch.cat(nearest).mean().item(), rel=1e-5)
    assert output.metrics["loss_over_guessing"].item() == pytest.approx(expected.item() / math.log(6), rel=1e-5)
    assert 0.0 <= output.metrics["contrastive_top1"].item() <= 100.0


def test_after_a_step_the_memory_alone_has_taken_in_the_embeddings_of_the_first_view() -> None:
    method, batch = tiny_method(), views()
    with torch.no_grad():
        first = normalize(embeddings(method, batch.global_views[0]), dim=-1)
    before = {key: value.clone() for key, value in method.state_dict().items()}
    method.after_step(method(batch, HYPER), HYPER)
    torch.testing.assert_close(method.memory.rows[:6], first)
    assert torch.equal(method.memory.rows[6:], before["memory.rows"][6:])
    assert int(method.memory.cursor) == 6
    assert all(
        torch.equal(value, before[key]) for key, value in method.state_dict().items() if not key.startswith("memory.")
    )


def test_the_forward_pass_changes_nothing_so_that_an_image_is_never_its_own_neighbour_at_once() -> None:
    method, batch = tiny_method(drop_path_rate=0.3), views()
    before = {key: value.clone() for key, value in method.state_dict().items()}
    assert torch.equal(method(batch, HYPER).loss, method(batch, HYPER).loss)
    assert all(torch.equal(value, before[key]) for key, value in method.state_dict().items())


def test_gradients_reach_everything_and_what_enters_the_memory_carries_none() -> None:
    method = tiny_method()
    output = method(views(), HYPER)
    output.loss.backward()
    for name, parameter in method.named_parameters():
        assert parameter.grad is not None
        if not name.endswith("model.norm.bias"):  # the projector's batch norm takes it away again
            assert parameter.grad.abs().max() > 1e-6, name
    assert not output.carry["memory_rows"].requires_grad
    assert output.carry["memory_rows"].shape == (6, 8)  # images first, so that parts of a batch can be joined


def test_only_the_first_two_global_views_count() -> None:
    batch = views(num_global=3)
    two = replace(batch, global_views=batch.global_views[:2])
    method = tiny_method(drop_path_rate=0.5)
    assert torch.equal(method(batch, HYPER).loss, method(two, HYPER).loss)


def run(method: NNCLR, steps: range, *, bf16: bool = False) -> list[Tensor]:
    optimizer = build_optimizer(method, OptimizerSettings(decayed="all", clip_norm=0.0))
    step_of = TrainingStep(method=method, parallel=method, optimizer=optimizer, bf16=bf16, device=torch.device("cpu"))
    return [step_of([views()], replace(HYPER, step=step), num_parts=1).loss.detach() for step in steps]


def test_training_continues_bit_for_bit_from_what_is_saved() -> None:
    whole, first, second = tiny_method(), tiny_method(), tiny_method(seed=5)
    optimizers = {
        method: build_optimizer(method, OptimizerSettings(decayed="all")) for method in (whole, first, second)
    }

    def train(method: NNCLR, steps: range) -> list[Tensor]:
        step_of = TrainingStep(
            method=method, parallel=method, optimizer=optimizers[method], bf16=False, device=torch.device("cpu")
        )
        return [step_of([views()], replace(HYPER, step=step), num_parts=1).loss.detach() for step in steps]

    expected, losses = train(whole, range(5)), train(first, range(2))
    second.load_state_dict(first.state_dict())
    optimizers[second].load_portable_state(optimizers[first].portable_state())
    assert [*losses, *train(second, range(2, 5))] == expected  # the memory of 20 rows goes round at the fourth step
    assert all(torch.equal(second.state_dict()[key], value) for key, value in whole.state_dict().items())


def test_the_task_is_learnt_and_neighbours_come_nearer() -> None:
    method = tiny_method()
    before = method(views(), HYPER).metrics["neighbour_similarity"].item()
    losses = run(method, range(40))
    assert losses[-1] < 0.5 * losses[0]
    assert method(views(), HYPER).metrics["neighbour_similarity"].item() > before + 0.1


def test_the_seed_alone_decides_the_start() -> None:
    torch.manual_seed(1)
    first = NNCLR(SETTINGS, BACKBONE, seed=4).state_dict()
    torch.manual_seed(2)
    second = NNCLR(SETTINGS, BACKBONE, seed=4).state_dict()
    assert all(torch.equal(second[key], value) for key, value in first.items())
    other = NNCLR(SETTINGS, BACKBONE, seed=5).state_dict()
    for part in ("student.head.layers.0.weight", "predictor.layers.0.weight", "memory.rows"):
        assert not torch.equal(other[part], first[part])


def test_the_trained_backbone_is_the_one_to_evaluate() -> None:
    method = tiny_method()
    assert method.backbone_to_evaluate() is method.student.backbone


def test_under_bf16_autocast_it_trains_and_the_memory_stays_float32() -> None:
    method, batch = tiny_method(), views()
    exact = method(batch, HYPER)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = method(batch, HYPER)
    assert output.loss.dtype == output.carry["memory_rows"].dtype == torch.float32
    torch.testing.assert_close(output.carry["memory_rows"].norm(dim=1), torch.ones(6))
    torch.testing.assert_close(output.carry["memory_rows"], exact.carry["memory_rows"], rtol=0, atol=0.1)
    assert not torch.equal(output.loss, exact.loss)
    assert all(loss.isfinite() for loss in run(method, range(3), bf16=True))


def test_the_defaults_are_the_values_of_the_paper() -> None:
    settings = NNCLRSettings()
    assert (settings.temperature, settings.memory.num_rows) == (0.1, 98_304)
    assert (settings.projector.num_layers, settings.projector.hidden_dim, settings.projector.out_dim) == (3, 2048, 256)
    assert (settings.predictor.num_layers, settings.predictor.hidden_dim) == (2, 4096)
    assert settings.ramps() == {}


def test_health_and_signs_of_collapse_are_those_of_contrastive_methods() -> None:
    method = tiny_method()
    features = torch.randn(30, 16, generator=torch.Generator().manual_seed(0))
    health = method.health(features, HYPER)
    assert health.keys() == {"feature_spread", "embedding_rank"}
    healthy = {"loss_over_guessing": 0.7, **health}
    assert method.collapse_signs(healthy) == []
    (sign,) = method.collapse_signs(healthy | {"loss_over_guessing": 0.995})
    assert "no better than by guessing (0.995 of" in sign


def test_unused_views_parts_of_batches_and_a_memory_larger_than_the_data_are_cautioned_against() -> None:
    method = tiny_method()
    assert method.cautions(plan(num_images=20)) == []
    for given, message in [
        (plan(num_local=6), "set views.num_local to 0"),
        (plan(num_global=3), "lower views.num_global"),
        (plan(num_parts=2), "predictions and batch statistics"),
        (plan(num_images=19), "(method.memory.num_rows = 20) is larger than the data set (19 images)"),
        (replace(plan(), batch_size=21), "a batch (21 images) is larger than the memory (method.memory.num_rows = 20)"),
    ]:
        (caution,) = method.cautions(given)
        assert message in caution
