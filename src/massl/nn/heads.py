"""Projection heads, projectors and predictors, and the batch norm they share."""

import itertools
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import normalize

from massl import distributed
from massl.config import RecipeError, Settings

_EPSILON = 1e-5  # torch's, and that of every method here


class BatchNorm(nn.Module):
    """Batch norm (Ioffe and Szegedy, 2015) with batch statistics only, per view and over all ranks.

    There are no running statistics: only evaluation would read them, and heads are not used after training. So a
    forward pass changes nothing, and a teacher uses its own batch too, as in MoCo-v3. A batch spread over ranks gives
    the result and gradients of one process with the whole batch, as torch's SyncBatchNorm does.
    """

    def __init__(self, dim: int, *, scale: bool = True, shift: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim)) if scale else None
        self.bias = nn.Parameter(torch.zeros(dim)) if shift else None

    def forward(self, rows: Tensor) -> Tensor:  # [..., N, D] -> the same, float32
        """Normalise over the N rows of all ranks, separately for each leading index; then weight and bias, if any."""
        num_rows = rows.shape[-2] * distributed.world_size()
        if num_rows < 2:
            raise RecipeError("batch norm needs at least two images in a batch: raise trainer.batch_size")
        rows = rows.float()  # in bfloat16 the mean of 4096 rows has 3 digits
        mean = distributed.sum_over_ranks(rows.sum(dim=-2, keepdim=True)) / num_rows
        # subtract before squaring: mean of squares minus square of mean loses digits if the mean is large
        centred = rows - mean
        variance = distributed.sum_over_ranks(centred.square().sum(dim=-2, keepdim=True)) / num_rows
        normed = centred * torch.rsqrt(variance + _EPSILON)
        scaled = normed if self.weight is None else normed * self.weight
        return scaled if self.bias is None else scaled + self.bias


class HeadSettings(Settings):
    num_layers: int = Field(default=3, ge=1, description="linear layers of the projection head")
    hidden_dim: int = Field(default=2048, gt=0, description="width of its hidden layers")
    out_dim: int = Field(default=256, gt=0, description="dimension of the embedding")


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
        # float32: unit length to 7 digits in any precision of the layers
        return normalize(self.mlp(features).float(), dim=-1, eps=1e-6)


class BatchNormHead(nn.Module):
    """MLP with batch norm and GELU after each layer but the last (DINO's head for convolutional networks).

    The statistics are over all rows: all views of both sizes and all processes. Layers before a batch norm have no
    bias, because the norm would remove it.
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


class ProjectorSettings(Settings):
    num_layers: int = Field(default=3, ge=1, description="linear layers of the projector")
    hidden_dim: int = Field(default=4096, gt=0, description="width of its hidden layers")
    out_dim: int = Field(default=256, gt=0, description="dimension of the embeddings")


class PredictorSettings(Settings):
    num_layers: int = Field(default=2, ge=1, description="linear layers of the predictor")
    hidden_dim: int = Field(default=4096, gt=0, description="width of its hidden layers")


LastNorm = Literal["scaled", "plain", "none"]  # after the last layer: batch norm with weight, without, or nothing


class BatchNormMLP(nn.Module):
    """Linear layers with batch norm and ReLU after each but the last, which `last_norm` follows.

    No bias precedes a batch norm, which would remove it: neither in the layers nor in the last norm, whose embeddings
    go to a predictor. Its gradient would be pure rounding error, which AdamW scales up to full steps. Initial weights
    are torch's defaults, as in the official MoCo-v3.
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
    hidden = [settings.hidden_dim] * (settings.num_layers - 1)
    return BatchNormMLP([dim, *hidden, dim], last_norm=last_norm)
