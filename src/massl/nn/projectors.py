"""Projectors and predictors with batch norm (MoCo-v3, NNCLR), and an encoder that shows them one view at a time."""

import itertools
from collections.abc import Sequence
from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from massl.config import Settings
from massl.nn.backbone import Backbone
from massl.nn.batch_norm import BatchNorm


class ProjectorSettings(Settings):
    num_layers: int = Field(default=3, ge=1, description="linear layers of the projector")
    hidden_dim: int = Field(default=4096, gt=0, description="width of its hidden layers")
    out_dim: int = Field(default=256, gt=0, description="dimension of the embeddings that are compared")


class PredictorSettings(Settings):
    num_layers: int = Field(default=2, ge=1, description="linear layers of the predictor")
    hidden_dim: int = Field(default=4096, gt=0, description="width of its hidden layers")


LastNorm = Literal["scaled", "plain", "none"]  # what follows the last layer: batch norm with weights, without, or nothing


class BatchNormMLP(nn.Module):
    """Linear layers, batch norm and ReLU after each but the last, which `last_norm` follows.

    Nothing has a bias that a batch norm would take away again: not the layers before one, nor the last norm, whose embeddings go to a
    predictor that begins so. Its gradient would be zero but for rounding, which AdamW scales up to steps as long as any other's.
    Initial weights are torch's own, as in the official MoCo-v3.
    """

    def __init__(self, dims: Sequence[int], *, last_norm: LastNorm) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for layer_in, layer_out in itertools.pairwise(dims[:-1]):
            layers += [nn.Linear(layer_in, layer_out, bias=False), BatchNorm(layer_out), nn.ReLU()]
        layers.append(nn.Linear(dims[-2], dims[-1], bias=last_norm == "none"))
        if last_norm != "none":
            layers.append(BatchNorm(dims[-1], scale=last_norm == "scaled", shift=False))
        self.layers = nn.Sequential(*layers)

    def forward(self, rows: Tensor) -> Tensor:  # [..., N, in_dim] -> [..., N, out_dim], float32
        return self.layers(rows).float()  # type: ignore[no-any-return]


def build_projector(in_dim: int, settings: ProjectorSettings, *, last_norm: LastNorm) -> BatchNormMLP:
    hidden = [settings.hidden_dim] * (settings.num_layers - 1)
    return BatchNormMLP([in_dim, *hidden, settings.out_dim], last_norm=last_norm)


def build_predictor(dim: int, settings: PredictorSettings, *, last_norm: LastNorm) -> BatchNormMLP:
    """From embeddings to embeddings."""
    hidden = [settings.hidden_dim] * (settings.num_layers - 1)
    return BatchNormMLP([dim, *hidden, dim], last_norm=last_norm)


class ViewwiseEncoder(nn.Module):
    """A backbone and a head that takes the statistics of each view apart, as if it were called once for each."""

    def __init__(self, backbone: Backbone, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, views: Tensor, sample_keys: Tensor | None = None) -> Tensor:  # [V, B, 3, H, W], [V, B] -> [V, B, D]
        features = self.backbone.pooled([views.flatten(0, 1)], None if sample_keys is None else sample_keys.flatten())
        return self.head(features.reshape(*views.shape[:2], -1))  # type: ignore[no-any-return]
