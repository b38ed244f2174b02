"""The last layer of DINO's head: learned prototypes, and the centre that keeps one of them from always winning."""

import torch
from pydantic import Field
from torch import Tensor, nn

from massl import distributed
from massl.config import Settings


class PrototypeSettings(Settings):
    num_prototypes: int = Field(65_536, gt=1, description="K: number of prototypes an embedding is compared with")
    unit_length: bool = Field(
        True, description="prototypes have length 1; False learns lengths: better for ViT-S, unstable for larger ViTs"
    )
    frozen_epochs: int = Field(1, ge=0, description="first epochs in which the prototypes are not trained")
    centre_momentum: float = Field(0.9, ge=0.0, lt=1.0, description="momentum of the mean of the teacher's output")


class Prototypes(nn.Module):
    """K vectors p_k = length_k * direction_k / |direction_k| (weight normalisation; Salimans and Kingma, 2016).

    As in DINO's head, directions start like the weights of a linear layer and lengths at 1. The EMA covers both.
    """

    def __init__(self, dim: int, settings: PrototypeSettings) -> None:
        super().__init__()
        bound = dim**-0.5
        self.directions = nn.Parameter(torch.empty(settings.num_prototypes, dim).uniform_(-bound, bound))
        # a column, so that weight decay applies to it as to matrices, as in the authors' code
        self.lengths = nn.Parameter(torch.ones(settings.num_prototypes, 1), requires_grad=not settings.unit_length)

    def forward(self) -> Tensor:  # -> [K, D]
        # one kernel each way; separate operations would keep four more tensors of K x D (64 MiB each in DINO)
        return torch._weight_norm(self.directions, self.lengths, 0)


class Centre(nn.Module):
    """Running mean of the teacher's similarity to each prototype over all processes (Caron et al., 2021, eq. 4)."""

    value: Tensor  # [K]

    def __init__(self, settings: PrototypeSettings) -> None:
        super().__init__()
        self.momentum = settings.centre_momentum
        self.register_buffer("value", torch.zeros(settings.num_prototypes))

    @torch.no_grad()
    def follow(self, embeddings: Tensor, prototypes: Tensor) -> None:  # [n, D] of this process, [K, D]
        """Move towards the mean similarity of these embeddings to the teacher's prototypes.

        The mean of products is the product with the mean, so the n x K similarities are not computed.
        """
        mean = distributed.mean_over_ranks(embeddings.float().mean(dim=0))
        self.value.mul_(self.momentum).add_(prototypes @ mean, alpha=1.0 - self.momentum)
