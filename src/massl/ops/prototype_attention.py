"""The loss of DINO and iBOT: cross-entropy between the softmaxes of teacher and student over learnable prototypes.

For a student embedding s and a teacher embedding t of one image, with prototypes p_k (student) and p'_k (teacher, a
moving average),

    - sum_k q_k log softmax(p s / tau_s)_k  =  logsumexp_k(p_k . s / tau_s)  -  s . m / tau_s ,      m = sum_k q_k p_k

with q = softmax((p' t - centre) / tau_t). All pairs of views share the V logsumexps and the G means m, so no pair ever
needs numbers per prototype. With pair weights w[v, g] and W[v] = sum_g w[v, g], the gradients of one image are linear
in the softmaxes a_v (student), q_g:

    of s_v:   (W[v] sum_k a_vk p_k  -  sum_g w[v, g] m_g) / tau_s
    of p_k:   (sum_v a_vk W[v] s_v  -  sum_g q_gk sum_v w[v, g] s_v) / tau_s

So a_v and q_g are never mixed: stacked as [(V + G) rows, K] they enter two matrix products, and one pass over a few
images at a time gives value and gradients. Flash attention, as in memory_attention, does not apply: it never stores the
softmaxes, but the gradient of the prototypes needs each one a second time.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from massl.ops.view_losses import check_shapes, check_temperatures, equal_chunks, num_different_pairs

# Logits held at once: 2**26 float32 = 256 MiB, briefly twice (before and after the softmax): 73 images for 65,536
# prototypes and 2 + 12 views. Smaller chunks would add to the prototypes' gradient more often (134 MB of traffic each).
_MAX_LOGITS = 1 << 26
# No float16: the share of one of 65,536 prototypes, 1.5e-5, is below its smallest normal number.
_OPERAND_DTYPES = (torch.float32, torch.bfloat16)


def prototype_loss(
    student: Tensor,  # [V, N, D] unit vectors; receives a gradient
    teacher: Tensor,  # [G, N, D] unit vectors
    student_prototypes: Tensor,  # [K, D]; receives a gradient
    teacher_prototypes: Tensor,  # [K, D]
    centre: Tensor,  # [K] subtracted from the teacher's similarities
    *,
    student_temperature: float,
    teacher_temperature: float | Tensor,
    pair_weights: Tensor,  # [V, G] of student view v imitating teacher view g; 0 leaves the pair out
    row_weights: Tensor | None = None,  # [N]; None: each 1 / N
    operand_dtype: torch.dtype = torch.float32,
) -> Tensor:  # []
    """Make student views choose the prototypes that the teacher chooses (Caron et al., 2021; Zhou et al., 2022).

    Equals `reference_prototype_loss`: the sum over v, g, n of pair_weights[v, g] row_weights[n] times the cross-entropy
    between softmax((teacher_prototypes . teacher[g, n] - centre) / teacher_temperature), the target, and
    softmax(student_prototypes . student[v, n] / student_temperature). The result is float32.

    A row of weight 0 is ignored even if it holds NaN, and its gradient is 0: it may pad a batch to a fixed size.
    `operand_dtype` is the type of matrix operands (sums are float32); autocast is ignored. The teacher's temperature
    may be a tensor, which a CUDA graph rereads.
    """
    tensors = (student, teacher, student_prototypes, teacher_prototypes, centre, pair_weights, row_weights)
    return _loss_and_entropy(*tensors, student_temperature, teacher_temperature, operand_dtype, with_entropy=False)[0]


def prototype_loss_and_entropy(
    student: Tensor,
    teacher: Tensor,
    student_prototypes: Tensor,
    teacher_prototypes: Tensor,
    centre: Tensor,
    *,
    student_temperature: float,
    teacher_temperature: float | Tensor,
    pair_weights: Tensor,
    row_weights: Tensor | None = None,
    operand_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:  # as prototype_loss -> [], []
    """`prototype_loss`, and from the same logits the mean entropy in nats of the teacher's softmaxes, no gradient."""
    tensors = (student, teacher, student_prototypes, teacher_prototypes, centre, pair_weights, row_weights)
    return _loss_and_entropy(*tensors, student_temperature, teacher_temperature, operand_dtype, with_entropy=True)


def _loss_and_entropy(
    student: Tensor,
    teacher: Tensor,
    student_prototypes: Tensor,
    teacher_prototypes: Tensor,
    centre: Tensor,
    pair_weights: Tensor,
    row_weights: Tensor | None,
    student_temperature: float,
    teacher_temperature: float | Tensor,
    operand_dtype: torch.dtype,
    *,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    _check_inputs(student, teacher, student_prototypes, teacher_prototypes, centre, pair_weights, row_weights)
    check_temperatures(student_temperature, teacher_temperature)
    if operand_dtype not in _OPERAND_DTYPES:
        raise ValueError(f"operand_dtype must be torch.float32 or torch.bfloat16; got {operand_dtype}")
    with torch.autocast(student.device.type, enabled=False):
        if row_weights is None:
            row_weights = torch.full((student.shape[1],), 1.0 / student.shape[1], device=student.device)
        else:
            is_left_out = (row_weights == 0)[:, None]
            student, teacher = student.masked_fill(is_left_out, 0.0), teacher.masked_fill(is_left_out, 0.0)
        loss, entropy = _PrototypeLoss.apply(
            student,
            teacher.detach(),
            student_prototypes,
            teacher_prototypes.detach(),
            centre,
            student_temperature,
            teacher_temperature,
            pair_weights.float(),
            row_weights.float(),
            operand_dtype,
            with_entropy,
        )
    return loss, entropy


def reference_prototype_loss(
    student: Tensor,
    teacher: Tensor,
    student_prototypes: Tensor,
    teacher_prototypes: Tensor,
    centre: Tensor,
    *,
    student_temperature: float,
    teacher_temperature: float | Tensor,
    pair_weights: Tensor,
    row_weights: Tensor | None = None,
    operand_dtype: torch.dtype = torch.float32,
) -> Tensor:  # as prototype_loss
    """The plain version of `prototype_loss`: all logits, one cross-entropy per pair of views, gradients by autograd.

    With `operand_dtype` torch.float64 everything is float64.
    """
    _check_inputs(student, teacher, student_prototypes, teacher_prototypes, centre, pair_weights, row_weights)
    check_temperatures(student_temperature, teacher_temperature)
    sum_dtype = torch.promote_types(operand_dtype, torch.float32)

    def similarities(rows: Tensor, prototypes: Tensor) -> Tensor:
        return rows.to(operand_dtype).to(sum_dtype) @ prototypes.to(operand_dtype).to(sum_dtype).T

    with torch.autocast(student.device.type, enabled=False):
        with torch.no_grad():
            targets = torch.softmax(
                (similarities(teacher, teacher_prototypes) - centre.to(sum_dtype)) / teacher_temperature, dim=-1
            )
        log_predictions = torch.log_softmax(similarities(student, student_prototypes) / student_temperature, dim=-1)
        if row_weights is None:
            row_weights = torch.full(
                (student.shape[1],), 1.0 / student.shape[1], dtype=sum_dtype, device=student.device
            )
        loss = torch.zeros((), dtype=sum_dtype, device=student.device)
        for v in range(student.shape[0]):
            for g in range(teacher.shape[0]):
                cross_entropies = -(targets[g] * log_predictions[v]).sum(dim=-1)  # [N]
                loss = loss + pair_weights[v, g].to(sum_dtype) * (row_weights.to(sum_dtype) * cross_entropies).sum()
    return loss


def cross_view_weights(num_student_views: int, num_teacher_views: int, *, device: torch.device | str) -> Tensor:
    """Pair weights [V, G] that average over all pairs of different views; view g of both networks is the same crop."""
    weight = 1.0 / num_different_pairs(num_student_views, num_teacher_views)
    return torch.full((num_student_views, num_teacher_views), weight, device=device).fill_diagonal_(0.0)


class _PrototypeLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        student_prototypes: Tensor,
        teacher_prototypes: Tensor,
        centre: Tensor,
        student_temperature: float,
        teacher_temperature: float | Tensor,
        pair_weights: Tensor,
        row_weights: Tensor,
        dtype: torch.dtype,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        (num_views, num_rows, dim), num_targets = student.shape, teacher.shape[0]
        needs_student, needs_prototypes = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        # Temperatures divide the small factor of each product, before it is rounded.
        queries = student.float() / student_temperature
        teacher_queries = (teacher.float() / teacher_temperature).to(dtype)
        teacher_offset = centre.float() / teacher_temperature
        prototypes, teacher_prototypes = student_prototypes.to(dtype), teacher_prototypes.to(dtype)
        view_weights = pair_weights.sum(dim=1)[:, None]  # [V, 1]: W in the text above

        loss, entropy = torch.zeros((), device=student.device), torch.zeros((), device=student.device)
        student_gradient = torch.empty_like(queries) if needs_student else None
        prototype_gradient = torch.zeros_like(prototypes, dtype=torch.float32) if needs_prototypes else None
        for rows in equal_chunks(num_rows, _MAX_LOGITS // ((num_views + num_targets) * len(prototypes))):
            weights, query = row_weights[rows], queries[:, rows]  # [C], [V, C, D]
            operand = query.to(dtype)
            log_shares, logsumexps = _log_softmax(
                operand, teacher_queries[:, rows], prototypes, teacher_prototypes, teacher_offset
            )
            num_targeted = num_targets * query.shape[1]  # the last rows of log_shares
            if with_entropy:
                log_targets = log_shares[-num_targeted:].reshape(num_targets, *weights.shape, -1)
                entropy -= (weights * (log_targets.exp() * log_targets).sum(dim=-1)).sum() / num_targets
            shares = _exponential(
                log_shares if needs_student or needs_prototypes else log_shares[-num_targeted:], dtype
            )
            del log_shares  # before the products: 256 MiB
            means = _product(shares if needs_student else shares[-num_targeted:], prototypes)  # [(V + G) C or G C, D]
            target = (pair_weights @ means[-num_targeted:].reshape(num_targets, -1)).reshape(query.shape)
            attraction = (operand.float() * target).sum(dim=-1)  # [V, C]
            loss += (weights * (view_weights * logsumexps - attraction)).sum()
            if student_gradient is not None:
                repulsion = view_weights[:, :, None] * means[:-num_targeted].reshape(query.shape)
                student_gradient[:, rows] = (repulsion - target) * (weights / student_temperature)[:, None]
            if prototype_gradient is not None:
                weighted = (query * weights[:, None]).reshape(num_views, -1)
                pulls = torch.cat([view_weights * weighted, -(pair_weights.T @ weighted)]).reshape(-1, dim)
                _add_product(prototype_gradient, shares.T, pulls.to(dtype))
        ctx.save_for_backward(student_gradient, prototype_gradient)
        ctx.mark_non_differentiable(entropy)
        return loss, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # float32; autograd casts to the type of each input
        student, prototypes = (None if gradient is None else gradient * grad_loss for gradient in ctx.saved_tensors)
        return student, None, prototypes, None, None, None, None, None, None, None, None


def _log_softmax(
    queries: Tensor, teacher_queries: Tensor, prototypes: Tensor, teacher_prototypes: Tensor, teacher_offset: Tensor
) -> tuple[Tensor, Tensor]:  # [V, C, D], [G, C, D], [K, D], [K, D], [K] -> [(V + G) C, K], [V, C]
    """Log-softmaxes, student rows before teacher rows, and logsumexps of the student rows; all float32."""
    num_student = queries.shape[0] * queries.shape[1]
    num_all = num_student + teacher_queries.shape[0] * teacher_queries.shape[1]
    logits = torch.empty(num_all, len(prototypes), device=queries.device)
    _product(queries.flatten(0, 1), prototypes.T, out=logits[:num_student])
    _product(teacher_queries.flatten(0, 1), teacher_prototypes.T, out=logits[num_student:]).sub_(teacher_offset)
    if logits.is_cuda:  # one fused kernel, where torch.logsumexp has four; any column's difference is the logsumexp
        log_shares = torch.log_softmax(logits, dim=-1)
        logsumexps = logits[:num_student, 0] - log_shares[:num_student, 0]
    else:  # the fused kernel for CPUs has an inaccurate exponential: at a temperature of 0.04 shares sum to 1.00001
        largest = logits.amax(dim=-1, keepdim=True)  # subtracted first: logits of 10,000 have steps of 0.001
        remainders = torch.logsumexp(logits.sub_(largest), dim=-1, keepdim=True)
        log_shares, logsumexps = logits.sub_(remainders), (largest + remainders)[:num_student]
    return log_shares, logsumexps.reshape(queries.shape[:2])


def _exponential(logarithms: Tensor, dtype: torch.dtype) -> Tensor:
    """In place if the type allows, else rounded in the same pass."""
    out = logarithms if dtype == logarithms.dtype else torch.empty_like(logarithms, dtype=dtype)
    return torch.exp(logarithms, out=out)


def _product(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Product with float32 result: rounding logits of 25 to bfloat16 costs 0.06, far more than rounding operands."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32, out=out)
    return torch.mm(left.float(), right.float(), out=out)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a matrix product to a float32 total, in the same pass."""
    if left.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


def _check_inputs(
    student: Tensor,
    teacher: Tensor,
    student_prototypes: Tensor,
    teacher_prototypes: Tensor,
    centre: Tensor,
    pair_weights: Tensor,
    row_weights: Tensor | None,
) -> None:
    check_shapes(
        {
            "student": (student, "views rows dim"),
            "teacher": (teacher, "teacher_views rows dim"),
            "student_prototypes": (student_prototypes, "prototypes dim"),
            "teacher_prototypes": (teacher_prototypes, "prototypes dim"),
            "centre": (centre, "prototypes"),
            "pair_weights": (pair_weights, "views teacher_views"),
            "row_weights": (row_weights, "rows"),
        }
    )
