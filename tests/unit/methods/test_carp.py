import math

import pytest
import torch
from pydantic import ValidationError

from massl import keyed_random
from massl.data.views import ViewBatch, ViewSettings
from massl.methods.base import StepHyper, TrainingPlan
from massl.methods.carp import CARP, CARPSettings, PartitionSettings
from massl.nn.backbone import BackboneSettings
from massl.nn.heads import HeadSettings
from massl.ops.partition_loss import imbalance, reference_partition_terms

HYPER = StepHyper(step=3, epoch=0, learning_rate=0.1, weight_decay=0.0, own={"momentum": 0.75})
SETTINGS = CARPSettings(
    head=HeadSettings(hidden_dim=16, out_dim=8), prototypes=PartitionSettings(num_prototypes=26, block_size=8)
)
PLAN = TrainingPlan(num_images=100, batch_size=4, num_parts=1, views=ViewSettings())


def backbone_settings(drop_path_rate: float = 0.0) -> BackboneSettings:
    options: dict[str, int | float | bool | str] = {"embed_dim": 16, "depth": 2, "num_heads": 2}
    return BackboneSettings(
        name="vit_tiny_patch16_224", image_size=8, patch_size=4, drop_path_rate=drop_path_rate, timm_options=options
    )


def tiny_method(*, seed: int = 0, drop_path_rate: float = 0.0) -> CARP:
    method = CARP(SETTINGS, backbone_settings(drop_path_rate), seed=seed)
    # as after some training: student and teacher differ, and embeddings of different images do too
    with torch.no_grad():
        for position, parameter in enumerate(method.parameters()):
            if not torch.equal(parameter, torch.ones(26, 1)):  # lengths of prototypes stay 1
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(position)))
    return method.train()


def views(num_images: int = 4, *, with_local: bool = True) -> ViewBatch:
    generator = torch.Generator().manual_seed(0)
    return ViewBatch(
        global_views=torch.randn(2, num_images, 3, 8, 8, generator=generator),
        local_views=torch.randn(3, num_images, 3, 4, 4, generator=generator) if with_local else None,
        image_indices=torch.arange(100, 100 + num_images),
    )


@pytest.mark.parametrize("with_local", [True, False])
def test_the_loss_compares_all_views_with_the_teachers_global_ones_over_blocks_of_prototypes(with_local: bool) -> None:
    method, batch = tiny_method(seed=9), views(with_local=with_local)
    with torch.no_grad():
        output = method(batch, HYPER)
        student = method.student(batch.groups())
        teacher = method.teacher([batch.global_views])
        order = keyed_random.permutation(26, 9, "partition", 3)[:24]
        blocks, teacher_blocks = (
            torch.nn.functional.normalize(prototypes.directions)[order].reshape(3, 8, 8)
            for prototypes in (method.student_prototypes, method.teacher_prototypes)
        )
        disagreement, mean_shares = reference_partition_terms(student, teacher, blocks, teacher_blocks)
    torch.testing.assert_close(output.metrics["disagreement"], disagreement, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output.metrics["imbalance"], imbalance(mean_shares), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(output.loss, disagreement + imbalance(mean_shares), rtol=1e-5, atol=1e-6)


def test_batch_norm_takes_its_statistics_from_all_views_together() -> None:
    method, batch = tiny_method(), views()
    with torch.no_grad():
        features = method.student.backbone.pooled([group.flatten(0, 1) for group in batch.groups()])
        together = method.student.head(features).reshape(5, 4, 8)
        apart = method.student.head(features[:8]).reshape(2, 4, 8)
        torch.testing.assert_close(method.student(batch.groups()), together)
    assert not torch.allclose(together[:2], apart, atol=1e-2)


def test_the_forward_pass_changes_nothing_and_the_same_step_gives_the_same_loss() -> None:
    method, batch = tiny_method(drop_path_rate=0.3), views()
    before = {key: value.clone() for key, value in method.state_dict().items()}
    first, second = method(batch, HYPER).loss, method(batch, HYPER).loss
    assert torch.equal(first, second)
    assert all(torch.equal(value, before[key]) for key, value in method.state_dict().items())


def test_student_and_prototypes_learn_and_the_teacher_and_lengths_get_no_gradient() -> None:
    method = tiny_method()
    method(views(), HYPER).loss.backward()
    trained = [*method.student.parameters(), method.student_prototypes.directions]
    still = [*method.teacher.parameters(), *method.teacher_prototypes.parameters(), method.student_prototypes.lengths]
    assert all(parameter.grad is not None for parameter in trained)
    # A shift of all features alike is taken away by batch norm: that of the last layer norm has no effect.
    shift = method.student.backbone.model.norm.bias
    assert all((parameter.grad.abs().max() > 1e-6) == (parameter is not shift) for parameter in trained)  # type: ignore[union-attr]
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in still)
    assert len(trained) + len(still) == len(list(method.parameters()))


def test_prototypes_that_fill_no_block_get_no_gradient_in_that_step() -> None:
    method = tiny_method(seed=9)
    method(views(), HYPER).loss.backward()
    left_out = keyed_random.permutation(26, 9, "partition", 3)[24:]
    assert method.student_prototypes.directions.grad is not None
    has_gradient = method.student_prototypes.directions.grad.abs().amax(dim=1) > 0
    assert torch.equal((~has_gradient).nonzero().flatten(), left_out.sort().values)


def test_after_a_step_the_teacher_and_its_prototypes_have_moved_by_one_minus_momentum_and_nothing_else_has() -> None:
    method, batch = tiny_method(), views()
    before = {key: value.clone() for key, value in method.state_dict().items()}
    method.after_step(method(batch, HYPER), HYPER)
    num_moved = 0
    for key, value in method.state_dict().items():
        if key.startswith("teacher"):
            expected = 0.75 * before[key] + 0.25 * before[key.replace("teacher", "student", 1)]
            torch.testing.assert_close(value, expected)
            num_moved += not torch.equal(value, before[key])
        else:
            assert torch.equal(value, before[key])
    assert num_moved == len(before) // 2 - 1  # all but the lengths


def test_student_and_teacher_start_equal_and_the_seed_alone_decides_them() -> None:
    torch.manual_seed(1)
    first = CARP(SETTINGS, backbone_settings(), seed=4)
    torch.manual_seed(2)
    second, other = CARP(SETTINGS, backbone_settings(), seed=4), CARP(SETTINGS, backbone_settings(), seed=5)
    state = first.state_dict()
    for key, value in state.items():
        assert torch.equal(state[key.replace("student", "teacher", 1)], value)
        assert torch.equal(second.state_dict()[key], value)
    for key in ("student.head.mlp.0.weight", "student_prototypes.directions", "student.backbone.model.cls_token"):
        assert not torch.equal(other.state_dict()[key], state[key])


def test_blocks_are_disjoint_new_each_step_and_the_same_for_student_and_teacher() -> None:
    method = CARP(SETTINGS, backbone_settings(), seed=2)
    blocks = method._blocks(method.student_prototypes, 5)
    assert blocks.shape == (3, 8, 8)
    assert len(blocks.reshape(24, 8).unique(dim=0)) == 24
    assert torch.equal(method._blocks(method.teacher_prototypes, 5), blocks)
    assert torch.equal(method._blocks(method.student_prototypes, torch.tensor(5)), blocks)
    assert not torch.equal(method._blocks(method.student_prototypes, 6), blocks)
    torch.testing.assert_close(blocks.norm(dim=-1), torch.ones(3, 8))


def train(method: CARP, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        hyper = StepHyper(step=step, epoch=0, learning_rate=0.1, weight_decay=0.0, own={"momentum": 0.75})
        output = method(views(), hyper)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        method.after_step(output, hyper)
        losses.append(output.loss.item())
    return losses


def test_a_run_that_stops_and_goes_on_is_the_run_that_did_not() -> None:
    whole = tiny_method(drop_path_rate=0.3)
    losses = train(whole, torch.optim.SGD(whole.parameters(), lr=0.1), range(4))
    stopped = tiny_method(drop_path_rate=0.3)
    first_losses = train(stopped, torch.optim.SGD(stopped.parameters(), lr=0.1), range(2))
    resumed = CARP(SETTINGS, backbone_settings(0.3), seed=0).train()
    resumed.load_state_dict(stopped.state_dict())
    assert first_losses + train(resumed, torch.optim.SGD(resumed.parameters(), lr=0.1), range(2, 4)) == losses
    assert all(torch.equal(value, whole.state_dict()[key]) for key, value in resumed.state_dict().items())


def test_under_bf16_autocast_the_loss_is_nearly_that_of_float32() -> None:
    method, batch = tiny_method(), views()
    exact = method(batch, HYPER).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = method(batch, HYPER).loss
    rounded.backward()
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(exact.item(), rel=0.05)
    assert rounded.item() != exact.item()


def test_scalar_tensors_serve_as_schedule_values() -> None:
    method, batch = tiny_method(), views()
    tensors = StepHyper(
        step=torch.tensor(3),
        epoch=0,
        learning_rate=torch.tensor(0.1),
        weight_decay=0.0,
        own={"momentum": torch.tensor(0.75).double()},
    )
    assert torch.equal(method(batch, tensors).loss, method(batch, HYPER).loss)
    other = tiny_method()
    for one, hyper in ((method, tensors), (other, HYPER)):
        one.after_step(one(batch, hyper), hyper)
    torch.testing.assert_close(method.teacher_prototypes.directions, other.teacher_prototypes.directions)


def test_the_teachers_backbone_is_the_one_to_evaluate() -> None:
    method = tiny_method()
    assert method.backbone_to_evaluate() is method.teacher.backbone


def test_health_describes_how_the_teacher_uses_the_prototypes_of_each_block() -> None:
    method = tiny_method()
    features = torch.randn(30, 16, generator=torch.Generator().manual_seed(0))
    health = method.health(features, HYPER)
    with torch.no_grad():
        embeddings = method.teacher.head(features)
        logits = torch.einsum("nd,bcd->bnc", embeddings, method._blocks(method.teacher_prototypes, 3))
    shares, unit = logits.softmax(dim=-1), embeddings / embeddings.norm(dim=-1, keepdim=True)
    mean = shares.mean(dim=1)
    winners = [len(block.argmax(dim=-1).unique()) for block in logits]
    assert health == pytest.approx(
        {
            "embedding_spread": math.sqrt(1 - unit.mean(dim=0).square().sum().item()),
            "teacher_entropy": -(shares * shares.log()).sum(dim=-1).mean().item(),
            "prototype_entropy": -(mean * mean.log()).sum(dim=-1).mean().item(),
            "prototype_winner_share": sum(winners) / 24,
        },
        rel=1e-4,
    )


def test_a_healthy_run_shows_no_sign_of_collapse_and_each_kind_of_collapse_is_named() -> None:
    method = tiny_method()
    healthy = {"loss": 1.5, "teacher_entropy": 1.0, "prototype_entropy": 1.9, "embedding_spread": 0.9}
    assert method.collapse_signs(healthy) == []
    for change, message in [
        ({"teacher_entropy": 0.999 * math.log(8)}, "the same share"),
        ({"prototype_entropy": 0.01}, "one prototype for all images"),
        ({"embedding_spread": 0.001}, "nearly the same vector"),
    ]:
        (sign,) = method.collapse_signs(healthy | change)
        assert message in sign


def test_what_does_not_fit_together_is_cautioned_against() -> None:
    def cautions(prototypes: PartitionSettings, plan: TrainingPlan) -> list[str]:
        return CARP(SETTINGS.model_copy(update={"prototypes": prototypes}), backbone_settings(), seed=0).cautions(plan)

    fitting = PartitionSettings(num_prototypes=24, block_size=8)
    assert cautions(fitting, PLAN) == []
    (caution,) = cautions(PartitionSettings(num_prototypes=26, block_size=8), PLAN)
    assert "2 random prototypes stay unused each step" in caution
    (caution,) = cautions(fitting, TrainingPlan(num_images=23, batch_size=4, num_parts=1, views=ViewSettings()))
    assert "more prototypes (method.prototypes.num_prototypes = 24) than images (23)" in caution
    (caution,) = cautions(fitting, TrainingPlan(num_images=100, batch_size=4, num_parts=2, views=ViewSettings()))
    assert "from each of the 2 parts of a batch" in caution


def test_a_block_larger_than_all_prototypes_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"block_size 9.*num_prototypes 8"):
        PartitionSettings(num_prototypes=8, block_size=9)


def test_settings_start_with_the_authors_values() -> None:
    settings = CARPSettings()
    assert (settings.prototypes.num_prototypes, settings.prototypes.block_size, settings.teacher.momentum) == (
        65_536,
        512,
        0.99,
    )
    assert (settings.head.num_layers, settings.head.hidden_dim, settings.head.out_dim) == (3, 2048, 256)
    (ramp,) = settings.ramps().values()
    assert (ramp.start, ramp.end, ramp.epochs) == (0.99, 1.0, None)
