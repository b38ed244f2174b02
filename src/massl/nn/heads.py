"""Projection heads."""

import itertools

from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import normalize

from massl.config import Settings


class HeadSettings(Settings):
    num_layers: int = Field(default=3, ge=1, description="linear layers of the projection head")
    hidden_dim: int = Field(default=2048, gt=0, description="width of its hidden layers")
    out_dim: int = Field(default=256, gt=0, description="dimension of the embedding that is compared with the memory")


class ProjectionHead(nn.Module):
    """MLP with GELU and biases, no batch norm; the output has unit length (DINO's head without its prototype layer)."""

    def __init__(self, in_dim: int, settings: HeadSettings) -> None:
        super().__init__()
        dims = [in_dim] + [settings.hidden_dim] * (settings.num_layers - 1) + [settings.out_dim]
        layers: list[nn.Module] = []
        for layer_in, layer_out in itertools.pairwise(dims):
            linear = nn.Linear(layer_in, layer_out)
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
            layers += [linear, nn.GELU()]
        self.mlp = nn.Sequential(*layers[:-1])

    def forward(self, features: Tensor) -> Tensor:  # [B, in_dim] -> [B, out_dim] float32
        # float32: unit length to 7 digits, whatever the precision of the layers
        return normalize(self.mlp(features).float(), dim=-1, eps=1e-6)
