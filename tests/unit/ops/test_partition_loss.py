import math

import pytest
import torch
from torch import Tensor

from massl.ops import partition_loss
from massl.ops.partition_loss import imbalance, partition_terms, reference_partition_terms


def inputs(
    *,
    views: int = 5,
    targets: int = 2,
    images: int = 6,
    dim: int = 8,
    blocks: int = 5,
    size: int = 7,
    length: float = 3.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(views + blocks)
    centres = torch.randn(images, dim, generator=generator)
    student, teacher = (
        length * (centres + torch.randn(count, images, dim, generator=generator)) for count in (views, targets)
    )
    student_blocks = torch.randn(blocks, size, dim, generator=generator)
    teacher_blocks = student_blocks + 0.1 * torch.randn(blocks, size, dim, generator=generator)
    return student.requires_grad_(), teacher, student_blocks.requires_grad_(), teacher_blocks


def values_and_gradients(terms: tuple[Tensor, Tensor], *leaves: Tensor) -> list[Tensor]:
    """Both results, and the gradients of a mixture of them in which no two entries weigh the same."""
    disagreement, mean_shares = terms
    weights = torch.linspace(-1.0, 2.0, mean_shares.numel()).reshape(mean_shares.shape)
    mixture = 1.5 * disagreement + (weights * mean_shares).sum()
    return [disagreement.detach(), mean_shares.detach(), *torch.autograd.grad(mixture, leaves)]


@pytest.mark.parametrize(
    "max_logits", [1, 2 * 7 * 6 * 7, 1 << 26], ids=["one block at a time", "chunks of 2, 2 and 1", "all at once"]
)
@pytest.mark.parametrize("length", [0.0, 1.0, 3.0, 40.0], ids=["all alike", "soft", "sharp", "clamped"])
def test_values_and_gradients_are_those_of_the_slow_truth(
    max_logits: int, length: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_loss, "_MAX_LOGITS", max_logits)
    student, teacher, student_blocks, teacher_blocks = inputs(length=length)
    given = (student, teacher, student_blocks, teacher_blocks)
    results = values_and_gradients(partition_terms(*given), student, student_blocks)
    expected = values_and_gradients(reference_partition_terms(*given), student, student_blocks)
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("views", "targets"), [(2, 2), (3, 1), (1, 2), (4, 3)])
def test_any_number_of_views_is_averaged_over_pairs_of_different_ones(views: int, targets: int) -> None:
    student, teacher, student_blocks, teacher_blocks = inputs(views=views, targets=targets)
    disagreement, mean_shares = partition_terms(student, teacher, student_blocks, teacher_blocks)
    expected, expected_shares = reference_partition_terms(student, teacher, student_blocks, teacher_blocks)
    torch.testing.assert_close(disagreement, expected)
    torch.testing.assert_close(mean_shares, expected_shares)


def test_the_slow_truth_is_minus_the_logarithm_of_overlaps_and_the_mean_of_all_softmaxes() -> None:
    student, teacher, blocks, teacher_blocks = (
        tensor.detach().double() for tensor in inputs(views=3, images=2, blocks=2, length=0.5)
    )
    total, num_terms, shares = 0.0, 0, torch.zeros(2, 7, dtype=torch.float64)
    for block in range(2):
        for image in range(2):
            p = [torch.softmax(blocks[block] @ student[v, image], dim=0) for v in range(3)]
            q = [torch.softmax(teacher_blocks[block] @ teacher[t, image], dim=0) for t in range(2)]
            shares[block] += sum([*p, *q]) / (2 * 5)
            for v, t in [(0, 1), (1, 0), (2, 0), (2, 1)]:
                total -= math.log(float(p[v] @ q[t]))
                num_terms += 1
    disagreement, mean_shares = reference_partition_terms(student, teacher, blocks, teacher_blocks)
    assert disagreement.item() == pytest.approx(total / num_terms, rel=1e-12)
    torch.testing.assert_close(mean_shares, shares)


def test_overlaps_beyond_the_limits_are_seen_in_the_clamped_case() -> None:
    student, teacher, blocks, teacher_blocks = (tensor.detach() for tensor in inputs(length=40.0))
    p, q = torch.softmax(student[0] @ blocks[0].T, dim=-1), torch.softmax(teacher[1] @ teacher_blocks[0].T, dim=-1)
    overlaps = (p * q).sum(dim=-1)
    assert overlaps.min() < partition_loss._EPSILON
    assert overlaps.max() > 1.0 - partition_loss._EPSILON


def test_the_teacher_receives_no_gradient() -> None:
    student, teacher, student_blocks, teacher_blocks = inputs()
    teacher.requires_grad_()
    teacher_blocks.requires_grad_()
    disagreement, mean_shares = partition_terms(student, teacher, student_blocks, teacher_blocks)
    (disagreement + imbalance(mean_shares)).backward()  # type: ignore[no-untyped-call]
    assert teacher.grad is None
    assert teacher_blocks.grad is None
    assert student.grad is not None
    assert student_blocks.grad is not None


def test_either_result_may_be_used_alone() -> None:
    student, *rest = inputs()
    for position in (0, 1):
        result = partition_terms(student, *rest)[position].square().sum()
        expected = reference_partition_terms(student, *rest)[position].square().sum()
        torch.testing.assert_close(
            *(torch.autograd.grad(one, student)[0] for one in (result, expected)), rtol=1e-4, atol=1e-6
        )


def test_embeddings_that_cannot_choose_and_embeddings_that_all_choose_the_same_both_cost_ln_of_the_block_size() -> None:
    blocks = torch.eye(8)[None]
    undecided, same = torch.zeros(2, 4, 8), 100.0 * torch.eye(8)[3].expand(2, 4, 8)
    for embeddings, expected in [(undecided, (math.log(8), 0.0)), (same, (0.0, math.log(8)))]:
        disagreement, mean_shares = partition_terms(embeddings, embeddings, blocks, blocks)
        assert disagreement.item() == pytest.approx(expected[0], abs=1e-5)
        assert imbalance(mean_shares).item() == pytest.approx(expected[1], abs=1e-5)
    each_its_own = 100.0 * torch.eye(8).expand(2, 8, 8)
    disagreement, mean_shares = partition_terms(each_its_own, each_its_own, blocks, blocks)
    assert (disagreement + imbalance(mean_shares)).item() == pytest.approx(0.0, abs=1e-5)


def test_imbalance_is_the_divergence_of_the_mean_shares_from_the_uniform_ones_averaged_over_blocks() -> None:
    shares = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])
    divergences = [sum(share * math.log(3 * share) for share in block) for block in shares.tolist()]
    assert imbalance(shares).item() == pytest.approx(sum(divergences) / 2, rel=1e-6)


def test_bfloat16_operands_change_little_and_results_stay_float32() -> None:
    student, teacher, student_blocks, teacher_blocks = inputs(length=1.0)
    given = (student, teacher, student_blocks, teacher_blocks)
    exact = values_and_gradients(partition_terms(*given), student, student_blocks)
    rounded = values_and_gradients(partition_terms(*given, operand_dtype=torch.bfloat16), student, student_blocks)
    assert not torch.equal(rounded[0], exact[0])
    for result, wanted in zip(rounded, exact, strict=True):
        assert result.dtype == torch.float32
        assert (result - wanted).norm() < 0.02 * wanted.norm()


def test_autocast_has_no_say() -> None:
    student, teacher, student_blocks, teacher_blocks = inputs()
    expected = partition_terms(student, teacher, student_blocks, teacher_blocks)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = partition_terms(student, teacher, student_blocks, teacher_blocks)
    assert torch.equal(result[0], expected[0])
    assert torch.equal(result[1], expected[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_computes_the_same(dtype: torch.dtype) -> None:
    student, teacher, student_blocks, teacher_blocks = inputs(views=8, images=32, dim=64, blocks=4, size=64, length=0.3)
    expected = values_and_gradients(
        partition_terms(student, teacher, student_blocks, teacher_blocks), student, student_blocks
    )
    moved = [tensor.detach().cuda() for tensor in (student, teacher, student_blocks, teacher_blocks)]
    moved[0].requires_grad_()
    moved[2].requires_grad_()
    terms = partition_terms(*moved, operand_dtype=dtype)
    weights = torch.linspace(-1.0, 2.0, terms[1].numel(), device="cuda").reshape(terms[1].shape)
    gradients = torch.autograd.grad(1.5 * terms[0] + (weights * terms[1]).sum(), (moved[0], moved[2]))
    for result, wanted in zip([*terms, *gradients], expected, strict=True):
        assert (result.detach().cpu() - wanted).norm() < (0.03 if dtype == torch.bfloat16 else 1e-4) * wanted.norm()


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 4, 8), (2, 4, 8), (3, 8), (3, 8)), "student_blocks must be"),
        (((2, 4, 8), (2, 5, 8), (3, 6, 8), (3, 6, 8)), "teacher must be"),
        (((2, 4, 8), (2, 4, 8), (3, 6, 7), (3, 6, 7)), "student_blocks must be"),
        (((2, 4, 8), (2, 4, 8), (3, 6, 8), (2, 6, 8)), "teacher_blocks must be"),
        (((2, 0, 8), (2, 0, 8), (3, 6, 8), (3, 6, 8)), "student must be"),
        (((1, 4, 8), (1, 4, 8), (3, 6, 8), (3, 6, 8)), "no pair of different views"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    for terms in (partition_terms, reference_partition_terms):
        with pytest.raises(ValueError, match=message):
            terms(*map(torch.zeros, shapes))
