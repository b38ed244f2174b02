"""Images and labels mixed, erased and smoothed, as DeiT trains (Touvron et al., ICML 2021).

Mixup (Zhang et al., 2018) and CutMix (Yun et al., 2019) mix each image with the one at the other end of the batch; all
of a batch share one mixture, as in timm's `Mixup` in its batch mode. Random erasing (Zhong et al., 2020) fills a
rectangle of an image with normal noise. Every choice is a function of a key, and tensors alone decide: nothing here
waits for a value to reach the host.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from massl import keyed_random

_NUM_GAMMA_TRIES = 16  # each is accepted with probability above 0.95: none of 16 once in 6e20 draws
_SMALLEST_UNIFORM = 2.0**-25  # in place of 0, which is one of the 2**24 numbers that are drawn
# of a rectangle that must be lower and narrower than the image; then the image stays whole, as in timm
_NUM_ERASING_TRIES = 10
_ERASED_AREA = (0.02, 1 / 3)  # share of the image, uniform
_ERASED_LOG_ASPECT = (math.log(0.3), math.log(1 / 0.3))  # height / width, uniform in its logarithm


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """How each image of a batch is mixed with its partner."""

    share: Tensor  # []: how much of the label an image keeps; its partner's label has the rest
    pixel_shares: Tensor  # [H, W]: the same number everywhere (mixup), or 0 in a rectangle and 1 around it (CutMix)


def draw_mixture(
    *key: keyed_random.Key,
    size: tuple[int, int],
    mixup_alpha: float,
    cutmix_alpha: float,
    cutmix_probability: float,
    device: torch.device,
) -> Mixture:
    """Mixup or CutMix at random where both alphas are positive, else the one whose alpha is; shares follow Beta(alpha,
    alpha).
    """
    bits = keyed_random.bits(*key, device=device)
    if mixup_alpha > 0.0 and cutmix_alpha > 0.0:
        cuts = keyed_random.uniform(bits, "which") < cutmix_probability
        share = torch.where(
            cuts, symmetric_beta(bits, "cutmix", alpha=cutmix_alpha), symmetric_beta(bits, "mixup", alpha=mixup_alpha)
        )
    else:
        cuts = torch.full((), cutmix_alpha > 0.0, device=device)
        share = symmetric_beta(bits, "either", alpha=max(mixup_alpha, cutmix_alpha))
    row, column = (
        keyed_random.integers(bits, axis, upper=length) for axis, length in zip(("row", "column"), size, strict=True)
    )
    return mixture_of(share, cuts=cuts, centre=(row, column), size=size)


def mixture_of(share: Tensor, *, cuts: Tensor, centre: tuple[Tensor, Tensor], size: tuple[int, int]) -> Mixture:
    """Mixup by `share`, or where `cuts` is true a rectangle of about 1 - share of the area around `centre`.

    The rectangle ends at the border of the image; the share is then what is left of the image indeed.
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
    """Each image with its partner, the one as far from the end of the batch as it is from the start."""
    # float32: in bfloat16 the share itself would be off by up to 0.4 %, while the labels have it exactly
    partners = images.flip(0).float()
    return torch.lerp(partners, images.float(), mixture.pixel_shares).to(images.dtype)


def mix_rows(rows: Tensor, share: Tensor) -> Tensor:  # [R, ...]
    """The same for labels as rows of numbers."""
    return share * rows + (1.0 - share) * rows.flip(0)


# [R] int64 -> [R, num_classes] float32
def smoothed_targets(labels: Tensor, *, num_classes: int, smoothing: float) -> Tensor:
    """1 - smoothing on the label's class and the rest spread over all classes; a row of zeros where there is no label
    (-1).
    """
    is_class = labels[:, None] == torch.arange(num_classes, device=labels.device)
    targets = is_class * (1.0 - smoothing) + smoothing / num_classes
    return targets * (labels >= 0)[:, None]


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:  # [R, C], [R, C] -> []
    """-sum_c target_c log softmax(logits)_c, averaged over all rows; a row of zeros adds nothing."""
    return -(targets * log_softmax(logits.float(), dim=-1)).sum(dim=-1).mean()


def erase_rectangles(
    images: Tensor, image_keys: Tensor, *noise_key: keyed_random.Key, probability: float
) -> Tensor:  # [R, 3, H, W], [R] int64
    """Normal noise in a rectangle of some images; which ones and where depends on each image's own key.

    All images read one field of noise, drawn from `noise_key`, each from another place: a draw for every pixel of every
    image would cost more than the step it is for, and only a quarter of the images needs any.
    """
    num_colours, height, width = images.shape[1:]
    draws = keyed_random.uniform(
        image_keys[:, None], torch.arange(2 * _NUM_ERASING_TRIES + 5, device=image_keys.device)
    )
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
    """Numbers from Beta(alpha, alpha): each G / (G + H) of two gamma-distributed numbers, from their logarithms."""
    first, second = _log_gamma(keys, purpose, alpha=alpha).unbind(-1)
    return torch.sigmoid(first - second).float()


def _log_gamma(keys: Tensor, purpose: str, *, alpha: float) -> Tensor:  # [...] int64 -> [..., 2] float64
    """Logarithms of two numbers from Gamma(alpha) for each key, by the method of Marsaglia and Tsang (2000) for
    Gamma(alpha + 1).

    Of a fixed number of tries the first accepted one counts. Logarithms, because Gamma(alpha) of a small alpha is often
    below 1e-38.
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
