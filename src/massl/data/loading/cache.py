"""Decoded images kept in memory, so that later epochs neither read nor decode them."""

from threading import Lock

import numpy as np
import torch
from torch import Tensor


class ImageCache:
    """Keeps the first images that fit and evicts none; thread-safe. It never changes a batch.

    Evicting would gain nothing: a shuffled epoch reads each image once, so any set of cached images saves equally.
    """

    def __init__(self, *, max_gib: float) -> None:
        self._max_gib = max_gib
        self._max_bytes = int(max_gib * 2**30)
        self._images: dict[tuple[str, int], Tensor] = {}  # source name, index -> [3, H, W] uint8
        self._num_bytes = 0
        self._is_full = False
        self._lock = Lock()

    @property
    def is_full(self) -> bool:
        """True once an image did not fit; nothing is added afterwards."""
        return self._is_full

    def get(self, source_name: str, index: int) -> Tensor | None:  # -> [3, H, W] uint8, read-only
        return self._images.get((source_name, index))

    def keep(self, source_name: str, index: int, pixels: Tensor) -> Tensor:  # [3, H, W] uint8 on the CPU -> the same
        """Store a copy if it fits; returns the copy, or `pixels` once the cache is full."""
        if self._is_full:
            return pixels
        # a copy in [3, H, W] order: decoders may return [H, W, 3], and worker processes reuse their memory
        planar = torch.from_numpy(np.array(pixels.numpy(), order="C"))
        with self._lock:
            fits = self._num_bytes + planar.numel() <= self._max_bytes
            self._is_full = not fits
            if fits and (source_name, index) not in self._images:
                self._images[source_name, index] = planar
                self._num_bytes += planar.numel()
        return planar

    def describe(self, num_images: int) -> str:
        """One line for the log; `num_images` is the size of the source."""
        return (
            f"the cache of decoded images is full: {len(self._images):,} images take {self._num_bytes / 2**30:.1f} of "
            f"data.cache_gib {self._max_gib:g}; the rest of the {num_images:,} to train on, and of those of the "
            "probes, is decoded each time"
        )
