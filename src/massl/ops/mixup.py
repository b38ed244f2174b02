"""Mixup, CutMix, random erasing and label smoothing, as DeiT trains (Touvron et al., ICML 2021).

Mixup (Zhang et al., 2018) and CutMix (Yun et al., 2019) mix each image with the one at the other end of the batch; a
batch shares one mixture, as in timm's `Mixup` in batch mode. Random erasing (Zhong et al., 2020) fills a rectangle with
normal noise. All choices are keyed and made by tensor operations, so the host never waits for the device.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from massl import keyed_random

_NUM_GAMMA_TRIES = 16  # each succeeds with probability above 0.95: all 16 fail once in 6e20 draws
_SMALLEST_UNIFORM = 2.0**-25  # replaces 0, one of the 2**24 possible numbers
_NUM_ERASING_TRIES = 10  # to draw a rectangle smaller than the image; else nothing is erased, as in timm
_ERASED_AREA = (0.02, 1 / 3)  # share of the image, uniform
_ERASED_LOG_ASPECT = (math.log(0.3), math.log(1 / 0.3))  # height / width, uniform in its logarithm


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """How each image of a batch is mixed with its partner."""

    share: Tensor  # []: of an image's own label; its partner's label has the rest
    pixel_shares: Tensor  # [H, W]: constant (mixup), or 0 in a rectangle and 1 around it (CutMix)


def draw_mixture(
    *key: keyed_random.Key,
    size: tuple[int, int],
    mixup_alpha: float,
    cutmix_alpha: float,
    cutmix_probability: float,
    device: torch.device,
) -> Mixture:
    """Mixup or CutMix: at random if both alphas are positive, else the positive one; shares ~ Beta(alpha, alpha)."""
    bits = keyed_random.bits(*key, device=device)
    if mixup_alpha > 0.0 and cutmix_alpha > 0.0:
        cuts = keyed_random.uniform(bits, "which") < cutmix_probability
        cutmix, mixup = (
            symmetric_beta(bits, "cutmix", alpha=cutmix_alpha),
            symmetric_beta(bits, "mixup", alpha=mixup_alpha),
        )
        share = torch.where(cuts, cutmix, mixup)
    else:
        cuts = torch.full((), cutmix_alpha > 0.0, device=device)
        share = symmetric_beta(bits, "either", alpha=max(mixup_alpha, cutmix_alpha))
    row, column = (keyed_random.integers(bits, axis, upper=size[i]) for i, axis in enumerate(("row", "column")))
    return mixture_of(share, cuts=cuts, centre=(row, column), size=size)


def mixture_of(share: Tensor, *, cuts: Tensor, centre: tuple[Tensor, Tensor], size: tuple[int, int]) -> Mixture:
    """Mixup by `share`, or if `cuts` is true a rectangle around `centre` of about 1 - share of the area.

    The rectangle is cut at the border of the image, and the share follows its true area.
    """
    inside = torch.ones(size, dtype=torch.bool, device=share.device)
    for axis, (length, middle) in enumerate(zip(size, centre, strict=True)):
        extent = (length * torch.sqrt(1.0 - share)).long()
        numbers = torch.arange(length, device=share.device)
        between = (numbers >= middle - extent // 2) & (numbers < middle + (extent + 1) // 2)
        inside &= between[:, None] if axis == 0 else between
    left = 1.0 - inside.float()
    return Mixture(share=torch.where(cuts, left.mean(), share), pixel_shares=torch.where(cuts, left, share))


def mix_images(images: Tensor, mixture: Mixture) -> Tensor:  # [R, 3, H, W]
    """Mix each image with its partner at the mirrored position of the batch."""
    # float32: in bfloat16 the share would be off by up to 0.4 % from that of the labels
    partners = images.flip(0).float()
    return torch.lerp(partners, images.float(), mixture.pixel_shares).to(images.dtype)


def mix_rows(rows: Tensor, share: Tensor) -> Tensor:  # [R, ...]
    """Mix the targets of each image with its partner's."""
    return share * rows + (1.0 - share) * rows.flip(0)


def smoothed_targets(labels: Tensor, *, num_classes: int, smoothing: float) -> Tensor:  # [R] -> [R, num_classes]
    """1 - smoothing on the label's class, the rest spread over all classes; a row of zeros without a label (-1)."""
    is_class = labels[:, None] == torch.arange(num_classes, device=labels.device)
    targets = is_class * (1.0 - smoothing) + smoothing / num_classes
    return targets * (labels >= 0)[:, None]


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:  # [R, C], [R, C] -> []
    """-sum_c target_c log softmax(logits)_c, averaged over all rows; a row of zeros adds nothing."""
    return -(targets * log_softmax(logits.float(), dim=-1)).sum(dim=-1).mean()


def erase_rectangles(
    images: Tensor, image_keys: Tensor, *noise_key: keyed_random.Key, probability: float
) -> Tensor:  # [R, 3, H, W], [R] int64
    """Normal noise in a rectangle of some images, chosen by each image's own key.

    All images read one noise field of `noise_key`, each from another place: a draw per pixel of every image would cost
    more than the training step.
    """
    num_colours, height, width = images.shape[1:]
    draw_numbers = torch.arange(2 * _NUM_ERASING_TRIES + 5, device=image_keys.device)
    draws = keyed_random.uniform(image_keys[:, None], draw_numbers)
    tried, (erases, down, right, *shift) = draws[:, :-5], draws[:, -5:].T
    areas, log_aspects = tried.tensor_split(2, dim=1)  # each [R, tries]
    areas = height * width * (_ERASED_AREA[0] + areas * (_ERASED_AREA[1] - _ERASED_AREA[0]))
    aspects = torch.exp(_ERASED_LOG_ASPECT[0] + log_aspects * (_ERASED_LOG_ASPECT[1] - _ERASED_LOG_ASPECT[0]))
    heights, widths = torch.sqrt(areas * aspects).round(), torch.sqrt(areas / aspects).round()
    fits = (heights < height) & (widths < width)
    first_fit = fits.byte().argmax(dim=1, keepdim=True)
    tall, wide = heights.gather(1, first_fit)[:, 0], widths.gather(1, first_fit)[:, 0]
    top, left = (down * (height - tall + 1)).floor(), (right * (width - wide + 1)).floor()
    rows, columns = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
    inside = _between(rows, top, tall)[:, :, None] & _between(columns, left, wide)[:, None, :]
    erased = inside & (fits.any(dim=1) & (erases < probability))[:, None, None]
    colours = torch.arange(num_colours, device=images.device)[:, None, None]
    field = keyed_random.normal(*noise_key, colours, rows[:, None], columns, device=images.device).to(images.dtype)
    read_rows = (rows + (shift[0] * height).long()[:, None]) % height
    read_columns = (columns + (shift[1] * width).long()[:, None]) % width
    noise = field[:, read_rows[:, :, None], read_columns[:, None, :]].movedim(0, 1)
    return torch.where(erased[:, None], noise, images)


def _between(numbers: Tensor, first: Tensor, count: Tensor) -> Tensor:  # [n], [R], [R] -> [R, n]
    return (numbers >= first[:, None]) & (numbers < (first + count)[:, None])


def symmetric_beta(keys: Tensor, purpose: str, *, alpha: float) -> Tensor:  # [...] int64 -> [...] float32
    """Beta(alpha, alpha) as G / (G + H) of two gamma-distributed numbers, from their logarithms."""
    first, second = _log_gamma(keys, purpose, alpha=alpha).unbind(-1)
    return torch.sigmoid(first - second).float()


def _log_gamma(keys: Tensor, purpose: str, *, alpha: float) -> Tensor:  # [...] int64 -> [..., 2] float64
    """Logarithms of two numbers from Gamma(alpha) per key, by Marsaglia and Tsang (2000) for Gamma(alpha + 1).

    The first accepted of a fixed number of tries counts. Logarithms, because a small alpha often gives less than 1e-38.
    """
    pair, tries = torch.arange(2, device=keys.device), torch.arange(_NUM_GAMMA_TRIES, device=keys.device)
    normal = keyed_random.normal(purpose, "normal", keys[..., None, None], pair[:, None], tries).double()
    accept = keyed_random.uniform(purpose, "accept", keys[..., None, None], pair[:, None], tries).double()
    boost = keyed_random.uniform(purpose, "boost", keys[..., None], pair).double()
    shift = alpha + 1.0 - 1.0 / 3.0
    root = 1.0 + normal / math.sqrt(9.0 * shift)
    log_cube = 3.0 * torch.log(root.clamp_min(1e-9))
    limit = 0.5 * normal.square() + shift * (1.0 - root**3 + log_cube)
    accepted = (root > 0.0) & (torch.log(accept.clamp_min(_SMALLEST_UNIFORM)) < limit)
    chosen = log_cube.gather(-1, accepted.byte().argmax(dim=-1, keepdim=True))[..., 0]
    return math.log(shift) + chosen + torch.log(boost.clamp_min(_SMALLEST_UNIFORM)) / alpha
