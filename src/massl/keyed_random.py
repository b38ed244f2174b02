"""Counter-based random numbers: each is a function of its key, such as ``(seed, "crop", epoch, image, view)``.

The same key gives the same bits on any device, in any process, before and after a restart, so there is no generator
state to save. Key parts are integers, strings or integer tensors; tensors broadcast, so one call draws a whole batch.

The bits come from two 32-bit lanes, each mixed by the multiply-xorshift permutation of Wellons' hash-prospector
("lowbias32"). Both multipliers are below 2**31, so products fit signed 64-bit integers and are exact on every backend.
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

KeyPart = int | str | Tensor
Key = KeyPart | Sequence["Key"]

MAX_SEED = 2**63 - 1  # the largest integer in a key
_MASK32 = 0xFFFFFFFF
_FIRST_LANE_START = 0x243F6A88  # digits of pi: any two different constants will do
_SECOND_LANE_START = 0x13198A2E

Word = TypeVar("Word", int, Tensor)


def _mix32(word: Word) -> Word:
    word = word ^ (word >> 16)
    word = (word * 0x21F0AAAD) & _MASK32
    word = word ^ (word >> 15)
    word = (word * 0x735A2D97) & _MASK32
    return word ^ (word >> 15)


def _absorb(first: Word, second: Word, part: Word) -> tuple[Word, Word]:
    low, high = part & _MASK32, (part >> 32) & _MASK32
    first = _mix32((first ^ low) + high & _MASK32)
    second = _mix32((second + low & _MASK32) ^ _mix32(first ^ high))
    return first, second


def _flatten(key: Sequence[Key]) -> Iterator[int | Tensor]:
    for part in key:
        if isinstance(part, str):
            yield zlib.crc32(part.encode()) | (1 << 40)  # bit 40: differs from every small integer
        elif isinstance(part, Tensor):
            if part.is_floating_point():
                raise TypeError("a key holds integers and strings, not floating-point tensors")
            yield part.to(torch.int64)
        elif isinstance(part, int):
            if not -MAX_SEED - 1 <= part <= MAX_SEED:
                raise ValueError(f"the key part {part} does not fit 64 bits")
            yield part
        else:
            yield from _flatten(part)


def _mixed_prefix(key: Sequence[Key]) -> tuple[int, int, list[int | Tensor]]:
    """The lanes after all parts before the first tensor, mixed as Python integers, and the remaining parts."""
    parts = list(_flatten(key))
    if not parts:
        raise ValueError("a key needs at least one part")
    num_plain = next((position for position, part in enumerate(parts) if isinstance(part, Tensor)), len(parts))
    first, second = _FIRST_LANE_START, _SECOND_LANE_START
    for part in parts[:num_plain]:
        assert isinstance(part, int)
        first, second = _absorb(first, second, part)
    return first, second, parts[num_plain:]


def _lanes(
    plain_first: int, plain_second: int, parts: list[int | Tensor], device: torch.device | str | None
) -> tuple[Tensor, Tensor]:
    """Two 32-bit words per key."""
    if device is None:
        device = next((part.device for part in parts if isinstance(part, Tensor)), torch.device("cpu"))
    first = torch.full((), plain_first, dtype=torch.int64, device=device)
    second = torch.full((), plain_second, dtype=torch.int64, device=device)
    for part in parts:
        words = part.to(device) if isinstance(part, Tensor) else torch.full((), part, dtype=torch.int64, device=device)
        first, second = _absorb(first, second, words)
    return _mix32(first ^ second), _mix32((first + second * 3) & _MASK32)


def _fits_kernel(parts: list[int | Tensor], device: torch.device | str | None) -> bool:
    """At most three tensors of at most three axes, all on the GPU of the result, and no two integers in a row."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if not 1 <= len(tensors) <= 3 or any(tensor.dim() > 3 for tensor in tensors):
        return False
    wanted = tensors[0].device if device is None else torch.device(device)
    if wanted.type != "cuda" or any(tensor.device != wanted for tensor in tensors):
        return False
    return not any(isinstance(part, int) and isinstance(following, int) for part, following in pairwise(parts))


def bits(*key: Key, device: torch.device | str | None = None) -> Tensor:
    """62 random bits per key, as int64 >= 0."""
    prefix = _mixed_prefix(key)
    if _fits_kernel(prefix[2], device):
        from massl import keyed_random_kernel  # needs Triton, which requires CUDA

        return keyed_random_kernel.draw(*prefix, as_uniform=False)
    first, second = _lanes(*prefix, device)
    return ((first & 0x7FFFFFFF) << 31) | (second & 0x7FFFFFFF)


def uniform(*key: Key, low: float = 0.0, high: float = 1.0, device: torch.device | str | None = None) -> Tensor:
    """Float32 numbers from low to high, one per key; [0, 1) by default, with 24 random bits: exact on every device."""
    prefix = _mixed_prefix(key)
    if _fits_kernel(prefix[2], device):
        from massl import keyed_random_kernel

        unit = keyed_random_kernel.draw(*prefix, as_uniform=True)
    else:
        unit = (_lanes(*prefix, device)[0] >> 8).to(torch.float32) * 2.0**-24
    return unit if (low, high) == (0.0, 1.0) else low + unit * (high - low)


def integers(*key: Key, upper: int | Tensor, device: torch.device | str | None = None) -> Tensor:
    """Int64 numbers in [0, upper), one per key: 62 bits modulo `upper`, with a bias below 2**-30 for upper < 2**32."""
    return bits(*key, device=device) % upper


def normal(*key: Key, device: torch.device | str | None = None) -> Tensor:
    """Float32 standard normal numbers, one per key (Box and Muller, 1958)."""
    first, second = _lanes(*_mixed_prefix(key), device)
    radius = torch.sqrt(-2.0 * torch.log(((first >> 8) + 1).to(torch.float32) * 2.0**-24))
    return radius * torch.cos((2.0 * math.pi * 2.0**-24) * (second >> 8).to(torch.float32))


def permutation(num_items: int, *key: Key, device: torch.device | str | None = None) -> Tensor:  # -> [num_items]
    """A random permutation of range(num_items): items sorted by their random bits."""
    items = torch.arange(num_items, device=device)
    return torch.argsort(bits(key, items), stable=True)


def seed_from(*key: Key) -> int:
    """An integer seed for libraries that only accept one."""
    return int(bits(*key))
