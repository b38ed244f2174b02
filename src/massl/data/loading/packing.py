"""Packs decoded images into one piece of memory per batch, on the CPU or the GPU."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from massl.data.sources.base import Pixels
from massl.ops.image_ops import RaggedImages

_SMALL_STEP, _LARGE_STEP = 2**20, 2**24  # bytes
_idle_streams: dict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


def pack(images: Sequence[Tensor], *, device: torch.device | None, pin: bool) -> RaggedImages:
    """Images [3, H, W], each on the CPU or on `device`, one after another on `device` (default: the CPU)."""
    sizes = torch.tensor([image.shape[1:] for image in images])
    num_bytes = 3 * sizes.prod(dim=1)
    ends = num_bytes.cumsum(0)
    total = int(ends[-1])
    held = [image for image in images if image.device.type == "cpu"]
    if len(held) == len(images):
        pixels = _on(device, _in_one_piece([image.numpy() for image in images], total, pin=pin))
    else:
        assert device is not None
        from_cpu = iter(_copied(held, device))
        pixels = _empty(total, device=device)
        copies = [(next(from_cpu) if image.device.type == "cpu" else image).reshape(-1) for image in images]
        torch.cat(copies, out=pixels)
    return RaggedImages(pixels=pixels, offsets=ends - num_bytes, sizes=sizes)


def pack_equal(images: Pixels, *, device: torch.device | None, pin: bool) -> RaggedImages:  # [B, H, W] or [B, H, W, 3]
    """Images of one size, from an array."""
    num_images, height, width = images.shape[:3]
    pixels = _empty(images.shape[0] * 3 * height * width, pin=pin)
    planes = pixels.numpy().reshape(num_images, 3, height, width)
    planes[:] = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    offsets = torch.arange(num_images) * (3 * height * width)
    sizes = torch.tensor([[height, width]]).repeat(num_images, 1)
    return RaggedImages(pixels=_on(device, pixels), offsets=offsets, sizes=sizes)


@contextmanager
def side_stream(device: torch.device | None) -> Iterator[None]:
    """GPU work inside runs beside the training stream and is complete at the end.

    A stream serves one batch at a time and is idle when reused, so memory freed inside is never reused while it is
    written to. All loaders of the process share the streams: the allocator keeps separate free memory for each stream.
    """
    if device is None or device.type != "cuda":
        yield
        return
    idle = _idle_streams[device]
    try:
        stream = idle.pop()
    except IndexError:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # blocking: this thread sleeps while it waits, instead of spinning on a core
    complete = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        complete.record(stream)
        complete.synchronize()
        idle.append(stream)


def _copied(images: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """CPU images copied to the GPU in one transfer."""
    if not images:
        return []
    num_bytes = [image.numel() for image in images]
    flat = _on(device, _in_one_piece([image.numpy() for image in images], sum(num_bytes), pin=True))
    return list(torch.split(flat, num_bytes))


def _in_one_piece(images: Sequence[NDArray[np.uint8]], total: int, *, pin: bool) -> Tensor:  # each [3, H, W] -> [total]
    pixels = _empty(total, pin=pin)
    piece, start = pixels.numpy(), 0
    # numpy releases the interpreter lock; torch would start a team of threads in each of ours
    for image in images:
        stop = start + image.size
        np.copyto(piece[start:stop].reshape(image.shape), image)
        start = stop
    return pixels


def _on(device: torch.device | None, pixels: Tensor) -> Tensor:
    """The pixels on the GPU, if `device` is one. The CPU copy may be freed at once.

    PyTorch's allocator reuses a pinned block only after all copies from it are complete.
    """
    if device is None or device.type == "cpu":
        return pixels
    return _empty(len(pixels), device=device).copy_(pixels, non_blocking=True)


def _empty(num_bytes: int, *, device: torch.device | None = None, pin: bool = False) -> Tensor:  # -> [num_bytes] uint8
    """Memory for one batch. Rounded sizes let the allocators reuse blocks: a new one takes milliseconds."""
    if device is None and not pin:
        return torch.empty(num_bytes, dtype=torch.uint8)
    step = _SMALL_STEP if num_bytes <= _LARGE_STEP else _LARGE_STEP
    return torch.empty(-(-num_bytes // step) * step, dtype=torch.uint8, device=device, pin_memory=pin)[:num_bytes]
