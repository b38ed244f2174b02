"""Health metrics and collapse signs of contrastive methods with batch norm (MoCo-v3, NNCLR)."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from massl.ops.scoring.feature_health import effective_rank, embedding_spread


@torch.no_grad()
def contrastive_health(features: Tensor, projector: nn.Module) -> dict[str, float]:  # [N, D]
    """Spread of the features and effective rank of their embeddings.

    The spread is taken before the projector, whose batch norm spreads any input.
    """
    return {
        "feature_spread": embedding_spread(normalize(features, dim=-1)),
        "embedding_rank": effective_rank(projector(features)),
    }


def contrastive_collapse_signs(metrics: Mapping[str, float]) -> list[str]:
    signs = []
    if metrics["loss_over_guessing"] > 0.99:
        share = f"{metrics['loss_over_guessing']:.3f} of its cross-entropy"
        signs.append(f"views find their own image among the batch no better than by guessing ({share})")
    if metrics["feature_spread"] < 0.02:
        signs.append(f"all features are nearly the same vector (spread {metrics['feature_spread']:.4f} of 1)")
    if metrics["embedding_rank"] < 2.0:
        signs.append(f"the embeddings span a single direction (effective rank {metrics['embedding_rank']:.2f})")
    return signs
