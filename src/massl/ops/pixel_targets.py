"""Targets and loss of a masked autoencoder: the pixels of the hidden patches (He et al., CVPR 2022)."""

import torch
from torch import Tensor

_SMALLEST_VARIANCE = 1e-6  # added to a patch's variance, so that the target of a one-coloured patch is zero, not NaN


def cut_patches(images: Tensor, patch_size: int) -> Tensor:  # [R, 3, H, W] -> [R, N, patch_size ** 2 * 3]
    """Patches row by row, their pixels row by row, then red, green, blue; pixels beyond whole patches are left out."""
    num_images, num_colours = images.shape[:2]
    height, width = images.shape[2] // patch_size, images.shape[3] // patch_size
    whole = images[:, :, : height * patch_size, : width * patch_size]
    cells = whole.reshape(num_images, num_colours, height, patch_size, width, patch_size)
    return cells.permute(0, 2, 4, 3, 5, 1).reshape(num_images, height * width, -1)


def normalised_patches(patches: Tensor) -> Tensor:  # [R, N, P] -> [R, N, P] float32
    """Each patch less its mean and over its standard deviation, over pixels and colours (the authors' `norm_pix_loss`).

    The variance is unbiased, as in their code; predicting only the mean has the error 1 - 1 / P.
    """
    variance, mean = torch.var_mean(patches.float(), dim=-1, keepdim=True)
    return (patches.float() - mean) * torch.rsqrt(variance + _SMALLEST_VARIANCE)


def hidden_patches(kept: Tensor, num_patches: int) -> Tensor:  # [R, n] int64 -> [R, num_patches] float32
    """1 for every patch whose index is not in `kept`, else 0."""
    return torch.ones(len(kept), num_patches, device=kept.device).scatter(1, kept, 0.0)


def hidden_patch_error(predictions: Tensor, targets: Tensor, kept: Tensor) -> Tensor:  # [R, N, P] x 2, [R, n] -> []
    """Mean squared error over the hidden patches; predictions of visible ones are ignored."""
    num_images, num_patches = targets.shape[:2]
    errors = (predictions.float() - targets).square().mean(dim=-1)
    num_hidden = num_images * (num_patches - kept.shape[1])  # every image hides the same number
    return (errors * hidden_patches(kept, num_patches)).sum() / num_hidden
