"""Numbers that tell a spread-out set of features from a collapsed one."""

import torch
from torch import Tensor
from torch.nn.functional import normalize


def effective_rank(features: Tensor) -> float:  # [N, D] -> number in [1, min(N, D)]
    """exp of the entropy of the normalised singular values (Roy & Vetterli, 2007; RankMe, Garrido et al., 2023).

    Features are not centred: a collapse to one vector then gives 1, however the small remainder is distributed.
    """
    singular_values = torch.linalg.svdvals(normalize(features.double(), dim=-1))
    shares = singular_values / singular_values.sum()
    shares = shares[shares > 0]
    return float(torch.exp(-(shares * shares.log()).sum()))


def embedding_spread(embeddings: Tensor) -> float:  # [N, D], L2-normalised -> number in [0, 1]
    """Root of the summed variance of unit embeddings: 0 when all are equal, 1 when their mean is the origin."""
    return float((1.0 - embeddings.double().mean(dim=0).square().sum()).clamp(min=0.0).sqrt())
