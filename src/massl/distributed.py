"""Data parallelism: the only file that imports torch.distributed. Every function works in a single process too."""

import contextlib
import datetime
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def start(device_type: str) -> None:
    """Join the process group that torchrun describes in the environment; nothing to do for a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return
    if device_type == "cuda":
        torch.cuda.set_device(local_rank())
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=datetime.timedelta(minutes=30))


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def local_rank() -> int:
    """Which device of its machine this process uses."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_main() -> bool:
    return rank() == 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def gather_rows(rows: Tensor) -> Tensor:  # [n, ...] on each rank -> [n * world_size, ...], in rank order
    """The rows of all ranks, one below the other; no gradient. Every rank must bring the same number."""
    if world_size() == 1:
        return rows
    rows = rows.contiguous()  # and so what is made like it: collectives know nothing of strides
    gathered = [torch.empty_like(rows) for _ in range(world_size())]
    dist.all_gather(gathered, rows)
    return torch.cat(gathered)


def gather_rows_with_gradient(rows: Tensor) -> Tensor:  # [n, ...] on each rank -> [n * world_size, ...], in rank order
    """`gather_rows` for losses in which the images of all ranks meet: each rank's rows receive the gradients of every
    rank's loss.

    Data parallelism averages gradients over ranks, so what is trained is the mean of the ranks' losses.
    """
    return rows if world_size() == 1 else _GatherRows.apply(rows)


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum of all ranks' values, on each of them; every value receives the gradients of every rank's loss."""
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
    if world_size() == 1:
        return value
    return _summed(value) / world_size()


def largest_over_ranks(number: int, device: torch.device) -> int:
    """The largest number of all ranks, so that all act on it at the same step."""
    if world_size() == 1:
        return number
    largest = torch.tensor(number, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def data_parallel(module: nn.Module, device: torch.device) -> nn.Module:
    """The module with its gradients averaged over ranks; the module itself in a single process.

    Buffers are not broadcast: the memory is the same on all ranks by construction, because all enqueue the gathered
    rows.
    """
    if world_size() == 1:
        return module
    synchronised = synchronise_batch_norms(module) if device.type == "cuda" else module
    parallel = DistributedDataParallel(synchronised, device_ids=[device.index] if device.type == "cuda" else None)
    # set afterwards: torch 2.15 warns of the argument, and before it there is no other
    parallel.broadcast_buffers = False
    return parallel


def synchronise_batch_norms(module: nn.Module) -> nn.Module:
    """Batch norms that share their statistics over ranks. By timm: torch's own conversion would drop the activations
    that timm's carry.
    """
    from timm.layers.norm_act import convert_sync_batchnorm

    converted: nn.Module = convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
    return converted


def without_sync(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Gradients computed inside are added up locally; the next backward outside averages them all."""
    if isinstance(module, DistributedDataParallel):
        return module.no_sync()
    return contextlib.nullcontext()
