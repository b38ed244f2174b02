"""Random subsets of a labelled set: a few or a share of each class, a long tail, a held-out part.

All are drawn by key. A key defines one random order of each class and takes its first images, so that its 1 % is part
of its 10 %.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from massl import keyed_random
from massl.data.sources.base import DataError


# CPU int64 [N] -> [n] sorted
def balanced_choice(labels: Tensor, *, num_per_class: int, key: tuple[keyed_random.Key, ...]) -> Tensor:
    """Equally many images of every class."""
    if num_per_class < 1:
        raise DataError(f"{num_per_class} images per class are requested; choose at least 1")
    counts = _class_counts(labels)
    _require_enough(counts, torch.full_like(counts, num_per_class))
    return (_ranks_within_class(labels, key) < num_per_class).nonzero().flatten()


# CPU int64 [N] -> [n] sorted
def fraction_choice(labels: Tensor, *, fraction: float, key: tuple[keyed_random.Key, ...]) -> Tensor:
    """The same share of every class, rounded, but at least one image of each that has any."""
    if not 0 < fraction <= 1:
        raise DataError(f"a share of {fraction} of the images is requested; choose one above 0 and at most 1")
    wanted = (_class_counts(labels) * fraction).round().long().clamp_min(1)
    return (_ranks_within_class(labels, key) < wanted[labels]).nonzero().flatten()


def long_tail_counts(num_classes: int, *, largest: int, smallest: int = 5, power: float = 6.0) -> list[int]:
    """Images per class, descending: a Pareto distribution between two bounds, as ImageNet-LT (Liu et al., 2019).

    ImageNet-LT is one random draw; here each rank gets its median over draws. For 1000 classes of 1280 to 5 images that
    is 112,732 images (ImageNet-LT: 115,846), with 377, 476 and 147 classes of more than 100, 20 to 100 and fewer images
    (385, 479 and 136).
    """
    if num_classes < 2 or not 1 <= smallest <= largest or power <= 0:
        raise DataError(
            f"no long tail has {num_classes} classes of {largest} down to {smallest} images and the power {power}; "
            "choose at least 2 classes, 1 <= smallest <= largest and a power above 0"
        )
    ranks = torch.arange(1, num_classes + 1, dtype=torch.float64)
    tail = (ranks - 0.3) / (num_classes + 0.4)  # probability of more, in the median (Benard and Bos-Levenbach, 1953)
    quantiles = tail ** (-1 / power) - 1
    share = (quantiles - quantiles[-1]) / (quantiles[0] - quantiles[-1])
    counts: list[int] = (smallest + (largest - smallest) * share).round().long().tolist()
    return counts


# CPU int64 [N] -> [n] sorted
def long_tail_choice(labels: Tensor, counts: Sequence[int], *, key: tuple[keyed_random.Key, ...]) -> Tensor:
    """`counts[r]` images of the class at rank r of a random order of the classes."""
    available = _class_counts(labels)
    if len(available) > len(counts):
        raise DataError(f"counts for {len(counts)} classes, but labels of {len(available)}; give one for each class")
    available = torch.nn.functional.pad(available, (0, len(counts) - len(available)))
    wanted = torch.empty_like(available)
    wanted[keyed_random.permutation(len(counts), key, "frequency")] = torch.tensor(counts)
    _require_enough(available, wanted)
    return (_ranks_within_class(labels, key) < wanted[labels]).nonzero().flatten()


# -> [n] kept, [m] held out
def split_off(num_images: int, *, fraction: float, key: tuple[keyed_random.Key, ...]) -> tuple[Tensor, Tensor]:
    """Split off a random part of the images, at least one and not all; both parts sorted."""
    if num_images < 2 or not 0 < fraction < 1:
        raise DataError(
            f"{fraction} of {num_images} images cannot be held out; give at least 2 images and a share between 0 and 1"
        )
    num_held_out = min(max(1, round(fraction * num_images)), num_images - 1)
    order = keyed_random.permutation(num_images, key)
    return order[num_held_out:].sort().values, order[:num_held_out].sort().values


def _class_counts(labels: Tensor) -> Tensor:  # [N] -> [C], C the largest label and one
    if len(labels) == 0:
        raise DataError("there are no images to choose from")
    num_unlabelled = int((labels < 0).sum())
    if num_unlabelled:
        raise DataError(f"{num_unlabelled} of {len(labels)} images have no label; choosing by class needs one for each")
    return torch.bincount(labels)


def _ranks_within_class(labels: Tensor, key: tuple[keyed_random.Key, ...]) -> Tensor:  # [N] -> [N]
    """The place of each image in a random order of its class."""
    shuffled = keyed_random.permutation(len(labels), key)
    by_class = shuffled[torch.argsort(labels[shuffled], stable=True)]
    counts = torch.bincount(labels)
    first_of_class = counts.cumsum(0) - counts
    ranks = torch.empty_like(by_class)
    ranks[by_class] = torch.arange(len(labels)) - first_of_class[labels[by_class]]
    return ranks


def _require_enough(available: Tensor, wanted: Tensor) -> None:
    """As many images of every class as wanted, or an error that names the first class with too few."""
    short = (available < wanted).nonzero().flatten().tolist()
    if short:
        first = short[0]
        raise DataError(
            f"{len(short)} of {len(available)} classes have fewer images than requested: "
            f"class {first} has {int(available[first])} of {int(wanted[first])}; request fewer, or give a larger set"
        )
