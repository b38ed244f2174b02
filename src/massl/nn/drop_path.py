"""Stochastic depth with given scales, so that they can be keyed by image, view and step."""

from collections.abc import Sequence

import torch
from timm.layers.drop import DropPath
from torch import Tensor, nn

from massl import keyed_random


class KeyedDropPath(nn.Module):
    """Multiplies each sample's residual branch by 0 or 1 / keep; set `scales` before each forward pass."""

    def __init__(self, drop_probability: float, *, layer: int) -> None:
        super().__init__()
        self.drop_probability = drop_probability
        self.layer = layer  # its row in the scales of the whole network
        self.scales: Tensor | None = None  # [B]; None: the branch is unchanged

    def forward(self, branch: Tensor) -> Tensor:  # [B, ...]
        if self.scales is None:
            return branch
        return branch * self.scales.to(branch.dtype).reshape(-1, *[1] * (branch.dim() - 1))


def replace_drop_paths(model: nn.Module) -> list[KeyedDropPath]:
    """Replace every timm DropPath of the model by a keyed one, in place; returns them in order."""
    replaced: list[KeyedDropPath] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, DropPath):
                keyed = KeyedDropPath(float(child.drop_prob or 0.0), layer=len(replaced))
                setattr(parent, name, keyed)
                replaced.append(keyed)
    return replaced


def keep_probabilities(drop_paths: list[KeyedDropPath]) -> Tensor:  # -> [num_drop_paths]
    return torch.tensor([1.0 - drop_path.drop_probability for drop_path in drop_paths])


def draw_scales(keep: Tensor, sample_keys: Tensor) -> Tensor:  # [num_drop_paths], [B] -> [num_drop_paths, B]
    """For each layer and sample: 0 with the layer's drop probability, else 1 / keep."""
    layers = torch.arange(len(keep), device=sample_keys.device)[:, None]
    return (keyed_random.uniform("drop path", layers, sample_keys[None, :]) < keep[:, None]) / keep[:, None]


# [num_drop_paths, sum R_i]
def split_scales(scales: Tensor | None, view_groups: list[Tensor]) -> Sequence[Tensor | None]:
    if scales is None:
        return [None] * len(view_groups)
    return torch.split(scales, [len(group) for group in view_groups], dim=1)
