"""The loss of CARP: views agree on prototypes within random blocks, and each block's prototypes are used equally.

With p_v and q_t the softmaxes of student view v and teacher view t over the prototypes of one block, its terms are

    disagreement  =  mean over blocks, images and pairs v != t of  - log <p_v, q_t>
    imbalance     =  mean over blocks of  KL(mean of all p_v and q_t over the batch || uniform)

The gradient of the first by the student's logits is p_v - p_v q_t / <p_v, q_t>. Softmaxes of a few blocks are held at a
time and recomputed in the backward pass: that costs less than keeping [views x images, prototypes] numbers.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from massl.ops.view_losses import check_shapes, equal_chunks, num_different_pairs

# Logits held at once: 2**26 float32 = 256 MiB, briefly four times (logits, softmax and the gradients of both). That is
# 73 blocks of 512 prototypes for 128 images and 12 + 2 views.
_MAX_LOGITS = 1 << 26
# Overlaps and mean shares are clamped this far from 0 and 1 before the logarithm, as the authors do.
_EPSILON = torch.finfo(torch.float32).eps


def partition_terms(
    student: Tensor,  # [V, N, D] embeddings of any length; receives a gradient
    teacher: Tensor,  # [T, N, D]
    student_blocks: Tensor,  # [B, C, D] prototypes, cut into blocks; receives a gradient
    teacher_blocks: Tensor,  # [B, C, D] the teacher's prototypes, cut in the same way
    *,
    operand_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:  # -> [], [B, C], both float32
    """Disagreement of student views with *other* teacher views, and mean share of each prototype.

    Equals `reference_partition_terms` (Silva and Ramírez Rivera, 2023). Teacher view t is the same crop as student view
    t. The mean share is taken over all given images and all views of both networks; averaged over processes, it is the
    input of `imbalance`, the second term. Student and its prototypes receive the gradients of both results.

    `operand_dtype` is the type of the operands of large matrix products (sums are float32); autocast is ignored.
    """
    _check_inputs(student, teacher, student_blocks, teacher_blocks)
    with torch.autocast(student.device.type, enabled=False):
        terms: tuple[Tensor, Tensor] = _PartitionTerms.apply(
            student, teacher.detach(), student_blocks, teacher_blocks.detach(), operand_dtype
        )
    return terms


def reference_partition_terms(
    student: Tensor, teacher: Tensor, student_blocks: Tensor, teacher_blocks: Tensor
) -> tuple[Tensor, Tensor]:  # as partition_terms
    """The plain version of `partition_terms`: all softmaxes at once, one overlap per pair of views, autograd."""
    _check_inputs(student, teacher, student_blocks, teacher_blocks)
    predictions = torch.softmax(torch.einsum("vnd,bcd->vbnc", student, student_blocks), dim=-1)
    targets = torch.softmax(torch.einsum("tnd,bcd->tbnc", teacher.detach(), teacher_blocks.detach()), dim=-1)
    pair_losses = [
        -(predictions[v] * targets[t]).sum(dim=-1).clamp(_EPSILON, 1.0 - _EPSILON).log().mean()
        for v in range(len(predictions))
        for t in range(len(targets))
        if v != t
    ]
    mean_shares = torch.cat([predictions, targets]).mean(dim=(0, 2))
    return torch.stack(pair_losses).mean(), mean_shares


def imbalance(mean_shares: Tensor) -> Tensor:  # [B, C] -> [], 0 to ln C
    """KL divergence in nats of the mean shares of a block's prototypes from uniform, averaged over blocks."""
    negative_entropy = (mean_shares * mean_shares.clamp(_EPSILON, 1.0 - _EPSILON).log()).sum(dim=-1)
    return (math.log(mean_shares.shape[-1]) + negative_entropy).mean()


class _PartitionTerms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, student_blocks: Tensor, teacher_blocks: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(student, teacher, student_blocks, teacher_blocks)
        ctx.dtype = dtype
        queries, targets = _rows(student, dtype), _rows(teacher, dtype)
        pair_weights = _pair_weights(student, teacher, num_blocks=len(student_blocks))
        disagreement = torch.zeros((), device=student.device)
        mean_shares = torch.empty(student_blocks.shape[:2], device=student.device)
        for chunk in _chunks_of_blocks(student_blocks, len(queries) + len(targets)):
            shares = _block_softmax(queries, student_blocks[chunk].to(dtype))
            target_shares = _block_softmax(targets, teacher_blocks[chunk].to(dtype))
            overlaps = _overlaps(shares, target_shares, num_images=student.shape[1])
            disagreement -= (pair_weights * overlaps.clamp(_EPSILON, 1.0 - _EPSILON).log()).sum()
            mean_shares[chunk] = (shares.sum(dim=1) + target_shares.sum(dim=1)) / (len(queries) + len(targets))
        return disagreement, mean_shares

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, disagreement_gradient: Tensor, mean_gradient: Tensor
    ) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        student, teacher, student_blocks, teacher_blocks = ctx.saved_tensors
        (num_views, num_images, dim), dtype = student.shape, ctx.dtype
        queries, targets = _rows(student, dtype), _rows(teacher, dtype)
        pair_weights = disagreement_gradient * _pair_weights(student, teacher, num_blocks=len(student_blocks))
        mean_gradient = mean_gradient / (len(queries) + len(targets))
        query_gradient = torch.zeros(len(queries), dim, device=student.device)
        block_gradient = torch.empty(student_blocks.shape, device=student.device)
        for chunk in _chunks_of_blocks(student_blocks, len(queries) + len(targets)):
            prototypes = student_blocks[chunk].to(dtype)
            shares = _block_softmax(queries, prototypes)
            target_shares = _block_softmax(targets, teacher_blocks[chunk].to(dtype))
            overlaps = _overlaps(shares, target_shares, num_images=num_images)
            is_inside = (overlaps >= _EPSILON) & (overlaps <= 1.0 - _EPSILON)
            pulls = torch.where(is_inside, pair_weights / overlaps, 0.0)  # [B N, V, T]
            share_gradient = -torch.bmm(pulls, target_shares.reshape(len(pulls), -1, prototypes.shape[1]))
            share_gradient = share_gradient.view_as(shares).add_(mean_gradient[chunk][:, None])
            logit_gradient = torch.ops.aten._softmax_backward_data(share_gradient, shares, -1, torch.float32).to(dtype)
            del shares, target_shares, share_gradient  # before the products: 700 MiB
            query_gradient += _product(logit_gradient, prototypes).sum(dim=0)
            block_gradient[chunk] = _product(logit_gradient.transpose(1, 2), queries.expand(len(prototypes), -1, -1))
        student_gradient = query_gradient.reshape(num_images, num_views, dim).transpose(0, 1).to(student.dtype)
        return student_gradient, None, block_gradient.to(student_blocks.dtype), None, None


def _rows(views: Tensor, dtype: torch.dtype) -> Tensor:  # [V, N, D] -> [N V, D]
    """Views of one image in adjacent rows, so that an image's overlaps are one small matrix product."""
    return views.to(dtype).transpose(0, 1).reshape(-1, views.shape[-1])


def _pair_weights(student: Tensor, teacher: Tensor, *, num_blocks: int) -> Tensor:  # -> [V, T]
    """Weights of one overlap in the mean over blocks, images and pairs of different views."""
    num_terms = num_different_pairs(len(student), len(teacher)) * student.shape[1] * num_blocks
    return torch.full((len(student), len(teacher)), 1.0 / num_terms, device=student.device).fill_diagonal_(0.0)


def _chunks_of_blocks(blocks: Tensor, num_rows: int) -> Iterator[slice]:
    return equal_chunks(len(blocks), _MAX_LOGITS // (num_rows * blocks.shape[1]))


def _block_softmax(rows: Tensor, blocks: Tensor) -> Tensor:  # [R, D], [B, C, D] -> [B, R, C] float32
    return torch.softmax(_product(rows.expand(len(blocks), -1, -1), blocks.transpose(1, 2)), dim=-1)


def _overlaps(shares: Tensor, target_shares: Tensor, *, num_images: int) -> Tensor:
    """Inner products of the softmaxes of all views of an image: [B, N V, C], [B, N T, C] -> [B N, V, T]."""
    shape = (len(shares) * num_images, -1, shares.shape[-1])
    return torch.bmm(shares.reshape(shape), target_shares.reshape(shape).transpose(1, 2))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Batched product with float32 result: rounding logits of 25 to bfloat16 costs 0.06, more than rounded operands."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


def _check_inputs(student: Tensor, teacher: Tensor, student_blocks: Tensor, teacher_blocks: Tensor) -> None:
    check_shapes(
        {
            "student": (student, "views images dim"),
            "teacher": (teacher, "teacher_views images dim"),
            "student_blocks": (student_blocks, "blocks prototypes dim"),
            "teacher_blocks": (teacher_blocks, "blocks prototypes dim"),
        }
    )
    num_different_pairs(len(student), len(teacher))
