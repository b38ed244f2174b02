"""Signs of life that contrastive methods with batch norm share (MoCo-v3, NNCLR)."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from massl.ops.scoring.feature_health import effective_rank, embedding_spread


@torch.no_grad()
def contrastive_health(features: Tensor, projector: nn.Module) -> dict[str, float]:  # [N, D]
    """How the features spread, and how many dimensions their embeddings use.

    The spread is that of the features, before the projector: its batch norm spreads whatever it is given, so that of
    the embeddings says nothing.
    """
    return {
        "feature_spread": embedding_spread(normalize(features, dim=-1)),
        "embedding_rank": effective_rank(projector(features)),
    }


def contrastive_collapse_signs(metrics: Mapping[str, float]) -> list[str]:
    signs = []
    if metrics["loss_over_guessing"] > 0.99:
        share = metrics["loss_over_guessing"]
        signs.append(
            f"views find their own image among the batch no better than by guessing ({share:.3f} of the cross-entropy of guessing)"
        )
    if metrics["feature_spread"] < 0.02:
        signs.append(f"all features are nearly the same vector (spread {metrics['feature_spread']:.4f} of 1)")
    if metrics["embedding_rank"] < 2.0:
        signs.append(f"the embeddings span a single direction (effective rank {metrics['embedding_rank']:.2f})")
    return signs
