"""Damage to bytes, as disks, transfers and attackers do it."""

import numpy as np

_INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def mutated(data: bytes, random: np.random.Generator, *, header: int = 64) -> bytes:
    """One to three kinds of damage; half of them hit the first `header` bytes, where sizes and counts are."""
    changed = bytearray(data)
    for _ in range(int(random.integers(1, 4))):
        if not changed:
            break
        kind = _KINDS[int(random.integers(len(_KINDS)))]
        end = min(header, len(changed)) if random.random() < 0.5 else len(changed)
        kind(changed, int(random.integers(end)), random)
    return bytes(changed)


def _flip_a_bit(data: bytearray, at: int, random: np.random.Generator) -> None:
    data[at] ^= 1 << int(random.integers(8))


def _overwrite(data: bytearray, at: int, random: np.random.Generator) -> None:
    end = min(len(data), at + int(random.integers(1, 17)))
    data[at:end] = random.bytes(end - at)


def _set_a_number(data: bytearray, at: int, random: np.random.Generator) -> None:
    """A field of 1, 2 or 4 bytes gets a value at the edge of its range."""
    size = int(random.choice([1, 2, 4]))
    value = _INTERESTING[int(random.integers(len(_INTERESTING)))] & ((1 << 8 * size) - 1)
    order = "big" if random.random() < 0.5 else "little"
    field = value.to_bytes(size, order)  # type: ignore[arg-type]
    data[at : at + size] = field[: len(data) - at]


def _cut_off(data: bytearray, at: int, random: np.random.Generator) -> None:
    del data[at:]


def _drop(data: bytearray, at: int, random: np.random.Generator) -> None:
    del data[at : at + int(random.integers(1, 65))]


def _insert(data: bytearray, at: int, random: np.random.Generator) -> None:
    data[at:at] = random.bytes(int(random.integers(1, 65)))


def _repeat(data: bytearray, at: int, random: np.random.Generator) -> None:
    data[at:at] = data[at : at + int(random.integers(1, 257))]


def _swap(data: bytearray, at: int, random: np.random.Generator) -> None:
    """Two pieces change places."""
    other, size = int(random.integers(len(data))), int(random.integers(1, 65))
    first, second = sorted((at, other))
    size = min(size, second - first, len(data) - second)
    data[first : first + size], data[second : second + size] = (
        data[second : second + size],
        data[first : first + size],
    )


def _zero(data: bytearray, at: int, random: np.random.Generator) -> None:
    """As a block that the disk lost."""
    end = min(len(data), at + int(random.integers(1, 513)))
    data[at:end] = bytes(end - at)


_KINDS = (_flip_a_bit, _overwrite, _set_a_number, _cut_off, _drop, _insert, _repeat, _swap, _zero)
