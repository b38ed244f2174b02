"""Data parallelism; the only file that imports torch.distributed. Every function also works in a single process."""

import contextlib
import datetime
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Value = TypeVar("Value")


_started_here = False  # whether `start` created the process group; the user's own is left alone


def start(device_type: str) -> None:
    """Join the process group that torchrun describes in the environment; does nothing in a single process.

    A group that exists already is used as it is.
    """
    global _started_here
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return
    if device_type == "cuda":
        torch.cuda.set_device(local_rank())
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=datetime.timedelta(minutes=30))
    _started_here = True


def stop() -> None:
    """Leave the process group that `start` created; one created by someone else stays."""
    global _started_here
    if _started_here and dist.is_initialized():
        dist.destroy_process_group()
    _started_here = False


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def local_rank() -> int:
    """Index of this process's device on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_main() -> bool:
    return rank() == 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def gather_objects(value: Value) -> list[Value]:
    """A small plain value of every rank, in rank order."""
    gathered: list[Value] = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(gathered, value)
    return gathered


def copy_from_main(tensors: Iterable[Tensor]) -> None:
    """Give every rank the values of rank 0."""
    for tensor in tensors if world_size() > 1 else ():
        dist.broadcast(tensor, src=0)


def gather_rows(rows: Tensor) -> Tensor:  # [n, ...] on each rank -> [n * world_size, ...], in rank order
    """The rows of all ranks, concatenated, without gradient. Every rank must have the same number of rows."""
    if world_size() == 1:
        return rows
    rows = rows.contiguous()  # collectives ignore strides; empty_like copies them
    gathered = [torch.empty_like(rows) for _ in range(world_size())]
    dist.all_gather(gathered, rows)
    return torch.cat(gathered)


def gather_rows_with_gradient(rows: Tensor) -> Tensor:  # [n, ...] on each rank -> [n * world_size, ...], in rank order
    """`gather_rows` for losses over the images of all ranks: the rows receive the gradients of every rank's loss.

    Data parallelism averages gradients over ranks, so the mean of the ranks' losses is trained.
    """
    return rows if world_size() == 1 else _GatherRows.apply(rows)


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum over ranks, on each rank; every value receives the gradients of every rank's loss."""
    return value if world_size() == 1 else _Sum.apply(value)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.num_rows = rows.shape[0]
        return gather_rows(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        first = rank() * ctx.num_rows
        return _summed(gradient)[first : first + ctx.num_rows]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return _summed(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _summed(gradient)


def _summed(value: Tensor) -> Tensor:
    total = value.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def mean_over_ranks(value: Tensor) -> Tensor:
    return value if world_size() == 1 else _summed(value) / world_size()


def largest_over_ranks(number: int, device: torch.device) -> int:
    """The largest number over ranks, so that all ranks act at the same step."""
    return number if world_size() == 1 else start_largest((number,), device)()[0]


def start_largest(numbers: Sequence[int], device: torch.device) -> Callable[[], list[int]]:
    """Begin to exchange numbers; the function that is returned waits for the largest of each over ranks.

    On a GPU it waits for the work queued before, not for what is queued between the two calls.
    """
    largest = torch.zeros(len(numbers), dtype=torch.int64, device=device)
    for position, number in enumerate(numbers):
        largest[position].fill_(number)  # a launch argument; copying a list there would wait for the GPU
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    on_host, copied = largest.to("cpu", non_blocking=True), None
    if device.type == "cuda":
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record()

    def wait() -> list[int]:
        if copied is not None:
            copied.synchronize()
        return [int(number) for number in on_host]

    return wait


def data_parallel(module: nn.Module, device: torch.device) -> nn.Module:
    """The module with gradients averaged over ranks; the module itself in a single process.

    Buffers are not broadcast: the memory is equal on all ranks, because all enqueue the gathered rows.
    """
    if world_size() == 1:
        return module
    synchronised = synchronise_batch_norms(module) if device.type == "cuda" else module
    parallel = DistributedDataParallel(synchronised, device_ids=[device.index] if device.type == "cuda" else None)
    parallel.broadcast_buffers = False  # not as an argument, which torch 2.15 deprecates
    return parallel


def synchronise_batch_norms(module: nn.Module) -> nn.Module:
    """Synchronise batch norms over ranks, by timm: torch's conversion would drop the activations inside timm's."""
    from timm.layers.norm_act import convert_sync_batchnorm

    converted: nn.Module = convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
    return converted.train(module.training)  # as new modules they are in training mode


def without_sync(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Gradients computed inside are accumulated locally; the next backward pass outside averages them all."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()
