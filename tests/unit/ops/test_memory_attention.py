import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from massl.ops import memory_attention
from massl.ops.memory_attention import (
    attend,
    block_entropy,
    memory_loss,
    memory_loss_and_entropy,
    memory_loss_reference,
)


def unit_rows(*shape: int, seed: int) -> Tensor:
    return normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def world(
    views: int, teacher_views: int, samples: int, dim: int, num_blocks: int, block_size: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Views of a sample are alike, as they are after some training."""
    centres = unit_rows(samples, dim, seed=seed)
    student = normalize(centres + 0.7 * unit_rows(views, samples, dim, seed=seed + 1), dim=-1)
    teacher = normalize(centres + 0.7 * unit_rows(teacher_views, samples, dim, seed=seed + 2), dim=-1)
    return student, teacher, unit_rows(num_blocks, block_size, dim, seed=seed + 3)


def loss_by_loops(
    student: Tensor, teacher: Tensor, blocks: Tensor, student_temperature: float, teacher_temperature: float
) -> float:
    """The definition, one number at a time."""
    terms = []
    for v in range(len(student)):
        for t in range(len(teacher)):
            if v == t:
                continue
            for n in range(student.shape[1]):
                for block in blocks:
                    student_logits = [float(row @ student[v, n]) / student_temperature for row in block]
                    teacher_logits = [float(row @ teacher[t, n]) / teacher_temperature for row in block]
                    student_total = sum(math.exp(logit) for logit in student_logits)
                    teacher_total = sum(math.exp(logit) for logit in teacher_logits)
                    terms.append(
                        -sum(
                            math.exp(target) / teacher_total * (logit - math.log(student_total))
                            for target, logit in zip(teacher_logits, student_logits, strict=True)
                        )
                    )
    return sum(terms) / len(terms)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[tuple[Tensor, Tensor, Tensor], float, float]:
    views = draw(st.integers(1, 12), label="views")
    teacher_views = draw(st.integers(2 if views == 1 else 1, 3), label="teacher views")
    dim = draw(st.sampled_from([1, 3, 8, 12, 16, 40, 256, 264, 300]), label="dim")
    samples, num_blocks = draw(st.integers(1, 6), label="samples"), draw(st.integers(1, 4), label="blocks")
    block_size = draw(st.integers(1, 48), label="block size")
    temperatures = st.floats(0.03, 0.5)
    seed = draw(st.integers(0, 1000), label="seed")
    return (
        world(views, teacher_views, samples, dim, num_blocks, block_size, seed),
        draw(temperatures),
        draw(temperatures),
    )


def value_and_gradient(
    loss_function: Callable[..., Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    student_temperature: float,
    teacher_temperature: float,
) -> tuple[Tensor, Tensor]:
    student = inputs[0].clone().requires_grad_()
    loss = loss_function(
        student, *inputs[1:], student_temperature=student_temperature, teacher_temperature=teacher_temperature
    )
    (gradient,) = torch.autograd.grad(loss, student)
    return loss.detach(), gradient


def assert_agrees_with_reference(
    inputs: tuple[Tensor, Tensor, Tensor], student_temperature: float, teacher_temperature: float
) -> None:
    loss, gradient = value_and_gradient(memory_loss, inputs, student_temperature, teacher_temperature)
    doubles = tuple(tensor.double() for tensor in inputs)
    true_loss, true_gradient = value_and_gradient(
        memory_loss_reference, doubles, student_temperature, teacher_temperature
    )  # type: ignore[arg-type]
    assert loss.dtype == gradient.dtype == torch.float32
    # Absolute: the loss is a difference of numbers up to 1 / tau_s, so float32 leaves this much; a block of one row has
    # loss 0.
    assert loss.item() == pytest.approx(true_loss.item(), rel=1e-5, abs=4e-7 / student_temperature)
    # Where the networks agree the true gradient vanishes; float32 leaves 1e-6 of the largest there can be, 1 / (tau_s
    # sqrt(V N)).
    scale = max(
        true_gradient.norm().item(), 0.02 / (student_temperature * math.sqrt(gradient.shape[0] * gradient.shape[1]))
    )
    assert (gradient.double() - true_gradient).norm().item() < 1e-4 * scale


@given(worlds())
@settings(max_examples=100)
def test_value_and_gradient_equal_the_reference_for_any_shape_and_temperature(
    drawn: tuple[tuple[Tensor, Tensor, Tensor], float, float],
) -> None:
    assert_agrees_with_reference(*drawn)


@given(worlds(), st.integers(1, 200))
@settings(max_examples=50)
def test_the_path_without_a_fused_kernel_gives_the_same_for_any_size_of_chunk(
    drawn: tuple[tuple[Tensor, Tensor, Tensor], float, float], max_logits: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_attention, "_can_fuse", lambda queries: False)
        patch.setattr(memory_attention, "_MAX_LOGITS", max_logits)
        assert_agrees_with_reference(*drawn)


def test_the_reference_equals_the_definition_written_as_loops() -> None:
    inputs = world(3, 2, 2, 5, 2, 4)
    assert memory_loss_reference(*inputs, student_temperature=0.1, teacher_temperature=0.05).item() == pytest.approx(
        loss_by_loops(*inputs, 0.1, 0.05), rel=1e-5
    )


def test_both_paths_are_taken_where_they_should_be() -> None:
    """Otherwise the tests above would compare one path with itself."""
    assert memory_attention._can_fuse(torch.zeros(2, 16))
    assert not memory_attention._can_fuse(torch.zeros(2, 12))
    assert not memory_attention._can_fuse(torch.zeros(2, 264))
    assert not memory_attention._can_fuse(torch.zeros(2, 16, dtype=torch.float64))
    assert list(memory_attention._query_chunks(5, memory_attention._MAX_LOGITS // 2)) == [
        slice(0, 2),
        slice(2, 4),
        slice(4, 6),
    ]
    assert len(list(memory_attention._query_chunks(3, memory_attention._MAX_LOGITS * 2))) == 3


def test_a_view_is_never_compared_with_itself() -> None:
    """With two views, view 0 sees teacher view 1 only: changing teacher view 0 leaves its gradient alone."""
    student, teacher, blocks = world(2, 2, 3, 8, 2, 16)
    _, gradient = value_and_gradient(memory_loss, (student, teacher, blocks), 0.1, 0.05)
    other = torch.stack([unit_rows(3, 8, seed=99), teacher[1]])
    _, changed = value_and_gradient(memory_loss, (student, other, blocks), 0.1, 0.05)
    torch.testing.assert_close(changed[0], gradient[0])
    assert (changed[1] - gradient[1]).norm() > 0.1 * gradient[1].norm()


@pytest.mark.parametrize(("num_views", "num_teacher_views"), [(1, 1), (3, 2), (2, 3)])
def test_views_that_are_not_shared_are_all_compared(num_views: int, num_teacher_views: int) -> None:
    student, teacher, blocks = world(num_views, num_teacher_views, 3, 8, 2, 16)
    temperatures = {"student_temperature": 0.1, "teacher_temperature": 0.05}
    student.requires_grad_()
    loss = memory_loss(student, teacher, blocks, **temperatures, shared_views=False)
    # View 0 of two against teacher view 1 of two, and the reverse: the same pair twice.
    doubled = [(torch.stack([view, view]), torch.stack([target, target])) for view in student for target in teacher]
    expected = torch.stack(
        [memory_loss_reference(views, targets, blocks, **temperatures) for views, targets in doubled]
    ).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        memory_loss_reference(student, teacher, blocks, **temperatures, shared_views=False),
        expected,
        rtol=1e-5,
        atol=1e-6,
    )
    (gradient,), (true_gradient,) = (
        torch.autograd.grad(value, student, retain_graph=True) for value in (loss, expected)
    )
    torch.testing.assert_close(gradient, true_gradient, rtol=1e-4, atol=1e-6)


def test_the_gradient_reaches_the_student_only() -> None:
    student, teacher, blocks = (tensor.requires_grad_() for tensor in world(3, 2, 4, 8, 2, 16))
    memory_loss(student, teacher, blocks, student_temperature=0.1, teacher_temperature=0.05).backward()
    assert student.grad is not None
    assert teacher.grad is None
    assert blocks.grad is None


def test_the_gradient_is_scaled_by_what_comes_after_the_loss() -> None:
    student, teacher, blocks = world(3, 2, 4, 8, 2, 16)
    student.requires_grad_()
    loss = memory_loss(student, teacher, blocks, student_temperature=0.1, teacher_temperature=0.05)
    (gradient,) = torch.autograd.grad(loss, student, retain_graph=True)
    (tripled,) = torch.autograd.grad(3.0 * loss, student)
    torch.testing.assert_close(tripled, 3.0 * gradient)


def test_without_a_student_gradient_the_value_is_the_same() -> None:
    inputs = world(3, 2, 4, 8, 2, 16)
    with torch.no_grad():
        loss = memory_loss(*inputs, student_temperature=0.1, teacher_temperature=0.05)
    assert not loss.requires_grad
    assert loss.item() == value_and_gradient(memory_loss, inputs, 0.1, 0.05)[0].item()


@pytest.mark.parametrize("dim", [16, 12])
def test_bfloat16_operands_give_nearly_the_same_in_float32(dim: int) -> None:
    inputs = world(4, 2, 8, dim, 2, 64)
    loss, gradient = value_and_gradient(memory_loss, inputs, 0.1, 0.07)
    student = inputs[0].clone().requires_grad_()
    rough = memory_loss(
        student, *inputs[1:], student_temperature=0.1, teacher_temperature=0.07, operand_dtype=torch.bfloat16
    )
    (rough_gradient,) = torch.autograd.grad(rough, student)
    assert rough.dtype == rough_gradient.dtype == torch.float32
    assert rough.item() == pytest.approx(loss.item(), rel=5e-3)
    assert rough.item() != loss.item()  # the operand type was taken
    assert (rough_gradient - gradient).norm() < 0.03 * gradient.norm()


@pytest.mark.parametrize("operand_dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing_as_the_operand_type_alone_decides(operand_dtype: torch.dtype) -> None:
    """Training calls the loss under autocast, which would round every float32 product inside it to bfloat16."""
    inputs = world(4, 2, 8, 16, 2, 64)
    results = []
    for enabled in (False, True):
        student = inputs[0].clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = memory_loss(
                student, *inputs[1:], student_temperature=0.1, teacher_temperature=0.07, operand_dtype=operand_dtype
            )
        results.append((loss.detach(), torch.autograd.grad(loss, student)[0]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@given(st.integers(0, 1000))
@settings(max_examples=20)
def test_the_order_of_rows_in_a_block_and_of_blocks_does_not_matter(seed: int) -> None:
    student, teacher, blocks = world(3, 2, 4, 16, 3, 24)
    generator = torch.Generator().manual_seed(seed)
    shuffled = blocks[torch.randperm(3, generator=generator)][:, torch.randperm(24, generator=generator)]
    loss, gradient = value_and_gradient(memory_loss, (student, teacher, blocks), 0.1, 0.05)
    same_loss, same_gradient = value_and_gradient(memory_loss, (student, teacher, shuffled), 0.1, 0.05)
    torch.testing.assert_close(same_loss, loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(same_gradient, gradient, rtol=1e-4, atol=1e-6)


def test_which_rows_share_a_block_does_matter() -> None:
    """Otherwise the random partition would be for nothing, and the test above would hold for any mistake."""
    student, teacher, blocks = world(3, 2, 4, 16, 2, 24)
    regrouped = torch.stack([blocks[:, :12].flatten(0, 1), blocks[:, 12:].flatten(0, 1)])
    first, second = (
        memory_loss(student, teacher, cut, student_temperature=0.1, teacher_temperature=0.05)
        for cut in (blocks, regrouped)
    )
    assert abs(first - second) > 1e-4


def test_a_memory_of_equal_rows_gives_the_loss_of_guessing() -> None:
    student, teacher, _ = world(3, 2, 4, 16, 1, 1)
    equal = unit_rows(1, 1, 16, seed=5).expand(2, 24, 16)
    loss, gradient = value_and_gradient(memory_loss, (student, teacher, equal), 0.1, 0.05)
    assert loss.item() == pytest.approx(math.log(24), rel=1e-6)
    assert gradient.abs().max() < 1e-6


def test_attend_gives_the_softmax_mean_and_the_logsumexp_averaged_over_blocks() -> None:
    queries, blocks = unit_rows(5, 16, seed=0), unit_rows(3, 20, 16, seed=1)
    means, logsumexps = attend(queries, blocks, 0.2)
    logits = torch.einsum("rd,bkd->brk", queries, blocks) / 0.2
    torch.testing.assert_close(means, (logits.softmax(dim=-1) @ blocks).mean(dim=0))
    torch.testing.assert_close(logsumexps, logits.logsumexp(dim=-1).mean(dim=0))


def test_block_entropy_is_the_mean_entropy_of_the_softmax_over_each_block() -> None:
    queries, blocks = unit_rows(5, 16, seed=0), unit_rows(3, 20, 16, seed=1)
    shares = (torch.einsum("rd,bkd->brk", queries, blocks) / 0.2).softmax(dim=-1)
    assert block_entropy(queries, blocks, 0.2).item() == pytest.approx(
        -(shares * shares.log()).sum(dim=-1).mean().item(), rel=1e-5
    )


def test_the_teachers_entropy_comes_with_the_same_loss_and_gradient_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(5)
    student, teacher, blocks = (
        normalize(torch.randn(*shape, 16, generator=generator), dim=-1) for shape in ((4, 6), (2, 6), (3, 24))
    )
    temperatures = {"student_temperature": 0.1, "teacher_temperature": torch.tensor(0.06)}
    plain, with_entropy = student.clone().requires_grad_(), student.clone().requires_grad_()
    loss = memory_loss(plain, teacher, blocks, **temperatures)
    same, entropy = memory_loss_and_entropy(with_entropy, teacher, blocks, **temperatures)
    loss.backward()
    same.backward()
    assert torch.equal(loss, same)
    torch.testing.assert_close(plain.grad, with_entropy.grad, rtol=0, atol=0)
    assert entropy.item() == pytest.approx(block_entropy(teacher.flatten(0, 1), blocks, 0.06).item(), rel=1e-5)
    assert not entropy.requires_grad


def test_block_entropy_is_zero_for_one_winner_and_ln_of_the_rows_when_all_are_alike() -> None:
    rows = torch.eye(16)[None]
    assert block_entropy(rows[0], rows, 0.01).item() == pytest.approx(0.0, abs=1e-4)
    assert block_entropy(rows[0], rows[:, :1].expand(1, 9, 16), 0.04).item() == pytest.approx(math.log(9), rel=1e-5)


@pytest.mark.parametrize("loss_function", [memory_loss, memory_loss_reference])
@pytest.mark.parametrize(
    ("student", "teacher", "blocks", "message"),
    [
        ((3, 4), (2, 3, 4), (1, 5, 4), r"student must be \[views, samples, dim\].*got \[3, 4\]"),
        ((2, 3, 4), (2, 3, 4), (5, 4), r"blocks must be \[blocks, rows, 4\]"),
        ((2, 3, 4), (2, 2, 4), (1, 5, 4), r"teacher must be \[teacher_views, 3, 4\]"),
        ((2, 3, 4), (2, 3, 4), (1, 5, 8), "blocks must be"),
        ((1, 3, 4), (1, 3, 4), (1, 5, 4), "no pair of different views"),
        ((2, 0, 4), (2, 0, 4), (1, 5, 4), "student must be .*not empty"),
        ((2, 3, 4), (2, 3, 4), (0, 5, 4), "blocks must be .*not empty"),
    ],
)
def test_wrong_shapes_are_refused_with_the_shapes_given(
    loss_function: Callable[..., Tensor],
    student: tuple[int, ...],
    teacher: tuple[int, ...],
    blocks: tuple[int, ...],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        loss_function(
            torch.ones(student),
            torch.ones(teacher),
            torch.ones(blocks),
            student_temperature=0.1,
            teacher_temperature=0.1,
        )


@pytest.mark.parametrize(("student_temperature", "teacher_temperature"), [(0.0, 0.1), (0.1, -0.1)])
def test_temperatures_must_be_positive(student_temperature: float, teacher_temperature: float) -> None:
    with pytest.raises(ValueError, match="temperatures must be positive"):
        memory_loss(
            *world(2, 2, 2, 8, 1, 4), student_temperature=student_temperature, teacher_temperature=teacher_temperature
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_loss_is_that_of_the_cpu(dtype: torch.dtype) -> None:
    inputs = world(12, 2, 16, 256, 4, 512)
    loss, gradient = value_and_gradient(memory_loss, inputs, 0.1, 0.04)
    student = inputs[0].cuda().requires_grad_()
    on_gpu = memory_loss(
        student,
        inputs[1].cuda(),
        inputs[2].cuda(),
        student_temperature=0.1,
        teacher_temperature=0.04,
        operand_dtype=dtype,
    )
    (gradient_on_gpu,) = torch.autograd.grad(on_gpu, student)
    assert on_gpu.item() == pytest.approx(loss.item(), rel=1e-4 if dtype == torch.float32 else 5e-3)
    assert (gradient_on_gpu.cpu() - gradient).norm() < (1e-3 if dtype == torch.float32 else 0.03) * gradient.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize(
    ("num_blocks", "block_size", "num_parts"),
    [(1, 4096, 8), (4, 1024, 2), (2, 1536, 2), (1, 1030, 2), (3, 1000, 1), (2, 1025, 1), (2, 128, 1)],
)
def test_on_a_gpu_attention_over_parts_of_blocks_gives_the_loss_and_the_gradient_of_the_reference(
    num_blocks: int, block_size: int, num_parts: int, dim: int
) -> None:
    """Temperatures are powers of two and embeddings rounded beforehand, which leaves the error of the kernels."""
    student, teacher, blocks = (tensor.bfloat16().float() for tensor in world(4, 2, 10, dim, num_blocks, block_size))
    assert memory_attention._parts_of_block(6 * 10, num_blocks, block_size) == num_parts
    doubles = (student.double(), teacher.double(), blocks.double())
    true_loss, true_gradient = value_and_gradient(memory_loss_reference, doubles, 0.125, 0.0625)
    on_gpu = student.cuda().requires_grad_()
    results = []
    for teacher_temperature in (0.0625, torch.tensor(0.0625, dtype=torch.float64, device="cuda")):
        loss = memory_loss(
            on_gpu,
            teacher.cuda(),
            blocks.cuda().bfloat16(),
            student_temperature=0.125,
            teacher_temperature=teacher_temperature,
            operand_dtype=torch.bfloat16,
        )
        (gradient,) = torch.autograd.grad(loss, on_gpu)
        assert loss.dtype == gradient.dtype == torch.float32
        results.append((loss.item(), gradient.cpu()))
    assert results[0][0] == pytest.approx(true_loss.item(), rel=1e-3)
    assert (results[0][1].double() - true_gradient).norm() < 0.01 * true_gradient.norm()
    assert results[1][0] == results[0][0]  # a temperature on the device is as good as a number
    assert torch.equal(results[1][1], results[0][1])
