"""Features in the plane: the position of each image, and the colour and shape of its class."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from massl.config import MasslError

Rows = NDArray[np.float32]
Positions = NDArray[np.int64]

_FEWEST_IMAGES = 10  # a map of fewer shows nothing
WIDTH = 1000  # units of the drawing from left to right
MAX_CLASSES = 12  # with their own colour; of more, the 11 most frequent and one grey for the others
_LOWEST = 300  # units of the drawing from top to bottom at least
_MARGIN = 20  # units of the drawing around the outermost dots
THUMBNAIL = 46  # units of the drawing: side of an image that is drawn in place of its dot
_PRINCIPAL_COMPONENTS = 50  # kept before t-SNE, as van der Maaten and Hinton (2008) advise
_PERPLEXITY = 30.0  # neighbours that t-SNE keeps together; a third of the images if there are few


class MapError(MasslError, ValueError):
    """The features cannot be drawn as a map; the message says why."""


@dataclass(frozen=True, kw_only=True)
class MapGroup:
    """Dots that look alike and are shown or hidden together."""

    name: str
    style: int | None  # number of its colour and shape; None: the grey of all further classes
    images: tuple[int, ...]  # numbers of its images


def plane_positions(rows: Rows) -> Positions:  # [N, D] -> [N, 2] to the right and downwards
    """t-SNE of the directions of the features; the same features give the same map."""
    from sklearn.decomposition import PCA  # here: scikit-learn takes a second to load
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # scikit-learn brings it

    if len(rows) < _FEWEST_IMAGES:
        raise MapError(f"a map needs at least {_FEWEST_IMAGES} images, and there are {len(rows)}")
    directions = rows.astype(np.float64)
    directions /= np.maximum(np.linalg.norm(directions, axis=1, keepdims=True), 1e-12)
    if float(directions.std(axis=0).max()) < 1e-6:
        raise MapError("all images have the same features: the model tells nothing apart, so there is no map to draw")
    # One thread: several sum up in a different order each time, and t-SNE amplifies the rounding.
    with threadpool_limits(limits=1):
        components = PCA(min(_PRINCIPAL_COMPONENTS, *rows.shape), svd_solver="full").fit_transform(directions)
        start = components[:, :2] / components[:, 0].std() * 1e-4
        tsne = TSNE(perplexity=min(_PERPLEXITY, (len(rows) - 1) / 3), init=start, random_state=0)
        return _scaled(tsne.fit_transform(components))


def _scaled(points: NDArray[np.float64]) -> Positions:  # [N, 2] -> [N, 2]
    """Whole units, rotated so that the map is widest from left to right; the aspect ratio stays."""
    centred = points - points.mean(axis=0)
    axes = np.linalg.svd(centred, full_matrices=False)[2]
    # the decomposition leaves the sign of an axis open
    axes *= np.sign(axes[np.arange(2), np.abs(axes).argmax(axis=1)])[:, None]
    turned = centred @ axes.T
    low, high = turned.min(axis=0), turned.max(axis=0)
    scale = (WIDTH - 2 * _MARGIN) / max(float((high - low).max()), 1e-12)
    middle = (high - low) * scale / 2 + _MARGIN
    moved = (turned - (low + high) / 2) * scale + np.maximum(middle, (WIDTH / 2, _LOWEST / 2))
    units: Positions = np.rint(moved).astype(np.int64)
    return units


def height_of(positions: Positions) -> int:  # [N, 2]
    """Units of the drawing from top to bottom."""
    return max(_LOWEST, int(positions[:, 1].max()) + _MARGIN)


def with_room(positions: Positions) -> list[int]:  # [N, 2]
    """Numbers of images whose thumbnails can be drawn without hiding each other, the first images first."""
    chosen: list[int] = []
    for number, place in enumerate(positions):
        if not chosen or int(np.abs(positions[chosen] - place).max(axis=1).min()) >= THUMBNAIL:
            chosen.append(number)
    return chosen


def class_groups(labels: Sequence[int], class_names: tuple[str, ...] | None) -> list[MapGroup]:
    """Images by class, the rarest of many classes together; one group without class names."""
    if class_names is None:
        return [MapGroup(name="images", style=0, images=tuple(range(len(labels))))]
    counts = Counter(labels)
    num_own = MAX_CLASSES if len(counts) <= MAX_CLASSES else MAX_CLASSES - 1
    frequent = sorted(sorted(counts), key=lambda label: -counts[label])[:num_own]
    groups = []
    if others := tuple(number for number, own in enumerate(labels) if own not in frequent):  # drawn below the rest
        groups.append(MapGroup(name=f"{len(counts) - len(frequent)} other classes", style=None, images=others))
    for style, label in enumerate(sorted(frequent)):
        images = tuple(number for number, own in enumerate(labels) if own == label)
        groups.append(MapGroup(name=class_names[label], style=style, images=images))
    return groups
