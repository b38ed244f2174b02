"""What a masked autoencoder is asked for: the pixels of the patches it did not see (He et al., CVPR 2022)."""

import torch
from torch import Tensor

# added to a patch's variance before the root, so that a patch of one colour has a target too: zeros
_SMALLEST_VARIANCE = 1e-6


def cut_patches(images: Tensor, patch_size: int) -> Tensor:  # [R, 3, H, W] -> [R, N, patch_size ** 2 * 3]
    """The patches of each image, row by row; in each its pixels row by row, and in each pixel red, green, blue.

    Pixels beyond the last whole patch are left out, as the backbones leave them out.
    """
    num_images, num_colours = images.shape[:2]
    height, width = images.shape[2] // patch_size, images.shape[3] // patch_size
    whole = images[:, :, : height * patch_size, : width * patch_size]
    cells = whole.reshape(num_images, num_colours, height, patch_size, width, patch_size)
    return cells.permute(0, 2, 4, 3, 5, 1).reshape(num_images, height * width, -1)


def normalised_patches(patches: Tensor) -> Tensor:  # [R, N, P] -> [R, N, P] float32
    """Each patch less its mean and over its standard deviation, both over all its pixels and colours (`norm_pix_loss`
    of the authors).

    The variance is the unbiased one, as in their code. What predicts nothing but the mean then has the error 1 - 1 / P.
    """
    variance, mean = torch.var_mean(patches.float(), dim=-1, keepdim=True)
    return (patches.float() - mean) * torch.rsqrt(variance + _SMALLEST_VARIANCE)


def hidden_patches(kept: Tensor, num_patches: int) -> Tensor:  # [R, n] int64 -> [R, num_patches] float32
    """1 for every patch whose number is not in `kept`, 0 for the others."""
    return torch.ones(len(kept), num_patches, device=kept.device).scatter(1, kept, 0.0)


# [R, N, P], [R, N, P], [R, n] -> []
def hidden_patch_error(predictions: Tensor, targets: Tensor, kept: Tensor) -> Tensor:
    """Mean squared error of the patches that were hidden; what is predicted for the visible ones does not count."""
    num_images, num_patches = targets.shape[:2]
    errors = (predictions.float() - targets).square().mean(dim=-1)
    num_hidden = num_images * (num_patches - kept.shape[1])  # known beforehand: every image hides the same number
    return (errors * hidden_patches(kept, num_patches)).sum() / num_hidden
