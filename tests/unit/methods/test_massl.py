import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from massl.config import RecipeError
from massl.data.views import ViewBatch, ViewSettings
from massl.methods.base import StepHyper, StepOutput, TeacherSettings, TrainingPlan, combine
from massl.methods.massl import MaSSL, MaSSLHeadSettings, MaSSLSettings, winner_share
from massl.nn.backbone import BackboneSettings
from massl.nn.memory import MemorySettings
from massl.ops.memory_attention import memory_loss_reference

HYPER = StepHyper(
    step=3, epoch=0, learning_rate=0.1, weight_decay=0.0, own={"momentum": 0.75, "teacher_temperature": 0.05}
)


def plan(*, num_images: int) -> TrainingPlan:
    return TrainingPlan(num_images=num_images, batch_size=4, num_parts=1, views=ViewSettings())


def tiny_method(
    *,
    seed: int = 0,
    drop_path_rate: float = 0.0,
    student_views: Literal["all", "local"] = "all",
    batch_norm: bool = False,
    entropy: float | None = None,
    instance_weight: float = 0.0,
    **memory: Any,
) -> MaSSL:
    settings = MaSSLSettings(
        student_views=student_views,
        instance_weight=instance_weight,
        teacher=TeacherSettings(entropy=entropy),
        head=MaSSLHeadSettings(hidden_dim=16, out_dim=8, batch_norm=batch_norm),
        memory=MemorySettings(**{"num_rows": 24, "block_size": 8, **memory}),
    )
    options: dict[str, int | float | bool | str] = {"embed_dim": 16, "depth": 2, "num_heads": 2}
    backbone = BackboneSettings(
        name="vit_tiny_patch16_224", image_size=8, patch_size=4, drop_path_rate=drop_path_rate, timm_options=options
    )
    method = MaSSL(settings, backbone, seed=seed)
    # as after some training: student and teacher differ, and embeddings of different images do too
    with torch.no_grad():
        for position, parameter in enumerate(method.parameters()):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(position)))
    return method.train()


def views(num_images: int = 4, *, with_local: bool = True) -> ViewBatch:
    generator = torch.Generator().manual_seed(0)
    return ViewBatch(
        global_views=torch.randn(2, num_images, 3, 8, 8, generator=generator),
        local_views=torch.randn(3, num_images, 3, 4, 4, generator=generator) if with_local else None,
        image_indices=torch.arange(100, 100 + num_images),
    )


def part(batch: ViewBatch, images: slice) -> ViewBatch:
    assert batch.local_views is not None
    return ViewBatch(
        global_views=batch.global_views[:, images],
        local_views=batch.local_views[:, images],
        image_indices=batch.image_indices[images],
    )


def student_embeddings(method: MaSSL, batch: ViewBatch) -> Tensor:
    return method.student(batch.groups(), method.drop_path_keys(batch, HYPER, num_views=batch.num_views))  # type: ignore[no-any-return]


@pytest.mark.parametrize("with_local", [True, False])
def test_the_loss_compares_all_views_with_the_teachers_global_ones_over_blocks_of_the_memory(with_local: bool) -> None:
    method, batch = tiny_method(seed=9), views(with_local=with_local)
    with torch.no_grad():
        loss = method(batch, HYPER).loss
        student = torch.stack(
            [method.student.head(method.student.backbone(view).pooled) for group in batch.groups() for view in group]
        )
        teacher = torch.stack(
            [method.teacher.head(method.teacher.backbone(view).pooled) for view in batch.global_views]
        )
        blocks = method.memory.random_blocks(8, key=(9, HYPER.step))
        expected = memory_loss_reference(student, teacher, blocks, student_temperature=0.1, teacher_temperature=0.05)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_global", [1, 2])
def test_a_student_of_local_views_alone_is_compared_with_every_view_of_the_teacher(num_global: int) -> None:
    method, batch = tiny_method(seed=9, student_views="local"), views()
    batch = replace(batch, global_views=batch.global_views[:num_global])
    assert batch.local_views is not None
    with torch.no_grad():
        output = method(batch, HYPER)
        student = torch.stack([method.student.head(method.student.backbone(view).pooled) for view in batch.local_views])
        teacher = torch.stack(
            [method.teacher.head(method.teacher.backbone(view).pooled) for view in batch.global_views]
        )
        blocks = method.memory.random_blocks(8, key=(9, HYPER.step))
        expected = memory_loss_reference(
            student, teacher, blocks, student_temperature=0.1, teacher_temperature=0.05, shared_views=False
        )
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output.carry["memory_rows"], teacher[-1])
    assert method.min_global_views == 1


def test_a_local_view_keeps_its_stochastic_depth_whether_or_not_the_student_sees_the_others() -> None:
    batch = views()
    seen: list[Tensor] = []
    for student_views in ("all", "local"):
        method = tiny_method(drop_path_rate=0.5, student_views=student_views)
        method.student.head.register_forward_hook(
            lambda head, inputs, output: seen.append(output.unflatten(0, (-1, 4)))
        )
        method(batch, HYPER)
    torch.testing.assert_close(seen[0][2:], seen[1])


def test_a_student_of_local_views_needs_some() -> None:
    with pytest.raises(RecipeError, match=r"needs local views: raise views\.num_local"):
        tiny_method(student_views="local")(views(with_local=False), HYPER)


def test_a_head_with_batch_norm_gives_unit_vectors_that_depend_on_the_batch() -> None:
    plain, normed, features = tiny_method().student.head, tiny_method(batch_norm=True).student.head, torch.randn(6, 16)
    torch.testing.assert_close(normed(features).norm(dim=-1), torch.ones(6))
    torch.testing.assert_close(plain(features)[:3], plain(features[:3]))
    assert (normed(features)[:3] - normed(features[:3])).abs().max() > 1e-3


@pytest.mark.parametrize("student_views", ["all", "local"])
def test_a_share_of_the_loss_can_tell_the_images_of_a_batch_apart(student_views: Literal["all", "local"]) -> None:
    batch = views()
    mixed, plain = (tiny_method(student_views=student_views, instance_weight=weight) for weight in (0.25, 0.0))
    output, memory_only = mixed(batch, HYPER), plain(batch, HYPER)
    groups = batch.groups() if student_views == "all" else batch.groups()[1:]
    student, teacher = plain.student(groups), plain.teacher([batch.global_views])
    terms = [
        -torch.log_softmax(student[v] @ teacher[t].T / 0.1, dim=1).diagonal().mean()
        for v in range(len(student))
        for t in range(2)
        if v != t or student_views == "local"
    ]
    torch.testing.assert_close(output.loss, 0.75 * memory_only.loss + 0.25 * torch.stack(terms).mean())
    assert 0 <= float(output.metrics["contrastive_top1"]) <= 100
    assert torch.equal(output.metrics["memory_loss"], memory_only.loss)
    assert not output.metrics["memory_loss"].requires_grad
    assert memory_only.metrics == {}
    output.loss.backward()
    assert all(parameter.grad is None for parameter in mixed.teacher.parameters())


def test_the_teachers_embedding_of_the_second_global_view_enters_the_memory() -> None:
    method, batch = tiny_method(), views()
    with torch.no_grad():
        first, second = method.teacher([batch.global_views])
    rows = method.memory.rows.clone()
    method.after_step(method(batch, HYPER), HYPER)
    assert not torch.allclose(first, second, atol=1e-2)
    torch.testing.assert_close(method.memory.rows[:4], second)
    assert torch.equal(method.memory.rows[4:], rows[4:])
    assert int(method.memory.cursor) == 4


def test_the_forward_pass_changes_nothing_so_that_a_batch_never_meets_itself() -> None:
    method, batch = tiny_method(drop_path_rate=0.3), views()
    before = {key: value.clone() for key, value in method.state_dict().items()}
    first, second = method(batch, HYPER).loss, method(batch, HYPER).loss
    assert torch.equal(first, second)
    assert all(torch.equal(value, before[key]) for key, value in method.state_dict().items())


def test_the_student_learns_and_the_teacher_gets_no_gradient() -> None:
    method = tiny_method()
    output = method(views(), HYPER)
    output.loss.backward()
    assert all(
        parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in method.student.parameters()
    )
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in method.teacher.parameters())
    assert not output.carry["memory_rows"].requires_grad


def test_a_memory_is_filled_with_the_rows_that_a_step_would_enqueue() -> None:
    method, batch = tiny_method(), views()
    with torch.no_grad():
        torch.testing.assert_close(method.memory_rows(batch), method(batch, HYPER).carry["memory_rows"])


def test_after_a_step_the_teacher_has_moved_towards_the_student_by_one_minus_momentum() -> None:
    method, batch = tiny_method(), views()
    before = [parameter.clone() for parameter in method.teacher.parameters()]
    method.after_step(method(batch, HYPER), HYPER)
    for parameter, old, student in zip(method.teacher.parameters(), before, method.student.parameters(), strict=True):
        torch.testing.assert_close(parameter, 0.75 * old + 0.25 * student.detach())


def test_student_and_teacher_start_equal_and_the_seed_alone_decides_them() -> None:
    settings = MaSSLSettings(
        head=MaSSLHeadSettings(hidden_dim=16, out_dim=8), memory=MemorySettings(num_rows=24, block_size=8)
    )
    backbone = BackboneSettings(
        name="vit_tiny_patch16_224",
        image_size=8,
        patch_size=4,
        timm_options={"embed_dim": 16, "depth": 2, "num_heads": 2},
    )
    torch.manual_seed(1)
    first = MaSSL(settings, backbone, seed=4)
    torch.manual_seed(2)
    second = MaSSL(settings, backbone, seed=4)
    for key, value in first.student.state_dict().items():
        assert torch.equal(first.teacher.state_dict()[key], value)
    assert all(torch.equal(second.state_dict()[key], value) for key, value in first.state_dict().items())
    assert not torch.equal(
        MaSSL(settings, backbone, seed=5).student.head.mlp[0].weight, first.student.head.mlp[0].weight
    )
    assert not torch.equal(MaSSL(settings, backbone, seed=5).memory.rows, first.memory.rows)


def test_what_is_saved_holds_student_teacher_and_memory() -> None:
    keys = tiny_method().state_dict().keys()
    assert {"memory.rows", "memory.cursor"} <= keys
    assert {key.split(".")[0] for key in keys} == {"student", "teacher", "memory"}


def test_the_teachers_backbone_is_the_one_to_evaluate() -> None:
    method = tiny_method()
    assert method.backbone_to_evaluate() is method.teacher.backbone


def test_drop_path_is_keyed_by_image_so_that_splitting_a_batch_changes_no_embedding() -> None:
    method, batch = tiny_method(drop_path_rate=0.5), views(8)
    whole = student_embeddings(method, batch)
    halves = torch.cat(
        [student_embeddings(method, part(batch, images)) for images in (slice(0, 4), slice(4, 8))], dim=1
    )
    torch.testing.assert_close(halves, whole)
    keys = method.drop_path_keys(batch, HYPER, num_views=batch.num_views)
    assert keys is not None
    assert len(keys.unique()) == 5 * 8  # each view of each image has its own


def test_drop_path_drops_and_only_in_the_student_and_only_in_training() -> None:
    method, batch = tiny_method(drop_path_rate=0.5), views(8)
    with torch.no_grad():
        dropped, teacher = student_embeddings(method, batch), method.teacher([batch.global_views])
        method.eval()
        assert method.drop_path_keys(batch, HYPER, num_views=batch.num_views) is None
        assert not torch.allclose(student_embeddings(method, batch), dropped, atol=1e-2)
        torch.testing.assert_close(method.teacher([batch.global_views]), teacher)
    assert tiny_method(drop_path_rate=0.0).drop_path_keys(batch, HYPER, num_views=batch.num_views) is None


def test_two_parts_of_a_batch_combine_to_the_output_of_the_whole() -> None:
    method, batch = tiny_method(drop_path_rate=0.3), views(8)
    whole, combined = (
        method(batch, HYPER),
        combine([method(part(batch, images), HYPER) for images in (slice(0, 4), slice(4, 8))]),
    )
    torch.testing.assert_close(combined.loss, whole.loss.detach())
    torch.testing.assert_close(combined.carry["memory_rows"], whole.carry["memory_rows"])


def test_combining_averages_losses_and_metrics_and_joins_what_is_carried() -> None:
    outputs = [
        StepOutput(loss=torch.tensor(x), metrics={"m": torch.tensor(2 * x)}, carry={"rows": torch.full((2, 1), x)})
        for x in (1.0, 3.0)
    ]
    combined = combine(outputs)
    assert (combined.loss.item(), combined.metrics["m"].item()) == (2.0, 4.0)
    assert combined.carry["rows"].flatten().tolist() == [1.0, 1.0, 3.0, 3.0]
    assert combine(outputs[:1]) is outputs[0]


def test_blocks_are_random_and_new_each_step_or_in_storage_order_when_asked_for() -> None:
    method = tiny_method(seed=2)
    assert torch.equal(method._blocks(5, torch.float32), method.memory.random_blocks(8, key=(2, 5)))
    assert not torch.equal(method._blocks(6, torch.float32), method._blocks(5, torch.float32))
    blockwise = tiny_method(random_blocks=False)
    assert torch.equal(blockwise._blocks(5, torch.float32), blockwise.memory.rows.reshape(3, 8, 8))
    assert torch.equal(blockwise._blocks(6, torch.float32), blockwise._blocks(5, torch.float32))
    assert blockwise(views(), HYPER).loss.item() != tiny_method()(views(), HYPER).loss.item()


def test_under_bf16_autocast_the_loss_is_nearly_that_of_float32() -> None:
    method, batch = tiny_method(), views()
    exact = method(batch, HYPER).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = method(batch, HYPER)
    assert output.loss.dtype == torch.float32
    assert output.carry["memory_rows"].dtype == torch.float32
    assert output.loss.item() == pytest.approx(exact.item(), rel=0.05)
    assert output.loss.item() != exact.item()


def test_activation_checkpointing_is_switched_on_in_the_student_only() -> None:
    method = tiny_method()
    method.set_activation_checkpointing(True)
    assert method.student.backbone.activation_checkpointing
    assert not method.teacher.backbone.activation_checkpointing


def test_health_describes_the_teachers_embeddings() -> None:
    method = tiny_method()
    features = torch.randn(30, 16, generator=torch.Generator().manual_seed(0))
    health = method.health(features, HYPER)
    assert health.keys() == {"embedding_spread", "teacher_entropy", "memory_winner_share"}
    embeddings = method.teacher.head(features).detach()
    shares = (
        torch.einsum("nd,bkd->bnk", embeddings, method._blocks(HYPER.step, torch.float32)) / HYPER.teacher_temperature
    ).softmax(dim=-1)
    assert health["teacher_entropy"] == pytest.approx(-(shares * shares.log()).sum(dim=-1).mean().item(), rel=1e-4)
    assert health["embedding_spread"] == pytest.approx(
        math.sqrt(1 - embeddings.mean(dim=0).square().sum().item()), rel=1e-4
    )


def test_a_healthy_run_shows_no_sign_of_collapse_and_each_kind_of_collapse_is_named() -> None:
    method = tiny_method()
    healthy = {"loss": 1.5, "teacher_entropy": 1.0, "embedding_spread": 0.9}
    assert method.collapse_signs(healthy) == []
    for change, message in [
        (
            {"loss": 0.999 * math.log(8), "teacher_entropy": 0.96 * math.log(8)},
            "random guessing over a block (ln 8 = 2.079)",
        ),
        ({"teacher_entropy": 0.01}, "all weight on one memory row"),
        ({"embedding_spread": 0.001}, "nearly the same vector"),
    ]:
        (sign,) = method.collapse_signs(healthy | change)
        assert message in sign


def test_where_the_loss_is_a_mixture_its_memory_part_is_compared_with_guessing() -> None:
    most = math.log(8)
    even = {"teacher_entropy": 0.96 * most, "embedding_spread": 0.9}
    (sign,) = tiny_method().collapse_signs(even | {"loss": 0.8 * most, "memory_loss": 0.999 * most})
    assert "the memory loss 2.077 is that of random guessing over a block" in sign
    assert tiny_method().collapse_signs(even | {"loss": most, "memory_loss": 0.8 * most}) == []


def test_an_even_teacher_is_slow_but_not_collapsed() -> None:
    method = tiny_method()
    even, uneven = (
        {"loss": 1.5, "teacher_entropy": share * math.log(8), "embedding_spread": 0.9} for share in (0.86, 0.84)
    )
    assert method.slow_signs(uneven) == method.collapse_signs(even) == []
    (sign,) = method.slow_signs(even)
    assert "entropy 1.79 of at most 2.08 nats" in sign
    assert "method.teacher.temperature" in sign


def test_a_memory_larger_than_the_data_set_or_with_a_remainder_is_cautioned_against() -> None:
    assert tiny_method().cautions(plan(num_images=24)) == []
    (caution,) = tiny_method().cautions(plan(num_images=23))
    assert "the memory (method.memory.num_rows = 24) is larger than the data set (23 images)" in caution
    (caution,) = tiny_method(block_size=7).cautions(plan(num_images=100))
    assert "3 random rows stay unused each step" in caution


def test_a_batch_larger_than_the_memory_and_blocks_of_one_row_are_cautioned_against() -> None:
    (caution,) = tiny_method().cautions(replace(plan(num_images=100), batch_size=25))
    assert "a batch (25 images) is larger than the memory (method.memory.num_rows = 24)" in caution
    assert tiny_method().cautions(replace(plan(num_images=100), batch_size=24)) == []
    (caution,) = tiny_method(block_size=1).cautions(plan(num_images=100))
    assert "method.memory.block_size = 1" in caution
    assert "nothing is learnt" in caution


def test_batch_norm_in_the_head_is_cautioned_against_where_batches_come_in_parts() -> None:
    in_parts = replace(plan(num_images=24), num_parts=2)
    assert tiny_method().cautions(in_parts) == tiny_method(batch_norm=True).cautions(plan(num_images=24)) == []
    (caution,) = tiny_method(batch_norm=True).cautions(in_parts)
    assert caution.startswith("batch norm in the head takes its statistics from each of the 2 parts of a batch")
    (caution,) = tiny_method(instance_weight=0.5).cautions(in_parts)
    assert caution.startswith("method.instance_weight takes the images to tell apart from each of the 2 parts")


def test_the_winner_share_counts_the_rows_that_are_nearest_to_some_query() -> None:
    rows = torch.eye(4)
    assert winner_share(rows, rows[None]) == 1.0
    assert winner_share(rows[:1].repeat(9, 1), rows[None]) == 0.25
    assert winner_share(rows[:2], rows[None]) == 1.0  # two queries cannot have more than two nearest rows
    queries, blocks = normalize(torch.randn(6, 5), dim=-1), normalize(torch.randn(3, 7, 5), dim=-1)
    num_winners = sum(
        len({max(range(7), key=lambda k: float(block[k] @ query)) for query in queries}) for block in blocks
    )
    assert winner_share(queries, blocks) == pytest.approx(num_winners / (3 * 6))


def test_a_teacher_held_at_an_entropy_adapts_its_temperature_and_logs_both() -> None:
    method, batch = tiny_method(entropy=1.0), views()
    hyper = replace(HYPER, own={"momentum": 1.0})  # no temperature: no schedule sets it
    entropies = []
    for _ in range(150):
        with torch.no_grad():
            output = method(batch, hyper)
        entropies.append(float(output.metrics["batch_teacher_entropy"]))
        method.after_step(replace(output, carry={"memory_rows": method.memory.rows.clone()}), hyper)  # the memory stays
    assert abs(entropies[0] - 1.0) > 0.1
    assert entropies[-1] == pytest.approx(1.0, abs=0.02)
    assert method.held_temperature is not None
    assert float(output.metrics["teacher_temperature"]) == pytest.approx(float(method.held_temperature()), rel=1e-2)
    assert math.isfinite(method.health(torch.randn(5, 16), hyper)["teacher_entropy"])


def test_the_published_schedule_adds_nothing_to_checkpoints_and_logs() -> None:
    method = tiny_method()
    assert not any("temperature" in key for key in method.state_dict())
    assert "held_temperature.logarithm" in tiny_method(entropy=1.0).state_dict()
    assert method(views(), HYPER).metrics == {}
    assert "teacher_temperature" in TeacherSettings().ramps()
    assert "teacher_temperature" not in TeacherSettings(entropy=1.0).ramps()


def test_an_entropy_that_no_softmax_over_a_block_reaches_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"method\.teacher\.entropy"):
        tiny_method(entropy=math.log(8) + 0.01)
