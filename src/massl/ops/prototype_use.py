"""How a set of embeddings uses prototypes: sharply or not, all of them or one."""

from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_LOGITS = 1 << 26  # held at once: 2**26 float32 = 256 MiB


@dataclass(frozen=True, kw_only=True)
class PrototypeUse:
    entropy: float  # mean entropy of the softmaxes, in nats: 0 when each embedding chooses one prototype, ln K when it cannot choose
    entropy_of_mean: float  # entropy of the mean softmax: 0 when all embeddings choose the same one, ln K when all are used alike
    winner_share: float  # prototypes that are the nearest one of some embedding, of those that could be


def prototype_use(embeddings: Tensor, prototypes: Tensor, centre: Tensor, *, temperature: float) -> PrototypeUse:  # [N, D], [K, D], [K]
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
