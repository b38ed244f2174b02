"""The last layer of DINO's head: prototypes of a learnt direction, and the centre that keeps any of them from winning
everywhere.
"""

import torch
from pydantic import Field
from torch import Tensor, nn

from massl import distributed
from massl.config import Settings


class PrototypeSettings(Settings):
    num_prototypes: int = Field(
        default=65_536, gt=1, description="K: how many prototypes an embedding is compared with"
    )
    unit_length: bool = Field(
        default=True,
        description="all prototypes keep length 1; False learns their lengths: better for ViT-S, unstable for larger networks",
    )
    frozen_epochs: int = Field(
        default=1, ge=0, description="epochs at the start during which the prototypes stand still"
    )
    centre_momentum: float = Field(
        default=0.9, ge=0.0, lt=1.0, description="how slowly the centre follows the teacher's mean output"
    )


class Prototypes(nn.Module):
    """K vectors p_k = length_k * direction_k / |direction_k| (weight normalisation; Salimans and Kingma, 2016).

    As in DINO's head, directions start like the weights of a linear layer and lengths at 1. Both are parameters of the
    teacher's average.
    """

    def __init__(self, dim: int, settings: PrototypeSettings) -> None:
        super().__init__()
        bound = dim**-0.5
        self.directions = nn.Parameter(torch.empty(settings.num_prototypes, dim).uniform_(-bound, bound))
        # A column, so that it decays with the matrices, as in the authors' code.
        self.lengths = nn.Parameter(torch.ones(settings.num_prototypes, 1), requires_grad=not settings.unit_length)

    def forward(self) -> Tensor:  # -> [K, D]
        # One kernel each way; spelled out, the gradient would keep four more tensors of K x D (64 MiB each at DINO's
        # size).
        return torch._weight_norm(self.directions, self.lengths, 0)


class Centre(nn.Module):
    """Running mean of the teacher's similarities to each prototype over the batches of all processes (Caron et al.,
    2021, eq. 4).
    """

    value: Tensor  # [K]

    def __init__(self, settings: PrototypeSettings) -> None:
        super().__init__()
        self.momentum = settings.centre_momentum
        self.register_buffer("value", torch.zeros(settings.num_prototypes))

    @torch.no_grad()
    def follow(self, embeddings: Tensor, prototypes: Tensor) -> None:  # [n, D] of this process, [K, D]
        """Move towards the mean similarity of these embeddings; the prototypes are those that the teacher used.

        The mean of products is the product with the mean, so n x K similarities need not exist.
        """
        mean = distributed.mean_over_ranks(embeddings.float().mean(dim=0))
        self.value.mul_(self.momentum).add_(prototypes @ mean, alpha=1.0 - self.momentum)
