"""Position embeddings at sizes other than the one they were made for."""

import functools

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn.functional import interpolate


@functools.lru_cache(maxsize=64)
def _resampling_matrix(old_side: int, new_height: int, new_width: int) -> Tensor:  # -> [new_height * new_width, old_side ** 2]
    """Bicubic resampling by the scale factor (n_new + 0.1) / n_old per axis, no antialias: the rule of DINO, iBOT and MaSSL.

    The extra 0.1 stretches the grid slightly; timm resamples to the exact size with antialias, which differs by 7 % at 96 px.
    Resampling is linear, so its matrix is what it makes of the identity. As a product it is deterministic on the GPU, where
    interpolate's backward is not.
    """
    # float32, as the authors resample: with coordinates in float64 the result is off from theirs by 4e-6 instead of 7e-7.
    with torch.inference_mode(False):
        identity = torch.eye(old_side * old_side).reshape(old_side * old_side, 1, old_side, old_side)
        scale = ((new_height + 0.1) / old_side, (new_width + 0.1) / old_side)
        resampled = interpolate(identity, scale_factor=scale, mode="bicubic", align_corners=False, recompute_scale_factor=False)
        assert resampled.shape[-2:] == (new_height, new_width), resampled.shape
        return resampled.flatten(1).T.contiguous()


def resample_positions(positions: Tensor, new_height: int, new_width: int) -> Tensor:  # [1, n * n, D] -> [1, new_height * new_width, D]
    """Patch position embeddings of a square grid, resampled the DINO way; unchanged on the grid they were made for."""
    side = round(positions.shape[1] ** 0.5)
    if side * side != positions.shape[1]:
        raise ValueError(f"{positions.shape[1]} position embeddings form no square grid")
    if (new_height, new_width) == (side, side):
        return positions
    return _matrix_on(positions.device, positions.dtype, side, new_height, new_width) @ positions


@functools.lru_cache(maxsize=64)  # on the device too: a copy from the host cannot be part of a CUDA graph
def _matrix_on(device: torch.device, dtype: torch.dtype, old_side: int, new_height: int, new_width: int) -> Tensor:
    with torch.inference_mode(False):  # kept for later calls, which may want gradients
        return _resampling_matrix(old_side, new_height, new_width).to(device=device, dtype=dtype)


def model_positions(model: VisionTransformer, height: int, width: int) -> Tensor | None:  # -> [1, prefix + height * width, D]
    """The position embeddings a transformer adds to a grid of patches, those of its prefix tokens first; None where it has none."""
    if model.pos_embed is None:
        return None
    num_prefix = 0 if model.no_embed_class else model.num_prefix_tokens
    resampled = resample_positions(model.pos_embed[:, num_prefix:], height, width)
    return torch.cat([model.pos_embed[:, :num_prefix], resampled], dim=1)
