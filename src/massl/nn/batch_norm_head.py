"""A projection head with batch norm."""

import itertools

from torch import Tensor, nn
from torch.nn.functional import normalize

from massl.nn.batch_norm import BatchNorm
from massl.nn.heads import HeadSettings


class BatchNormHead(nn.Module):
    """MLP with batch norm and GELU after each layer but the last (DINO's head for convolutional networks).

    The statistics are those of all rows together: of all views of both sizes, and of all processes. A layer has a bias only where no batch
    norm would take it away again.
    """

    def __init__(self, in_dim: int, settings: HeadSettings, *, unit_length: bool) -> None:
        super().__init__()
        self.unit_length = unit_length
        dims = [in_dim] + [settings.hidden_dim] * (settings.num_layers - 1)
        layers: list[nn.Module] = []
        for layer_in, layer_out in itertools.pairwise(dims):
            layers += [nn.Linear(layer_in, layer_out, bias=False), BatchNorm(layer_out), nn.GELU()]
        layers.append(nn.Linear(dims[-1], settings.out_dim))
        self.mlp = nn.Sequential(*layers)
        for layer in layers:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
        nn.init.zeros_(layers[-1].bias)  # type: ignore[arg-type]

    def forward(self, features: Tensor) -> Tensor:  # [N, in_dim] -> [N, out_dim] float32
        embeddings: Tensor = self.mlp(features).float()
        return normalize(embeddings, dim=-1, eps=1e-6) if self.unit_length else embeddings
