import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from massl.config import RecipeError
from massl.data.views import ViewBatch, ViewSettings
from massl.methods import ibot
from massl.methods.base import StepHyper, TrainingPlan, combine
from massl.methods.ibot import IBOT, IBOTSettings, MaskSettings, SharedPrototypeSettings
from massl.nn.backbone import BackboneSettings
from massl.nn.heads import HeadSettings
from massl.ops.block_masks import block_masks
from massl.ops.prototype_attention import cross_view_weights, reference_prototype_loss
from massl.training.optimizers import OptimizerSettings, build_optimizer
from massl.training.step import TrainingStep

HYPER = StepHyper(
    step=3, epoch=0, learning_rate=0.01, weight_decay=0.1, own={"momentum": 0.75, "teacher_temperature": 0.05}
)
BACKBONE = BackboneSettings(
    name="vit_tiny_patch16_224",
    image_size=16,
    patch_size=4,
    drop_path_rate=0.0,
    timm_options={"embed_dim": 16, "depth": 2, "num_heads": 2},
)


def tiny_method(
    *, seed: int = 0, drop_path_rate: float = 0.0, unit_length: bool = True, frozen_epochs: int = 1
) -> IBOT:
    settings = IBOTSettings(
        head=HeadSettings(hidden_dim=16, out_dim=8),
        prototypes=SharedPrototypeSettings(num_prototypes=24, unit_length=unit_length, frozen_epochs=frozen_epochs),
        masks=MaskSettings(ratios=(0.0, 0.4), ratio_variances=(0.0, 0.2)),
    )
    method = IBOT(settings, BACKBONE.model_copy(update={"drop_path_rate": drop_path_rate}), seed=seed)
    # as after some training: student and teacher differ, and embeddings of different images do too
    with torch.no_grad():
        for position, parameter in enumerate(method.parameters()):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(position)))
        for number, centre in enumerate((method.centre, method.patch_centre)):
            centre.value.normal_(std=0.1, generator=torch.Generator().manual_seed(90 + number))
    return method.train()


def views(num_images: int = 4, *, with_local: bool = True, first: int = 100) -> ViewBatch:
    generator = torch.Generator().manual_seed(first)
    return ViewBatch(
        global_views=torch.randn(2, num_images, 3, 16, 16, generator=generator),
        local_views=torch.randn(3, num_images, 3, 8, 8, generator=generator) if with_local else None,
        image_indices=torch.arange(first, first + num_images),
    )


def part(batch: ViewBatch, images: slice) -> ViewBatch:
    assert batch.local_views is not None
    return ViewBatch(
        global_views=batch.global_views[:, images],
        local_views=batch.local_views[:, images],
        image_indices=batch.image_indices[images],
    )


def masks_of(method: IBOT, batch: ViewBatch) -> Tensor:  # -> [G, B, N]
    masks = method.settings.masks
    key = (method.seed, "patch masks", HYPER.step)
    return block_masks(
        key, batch.image_indices, num_views=2, grid=(4, 4), ratios=masks.ratios, ratio_variances=masks.ratio_variances
    )


def state_of(method: IBOT) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in method.state_dict().items()}


def training_step(method: IBOT, *, bf16: bool = False) -> TrainingStep:
    optimizer = build_optimizer(method, OptimizerSettings())
    return TrainingStep(method=method, parallel=method, optimizer=optimizer, bf16=bf16, device=torch.device("cpu"))


@pytest.mark.parametrize("with_local", [True, False])
def test_the_class_loss_is_that_of_dino_on_a_student_whose_global_views_are_masked(with_local: bool) -> None:
    method, batch = tiny_method(), views(with_local=with_local)
    masks = masks_of(method, batch)
    with torch.no_grad():
        output = method(batch, HYPER)
        student = []
        for view, mask in zip(batch.global_views, masks, strict=True):
            pooled, _ = method.student.backbone.class_and_patches([view], masks=mask, mask_token=method.mask_token[0])
            student.append(method.student.head(pooled))
        student += [
            method.student.head(method.student.backbone(view).pooled)
            for view in (batch.groups()[1] if with_local else [])
        ]
        teacher = torch.stack(
            [method.teacher.head(method.teacher.backbone(view).pooled) for view in batch.global_views]
        )
        expected = reference_prototype_loss(
            torch.stack(student),
            teacher,
            method.student_prototypes(),
            method.teacher_prototypes(),
            method.centre.value,
            student_temperature=0.1,
            teacher_temperature=0.05,
            pair_weights=cross_view_weights(len(student), 2, device="cpu"),
        )
    torch.testing.assert_close(output.metrics["class_loss"], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output.loss, output.metrics["class_loss"] + output.metrics["patch_loss"])


def test_the_patch_loss_compares_hidden_patches_with_the_same_ones_seen_by_the_teacher() -> None:
    """Spelled out: per view of an image the mean over its hidden patches, then the mean over all views, those without
    any as 0.
    """
    method, batch = tiny_method(), views(6)
    masks, total = masks_of(method, batch), 0.0
    with torch.no_grad():
        loss = method(batch, HYPER).metrics["patch_loss"]
        prototypes, teacher_prototypes = method.student_prototypes(), method.teacher_prototypes()
        for view, mask in zip(batch.global_views, masks, strict=True):
            _, patches = method.student.backbone.class_and_patches([view], masks=mask, mask_token=method.mask_token[0])
            targets = method.teacher.backbone(view).patches
            assert targets is not None
            q = ((method.teacher.head(targets) @ teacher_prototypes.T - method.patch_centre.value) / 0.05).softmax(
                dim=-1
            )
            # [B, N]
            cross_entropies = -(q * (method.student.head(patches) @ prototypes.T / 0.1).log_softmax(dim=-1)).sum(dim=-1)
            total += sum(
                float(row[hidden].mean()) for row, hidden in zip(cross_entropies, mask, strict=True) if hidden.any()
            )
    assert loss.item() == pytest.approx(total / masks[..., 0].numel(), rel=1e-5)
    num_hidden = masks.sum(dim=-1)
    assert num_hidden.min() == 0
    assert num_hidden.max() > 3


def test_the_forward_pass_changes_nothing_and_the_same_step_has_the_same_loss_and_another_step_other_masks() -> None:
    method, batch = tiny_method(drop_path_rate=0.3), views()
    before = state_of(method)
    first, second = method(batch, HYPER).loss, method(batch, HYPER).loss
    assert torch.equal(first, second)
    assert all(torch.equal(value, before[key]) for key, value in method.state_dict().items())
    other = StepHyper(step=4, epoch=0, learning_rate=0.01, weight_decay=0.1, own=HYPER.own)
    assert not torch.equal(tiny_method()._masks(batch, HYPER), tiny_method()._masks(batch, other))


def test_drop_path_acts_in_training_only() -> None:
    method, batch = tiny_method(drop_path_rate=0.5), views()
    with torch.no_grad():
        dropped, plain = method(batch, HYPER).loss.item(), method.eval()(batch, HYPER).loss.item()
        expected = tiny_method()(batch, HYPER).loss.item()
    assert dropped != pytest.approx(plain, rel=1e-3)
    assert plain == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("unit_length", [True, False])
def test_student_prototypes_and_mask_token_learn_and_the_teacher_gets_no_gradient(unit_length: bool) -> None:
    method = tiny_method(unit_length=unit_length)
    output = method(views(), HYPER)
    output.loss.backward()
    for parameter in [*method.student.parameters(), method.student_prototypes.directions, method.mask_token]:
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0
    assert (method.student_prototypes.lengths.grad is None) == unit_length
    assert not any(
        parameter.requires_grad
        for module in (method.teacher, method.teacher_prototypes)
        for parameter in module.parameters()
    )
    assert not any(value.requires_grad for value in (*output.carry.values(), *output.metrics.values()))


def test_a_batch_in_which_nothing_is_hidden_has_a_gradient_for_every_parameter_as_data_parallelism_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        ibot, "block_masks", lambda key, image_indices, **others: torch.zeros(2, 4, 16, dtype=torch.bool)
    )
    method = tiny_method()
    output = method(views(), HYPER)
    output.loss.backward()
    assert output.metrics["patch_loss"] == 0.0
    assert method.mask_token.grad is not None
    assert method.mask_token.grad.abs().max() == 0.0


def test_after_a_step_teacher_and_prototypes_have_moved_towards_the_students_by_one_minus_momentum() -> None:
    method, batch = tiny_method(unit_length=False), views()
    before = state_of(method)
    method.after_step(method(batch, HYPER), HYPER)
    for key, value in method.state_dict().items():
        if key.startswith("teacher"):
            student = before[key.replace("teacher", "student", 1)]
            torch.testing.assert_close(value, 0.75 * before[key] + 0.25 * student, msg=key)
        elif not key.endswith("centre.value"):
            assert torch.equal(value, before[key])


def test_each_centre_follows_the_teachers_outputs_of_its_kind_made_with_the_prototypes_before_they_move() -> None:
    method, batch = tiny_method(), views()
    tokens = [method.teacher.backbone(view) for view in batch.global_views]
    with torch.no_grad():
        prototypes = method.teacher_prototypes()
        classes = torch.cat([method.teacher.head(token.pooled) for token in tokens])
        patches = torch.cat([method.teacher.head(token.patches).flatten(0, 1) for token in tokens])
        expected = 0.9 * method.centre.value + 0.1 * (classes @ prototypes.T).mean(dim=0)
        expected_of_patches = 0.9 * method.patch_centre.value + 0.1 * (patches @ prototypes.T).mean(dim=0)
    method.after_step(method(batch, HYPER), HYPER)
    torch.testing.assert_close(method.centre.value, expected)
    torch.testing.assert_close(method.patch_centre.value, expected_of_patches)


def test_prototypes_stand_still_in_the_first_epochs_and_move_afterwards() -> None:
    method = tiny_method(frozen_epochs=1)
    step, start = training_step(method), state_of(method)
    for epoch in (0, 1):
        hyper = StepHyper(step=epoch, epoch=epoch, learning_rate=0.01, weight_decay=0.1, own=HYPER.own)
        step([views()], hyper, num_parts=1)
        assert torch.equal(method.student_prototypes.directions, start["student_prototypes.directions"]) == (epoch == 0)
        assert not torch.equal(method.mask_token, start["mask_token"])


def test_student_and_teacher_start_equal_with_an_empty_mask_token_and_the_seed_alone_decides_them() -> None:
    settings = IBOTSettings(
        head=HeadSettings(hidden_dim=16, out_dim=8), prototypes=SharedPrototypeSettings(num_prototypes=24)
    )
    torch.manual_seed(1)
    first = IBOT(settings, BACKBONE, seed=4)
    torch.manual_seed(2)
    second = IBOT(settings, BACKBONE, seed=4)
    for key, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[key], value)
        assert torch.equal(first.state_dict()[key.replace("student", "teacher", 1)], value)
    assert first.mask_token.abs().max() == 0.0


def test_what_is_saved_holds_student_teacher_prototypes_mask_token_and_both_centres() -> None:
    parts = {"student", "teacher", "student_prototypes", "teacher_prototypes", "mask_token", "centre", "patch_centre"}
    assert {key.split(".")[0] for key in tiny_method().state_dict()} == parts


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
    torch.testing.assert_close(combined.metrics["patch_loss"], whole.metrics["patch_loss"])
    for name, value in whole.carry.items():
        torch.testing.assert_close(combined.carry[name], value)


def test_under_bf16_autocast_the_loss_is_nearly_that_of_float32_and_the_state_stays_float32() -> None:
    method, batch = tiny_method(), views()
    exact = method(batch, HYPER).loss.item()
    output = training_step(method, bf16=True)([batch], HYPER, num_parts=1)
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(exact, rel=0.05)
    assert output.loss.item() != exact
    assert all(value.dtype == torch.float32 for value in method.state_dict().values())


def test_schedule_values_may_be_tensors_as_a_recorded_step_needs() -> None:
    numbers, tensors = tiny_method(drop_path_rate=0.3), tiny_method(drop_path_rate=0.3)
    own = {name: torch.tensor(value, dtype=torch.float64) for name, value in HYPER.own.items()}
    hyper = StepHyper(
        step=torch.tensor(3), epoch=0, learning_rate=torch.tensor(0.01), weight_decay=torch.tensor(0.1), own=own
    )
    for method, given in ((numbers, HYPER), (tensors, hyper)):
        method.after_step(method(views(), given), given)
    for key, value in numbers.state_dict().items():
        torch.testing.assert_close(tensors.state_dict()[key], value)


def test_masks_that_cannot_be_are_refused_in_words() -> None:
    with pytest.raises(ValidationError, match=r"2 ratios.*1 ratio_variances"):
        MaskSettings(ratios=(0.0, 0.3), ratio_variances=(0.0,))
    with pytest.raises(ValidationError, match=r"0\.3 \+- 0\.4"):
        MaskSettings(ratios=(0.3,), ratio_variances=(0.4,))
    with pytest.raises(ValidationError, match="method dino"):
        MaskSettings(ratios=(0.0,), ratio_variances=(0.0,))


def test_a_network_without_patches_is_refused_in_words() -> None:
    settings = IBOTSettings(
        head=HeadSettings(hidden_dim=16, out_dim=8), prototypes=SharedPrototypeSettings(num_prototypes=24)
    )
    with pytest.raises(RecipeError, match=r"hides patches, which resnet18 does not have; choose .*--init"):
        IBOT(settings, BackboneSettings(name="resnet18", drop_path_rate=0.0), seed=0)


def test_the_teachers_backbone_is_evaluated_and_more_prototypes_than_images_are_cautioned_against() -> None:
    method = tiny_method()
    assert method.backbone_to_evaluate() is method.teacher.backbone
    assert method.health(torch.randn(30, 16), HYPER)["teacher_entropy"] > 0
    assert len(method.cautions(TrainingPlan(num_images=23, batch_size=4, num_parts=1, views=ViewSettings()))) == 1
