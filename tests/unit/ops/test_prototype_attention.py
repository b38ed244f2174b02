import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from massl.ops import prototype_attention
from massl.ops.prototype_attention import cross_view_weights, prototype_loss, reference_prototype_loss


@dataclass(frozen=True, kw_only=True, repr=False)
class World:
    """The arguments of the loss."""

    student: Tensor
    teacher: Tensor
    student_prototypes: Tensor
    teacher_prototypes: Tensor
    centre: Tensor
    pair_weights: Tensor
    row_weights: Tensor | None = None
    student_temperature: float = 0.1
    teacher_temperature: float | Tensor = 0.05

    def to(self, *target: Any) -> "World":
        moved = {field.name: getattr(self, field.name) for field in fields(self)}
        return World(
            **{name: value.to(*target) if isinstance(value, Tensor) else value for name, value in moved.items()}
        )


def draw_normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def world(
    views: int = 3, teacher_views: int = 2, rows: int = 4, dim: int = 8, prototypes: int = 16, seed: int = 0
) -> World:
    """Views of a row, and prototypes of the two networks, are alike, as they are after some training."""
    centres = normalize(draw_normal(rows, dim, seed=seed), dim=-1)
    student_prototypes = normalize(draw_normal(prototypes, dim, seed=seed + 1), dim=-1)
    return World(
        student=normalize(centres + 0.5 * draw_normal(views, rows, dim, seed=seed + 2), dim=-1),
        teacher=normalize(centres + 0.5 * draw_normal(teacher_views, rows, dim, seed=seed + 3), dim=-1),
        student_prototypes=student_prototypes,
        teacher_prototypes=student_prototypes + 0.1 * draw_normal(prototypes, dim, seed=seed + 4),
        centre=0.1 * draw_normal(prototypes, seed=seed + 5),
        pair_weights=draw_normal(views, teacher_views, seed=seed + 6).abs(),
    )


def loss_of(inputs: World, function: Callable[..., Tensor] = prototype_loss, **changed: Any) -> Tensor:
    return function(**{**{field.name: getattr(inputs, field.name) for field in fields(inputs)}, **changed})


def value_and_gradients(
    inputs: World, function: Callable[..., Tensor] = prototype_loss, **changed: Any
) -> tuple[Tensor, Tensor, Tensor]:
    student, prototypes = inputs.student.clone().requires_grad_(), inputs.student_prototypes.clone().requires_grad_()
    loss = loss_of(replace(inputs, student=student, student_prototypes=prototypes), function, **changed)
    return loss.detach(), *torch.autograd.grad(loss, (student, prototypes))


def truth(inputs: World) -> tuple[Tensor, Tensor, Tensor]:
    """Value and gradients of the reference in float64."""
    return value_and_gradients(inputs.to(torch.float64), reference_prototype_loss, operand_dtype=torch.float64)


@pytest.mark.parametrize("max_logits", [1 << 26, 200])
def test_the_teachers_entropy_comes_with_the_same_loss_and_gradients_bit_for_bit(
    max_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prototype_attention, "_MAX_LOGITS", max_logits)  # 200: several chunks of rows
    inputs = world(4, 2, 6, 16, 24, seed=3)
    entropies = []

    def with_entropy(**named: Any) -> Tensor:
        loss, entropy = prototype_attention.prototype_loss_and_entropy(**named)
        entropies.append(entropy)
        return loss

    for plain, same in zip(value_and_gradients(inputs), value_and_gradients(inputs, with_entropy), strict=True):
        assert torch.equal(plain, same)
    logits = (inputs.teacher @ inputs.teacher_prototypes.T - inputs.centre) / inputs.teacher_temperature
    expected = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert entropies[0].item() == pytest.approx(expected.item(), rel=1e-5)


def loss_by_numpy(inputs: World) -> float:
    """The definition, one cross-entropy at a time."""
    arrays = {
        field.name: np.asarray(getattr(inputs, field.name), dtype=np.float64)
        for field in fields(inputs)
        if field.name != "row_weights"
    }
    num_views, num_rows, _ = inputs.student.shape
    row_weights = np.full(num_rows, 1 / num_rows) if inputs.row_weights is None else inputs.row_weights.double().numpy()
    total = 0.0
    for v, g, n in np.ndindex(num_views, len(inputs.teacher), num_rows):
        student_logits = arrays["student_prototypes"] @ arrays["student"][v, n] / arrays["student_temperature"]
        teacher_logits = (arrays["teacher_prototypes"] @ arrays["teacher"][g, n] - arrays["centre"]) / arrays[
            "teacher_temperature"
        ]
        prediction, target = (np.exp(logits) / np.exp(logits).sum() for logits in (student_logits, teacher_logits))
        total += arrays["pair_weights"][v, g] * row_weights[n] * -(target * np.log(prediction)).sum()
    return float(total)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    def size(label: str, most: int) -> int:
        return draw(st.integers(1, most), label=label)

    views, teacher_views, rows, dim = size("views", 6), size("teacher views", 3), size("rows", 7), size("dim", 20)
    drawn = world(
        views, teacher_views, rows, dim, size("prototypes", 40), seed=draw(st.integers(0, 1000), label="seed")
    )
    weights = st.sampled_from([0.0, 0.05, 0.3, 1.0])
    row_weights = draw(st.none() | st.lists(weights, min_size=rows, max_size=rows), label="row weights")
    pairs = draw(
        st.lists(weights, min_size=views * teacher_views, max_size=views * teacher_views), label="pair weights"
    )
    return replace(
        drawn,
        pair_weights=torch.tensor(pairs).reshape(views, teacher_views),
        row_weights=None if row_weights is None else torch.tensor(row_weights),
        student_temperature=draw(st.floats(0.04, 1.0), label="student temperature"),
        teacher_temperature=draw(st.floats(0.03, 1.0), label="teacher temperature"),
    )


def assert_agrees_with_reference(inputs: World) -> None:
    results, truths = value_and_gradients(inputs), truth(inputs)
    row_weights = (
        torch.full(inputs.student.shape[1:2], 1 / inputs.student.shape[1])
        if inputs.row_weights is None
        else inputs.row_weights
    )
    total_weight = float(inputs.pair_weights.sum() * row_weights.sum())
    # Every result is a difference of numbers up to total_weight / tau_s; float32 leaves a few 1e-7 of that.
    tolerance = 2e-6 * total_weight / inputs.student_temperature
    for result, true in zip(results, truths, strict=True):
        assert result.dtype == torch.float32
        assert result.shape == true.shape
        assert (result.double() - true).norm().item() <= tolerance + 1e-5 * true.norm().item()


@given(worlds())
@settings(max_examples=100)
def test_value_and_both_gradients_equal_the_reference_for_any_shape_temperature_and_weights(inputs: World) -> None:
    assert_agrees_with_reference(inputs)


@given(worlds(), st.integers(1, 1500))
@settings(max_examples=60)
def test_they_are_the_same_for_any_size_of_chunk(inputs: World, max_logits: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prototype_attention, "_MAX_LOGITS", max_logits)
        assert_agrees_with_reference(inputs)


@given(worlds())
@settings(max_examples=30)
def test_the_reference_is_the_definition_written_with_numpy(inputs: World) -> None:
    doubles = loss_of(inputs.to(torch.float64), reference_prototype_loss, operand_dtype=torch.float64)
    assert doubles.dtype == torch.float64
    assert doubles.item() == pytest.approx(loss_by_numpy(inputs), rel=1e-10, abs=1e-12)
    floats = loss_of(inputs, reference_prototype_loss)
    assert floats.dtype == torch.float32
    assert floats.item() == pytest.approx(loss_by_numpy(inputs), rel=2e-5, abs=1e-5)


@pytest.mark.parametrize("function", [prototype_loss, reference_prototype_loss])
def test_a_case_worked_by_hand(function: Callable[..., Tensor]) -> None:
    """Two axes as prototypes. The student sees the first, the teacher the second, which the centre takes away: q =
    (1/2, 1/2).
    """
    inputs = World(
        student=torch.tensor([[[1.0, 0.0]]]),
        teacher=torch.tensor([[[0.0, 1.0]]]),
        student_prototypes=torch.eye(2),
        teacher_prototypes=torch.eye(2),
        centre=torch.tensor([0.0, 1.0]),
        pair_weights=torch.tensor([[3.0]]),
        student_temperature=0.5,
        teacher_temperature=0.25,
    )
    first = math.exp(2) / (math.exp(2) + 1)  # share of the first prototype for the student, logits (2, 0)
    loss, student_gradient, prototype_gradient = value_and_gradients(inputs, function)
    assert loss.item() == pytest.approx(3 * (math.log(math.exp(2) + 1) - 1), rel=1e-6)
    pull = 3 * (first - 0.5) / 0.5  # pair weight times gradient of the first logit over the student's temperature
    np.testing.assert_allclose(student_gradient, [[[pull, -pull]]], rtol=1e-6)
    np.testing.assert_allclose(prototype_gradient, [[pull, 0], [-pull, 0]], rtol=1e-6)
    inputs = replace(inputs, centre=torch.zeros(2))  # now q = (1, e^4) / (1 + e^4)
    target = 1 / (1 + math.exp(4))
    assert loss_of(inputs, function).item() == pytest.approx(3 * (math.log(math.exp(2) + 1) - 2 * target), rel=1e-6)


def test_gradients_are_the_slopes_of_the_value() -> None:
    """Central differences of the reference's value in float64, so that no derivative is taken from autograd."""
    inputs = world(views=2, rows=2, dim=3, prototypes=4)
    _, *gradients = value_and_gradients(inputs)
    doubles = inputs.to(torch.float64)
    for name, gradient in zip(("student", "student_prototypes"), gradients, strict=True):
        slopes = torch.zeros(gradient.shape, dtype=torch.float64)
        for place in np.ndindex(*gradient.shape):
            step = torch.zeros_like(slopes)
            step[place] = 1e-5
            above, below = (
                loss_of(
                    replace(doubles, **{name: getattr(doubles, name) + way * step}),
                    reference_prototype_loss,
                    operand_dtype=torch.float64,
                )
                for way in (1, -1)
            )
            slopes[place] = (above - below) / 2e-5
        torch.testing.assert_close(gradient.double(), slopes, rtol=1e-4, atol=1e-5)


def test_few_images_at_a_time_bound_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class LargestTensor(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            self.numel = max(self.numel, result.numel() if isinstance(result, Tensor) else 0)
            return result

    inputs = world(views=6, teacher_views=2, rows=20, dim=4, prototypes=128)
    largest = {}
    for max_logits in (1 << 26, 5000):  # 1,024 logits per row: 4 rows at a time
        monkeypatch.setattr(prototype_attention, "_MAX_LOGITS", max_logits)
        with LargestTensor() as watch:
            value_and_gradients(inputs)
        largest[max_logits] = watch.numel
    assert largest == {1 << 26: 20 * 1024, 5000: 4 * 1024}


def test_rows_of_weight_zero_are_left_out_whatever_they_hold() -> None:
    inputs = replace(world(rows=5), row_weights=torch.tensor([0.5, 0.0, 0.2, 0.0, 0.3]))
    kept = torch.tensor([0, 2, 4])
    student, teacher = inputs.student.clone(), inputs.teacher.clone()
    student[:, 1], student[:, 3], teacher[:, 1] = math.nan, 1e30, math.inf
    loss, student_gradient, prototype_gradient = value_and_gradients(replace(inputs, student=student, teacher=teacher))
    assert inputs.row_weights is not None
    without = replace(inputs, student=student[:, kept], teacher=teacher[:, kept], row_weights=inputs.row_weights[kept])
    true_loss, true_student_gradient, true_prototype_gradient = truth(without)
    assert torch.equal(student_gradient[:, [1, 3]], torch.zeros(3, 2, 8))
    torch.testing.assert_close(loss.double(), true_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(student_gradient[:, kept].double(), true_student_gradient, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(prototype_gradient.double(), true_prototype_gradient, rtol=1e-4, atol=1e-6)


def test_rows_that_all_weigh_nothing_give_zero() -> None:
    for result in value_and_gradients(replace(world(), row_weights=torch.zeros(4))):
        assert torch.equal(result, torch.zeros_like(result))


def test_a_pair_of_weight_zero_is_left_out() -> None:
    """View 0 imitates teacher view 1 only: another teacher view 0 leaves its gradient alone."""
    inputs = replace(world(2, 2), pair_weights=torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    _, gradient, _ = value_and_gradients(inputs)
    _, changed, _ = value_and_gradients(replace(inputs, teacher=torch.stack([-inputs.teacher[0], inputs.teacher[1]])))
    torch.testing.assert_close(changed[0], gradient[0])
    assert (changed[1] - gradient[1]).norm() > 0.1 * gradient[1].norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_teachers_temperature_may_be_a_tensor(dtype: torch.dtype) -> None:
    inputs = world()
    for result, same in zip(
        value_and_gradients(replace(inputs, teacher_temperature=torch.tensor(0.05, dtype=dtype))),
        value_and_gradients(inputs),
        strict=True,
    ):
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, same)


def test_no_gradient_reaches_the_teacher() -> None:
    inputs = world()
    for name in ("teacher", "teacher_prototypes", "centre", "pair_weights"):
        getattr(inputs, name).requires_grad_()
    leaves = replace(inputs, student=inputs.student.clone().requires_grad_())
    loss_of(leaves).backward()
    assert leaves.student.grad is not None
    for name in ("teacher", "teacher_prototypes", "centre", "pair_weights", "student_prototypes"):
        assert getattr(inputs, name).grad is None


def test_a_teacher_that_could_learn_makes_no_loss_to_learn_from() -> None:
    inputs = world()
    inputs.teacher.requires_grad_()
    inputs.teacher_prototypes.requires_grad_()
    assert not loss_of(inputs).requires_grad


@pytest.mark.parametrize("learner", ["student", "student_prototypes"])
def test_one_gradient_without_the_other_is_the_same(learner: str) -> None:
    inputs = world()
    loss, student_gradient, prototype_gradient = value_and_gradients(inputs)
    alone = getattr(inputs, learner).clone().requires_grad_()
    value = loss_of(replace(inputs, **{learner: alone}))
    torch.testing.assert_close(value.detach(), loss)
    torch.testing.assert_close(
        torch.autograd.grad(value, alone)[0], student_gradient if learner == "student" else prototype_gradient
    )


@pytest.mark.parametrize("is_enabled", [False, True])
def test_without_gradients_the_value_is_the_same(is_enabled: bool) -> None:
    inputs = world()
    with torch.set_grad_enabled(is_enabled):
        value = loss_of(inputs)
    assert not value.requires_grad
    torch.testing.assert_close(value, value_and_gradients(inputs)[0])


@pytest.mark.parametrize(
    ("learners", "num_exponential_rows", "num_mean_rows", "num_added"),
    [
        ([], 8, 8, 0),  # 2 teacher views of 4 images
        (["student"], 20, 20, 0),  # and 3 student views
        (["student_prototypes"], 20, 8, 1),
        (["student", "student_prototypes"], 20, 20, 1),
    ],
)
def test_no_work_is_done_for_gradients_that_nobody_needs(
    learners: list[str], num_exponential_rows: int, num_mean_rows: int, num_added: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work: dict[str, list[int]] = {"_exponential": [], "_product": [], "_add_product": []}

    def watch(name: str) -> None:
        function = getattr(prototype_attention, name)

        def watched(first: Tensor, *others: Any, **named: Any) -> Any:
            work[name].append(len(first))
            return function(first, *others, **named)

        monkeypatch.setattr(prototype_attention, name, watched)

    for name in work:
        watch(name)
    inputs = world()
    loss_of(replace(inputs, **{name: getattr(inputs, name).clone().requires_grad_() for name in learners}))
    logits = [3 * 4, 2 * 4]
    assert work == {
        "_exponential": [num_exponential_rows],
        "_product": [*logits, num_mean_rows],
        "_add_product": [16] * num_added,
    }


def test_gradients_are_scaled_by_what_comes_after_the_loss() -> None:
    inputs = world()
    _, *gradients = value_and_gradients(inputs)
    leaves = [inputs.student.clone().requires_grad_(), inputs.student_prototypes.clone().requires_grad_()]
    loss = loss_of(replace(inputs, student=leaves[0], student_prototypes=leaves[1]))
    torch.autograd.grad(loss, leaves, retain_graph=True)  # a first backward pass leaves what it used as it was
    for tripled, gradient in zip(torch.autograd.grad(3.0 * loss, leaves), gradients, strict=True):
        torch.testing.assert_close(tripled, 3.0 * gradient)


def test_bfloat16_operands_give_nearly_the_same_in_float32() -> None:
    inputs = replace(world(4, 2, 16, 32, 256), pair_weights=cross_view_weights(4, 2, device="cpu"))
    results, truths = value_and_gradients(inputs, operand_dtype=torch.bfloat16), truth(inputs)
    assert {result.dtype for result in results} == {torch.float32}
    assert results[0].item() == pytest.approx(truths[0].item(), rel=2e-3)
    assert results[0].item() != value_and_gradients(inputs)[0].item()  # the operand type was taken
    for gradient, true in zip(results[1:], truths[1:], strict=True):
        assert 1e-5 * true.norm() < (gradient - true).norm() < 0.01 * true.norm()
    rounded = loss_of(inputs, reference_prototype_loss, operand_dtype=torch.bfloat16)
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(results[0].item(), rel=2e-3)


def test_with_bfloat16_operands_every_product_takes_bfloat16_and_gives_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    operand_dtypes, result_dtypes = [], []
    product, add_product = prototype_attention._product, prototype_attention._add_product

    def watched_product(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
        result = product(left, right, out=out)
        operand_dtypes.extend([left.dtype, right.dtype])
        result_dtypes.append(result.dtype)
        # Sums of products of bfloat16 numbers, not rounded again: that would be 2e-3 of them.
        exact = left.double() @ right.double()
        assert (result - exact).norm() <= 1e-6 * exact.norm()
        return result

    def watched_add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
        operand_dtypes.extend([left.dtype, right.dtype])
        result_dtypes.append(total.dtype)
        add_product(total, left, right)

    monkeypatch.setattr(prototype_attention, "_product", watched_product)
    monkeypatch.setattr(prototype_attention, "_add_product", watched_add_product)
    value_and_gradients(world(), operand_dtype=torch.bfloat16)
    assert operand_dtypes == [torch.bfloat16] * 8
    assert result_dtypes == [torch.float32] * 4


def test_inputs_of_lower_precision_receive_gradients_of_their_own_type() -> None:
    inputs = world()
    halves = replace(inputs, student=inputs.student.bfloat16(), student_prototypes=inputs.student_prototypes.bfloat16())
    loss, student_gradient, prototype_gradient = value_and_gradients(halves)
    assert (loss.dtype, student_gradient.dtype, prototype_gradient.dtype) == (
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
    )
    _, true_student_gradient, true_prototype_gradient = truth(halves)
    torch.testing.assert_close(student_gradient.double(), true_student_gradient, rtol=8e-3, atol=1e-5)
    torch.testing.assert_close(prototype_gradient.double(), true_prototype_gradient, rtol=8e-3, atol=1e-5)


@pytest.mark.parametrize("operand_dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing_as_the_operand_type_alone_decides(operand_dtype: torch.dtype) -> None:
    inputs = world(4, 2, 8, 16, 64)
    plain = value_and_gradients(inputs, operand_dtype=operand_dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = value_and_gradients(inputs, operand_dtype=operand_dtype)
        reference = loss_of(inputs, reference_prototype_loss)
    assert all(torch.equal(one, other) for one, other in zip(plain, cast, strict=True))
    assert torch.equal(reference, loss_of(inputs, reference_prototype_loss))


def test_sharp_softmaxes_stay_finite() -> None:
    """Logits of 10,000 overflow where a maximum is not taken off first, and shares underflow to zero."""
    inputs = replace(world(), student_temperature=1e-4, teacher_temperature=1e-4)
    assert all(torch.isfinite(result).all() for result in value_and_gradients(inputs))
    assert_agrees_with_reference(inputs)


def test_thousands_of_prototypes_leave_the_rounding_of_float32_alone() -> None:
    """A rough exponential over 16,384 prototypes would show as 1e-5 of the gradients."""
    inputs = replace(
        world(3, 2, 4, 256, 16384), pair_weights=cross_view_weights(3, 2, device="cpu"), teacher_temperature=0.04
    )
    results, truths = value_and_gradients(inputs), truth(inputs)
    assert results[0].item() == pytest.approx(truths[0].item(), rel=2e-6)
    for gradient, true in zip(results[1:], truths[1:], strict=True):
        assert (gradient - true).norm() < 2e-6 * true.norm()


def test_equal_prototypes_give_the_loss_of_guessing() -> None:
    inputs = replace(world(), student_prototypes=torch.ones(16, 8), pair_weights=cross_view_weights(3, 2, device="cpu"))
    loss, student_gradient, _ = value_and_gradients(inputs)
    assert loss.item() == pytest.approx(math.log(16), rel=1e-5)
    assert student_gradient.abs().max() < 1e-5


def test_cross_view_weights_average_over_pairs_of_different_views() -> None:
    assert torch.equal(cross_view_weights(2, 2, device="cpu"), torch.tensor([[0, 0.5], [0.5, 0]]))
    assert torch.equal(cross_view_weights(3, 2, device="cpu"), torch.tensor([[0, 0.25], [0.25, 0], [0.25, 0.25]]))
    assert torch.equal(cross_view_weights(1, 3, device="cpu"), torch.tensor([[0, 0.5, 0.5]]))
    many = cross_view_weights(12, 2, device="cpu")
    assert many.sum().item() == pytest.approx(1.0)
    assert (many > 0).sum() == 22
    with pytest.raises(ValueError, match="no pair of different views"):
        cross_view_weights(1, 1, device="cpu")


@pytest.mark.parametrize("function", [prototype_loss, reference_prototype_loss])
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("student", (4, 8), r"student must be \[views, rows, dim\].*got \[4, 8\]"),
        ("teacher", (4, 8), r"teacher must be \[teacher_views, 4, 8\]"),
        ("student_prototypes", (1, 16, 8), r"student_prototypes must be \[prototypes, 8\]"),
        ("teacher", (2, 5, 8), r"teacher must be \[teacher_views, 4, 8\].*got \[2, 5, 8\]"),
        ("teacher", (2, 4, 1), r"teacher must be \[teacher_views, 4, 8\]"),
        ("student_prototypes", (16, 7), r"student_prototypes must be \[prototypes, 8\]"),
        ("teacher_prototypes", (15, 8), r"teacher_prototypes must be \[16, 8\]"),
        ("centre", (1, 16), r"centre must be \[16\]"),
        ("centre", (1,), r"centre must be \[16\]"),
        ("pair_weights", (2, 3), r"pair_weights must be \[3, 2\]"),
        ("row_weights", (3,), r"row_weights must be \[4\]"),
        ("student", (3, 0, 8), "student must be .*not empty"),
        ("teacher", (0, 4, 8), "teacher must be .*not empty"),
        ("student_prototypes", (0, 8), "student_prototypes must be .*not empty"),
    ],
)
def test_wrong_shapes_are_refused_by_name(
    function: Callable[..., Tensor], name: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        loss_of(world(), function, **{name: torch.ones(shape)})


@pytest.mark.parametrize("function", [prototype_loss, reference_prototype_loss])
@pytest.mark.parametrize(("student_temperature", "teacher_temperature"), [(0.0, 0.1), (0.1, -0.1)])
def test_temperatures_must_be_positive(
    function: Callable[..., Tensor], student_temperature: float, teacher_temperature: float
) -> None:
    with pytest.raises(ValueError, match="temperatures must be positive"):
        loss_of(world(), function, student_temperature=student_temperature, teacher_temperature=teacher_temperature)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_operands_of_other_types_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="operand_dtype"):
        loss_of(world(), operand_dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("max_logits", [1 << 26, 1 << 15])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
def test_on_a_gpu_value_and_gradients_are_those_of_the_reference(
    dtype: torch.dtype, tolerance: float, max_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prototype_attention, "_MAX_LOGITS", max_logits)
    inputs = replace(world(12, 2, 10, 256, 1000), pair_weights=cross_view_weights(12, 2, device="cpu"))
    truths, results = truth(inputs), value_and_gradients(inputs.to("cuda"), operand_dtype=dtype)
    for result, true in zip(results, truths, strict=True):
        assert result.dtype == torch.float32
        assert (result.cpu() - true).norm() < tolerance * true.norm()


@pytest.mark.gpu
def test_on_a_gpu_the_loss_can_be_recorded_and_replayed_with_another_temperature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prototype_attention, "_MAX_LOGITS", 1 << 15)
    temperature = torch.tensor(0.04, dtype=torch.float64, device="cuda")
    inputs = replace(world(4, 2, 16, 64, 1024), row_weights=torch.linspace(0, 1, 16)).to("cuda")
    recorded = replace(inputs, teacher_temperature=temperature)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        value_and_gradients(recorded, operand_dtype=torch.bfloat16)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = value_and_gradients(recorded, operand_dtype=torch.bfloat16)
    temperature.fill_(0.07)
    graph.replay()
    for result, direct in zip(
        results,
        value_and_gradients(replace(inputs, teacher_temperature=0.07), operand_dtype=torch.bfloat16),
        strict=True,
    ):
        torch.testing.assert_close(result, direct, rtol=1e-3, atol=1e-5)
