"""Nearest neighbours by cosine similarity, and the weighted vote of the k-NN protocol (Wu et al., 2018)."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from massl.ops.scoring.finite import require_finite


def cosine_topk(
    queries: Tensor, database: Tensor, *, num_neighbours: int, chunk_rows: int = 4096
) -> tuple[Tensor, Tensor]:  # [Q, D], [M, D] -> [Q, k], [Q, k]
    """Similarities and indices of the `num_neighbours` most similar database rows, most similar first."""
    if not 0 < num_neighbours <= database.shape[0]:
        raise ValueError(f"{num_neighbours} neighbours requested among {database.shape[0]} rows")
    require_finite(queries, name="the queries")
    require_finite(database, name="the database")
    rows = normalize(database.float(), dim=-1).T
    found = [
        torch.topk(normalize(chunk.float(), dim=-1) @ rows, num_neighbours, dim=-1)
        for chunk in torch.split(queries, chunk_rows)
    ]
    return torch.cat([top.values for top in found]), torch.cat([top.indices for top in found])


def without(
    similarities: Tensor, indices: Tensor, left_out: Tensor, *, num_neighbours: int
) -> tuple[Tensor, Tensor]:  # [Q, k + 1], [Q, k + 1], [Q, k + 1] bool -> [Q, k], [Q, k]
    """The most similar rows that are not left out; where too few remain, their similarity is minus infinity."""
    similarities, order = similarities.masked_fill(left_out, -torch.inf).sort(dim=1, descending=True, stable=True)
    return similarities[:, :num_neighbours], indices.gather(1, order)[:, :num_neighbours]


def weighted_vote(
    similarities: Tensor, labels: Tensor, *, num_classes: int, temperature: float
) -> Tensor:  # [Q, k], [Q, k] -> [Q, num_classes]
    """Class scores: each neighbour votes for its label with weight exp(similarity / temperature)."""
    # Subtracting the row's largest similarity changes no ranking and prevents overflow.
    weights = torch.exp((similarities - similarities[:, :1]) / temperature)
    return torch.zeros(len(labels), num_classes, device=labels.device).scatter_add_(1, labels, weights)


def knn_accuracy(
    queries: Tensor,
    query_labels: Tensor,
    database: Tensor,
    database_labels: Tensor,
    *,
    num_neighbours: int,
    temperature: float = 0.07,
) -> float:  # [Q, D], [Q], [M, D], [M] -> percent
    """Top-1 accuracy, in percent, of the weighted k-NN classifier."""
    similarities, indices = cosine_topk(queries, database, num_neighbours=min(num_neighbours, len(database)))
    return _vote_accuracy(similarities, indices, query_labels, database_labels, temperature=temperature)


def knn_accuracy_among_others(
    queries: Tensor,
    query_labels: Tensor,
    database: Tensor,
    database_labels: Tensor,
    query_images: Tensor,
    database_images: Tensor,
    *,
    num_neighbours: int,
    temperature: float,
) -> float:  # [Q, D], [Q], [M, D], [M], [Q], [M] -> percent
    """`knn_accuracy` without the query's own image: its row has no vote, and the next takes its place."""
    similarities, rows = cosine_topk(queries, database, num_neighbours=min(num_neighbours + 1, len(database)))
    itself = database_images[rows] == query_images[:, None]
    similarities, rows = without(similarities, rows, itself, num_neighbours=num_neighbours)
    return _vote_accuracy(similarities, rows, query_labels, database_labels, temperature=temperature)


def own_image_found(views: Tensor, images: Tensor) -> float:  # [N, D], [N, D] -> percent
    """How often a view of an image is nearest to that image among all; by chance 100 / N, also for equal features."""
    nearest = cosine_topk(views, images, num_neighbours=1)[1].squeeze(1)
    return 100.0 * float((nearest == torch.arange(len(images), device=nearest.device)).double().mean())


def _vote_accuracy(
    similarities: Tensor, indices: Tensor, query_labels: Tensor, database_labels: Tensor, *, temperature: float
) -> float:
    num_classes = int(torch.maximum(database_labels.max(), query_labels.max())) + 1
    scores = weighted_vote(similarities, database_labels[indices], num_classes=num_classes, temperature=temperature)
    return 100.0 * float((scores.argmax(dim=1) == query_labels).double().mean())
