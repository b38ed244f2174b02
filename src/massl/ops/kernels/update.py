"""The end of a training step in two launches: clip, decay and AdamW for all weights, then the teacher's EMA.

One kernel serves a list of tensors of any sizes. A table holds their addresses, a second one the part of a tensor that
each program updates; both reach the device in one copy. The references are `clip_each_gradient` with
`torch.optim.AdamW`, and torch's list operations in `nn.ema`. All tensors are float32 and contiguous, on one device.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 8192  # elements per program: 2,700 programs for 22 million weights
_BLOCK = 1024  # elements at once, four per thread; sixteen would take 206 registers, one program per multiprocessor
_NUM_WARPS = 8

# ---- the tables ------------------------------------------------------------------------------------------------------

# Pinned memory by number of words. Ordinary steps allocate it ahead, because recording a CUDA graph must not.
_spare: dict[int, list[Tensor]] = {}
_NUM_SPARES = 4  # uses of one size within a recording, or recordings without an ordinary step between
_recorded: list[Tensor] = []  # what recorded graphs copy from at every replay: never written again, never freed


class _Tables(NamedTuple):
    """Views of one int64 tensor on the device."""

    rows: Tensor  # [R, N]: the sizes of N tensors, then addresses and flags
    chunks: Tensor  # [P]: tensor index << 32 | part of it, for each program
    numbers: Tensor  # float64; a number passed to a kernel would be rounded to float32
    are_aligned: bool  # every address is a multiple of 16 bytes, so four elements move at once


@lru_cache(maxsize=16)
def _chunks(sizes: tuple[int, ...]) -> Tensor:  # -> CPU int64 [P]
    counts = torch.tensor([triton.cdiv(size, _CHUNK) for size in sizes])
    tensors = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    parts = torch.arange(len(tensors)) - (counts.cumsum(0) - counts)[tensors]
    return tensors << 32 | parts


def _upload(
    tensors: Sequence[Sequence[Tensor]],
    numbers: Sequence[float],
    *,
    steps: Sequence[Tensor] = (),
    flags: Sequence[bool] = (),
    scales: Sequence[float] | None = None,
    sizes: Sequence[int] | None = None,  # default: numbers of elements
) -> _Tables:
    sizes = tuple(tensor.numel() for tensor in tensors[0]) if sizes is None else tuple(sizes)
    addresses = [[tensor.data_ptr() for tensor in row] for row in tensors]
    rows = [sizes, *addresses]
    if steps:
        rows += [[step.data_ptr() for step in steps], list(flags)]
    if scales is not None:
        rows.append(torch.tensor(scales, dtype=torch.float64).view(torch.int64).tolist())
    chunks = _chunks(sizes)
    numbers_as_int = torch.tensor(numbers, dtype=torch.float64).view(torch.int64)
    words = _to_device(torch.cat([torch.tensor(rows).flatten(), chunks, numbers_as_int]), tensors[0][0].device)
    table, its_chunks, its_numbers = words.split([len(rows) * len(sizes), len(chunks), len(numbers)])
    are_aligned = all(address % 16 == 0 for row in addresses for address in row)
    return _Tables(table.view(len(rows), len(sizes)), its_chunks, its_numbers.view(torch.float64), are_aligned)


def _to_device(words: Tensor, device: torch.device) -> Tensor:
    """An asynchronous copy; a recorded one is repeated at every replay."""
    if device.type != "cuda":
        return words
    spare = _spare.setdefault(len(words), [])
    if torch.cuda.is_current_stream_capturing():
        if not spare:
            raise RuntimeError("no pinned memory for a recorded update; run it once on these sizes before recording")
        pinned = spare.pop().copy_(words)
        _recorded.append(pinned)
    else:
        spare.extend(
            torch.empty(len(words), dtype=words.dtype, pin_memory=True) for _ in range(_NUM_SPARES - len(spare))
        )
        pinned = words.pin_memory()  # new memory: the copy before this may still be pending
    return pinned.to(device, non_blocking=True)


def _is_on(device: torch.device, value: float | Tensor) -> bool:
    return isinstance(value, Tensor) and value.device == device


@triton.jit
def _address(rows_ptr, row, num_tensors, tensor, ALIGNED: tl.constexpr):
    pointer = tl.load(rows_ptr + row * num_tensors + tensor).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


# ---- AdamW -----------------------------------------------------------------------------------------------------------


@triton.jit
def _adamw_block(
    parameter_ptr, gradient_ptr, average_ptr, square_ptr, at, mask,
    factor, shrink, beta1, rest1, beta2, rest2, step_size, root_correction2, epsilon,
):  # fmt: skip
    gradient = tl.load(gradient_ptr + at, mask=mask) * factor
    average = tl.load(average_ptr + at, mask=mask) * beta1 + gradient * rest1
    square = tl.load(square_ptr + at, mask=mask) * beta2 + gradient * gradient * rest2
    parameter = tl.load(parameter_ptr + at, mask=mask) * shrink
    denominator = tl.div_rn(tl.sqrt_rn(square), root_correction2) + epsilon
    tl.store(parameter_ptr + at, parameter - tl.div_rn(step_size * average, denominator), mask=mask)
    tl.store(average_ptr + at, average, mask=mask)
    tl.store(square_ptr + at, square, mask=mask)


@triton.jit
def _clipped_adamw_kernel(
    rows_ptr, chunks_ptr, numbers_ptr, rate_ptr, decay_ptr, norms_ptr, applies_ptr, num_tensors,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, CLIPS: tl.constexpr, GUARDED: tl.constexpr, ALIGNED: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    chunk = tl.load(chunks_ptr + tl.program_id(0))
    tensor, first = chunk >> 32, (chunk & 0x7FFFFFFF) * CHUNK
    size = tl.load(rows_ptr + tensor)
    if GUARDED:
        size = tl.where(tl.load(applies_ptr) != 0, size, 0)  # of size 0, nothing is read or written
    # float64: 1 - beta2 in float32 would have a relative error of 1e-5.
    beta1, beta2 = tl.load(numbers_ptr), tl.load(numbers_ptr + 1)
    step = tl.load(_address(rows_ptr, 5, num_tensors, tensor, False)).to(tl.float64)
    correction1 = (1.0 - tl.exp(step * tl.load(numbers_ptr + 2))).to(tl.float32)
    root_correction2 = tl.sqrt(1.0 - tl.exp(step * tl.load(numbers_ptr + 3))).to(tl.float32)
    epsilon = tl.load(numbers_ptr + 4).to(tl.float32)
    rate = tl.load(rate_ptr).to(tl.float64)
    if SCALED:
        rate = rate * tl.load((rows_ptr + 7 * num_tensors + tensor).to(tl.pointer_type(tl.float64)))
    shrink = 1.0 - rate * tl.load(decay_ptr).to(tl.float64) * tl.load(rows_ptr + 6 * num_tensors + tensor).to(
        tl.float64
    )
    factor = tl.full([], 1.0, tl.float32)
    if CLIPS:
        factor = tl.div_rn(tl.load(numbers_ptr + 5).to(tl.float32), tl.load(norms_ptr + tensor) + 1e-6)
        factor = tl.where(factor > 1.0, 1.0, factor)  # not a minimum, so that NaN stays NaN
    parameter_ptr = _address(rows_ptr, 1, num_tensors, tensor, ALIGNED)
    gradient_ptr = _address(rows_ptr, 2, num_tensors, tensor, ALIGNED)
    average_ptr = _address(rows_ptr, 3, num_tensors, tensor, ALIGNED)
    square_ptr = _address(rows_ptr, 4, num_tensors, tensor, ALIGNED)
    beta1_, rest1, beta2_, rest2 = (
        beta1.to(tl.float32),
        (1.0 - beta1).to(tl.float32),
        beta2.to(tl.float32),
        (1.0 - beta2).to(tl.float32),
    )
    step_size = tl.div_rn(rate.to(tl.float32), correction1)
    if first + CHUNK <= size:  # no mask: four elements move at once
        for offset in range(0, CHUNK, BLOCK):
            _adamw_block(
                parameter_ptr, gradient_ptr, average_ptr, square_ptr, first + offset + tl.arange(0, BLOCK), None,
                factor, shrink.to(tl.float32), beta1_, rest1, beta2_, rest2, step_size, root_correction2, epsilon,
            )  # fmt: skip
    else:
        for offset in range(0, CHUNK, BLOCK):
            at = first + offset + tl.arange(0, BLOCK)
            _adamw_block(
                parameter_ptr, gradient_ptr, average_ptr, square_ptr, at, at < size,
                factor, shrink.to(tl.float32), beta1_, rest1, beta2_, rest2, step_size, root_correction2, epsilon,
            )  # fmt: skip


def clipped_adamw_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],  # [] each, float32: the number of this step, so at least 1
    norms: Tensor | None,  # [N] of the gradients; not needed where max_norm is 0
    decays: Sequence[bool],
    *,
    rate_scales: Sequence[float] | None = None,  # factors on the learning rate of each tensor
    learning_rate: float | Tensor,
    weight_decay: float | Tensor,
    betas: tuple[float, float],
    epsilon: float,
    max_norm: float,
    applies: Tensor | None = None,  # [] bool on the device; False: nothing is changed
) -> None:
    """AdamW (Loshchilov and Hutter, 2019) on gradients clipped tensor by tensor; the gradients are not changed."""
    device = parameters[0].device
    rate, decay = (0.0 if _is_on(device, value) else float(value) for value in (learning_rate, weight_decay))
    logarithms = [math.log(beta) if beta > 0.0 else -math.inf for beta in betas]
    tables = _upload(
        [parameters, gradients, exp_avgs, exp_avg_sqs],
        [*betas, *logarithms, epsilon, max_norm, rate, decay],
        steps=steps,
        flags=decays,
        scales=rate_scales,
    )
    if len(tables.chunks) == 0:
        return
    _clipped_adamw_kernel[(len(tables.chunks),)](
        tables.rows, tables.chunks, tables.numbers,
        learning_rate if _is_on(device, learning_rate) else tables.numbers[6:],
        weight_decay if _is_on(device, weight_decay) else tables.numbers[7:],
        norms, applies, len(parameters), CHUNK=_CHUNK, BLOCK=_BLOCK, CLIPS=max_norm > 0.0,
        GUARDED=applies is not None, ALIGNED=tables.are_aligned, SCALED=rate_scales is not None, num_warps=_NUM_WARPS,
    )  # fmt: skip


# ---- teachers --------------------------------------------------------------------------------------------------------


@triton.jit
def _move_block(teacher_ptr, student_ptr, at, mask, momentum, rest):
    moved = tl.load(teacher_ptr + at, mask=mask) * momentum + tl.load(student_ptr + at, mask=mask) * rest
    tl.store(teacher_ptr + at, moved, mask=mask)


@triton.jit
def _move_kernel(
    rows_ptr, chunks_ptr, momentum_ptr, num_tensors, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr
):
    chunk = tl.load(chunks_ptr + tl.program_id(0))
    tensor, first = chunk >> 32, (chunk & 0x7FFFFFFF) * CHUNK
    size = tl.load(rows_ptr + tensor)
    momentum = tl.load(momentum_ptr).to(tl.float64)
    teacher_ptr = _address(rows_ptr, 1, num_tensors, tensor, ALIGNED)
    student_ptr = _address(rows_ptr, 2, num_tensors, tensor, ALIGNED)
    share, rest = momentum.to(tl.float32), (1.0 - momentum).to(tl.float32)
    if first + CHUNK <= size:
        for offset in range(0, CHUNK, BLOCK):
            _move_block(teacher_ptr, student_ptr, first + offset + tl.arange(0, BLOCK), None, share, rest)
    else:
        for offset in range(0, CHUNK, BLOCK):
            at = first + offset + tl.arange(0, BLOCK)
            _move_block(teacher_ptr, student_ptr, at, at < size, share, rest)


def move_towards_(teachers: Sequence[Tensor], students: Sequence[Tensor], momentum: float | Tensor) -> None:
    """Each teacher <- momentum * teacher + (1 - momentum) * student."""
    given = _is_on(teachers[0].device, momentum)
    tables = _upload([teachers, students], [0.0 if given else float(momentum)])
    if len(tables.chunks) > 0:
        _move_kernel[(len(tables.chunks),)](
            tables.rows, tables.chunks, momentum if given else tables.numbers, len(teachers),
            CHUNK=_CHUNK, BLOCK=_BLOCK, ALIGNED=tables.are_aligned, num_warps=_NUM_WARPS,
        )  # fmt: skip


# ---- leaving a step out ----------------------------------------------------------------------------------------------


@triton.jit
def _restore_kernel(rows_ptr, chunks_ptr, keep_ptr, num_tensors, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    chunk = tl.load(chunks_ptr + tl.program_id(0))
    tensor, first = chunk >> 32, (chunk & 0x7FFFFFFF) * CHUNK
    size = tl.where(tl.load(keep_ptr) != 0, 0, tl.load(rows_ptr + tensor))
    target_ptr = tl.load(rows_ptr + num_tensors + tensor).to(tl.pointer_type(tl.int32))
    copy_ptr = tl.load(rows_ptr + 2 * num_tensors + tensor).to(tl.pointer_type(tl.int32))
    for offset in range(0, CHUNK, BLOCK):
        at = first + offset + tl.arange(0, BLOCK)
        tl.store(target_ptr + at, tl.load(copy_ptr + at, mask=at < size), mask=at < size)


def restore_unless_(keep: Tensor, targets: Sequence[Tensor], copies: Sequence[Tensor]) -> None:  # [] bool
    """Each target <- its copy, bit for bit, if `keep` is False; otherwise no memory is touched.

    Tensors of any type in whole words of 4 bytes, without gaps, laid out as their copies are.
    """
    sizes = [tensor.numel() * tensor.element_size() // 4 for tensor in targets]
    tables = _upload([targets, copies], [], sizes=sizes)
    if len(tables.chunks) > 0:
        _restore_kernel[(len(tables.chunks),)](
            tables.rows, tables.chunks, keep, len(targets), CHUNK=_CHUNK, BLOCK=_BLOCK, num_warps=_NUM_WARPS
        )
