"""Many linear classifiers trained at once on the same features, with closed-form gradients instead of autograd.

All heads share one matrix product: [B, D] x [D, H * C]. With 90 heads of 1000 classes, a step on 1024 rows of 1536
numbers is 0.6 TFLOP and needs 2.4 GB beside the features.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from massl.ops.scoring.finite import require_finite

MOMENTUM = 0.9
_MAX_LOGITS = 100_000_000  # held at once while classifying: 400 MB


@dataclass(frozen=True, kw_only=True)
class LinearHeads:
    """H classifiers and the momentum of their SGD. Only `sgd_step_` changes the tensors."""

    weights: Tensor  # [H, C, D] float32
    biases: Tensor  # [H, C]
    weight_momentum: Tensor  # [H, C, D]
    bias_momentum: Tensor  # [H, C]


def new_heads(weights: Tensor) -> LinearHeads:  # [H, C, D]
    """Heads with these weights (not copied), zero biases and no momentum."""
    biases = weights.new_zeros(weights.shape[:2])
    return LinearHeads(
        weights=weights,
        biases=biases,
        weight_momentum=torch.zeros_like(weights),
        bias_momentum=torch.zeros_like(biases),
    )


def _head_logits(weights: Tensor, biases: Tensor, rows: Tensor) -> Tensor:  # [H, C, D], [H, C], [B, D] -> [B, H, C]
    return torch.addmm(biases.flatten(), rows, weights.flatten(0, 1).T).view(-1, *biases.shape)


def mean_loss_gradients(
    heads: LinearHeads, rows: Tensor, labels: Tensor, *, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # [B, D], [B], [B, H] bool -> [H, C, D], [H, C]
    """Gradients of each head's mean cross-entropy over its `kept` rows, (softmax - one-hot) / number; 0 for no rows."""
    errors = _head_logits(heads.weights, heads.biases, rows).softmax(dim=2)
    errors[torch.arange(len(rows), device=rows.device), :, labels] -= 1.0
    if kept is None:
        errors /= len(rows)
    else:
        errors *= (kept / kept.sum(dim=0).clamp_min(1))[:, :, None]
    return (errors.flatten(1).T @ rows).view_as(heads.weights), errors.sum(dim=0)


def sgd_step_(heads: LinearHeads, rows: Tensor, labels: Tensor, *, rates: Tensor, kept: Tensor | None = None) -> None:
    """One step of PyTorch's SGD with momentum; head h learns with `rates[h]` from the rows `kept[:, h]`.

    A head that sees none of the rows keeps its weights and momentum, as if there had been no batch.
    """
    weight_gradients, bias_gradients = mean_loss_gradients(heads, rows, labels, kept=kept)
    momentum = torch.full_like(rates, MOMENTUM)
    if kept is not None:
        sees_rows = kept.any(dim=0)
        rates, momentum = rates * sees_rows, momentum.where(sees_rows, 1.0)
    for values, moments, gradients in (
        (heads.weights, heads.weight_momentum, weight_gradients),
        (heads.biases, heads.bias_momentum, bias_gradients),
    ):
        per_head = (-1, *[1] * (values.dim() - 1))
        moments.mul_(momentum.view(per_head)).add_(gradients)
        values.addcmul_(moments, rates.view(per_head), value=-1.0)


# [H, C, D], [H, C], [N, D], [N] -> [H] int64
def count_correct(weights: Tensor, biases: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
    """How many rows each head classifies correctly; none for a head whose numbers have overflowed."""
    correct = torch.zeros(len(weights), dtype=torch.int64, device=rows.device)
    chunk_rows = max(1, _MAX_LOGITS // biases.numel())
    for some_rows, some_labels in zip(torch.split(rows, chunk_rows), torch.split(labels, chunk_rows), strict=True):
        logits = _head_logits(weights, biases, some_rows)
        of_label = logits.gather(2, some_labels[:, None, None].expand(-1, len(weights), 1))[:, :, 0]
        correct += ((logits.argmax(dim=2) == some_labels[:, None]) & of_label.isfinite()).sum(dim=0)
    return correct


def classify(weights: Tensor, bias: Tensor, rows: Tensor) -> Tensor:  # [C, D], [C], [N, D] -> [N]
    """The class with the largest logit."""
    require_finite(rows, name="the features")
    chunks = torch.split(rows, max(1, _MAX_LOGITS // len(bias)))
    return torch.cat([torch.addmm(bias, chunk, weights.T).argmax(dim=1) for chunk in chunks])


@contextmanager
def matrix_products(*, allow_tf32: bool) -> Iterator[None]:
    """Exact float32 products on GPUs, or TF32 (11-bit operands, several times as fast); restored on exit."""
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32" if allow_tf32 else "ieee"
    try:
        yield
    finally:
        products.fp32_precision = before
