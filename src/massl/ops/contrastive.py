"""InfoNCE, and the nearest memory rows of NNCLR."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

_MAX_SIMILARITIES = 2**27  # at once, 0.5 GB; 4096 images and 98,304 rows together would need 3.2 GB


def info_nce(
    queries: Tensor, keys: Tensor, *, temperature: float, first_positive: int = 0
) -> tuple[Tensor, Tensor]:  # [V, N, D], [V, M, D], of unit length -> [], [] percent
    """InfoNCE (van den Oord et al., 2018), and how often a query's most similar key of its view is its own, in percent.

    Query i's own key has the index `first_positive` + i. Both results are means over views and queries:

        loss = - log( exp(q_i . k_i / temperature) / sum_j exp(q_i . k_j / temperature) )
    """
    # float32 even under autocast: bfloat16 logits of up to 10 would be off by 0.03
    with torch.autocast(queries.device.type, enabled=False):
        logits = (queries.float() @ keys.float().mT / temperature).flatten(0, 1)  # [V * N, M]
    own = (first_positive + torch.arange(queries.shape[1], device=queries.device)).repeat(queries.shape[0])
    picked = logits.detach().argmax(dim=1) == own
    return cross_entropy(logits, own), 100.0 * picked.float().mean()


@torch.no_grad()
def most_similar_rows(
    queries: Tensor, rows: Tensor, *, max_similarities: int = _MAX_SIMILARITIES
) -> tuple[Tensor, Tensor]:  # [N, D], [K, D], of unit length -> [N], [N]
    """Index and similarity of the row nearest to each query, in float32, `max_similarities` products at a time."""
    chunk_size = max(1, max_similarities // rows.shape[0])
    with torch.autocast(queries.device.type, enabled=False):
        found = [(chunk.float() @ rows.float().T).max(dim=1) for chunk in torch.split(queries, chunk_size)]
    return torch.cat([chunk.indices for chunk in found]), torch.cat([chunk.values for chunk in found])
