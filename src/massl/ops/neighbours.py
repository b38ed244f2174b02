"""Nearest neighbours by cosine similarity, and the weighted vote of the field's k-NN protocol."""

import torch
from torch import Tensor
from torch.nn.functional import normalize


def cosine_topk(
    queries: Tensor, database: Tensor, *, num_neighbours: int, chunk_rows: int = 4096
) -> tuple[Tensor, Tensor]:  # [Q, D], [M, D] -> [Q, k], [Q, k]
    """Similarities and row numbers of the `num_neighbours` most similar database rows, most similar first."""
    if not 0 < num_neighbours <= database.shape[0]:
        raise ValueError(f"asked for {num_neighbours} neighbours among {database.shape[0]} rows")
    rows = normalize(database.float(), dim=-1).T
    found = [torch.topk(normalize(chunk.float(), dim=-1) @ rows, num_neighbours, dim=-1) for chunk in torch.split(queries, chunk_rows)]
    return torch.cat([top.values for top in found]), torch.cat([top.indices for top in found])


def weighted_vote(
    similarities: Tensor, labels: Tensor, *, num_classes: int, temperature: float
) -> Tensor:  # [Q, k], [Q, k] -> [Q, num_classes]
    """Class scores: each neighbour votes for its label with weight exp(similarity / temperature) (Wu et al., 2018)."""
    # Subtracting the row's largest similarity changes no ranking and keeps exp() small.
    weights = torch.exp((similarities - similarities[:, :1]) / temperature)
    return torch.zeros(len(labels), num_classes, device=labels.device).scatter_add_(1, labels, weights)


def knn_accuracy(
    queries: Tensor, query_labels: Tensor, database: Tensor, database_labels: Tensor, *, num_neighbours: int, temperature: float = 0.07
) -> float:  # [Q, D], [Q], [M, D], [M] -> percent
    """Top-1 accuracy, in percent, of the weighted k-NN classifier."""
    similarities, indices = cosine_topk(queries, database, num_neighbours=min(num_neighbours, len(database)))
    num_classes = int(torch.maximum(database_labels.max(), query_labels.max())) + 1
    scores = weighted_vote(similarities, database_labels[indices], num_classes=num_classes, temperature=temperature)
    return 100.0 * float((scores.argmax(dim=1) == query_labels).double().mean())
