import math

import pytest
import torch
from torch import Tensor

from massl.data.views import ViewBatch, ViewSettings
from massl.methods.base import StepHyper, TrainingPlan, combine
from massl.methods.dino import DINO, DINOSettings
from massl.nn.backbone import BackboneSettings
from massl.nn.heads import HeadSettings
from massl.nn.prototypes import PrototypeSettings
from massl.ops.prototype_attention import cross_view_weights, reference_prototype_loss
from massl.training.optimizers import OptimizerSettings, build_optimizer
from massl.training.step import TrainingStep

HYPER = StepHyper(
    step=3, epoch=0, learning_rate=0.01, weight_decay=0.1, own={"momentum": 0.75, "teacher_temperature": 0.05}
)
BACKBONE = BackboneSettings(
    name="vit_tiny_patch16_224",
    image_size=8,
    patch_size=4,
    drop_path_rate=0.0,
    timm_options={"embed_dim": 16, "depth": 2, "num_heads": 2},
)


def tiny_method(
    *, seed: int = 0, drop_path_rate: float = 0.0, unit_length: bool = True, frozen_epochs: int = 1
) -> DINO:
    settings = DINOSettings(
        head=HeadSettings(hidden_dim=16, out_dim=8),
        prototypes=PrototypeSettings(num_prototypes=24, unit_length=unit_length, frozen_epochs=frozen_epochs),
    )
    method = DINO(settings, BACKBONE.model_copy(update={"drop_path_rate": drop_path_rate}), seed=seed)
    # as after some training: student and teacher differ, and embeddings of different images do too
    with torch.no_grad():
        for position, parameter in enumerate(method.parameters()):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(position)))
        method.centre.value.normal_(std=0.1, generator=torch.Generator().manual_seed(99))
    return method.train()


def views(num_images: int = 4, *, with_local: bool = True, first: int = 100) -> ViewBatch:
    generator = torch.Generator().manual_seed(first)
    return ViewBatch(
        global_views=torch.randn(2, num_images, 3, 8, 8, generator=generator),
        local_views=torch.randn(3, num_images, 3, 4, 4, generator=generator) if with_local else None,
        image_indices=torch.arange(first, first + num_images),
    )


def part(batch: ViewBatch, images: slice) -> ViewBatch:
    assert batch.local_views is not None
    return ViewBatch(
        global_views=batch.global_views[:, images],
        local_views=batch.local_views[:, images],
        image_indices=batch.image_indices[images],
    )


def state_of(method: DINO) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in method.state_dict().items()}


def training_step(method: DINO, *, bf16: bool = False) -> TrainingStep:
    optimizer = build_optimizer(method, OptimizerSettings())
    return TrainingStep(method=method, parallel=method, optimizer=optimizer, bf16=bf16, device=torch.device("cpu"))


@pytest.mark.parametrize("with_local", [True, False])
def test_the_loss_compares_all_views_with_the_teachers_global_ones_over_the_prototypes(with_local: bool) -> None:
    method, batch = tiny_method(), views(with_local=with_local)
    with torch.no_grad():
        loss = method(batch, HYPER).loss
        student = torch.stack(
            [method.student.head(method.student.backbone(view).pooled) for group in batch.groups() for view in group]
        )
        teacher = torch.stack(
            [method.teacher.head(method.teacher.backbone(view).pooled) for view in batch.global_views]
        )
        expected = reference_prototype_loss(
            student,
            teacher,
            method.student_prototypes(),
            method.teacher_prototypes(),
            method.centre.value,
            student_temperature=0.1,
            teacher_temperature=0.05,
            pair_weights=cross_view_weights(len(student), 2, device="cpu"),
        )
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


def test_the_forward_pass_changes_nothing_and_the_same_step_has_the_same_loss() -> None:
    method, batch = tiny_method(drop_path_rate=0.3), views()
    before = state_of(method)
    first, second = method(batch, HYPER).loss, method(batch, HYPER).loss
    assert torch.equal(first, second)
    assert all(torch.equal(value, before[key]) for key, value in method.state_dict().items())


def test_drop_path_acts_in_training_only_and_anew_at_each_step() -> None:
    method, batch = tiny_method(drop_path_rate=0.5), views()
    other = StepHyper(step=4, epoch=0, learning_rate=0.01, weight_decay=0.1, own=HYPER.own)
    with torch.no_grad():
        first, second = method(batch, HYPER).loss.item(), method(batch, other).loss.item()
        plain = method.eval()(batch, HYPER).loss.item()
    assert len({first, second, plain}) == 3
    assert plain == pytest.approx(tiny_method()(batch, HYPER).loss.item(), rel=1e-5)


@pytest.mark.parametrize("unit_length", [True, False])
def test_the_student_and_its_prototypes_learn_and_the_teacher_gets_no_gradient(unit_length: bool) -> None:
    method = tiny_method(unit_length=unit_length)
    output = method(views(), HYPER)
    output.loss.backward()
    for parameter in [*method.student.parameters(), method.student_prototypes.directions]:
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0
    assert (method.student_prototypes.lengths.grad is None) == unit_length
    assert not any(
        parameter.requires_grad
        for module in (method.teacher, method.teacher_prototypes)
        for parameter in module.parameters()
    )
    assert not output.carry["teacher_embeddings"].requires_grad


def test_after_a_step_teacher_and_prototypes_have_moved_towards_the_students_by_one_minus_momentum() -> None:
    method, batch = tiny_method(unit_length=False), views()
    before = state_of(method)
    method.after_step(method(batch, HYPER), HYPER)
    for key, value in method.state_dict().items():
        if key.startswith("teacher"):
            student = before[key.replace("teacher", "student", 1)]
            torch.testing.assert_close(value, 0.75 * before[key] + 0.25 * student, msg=key)
        elif key.startswith("student"):
            assert torch.equal(value, before[key])


def test_the_centre_follows_all_teacher_outputs_made_with_the_prototypes_before_they_move() -> None:
    method, batch = tiny_method(), views()
    with torch.no_grad():
        outputs = method.teacher([batch.global_views]).flatten(0, 1) @ method.teacher_prototypes().T
        expected = 0.9 * method.centre.value + 0.1 * outputs.mean(dim=0)
    method.after_step(method(batch, HYPER), HYPER)
    torch.testing.assert_close(method.centre.value, expected)


def test_prototypes_stand_still_in_the_first_epochs_and_move_afterwards() -> None:
    method = tiny_method(unit_length=False, frozen_epochs=2)
    step, start = training_step(method), state_of(method)
    for epoch, should_move in [(0, False), (1, False), (2, True)]:
        hyper = StepHyper(step=epoch, epoch=epoch, learning_rate=0.01, weight_decay=0.1, own=HYPER.own)
        step([views()], hyper, num_parts=1)
        for part_name in ("directions", "lengths"):
            key = f"student_prototypes.{part_name}"
            assert torch.equal(method.state_dict()[key], start[key]) != should_move
    key = "student.head.mlp.0.weight"
    assert not torch.equal(method.state_dict()[key], start[key])


def test_student_and_teacher_start_equal_and_the_seed_alone_decides_them() -> None:
    settings = DINOSettings(
        head=HeadSettings(hidden_dim=16, out_dim=8), prototypes=PrototypeSettings(num_prototypes=24)
    )
    torch.manual_seed(1)
    first = DINO(settings, BACKBONE, seed=4)
    torch.manual_seed(2)
    second = DINO(settings, BACKBONE, seed=4)
    for key, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[key], value)
        assert torch.equal(first.state_dict()[key.replace("student", "teacher", 1)], value)
    other = DINO(settings, BACKBONE, seed=5)
    assert not torch.equal(other.student_prototypes.directions, first.student_prototypes.directions)
    assert not torch.equal(other.student.head.mlp[0].weight, first.student.head.mlp[0].weight)


def test_what_is_saved_holds_student_teacher_prototypes_and_centre() -> None:
    keys = tiny_method().state_dict().keys()
    assert {key.split(".")[0] for key in keys} == {
        "student",
        "teacher",
        "student_prototypes",
        "teacher_prototypes",
        "centre",
    }


def test_a_run_continued_from_its_state_is_that_of_an_uninterrupted_one_bit_for_bit() -> None:
    def hyper(step: int) -> StepHyper:
        return StepHyper(step=step, epoch=step // 2, learning_rate=0.01, weight_decay=0.1, own=HYPER.own)

    method = tiny_method(drop_path_rate=0.3, unit_length=False)
    step = training_step(method)
    for number in range(2):
        step([views(first=10 * number)], hyper(number), num_parts=1)
    resumed = tiny_method(seed=7, drop_path_rate=0.3, unit_length=False)
    resumed.seed = method.seed
    resumed.load_state_dict(state_of(method))
    resumed_step = training_step(resumed)
    resumed_step.optimizer.load_portable_state(step.optimizer.portable_state())
    for number in range(2, 4):
        losses = [one([views(first=10 * number)], hyper(number), num_parts=1).loss for one in (step, resumed_step)]
        assert torch.equal(losses[0], losses[1])
    assert all(torch.equal(resumed.state_dict()[key], value) for key, value in method.state_dict().items())


def test_two_parts_of_a_batch_combine_to_the_output_of_the_whole() -> None:
    method, batch = tiny_method(drop_path_rate=0.3), views(8)
    whole, combined = (
        method(batch, HYPER),
        combine([method(part(batch, images), HYPER) for images in (slice(0, 4), slice(4, 8))]),
    )
    torch.testing.assert_close(combined.loss, whole.loss.detach())
    torch.testing.assert_close(combined.carry["teacher_embeddings"], whole.carry["teacher_embeddings"])


def test_under_bf16_autocast_the_loss_is_nearly_that_of_float32_and_the_state_stays_float32() -> None:
    method, batch = tiny_method(), views()
    exact = method(batch, HYPER).loss.item()
    output = training_step(method, bf16=True)([batch], HYPER, num_parts=1)
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(exact, rel=0.05)
    assert output.loss.item() != exact
    assert all(value.dtype == torch.float32 for value in method.state_dict().values())


def test_schedule_values_may_be_tensors_as_a_recorded_step_needs() -> None:
    numbers, tensors = tiny_method(), tiny_method()
    own = {name: torch.tensor(value, dtype=torch.float64) for name, value in HYPER.own.items()}
    hyper = StepHyper(
        step=torch.tensor(3), epoch=0, learning_rate=torch.tensor(0.01), weight_decay=torch.tensor(0.1), own=own
    )
    for method, given in ((numbers, HYPER), (tensors, hyper)):
        method.after_step(method(views(), given), given)
    for key, value in numbers.state_dict().items():
        torch.testing.assert_close(tensors.state_dict()[key], value)


def test_the_teachers_backbone_is_evaluated_and_its_use_of_prototypes_is_watched() -> None:
    method = tiny_method()
    assert method.backbone_to_evaluate() is method.teacher.backbone
    features = torch.randn(30, 16, generator=torch.Generator().manual_seed(0))
    health = method.health(features, HYPER)
    with torch.no_grad():
        embeddings = method.teacher.head(features)
        shares = ((embeddings @ method.teacher_prototypes().T - method.centre.value) / 0.05).softmax(dim=-1)
    assert health.keys() == {"embedding_spread", "teacher_entropy", "prototype_entropy", "prototype_winner_share"}
    assert health["teacher_entropy"] == pytest.approx(-(shares * shares.log()).sum(dim=-1).mean().item(), rel=1e-4)
    assert health["embedding_spread"] == pytest.approx(
        math.sqrt(1 - embeddings.mean(dim=0).square().sum().item()), rel=1e-4
    )
    assert method.collapse_signs({**health, "prototype_entropy": 0.0}) != []
    plan = TrainingPlan(num_images=23, batch_size=4, num_parts=1, views=ViewSettings())
    assert len(method.cautions(plan)) == 1
