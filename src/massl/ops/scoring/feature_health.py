"""Measures of feature health: effective rank, decay of the spectrum, spread, and how evenly prototypes are used."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize


def effective_rank(features: Tensor) -> float:  # [N, D] -> number in [1, min(N, D)]
    """exp of the entropy of the normalised singular values (Roy & Vetterli, 2007; RankMe, Garrido et al., 2023).

    Features are not centred, so that a collapse to one vector gives 1, whatever the distribution of the remainder.
    """
    singular_values = torch.linalg.svdvals(normalize(features.double(), dim=-1))
    shares = singular_values / singular_values.sum()
    shares = shares[shares > 0]
    return float(torch.exp(-(shares * shares.log()).sum()))


_FIRST_EIGENVALUE, _LAST_EIGENVALUE = 5, 100  # the fit leaves out the few largest, which follow no power law
_LEAST_SHARE = 1e-12  # of the largest eigenvalue: smaller ones are rounding errors


def spectrum_decay(features: Tensor) -> float | None:  # [N, D] -> exponent; None: they vary in too few directions
    """Exponent alpha of the covariance spectrum of unit features, eigenvalue i ~ i**-alpha (alpha-ReQ, Agrawal et al.,
    2022): near 0 if all directions vary alike, large if few do.

    A line through the logarithms of eigenvalues 5 to 100, at most half of them, weighted by 1 / i as in Stringer et al.
    (2019), so that each octave counts alike.
    """
    rows = normalize(features.double(), dim=-1)
    rows = rows - rows.mean(dim=0)
    # the smaller of [D, D] and [N, N] has the same eigenvalues
    square = rows.T @ rows if rows.shape[1] <= rows.shape[0] else rows @ rows.T
    eigenvalues = torch.linalg.eigvalsh(square).flip(0)[: len(rows) - 1]  # centring takes one direction
    first = min(_FIRST_EIGENVALUE, len(eigenvalues) // 4 + 1)
    last = max(first + 1, min(_LAST_EIGENVALUE, len(eigenvalues) // 2))
    if last > len(eigenvalues):
        return None
    least = max(float(eigenvalues[0]), len(rows) * _LEAST_SHARE) * _LEAST_SHARE
    if float(eigenvalues[first - 1]) <= least:
        return None
    numbers = torch.arange(first, last + 1, dtype=torch.float64, device=features.device)
    kept = eigenvalues[first - 1 : last].clamp(min=least).log()
    weights = (1 / numbers) / (1 / numbers).sum()
    x, y = numbers.log() - (weights * numbers.log()).sum(), kept - (weights * kept).sum()
    return float(-(weights * x * y).sum() / (weights * x * x).sum())


def embedding_spread(embeddings: Tensor) -> float:  # [N, D], L2-normalised -> number in [0, 1]
    """Root of the summed variance of unit embeddings: 0 if all are equal, 1 if their mean is the origin."""
    return float((1.0 - embeddings.double().mean(dim=0).square().sum()).clamp(min=0.0).sqrt())


_MAX_LOGITS = 1 << 26  # held at once: 2**26 float32 = 256 MiB


@dataclass(frozen=True, kw_only=True)
class PrototypeUse:
    entropy: float  # mean over embeddings, in nats: 0 if each chooses one prototype, ln K if it cannot choose
    entropy_of_mean: float  # of the mean softmax: 0 if all embeddings choose the same one, ln K if all are used alike
    winner_share: float  # of the prototypes that could be nearest to some embedding, those that are


# [N, D], [K, D], [K]
def prototype_use(embeddings: Tensor, prototypes: Tensor, centre: Tensor, *, temperature: float) -> PrototypeUse:
    """Statistics of softmax((prototypes . embedding - centre) / temperature) over embeddings."""
    entropy_sum, share_sum = torch.zeros((), dtype=torch.float64), torch.zeros(len(prototypes), dtype=torch.float64)
    has_won = torch.zeros(len(prototypes), dtype=torch.bool)
    for chunk in torch.split(embeddings, max(1, _MAX_LOGITS // len(prototypes))):
        log_shares = torch.log_softmax((chunk @ prototypes.T - centre) / temperature, dim=-1)
        shares = log_shares.exp()
        entropy_sum -= (shares * log_shares).sum(dim=-1).double().sum().cpu()
        share_sum += shares.sum(dim=0).double().cpu()
        has_won[log_shares.argmax(dim=-1).cpu()] = True
    mean_shares = share_sum / len(embeddings)
    return PrototypeUse(
        entropy=float(entropy_sum / len(embeddings)),
        entropy_of_mean=float(-torch.xlogy(mean_shares, mean_shares).sum()),
        winner_share=float(has_won.sum()) / min(len(embeddings), len(prototypes)),
    )
