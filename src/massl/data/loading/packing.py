"""From single decoded images to one batch in one piece of memory, on the CPU or on the GPU."""

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
    """Images [3, H, W], each on the CPU or on `device`, one after another on `device`; without one, on the CPU."""
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
        torch.cat(
            [(next(from_cpu) if image.device.type == "cpu" else image).reshape(-1) for image in images], out=pixels
        )
    return RaggedImages(pixels=pixels, offsets=ends - num_bytes, sizes=sizes)


def pack_equal(images: Pixels, *, device: torch.device | None, pin: bool) -> RaggedImages:  # [B, H, W] or [B, H, W, 3]
    """Images of one size, out of an array."""
    num_images, height, width = images.shape[:3]
    pixels = _empty(images.shape[0] * 3 * height * width, pin=pin)
    planes = pixels.numpy().reshape(num_images, 3, height, width)
    planes[:] = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    offsets = torch.arange(num_images) * (3 * height * width)
    return RaggedImages(
        pixels=_on(device, pixels), offsets=offsets, sizes=torch.tensor([[height, width]]).repeat(num_images, 1)
    )


@contextmanager
def side_stream(device: torch.device | None) -> Iterator[None]:
    """What is started on the GPU inside runs beside the training stream and is complete at the end.

    A stream serves one batch at a time and is handed on idle, so memory freed inside is never reused while it is still
    written to. Streams are shared by all loaders of the process: the allocator keeps free memory apart for each, so new
    ones would each need their own.
    """
    if device is None or device.type != "cuda":
        yield
        return
    idle = _idle_streams[device]
    try:
        stream = idle.pop()
    except IndexError:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # Blocking: this thread sleeps while it waits; by default it would spin on a core.
    complete = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        complete.record(stream)
        complete.synchronize()
        idle.append(stream)


def _copied(images: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """CPU images on the GPU, by one transfer."""
    if not images:
        return []
    num_bytes = [image.numel() for image in images]
    flat = _on(device, _in_one_piece([image.numpy() for image in images], sum(num_bytes), pin=True))
    return list(torch.split(flat, num_bytes))


def _in_one_piece(images: Sequence[NDArray[np.uint8]], total: int, *, pin: bool) -> Tensor:  # each [3, H, W] -> [total]
    pixels = _empty(total, pin=pin)
    piece, start = pixels.numpy(), 0
    # numpy: it lets go of the interpreter lock, and torch would start a team of threads in each of ours
    for image in images:
        stop = start + image.size
        np.copyto(piece[start:stop].reshape(image.shape), image)
        start = stop
    return pixels


def _on(device: torch.device | None, pixels: Tensor) -> Tensor:
    """The pixels on the GPU, if one is wanted. The CPU's copy may be freed at once: PyTorch's allocator of pinned
    memory gives a block to the next one only after the copies that were started from it are complete.
    """
    if device is None or device.type == "cpu":
        return pixels
    there = _empty(len(pixels), device=device)
    return there.copy_(pixels, non_blocking=True)


def _empty(num_bytes: int, *, device: torch.device | None = None, pin: bool = False) -> Tensor:  # -> [num_bytes] uint8
    """Memory for one batch. Pinning takes milliseconds and so does the GPU's own allocation, so sizes are rounded up to
    few different ones that the allocators can give out again.
    """
    if device is None and not pin:
        return torch.empty(num_bytes, dtype=torch.uint8)
    step = _SMALL_STEP if num_bytes <= _LARGE_STEP else _LARGE_STEP
    return torch.empty(-(-num_bytes // step) * step, dtype=torch.uint8, device=device, pin_memory=pin)[:num_bytes]
