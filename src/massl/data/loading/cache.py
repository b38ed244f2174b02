"""Decoded images kept in memory, so that later epochs neither read nor decode them."""

from threading import Lock

import numpy as np
import torch
from torch import Tensor


class ImageCache:
    """The first images that fit; none is ever thrown out.

    Throwing out would gain nothing: a shuffled epoch asks for each image once, so any choice of images saves the same
    share of the work. What is cached has no influence on any batch. All methods may be called from several threads at
    once.
    """

    def __init__(self, *, max_gib: float) -> None:
        self._max_gib = max_gib
        self._max_bytes = int(max_gib * 2**30)
        self._images: dict[tuple[str, int], Tensor] = {}  # name of the source, image -> [3, H, W] uint8
        self._num_bytes = 0
        self._is_full = False
        self._lock = Lock()

    @property
    def is_full(self) -> bool:
        """An image did not fit; from then on nothing is added."""
        return self._is_full

    def get(self, source_name: str, index: int) -> Tensor | None:  # -> [3, H, W] uint8, only for reading
        return self._images.get((source_name, index))

    def keep(self, source_name: str, index: int, pixels: Tensor) -> Tensor:  # [3, H, W] uint8 on the CPU -> the same
        """The image, from now on in the cache if it fits."""
        if self._is_full:
            return pixels
        # decoders may deliver [H, W, 3] in memory: reordered only once
        planar = torch.from_numpy(np.ascontiguousarray(pixels.numpy()))
        with self._lock:
            fits = self._num_bytes + planar.numel() <= self._max_bytes
            self._is_full = not fits
            if fits and (source_name, index) not in self._images:
                self._images[source_name, index] = planar
                self._num_bytes += planar.numel()
        return planar

    def describe(self, num_images: int) -> str:
        """One line for a person, of a source of so many images."""
        return (
            f"the cache of decoded images is full: {len(self._images):,} images take {self._num_bytes / 2**30:.1f} of "
            f"data.cache_gib {self._max_gib:g}; of {num_images:,} images the others are decoded anew in every epoch"
        )
