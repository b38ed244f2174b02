"""Quality of a ranking: average precision by the trapezoid rule, and precision among the first k.

Both follow the revisited Oxford and Paris benchmark (Radenović et al., 2018), as does Copydays: junk images, neither
right nor wrong for a query, are removed from its ranking first.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from massl.ops.scoring.finite import require_finite


def rank_by_cosine(queries: Tensor, database: Tensor) -> Tensor:  # [Q, D], [M, D] -> [Q, M] int64
    """Database rows by cosine similarity to each query, most similar first; ties keep their order."""
    require_finite(queries, name="the queries")
    require_finite(database, name="the database")
    similarities = normalize(queries.float(), dim=-1) @ normalize(database.float(), dim=-1).T
    return torch.argsort(similarities, dim=1, descending=True, stable=True)


# [Q, R] int64, bool [Q, M], bool [Q, M] -> [Q]
def average_precisions(rankings: Tensor, positive: Tensor, junk: Tensor) -> Tensor:
    """Area under each query's precision-recall curve by trapezoids, in [0, 1]; NaN for a query without positives.

    Positives beyond the end of a short ranking (R < M) add nothing. A single positive at rank r counts 1 if r is 0, and
    1 / (2 (r + 1)) otherwise: half of the usual, because the curve rises to it from precision 0.
    """
    is_hit, ranks = _hits(rankings, positive, junk)
    num_hits_above = (is_hit.cumsum(dim=1) - 1).double()
    precision_before = torch.where(ranks == 0, 1.0, num_hits_above / ranks.clamp_min(1))
    precision_after = (num_hits_above + 1) / (ranks + 1)
    areas = torch.where(is_hit, (precision_before + precision_after) / 2, 0.0).sum(dim=1)
    return areas / positive.sum(dim=1)  # 0 / 0 is NaN


# [Q, M] int64, bool [Q, M], [Q, M] -> [Q]
def precisions_at(rankings: Tensor, positive: Tensor, junk: Tensor, *, k: int) -> Tensor:
    """Share of positives among the first k of each whole ranking, in [0, 1]; NaN for a query without positives.

    Only ranks up to the last positive count, so that a query with few positives can reach 1.
    """
    assert rankings.shape == positive.shape, "a ranking that ends early does not say where the last positive is"
    is_hit, ranks = _hits(rankings, positive, junk)
    num_judged = torch.where(is_hit, ranks + 1, 0).amax(dim=1).clamp_max(k)
    return (is_hit & (ranks < num_judged[:, None])).sum(dim=1).double() / num_judged  # 0 / 0 is NaN


def mean_of_answered(scores: Tensor) -> tuple[float, int]:  # [Q] -> mean, number of queries
    """Mean and number of the queries that are not NaN, i.e. have positives."""
    answered = scores[~scores.isnan()]
    return float(answered.mean()), len(answered)


def _hits(rankings: Tensor, positive: Tensor, junk: Tensor) -> tuple[Tensor, Tensor]:  # -> bool [Q, R], int64 [Q, R]
    """Which places are positives, and the rank of each place without the junk above it."""
    is_junk = junk.gather(1, rankings)
    places = torch.arange(rankings.shape[1], device=rankings.device)
    return positive.gather(1, rankings), places - (is_junk.cumsum(dim=1) - is_junk.long())
