"""A softmax temperature that keeps the mean entropy of the softmax at a target.

A temperature means something only relative to how spread the embeddings are: 0.04 gives an untrained teacher 5.8 nats
of at most 6.9 over 1,024 memory rows (320 rows share the weight), a trained one 1.3 nats (4 rows). After each step

    log tau <- log tau + 0.05 (target - entropy)

so the temperature finds its own warm-up, whatever the network, the data and the number of rows.
"""

import math

import torch
from torch import Tensor, nn

from massl import distributed

_RATE = 0.05  # an entropy one nat too high lowers the temperature by 5 % a step
_SMALLEST, _LARGEST = 0.003, 0.5


class HeldTemperature(nn.Module):
    """The temperature as a scalar buffer, so that checkpoints hold it and a CUDA graph updates it in place."""

    logarithm: Tensor  # []

    def __init__(self, *, start: float, entropy: float) -> None:
        super().__init__()
        self.entropy = entropy
        self.register_buffer("logarithm", torch.tensor(math.log(start)))

    def forward(self) -> Tensor:  # -> []
        return self.logarithm.exp()

    @torch.no_grad()
    def follow(self, entropy: Tensor) -> None:  # [] of this process's batch, in nats
        """Move against the difference between the batch's mean entropy, over all processes, and the target."""
        excess = distributed.mean_over_ranks(entropy) - self.entropy
        self.logarithm.sub_(excess, alpha=_RATE).clamp_(math.log(_SMALLEST), math.log(_LARGEST))
