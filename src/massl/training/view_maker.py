"""The views of a batch, made on the training device."""

from dataclasses import replace

import torch

from massl.data.loading.loader import ImageBatch
from massl.data.views import ViewBatch, ViewSettings, make_views


class ViewMaker:
    """On a GPU, views are made on a stream of their own, beside the training."""

    def __init__(self, settings: ViewSettings, *, seed: int, bf16: bool, device: torch.device) -> None:
        self._settings, self._seed, self._device = settings, seed, device
        self._dtype = torch.bfloat16 if bf16 else torch.float32
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, images: ImageBatch, *, epoch: int) -> ViewBatch:
        if self._stream is None:
            return self._made(images, epoch)
        # The host is a step ahead, so the GPU makes these views while it trains on the last ones.
        with torch.cuda.stream(self._stream):
            views = self._made(images, epoch)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for group in views.groups():
            group.record_stream(current)
        return views

    def _made(self, images: ImageBatch, epoch: int) -> ViewBatch:
        pixels = images.to(self._device).images
        views = make_views(pixels, images.indices, self._settings, seed=self._seed, epoch=epoch, dtype=self._dtype)
        return replace(views, labels=images.labels)
