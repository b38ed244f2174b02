"""Position embeddings: resampling to other image sizes, and the fixed ones of MoCo-v3 and MAE."""

import functools
from typing import Literal, get_args

import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import interpolate

from massl.config import RecipeError

FirstAxis = Literal["rows", "columns"]
# How position embeddings are resampled to another size. Backbone files name the rule, in training and evaluation.
# dino: DINO, iBOT, MaSSL, DINOv2 without registers, and all runs of massl. timm: timm, and DINOv2 with registers.
ResamplingRule = Literal["dino", "timm"]
RESAMPLING_RULES: tuple[ResamplingRule, ...] = get_args(ResamplingRule)
RESAMPLING_RULE: ResamplingRule = "dino"
_MAX_WEIGHTS = 2**29  # of a resampling: 2 GiB; from 128 x 128 to 181 x 181


def resampling_rule(model: nn.Module) -> ResamplingRule:
    """The rule of a model: `create_timm_model` has noted it where it is not the usual one."""
    rule: ResamplingRule = getattr(model, "position_resampling", RESAMPLING_RULE)
    return rule


@functools.lru_cache(maxsize=64)
# -> [new_height * new_width, old_side ** 2]
def _resampling_matrix(rule: ResamplingRule, old_side: int, new_height: int, new_width: int) -> Tensor:
    """Bicubic resampling, by DINO's rule by (n_new + 0.1) / n_old per axis without antialias.

    The extra 0.1 stretches the grid slightly; timm resamples to the exact size with antialias, which differs by 7 % at
    96 px. Resampling the identity gives the matrix. A matrix product is deterministic on the GPU, unlike the backward
    pass of interpolate.
    """
    if old_side**2 * max(old_side**2, new_height * new_width) > _MAX_WEIGHTS:
        grids = f"{old_side} x {old_side} to {new_height} x {new_width} patches"
        raise RecipeError(
            f"resampling position embeddings from {grids} needs too much memory; choose another image size"
        )
    # float32 like the authors: float64 coordinates would differ from their result by 4e-6 instead of 7e-7
    with torch.inference_mode(False):
        identity = torch.eye(old_side * old_side).reshape(old_side * old_side, 1, old_side, old_side)
        if rule == "timm":
            resampled = interpolate(identity, size=(new_height, new_width), mode="bicubic", antialias=True)
        else:
            scale = ((new_height + 0.1) / old_side, (new_width + 0.1) / old_side)
            resampled = interpolate(
                identity, scale_factor=scale, mode="bicubic", align_corners=False, recompute_scale_factor=False
            )
        assert resampled.shape[-2:] == (new_height, new_width), resampled.shape
        return resampled.flatten(1).T.contiguous()


# [1, n * n, D] -> [1, new_height * new_width, D]
def resample_positions(
    positions: Tensor, new_height: int, new_width: int, *, rule: ResamplingRule = RESAMPLING_RULE
) -> Tensor:
    """Position embeddings of a square grid of patches, resampled by a rule; unchanged on their own grid."""
    side = round(positions.shape[1] ** 0.5)
    if side * side != positions.shape[1]:
        raise ValueError(f"{positions.shape[1]} position embeddings form no square grid")
    if (new_height, new_width) == (side, side):
        return positions
    return _matrix_on(positions.device, positions.dtype, rule, side, new_height, new_width) @ positions


@functools.lru_cache(maxsize=64)  # cached on the device: a CUDA graph cannot contain a copy from the host
def _matrix_on(
    device: torch.device, dtype: torch.dtype, rule: ResamplingRule, old_side: int, new_height: int, new_width: int
) -> Tensor:
    with torch.inference_mode(False):  # later calls may need gradients
        return _resampling_matrix(rule, old_side, new_height, new_width).to(device=device, dtype=dtype)


# -> [1, prefix + height * width, D]
def model_positions(model: VisionTransformer | Eva, height: int, width: int) -> Tensor | None:
    """Position embeddings of the prefix tokens and of a grid of patches; None if the model has none."""
    if model.pos_embed is None:
        return None
    num_prefix = 0 if model.no_embed_class else model.num_prefix_tokens
    resampled = resample_positions(model.pos_embed[:, num_prefix:], height, width, rule=resampling_rule(model))
    return torch.cat([model.pos_embed[:, :num_prefix], resampled], dim=1)


def sine_cosine_positions(
    dim: int, grid: tuple[int, int], *, first_axis: FirstAxis, temperature: float = 10_000.0
) -> Tensor:  # -> [1 + height * width, dim] float32
    """Fixed position embeddings: a row of zeros for the class token, then sines and cosines for each patch.

    Half of the dimensions encode the patch's row, half its column: sin(p f_k), then cos(p f_k), with frequencies f_k
    from 1 to nearly 1 / temperature. MoCo-v3 (Chen et al., 2021) puts rows first, MAE (He et al., 2022) columns.
    """
    if dim % 4:
        raise ValueError(f"sines and cosines of two axes need a multiple of 4 dimensions; got {dim}")
    frequencies = temperature ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    height, width = grid
    rows = torch.arange(height, dtype=torch.float64).repeat_interleave(width)
    columns = torch.arange(width, dtype=torch.float64).repeat(height)
    axes = (rows, columns) if first_axis == "rows" else (columns, rows)
    angles = [axis[:, None] * frequencies for axis in axes]
    patches = torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1)
    return torch.cat([patches.new_zeros(1, dim), patches]).float()


@torch.no_grad()
def fix_positions(model: VisionTransformer, *, first_axis: FirstAxis) -> None:
    """Replace a transformer's learned position embeddings by fixed sines and cosines."""
    if model.pos_embed is None:
        raise RecipeError("this vision transformer has no position embeddings; choose e.g. vit_small_patch16_224")
    if model.embed_dim % 4:
        raise RecipeError(f"fixed position embeddings need embed_dim to be a multiple of 4; it is {model.embed_dim}")
    patches = sine_cosine_positions(model.embed_dim, model.patch_embed.grid_size, first_axis=first_axis)[1:]
    model.pos_embed.zero_()  # class and register tokens have no position
    model.pos_embed[:, -len(patches) :] = patches
    model.pos_embed.requires_grad_(False)
